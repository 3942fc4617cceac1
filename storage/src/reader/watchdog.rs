//! Reports stuck reads. The thread that submitted one may be stuck with it, inside the kernel, so
//! this is done by another thread, which reads a table and touches neither files nor rings.
//!
//! A reader has a [`RequestTable`], with an entry for each of its slots. Filling and clearing an
//! entry are a few stores by the reader's thread, and a lock that is contended only if the entry is
//! old. The watchdog scans all tables. When a read is 10, 30 and 60 s old it reports the object,
//! the server and how the other reads fare: one stuck read among many that complete points to a
//! server, all of them together to a network or a mount.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::Object;
use crate::base::per_process::PerProcess;

/// The reads of this process in flight.
#[derive(Clone, Copy, Debug)]
pub struct StuckReads;

/// A read in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckRead {
    /// The object.
    pub object: String,
    /// Its first byte.
    pub offset: u64,
    /// Its bytes.
    pub len: u64,
    /// How long it has been in flight.
    pub age: Duration,
    /// How it is read; empty while it is young.
    pub backend: String,
    /// The server that has the bytes; empty if unknown.
    pub placement: String,
    /// Retries after an error.
    pub retries: u32,
    /// Reads of the same reader that are young.
    pub siblings: usize,
}

impl StuckReads {
    /// The oldest read of this process in flight.
    #[must_use]
    pub fn oldest() -> Option<StuckRead> {
        let tables = tables();
        let oldest = tables.iter().filter_map(|table| table.oldest());
        oldest.max_by_key(|pending| pending.age)
    }

    /// The oldest read in flight as text.
    #[must_use]
    pub fn describe() -> Option<String> {
        StuckReads::oldest().map(|pending| pending.to_string())
    }
}

impl fmt::Display for StuckRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StuckRead { object, offset, len, age, backend, placement, retries, siblings } = self;
        write!(f, "read of {len} bytes at byte {offset} of {object}: ")?;
        write!(f, "no completion for {} s", age.as_secs())?;
        match (backend.as_str(), placement.as_str()) {
            ("", _) => {}
            (backend, "") => write!(f, " ({backend})")?,
            (backend, placement) => write!(f, " ({backend}, from {placement})")?,
        }
        if *retries > 0 {
            write!(f, ", after {retries} retries")?;
        }
        match siblings {
            0 => f.write_str("; every read on this store is stuck"),
            1 => f.write_str("; 1 other read on this store is not stuck"),
            n => write!(f, "; {n} other reads on this store are not stuck"),
        }
    }
}

/// The request entries of one reader.
#[derive(Debug)]
pub(crate) struct RequestTable(Arc<Table>);

#[derive(Debug)]
struct Table {
    warn_after: [Duration; 3],
    seats: Box<[RequestEntry]>,
}

#[derive(Debug, Default)]
struct RequestEntry {
    /// Start of the read, in nanoseconds since the first [`clock`] call; 0 if the entry is free.
    since: AtomicU64,
    offset: AtomicU64,
    len: AtomicU64,
    retries: AtomicU32,
    /// Warnings so far. Written only by the watchdog, except for the reset to 0.
    warned: AtomicU8,
    who: Mutex<RequestTarget>,
}

#[derive(Debug, Default)]
struct RequestTarget {
    object: Option<Arc<dyn Object>>,
    backend: String,
    placement: String,
}

impl RequestTable {
    pub(crate) fn new(count: usize, warn_after: [Duration; 3]) -> Self {
        let seats = std::iter::repeat_with(RequestEntry::default).take(count).collect();
        let table = Arc::new(Table { warn_after, seats });
        let mut all = all_tables();
        all.push(Arc::downgrade(&table));
        drop(all);
        start_watchdog();
        RequestTable(table)
    }

    /// Fills an entry when a read starts.
    pub(crate) fn sit(
        &self,
        i: usize,
        object: &Arc<dyn Object>,
        offset: u64,
        len: u64,
        now: Instant,
    ) {
        let seat = &self.0.seats[i];
        seat.who().object = Some(Arc::clone(object));
        seat.offset.store(offset, Ordering::Relaxed);
        seat.len.store(len, Ordering::Relaxed);
        seat.retries.store(0, Ordering::Relaxed);
        seat.warned.store(0, Ordering::Relaxed);
        seat.since.store(clock(now), Ordering::Release);
    }

    pub(crate) fn retried(&self, i: usize) {
        self.0.seats[i].retries.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the backend and placement of an old read.
    pub(crate) fn place(&self, i: usize, (backend, placement): (String, String)) {
        let mut who = self.0.seats[i].who();
        (who.backend, who.placement) = (backend, placement);
    }

    /// Clears the entry of a read that is done.
    pub(crate) fn rise(&self, i: usize) {
        let seat = &self.0.seats[i];
        seat.since.store(0, Ordering::Release);
        *seat.who() = RequestTarget::default();
    }
}

impl RequestEntry {
    fn who(&self) -> MutexGuard<'_, RequestTarget> {
        self.who.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn age(&self, now: u64) -> Option<Duration> {
        let since = self.since.load(Ordering::Acquire);
        (since > 0).then(|| Duration::from_nanos(now.saturating_sub(since)))
    }
}

impl Table {
    fn oldest(&self) -> Option<StuckRead> {
        let now = clock(Instant::now());
        let ages = self.seats.iter().enumerate().filter_map(|(i, seat)| Some((seat.age(now)?, i)));
        let (age, i) = ages.max()?;
        self.pending(i, age)
    }

    fn pending(&self, i: usize, age: Duration) -> Option<StuckRead> {
        let now = clock(Instant::now());
        let young =
            |seat: &&RequestEntry| seat.age(now).is_some_and(|age| age < self.warn_after[0]);
        let siblings = self.seats.iter().filter(young).count();
        let seat = &self.seats[i];
        let who = seat.who();
        let pending = StuckRead {
            object: who.object.as_ref()?.display(),
            offset: seat.offset.load(Ordering::Relaxed),
            len: seat.len.load(Ordering::Relaxed),
            age,
            backend: who.backend.clone(),
            placement: who.placement.clone(),
            retries: seat.retries.load(Ordering::Relaxed),
            siblings: siblings - usize::from(siblings > 0 && age < self.warn_after[0]),
        };
        drop(who);
        // The entry may have been freed meanwhile, and reused.
        seat.age(now)?;
        Some(pending)
    }

    /// Warns of reads that passed a warning age since the last round.
    fn go_round(&self) {
        let now = clock(Instant::now());
        for (i, seat) in self.seats.iter().enumerate() {
            let Some(age) = seat.age(now) else { continue };
            let due = self.warn_after.iter().filter(|after| age >= **after).count();
            let due = due as u8; // fits: 3 at most
            if due > seat.warned.load(Ordering::Relaxed)
                && let Some(pending) = self.pending(i, age)
            {
                seat.warned.store(due, Ordering::Relaxed);
                log::warn!("{pending}");
            }
        }
    }
}

/// The tables of all live readers.
static TABLES: PerProcess<Mutex<Vec<Weak<Table>>>> = PerProcess::new();

fn all_tables() -> MutexGuard<'static, Vec<Weak<Table>>> {
    TABLES.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

fn tables() -> Vec<Arc<Table>> {
    let mut all = all_tables();
    all.retain(|table| table.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

/// The longest pause between two rounds: a warning is at most this late.
const ROUND_MAX: Duration = Duration::from_secs(1);

/// The shortest, for tests with short limits.
const ROUND_MIN: Duration = Duration::from_millis(5);

fn start_watchdog() {
    // The process that the watchdog runs in: a forked child has none of its parent's threads.
    static RUNS_IN: AtomicU32 = AtomicU32::new(0);
    let process = std::process::id();
    if RUNS_IN.swap(process, Ordering::AcqRel) == process {
        return;
    }
    let watch = || {
        loop {
            let tables = tables();
            tables.iter().for_each(|table| table.go_round());
            let soonest = tables.iter().map(|table| table.warn_after[0] / 8).min();
            drop(tables);
            thread::sleep(soonest.unwrap_or(ROUND_MAX).clamp(ROUND_MIN, ROUND_MAX));
        }
    };
    let builder = thread::Builder::new().name("watchdog".to_owned()).stack_size(256 << 10);
    if let Err(e) = builder.spawn(watch) {
        RUNS_IN.store(0, Ordering::Release);
        log::warn!("watchdog not started; stuck reads are not reported: {e}");
    }
}

/// Nanoseconds since the first call, and never 0.
fn clock(now: Instant) -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let since = now.saturating_duration_since(*BEGAN.get_or_init(Instant::now));
    1 + since.as_nanos() as u64 // fits: 584 years
}
