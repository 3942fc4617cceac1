//! Reports stuck reads from the thread of [`crate::base::watchdog`]: the thread that submitted one
//! may be stuck with it.
//!
//! A reader has a [`RequestTable`], with an entry for each of its slots. Filling and clearing an
//! entry are a few stores by the reader's thread, and a lock that is contended only if the entry is
//! old. The watchdog scans all tables. When a read is 10, 30 and 60 s old it reports the object,
//! the server and how many other reads are not stuck: one stuck read among many that complete
//! points to a server, all of them together to a network or a mount.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::Object;
use crate::base::per_process::PerProcess;
use crate::base::watchdog::watch;

/// The reads of this process in flight.
#[derive(Clone, Copy, Debug)]
pub struct StuckReads;

/// A read in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StuckRead {
    /// The object.
    pub object: String,
    /// Offset of its first byte.
    pub offset: u64,
    /// Its length in bytes.
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
    entries: Box<[RequestEntry]>,
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
    target: Mutex<RequestTarget>,
}

#[derive(Debug, Default)]
struct RequestTarget {
    object: Option<Arc<dyn Object>>,
    backend: String,
    placement: String,
}

impl RequestTable {
    pub(crate) fn new(count: usize, warn_after: [Duration; 3]) -> Self {
        let entries = std::iter::repeat_with(RequestEntry::default).take(count).collect();
        let table = Arc::new(Table { warn_after, entries });
        let mut all = all_tables();
        all.push(Arc::downgrade(&table));
        drop(all);
        RequestTable(table)
    }

    /// Fills an entry when a read starts.
    pub(crate) fn fill(
        &self,
        i: usize,
        object: &Arc<dyn Object>,
        offset: u64,
        len: u64,
        now: Instant,
    ) {
        let entry = &self.0.entries[i];
        entry.target().object = Some(Arc::clone(object));
        entry.offset.store(offset, Ordering::Relaxed);
        entry.len.store(len, Ordering::Relaxed);
        entry.retries.store(0, Ordering::Relaxed);
        entry.warned.store(0, Ordering::Relaxed);
        entry.since.store(clock(now), Ordering::Release);
    }

    pub(crate) fn retried(&self, i: usize) {
        self.0.entries[i].retries.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the backend and placement of an old read.
    pub(crate) fn set_description(&self, i: usize, (backend, placement): (String, String)) {
        let mut target = self.0.entries[i].target();
        (target.backend, target.placement) = (backend, placement);
    }

    /// Clears the entry of a read that is done.
    pub(crate) fn clear(&self, i: usize) {
        let entry = &self.0.entries[i];
        entry.since.store(0, Ordering::Release);
        *entry.target() = RequestTarget::default();
    }
}

impl RequestEntry {
    fn target(&self) -> MutexGuard<'_, RequestTarget> {
        self.target.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn age(&self, now: u64) -> Option<Duration> {
        let since = self.since.load(Ordering::Acquire);
        (since > 0).then(|| Duration::from_nanos(now.saturating_sub(since)))
    }
}

impl Table {
    fn oldest(&self) -> Option<StuckRead> {
        let now = clock(Instant::now());
        let ages =
            self.entries.iter().enumerate().filter_map(|(i, entry)| Some((entry.age(now)?, i)));
        let (age, i) = ages.max()?;
        self.pending(i, age)
    }

    fn pending(&self, i: usize, age: Duration) -> Option<StuckRead> {
        let now = clock(Instant::now());
        let young =
            |entry: &&RequestEntry| entry.age(now).is_some_and(|age| age < self.warn_after[0]);
        let siblings = self.entries.iter().filter(young).count();
        let entry = &self.entries[i];
        let target = entry.target();
        let pending = StuckRead {
            object: target.object.as_ref()?.display(),
            offset: entry.offset.load(Ordering::Relaxed),
            len: entry.len.load(Ordering::Relaxed),
            age,
            backend: target.backend.clone(),
            placement: target.placement.clone(),
            retries: entry.retries.load(Ordering::Relaxed),
            siblings: siblings - usize::from(siblings > 0 && age < self.warn_after[0]),
        };
        drop(target);
        // The entry may have been freed meanwhile, and reused.
        entry.age(now)?;
        Some(pending)
    }

    /// Warns of reads that passed a warning age since the last scan.
    fn warn_of_old_reads(&self) {
        let now = clock(Instant::now());
        for (i, entry) in self.entries.iter().enumerate() {
            let Some(age) = entry.age(now) else { continue };
            let passed = self.warn_after.iter().filter(|after| age >= **after).count();
            let passed = passed as u8; // fits: 3 at most
            if passed > entry.warned.load(Ordering::Relaxed)
                && let Some(pending) = self.pending(i, age)
            {
                entry.warned.store(passed, Ordering::Relaxed);
                log::warn!("{pending}");
            }
        }
    }
}

/// The tables of all live readers.
static TABLES: PerProcess<Mutex<Vec<Weak<Table>>>> = PerProcess::new();

fn all_tables() -> MutexGuard<'static, Vec<Weak<Table>>> {
    let first = || {
        watch(scan);
        Mutex::default()
    };
    TABLES.get(first).lock().unwrap_or_else(PoisonError::into_inner)
}

fn tables() -> Vec<Arc<Table>> {
    let mut all = all_tables();
    all.retain(|table| table.strong_count() > 0);
    all.iter().filter_map(Weak::upgrade).collect()
}

fn scan() -> Option<Duration> {
    let tables = tables();
    tables.iter().for_each(|table| table.warn_of_old_reads());
    tables.iter().map(|table| table.warn_after[0]).min()
}

/// Nanoseconds since the first call, and never 0.
fn clock(now: Instant) -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let since = now.saturating_duration_since(*START.get_or_init(Instant::now));
    1 + since.as_nanos() as u64 // fits: 584 years
}
