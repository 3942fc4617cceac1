//! Reads: the data that is read, and requests for it, as they come or at a given rate.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use storage::probe::cached_share;
use storage::{Buffer, BufferPool, Completion, Key, Object, ReadRequest, Reader, ReaderOptions};

use crate::bench::measure::counters::{CounterSource, Counters};
use crate::bench::measure::validity::RESIDENT;
use crate::bench::patterns::PatternRun;
use crate::bench::random::word;
use crate::bench::target::TargetFolder;
use crate::ui::timeout::StopSignal;

/// The object that is read.
const DATA: &str = "tokens.bin";

/// Pieces in which the data is made.
const PIECE_BYTES: u64 = 4 << 20;

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct BenchRead {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
}

/// How requests follow each other.
#[derive(Clone, Copy, Debug)]
pub enum ArrivalProcess {
    /// The next when one has come: what is most.
    AsTheyCome,
    /// So many a second, whether others have come or not. Each is timed from when it was due: one
    /// that waits behind a stall has waited for it too.
    PerSecond(f64),
}

/// Who reads, and within what bounds.
#[derive(Debug)]
pub struct ReadWorkload<'a> {
    /// Where the data lies.
    pub place: &'a TargetFolder,
    /// What the data was made of.
    pub seed: u64,
    /// Requests in flight at most.
    pub depth: usize,
    /// Bytes of a request at most.
    pub len_max: usize,
    /// For so long requests are made.
    pub seconds: f64,
    /// A request that takes longer is an error.
    pub timeout: Duration,
    /// When to stop.
    pub stop: &'a StopSignal,
}

/// Writes the data: what no device can compress, and of which each part says where it belongs.
///
/// # Errors
/// What the store says.
pub fn write_data(place: &TargetFolder, bytes: u64, seed: u64, stop: &StopSignal) -> Result<()> {
    let told = |error| place.told(error);
    let mut upload = place.store.create(&data_key(place)?, bytes).map_err(told)?;
    let mut piece = vec![0; PIECE_BYTES.min(bytes) as usize]; // fits: 4 MiB
    let mut at = 0;
    while at < bytes {
        stop.check()?;
        piece.truncate((bytes - at).min(PIECE_BYTES) as usize); // fits: 4 MiB
        fill(&mut piece, seed, at);
        upload.write(&piece).map_err(told)?;
        at += piece.len() as u64;
    }
    upload.finish().map_err(told)?;
    Ok(())
}

/// Its name.
///
/// # Errors
/// As [`TargetFolder::key`].
pub fn data_key(place: &TargetFolder) -> storage::Result<Key> {
    place.key(DATA)
}

/// Opens it.
///
/// # Errors
/// What the store says.
pub fn open_data(place: &TargetFolder) -> Result<Arc<dyn Object>> {
    Ok(place.store.open(&data_key(place)?)?)
}

/// Where it lies on this machine.
#[must_use]
pub fn data_path(place: &TargetFolder) -> Option<std::path::PathBuf> {
    place.path(DATA)
}

/// The source of it for a loader.
///
/// # Errors
/// What the store says.
pub fn data_source(place: &TargetFolder) -> Result<loader::DataFile> {
    let len_bytes = open_data(place)?.len_bytes();
    Ok(loader::DataFile::new(Arc::clone(&place.store), data_key(place)?, len_bytes))
}

/// Fills memory with the bytes that belong at a place, a multiple of 8.
pub fn fill(piece: &mut [u8], seed: u64, at: u64) {
    for (nth, bytes) in piece.chunks_mut(8).enumerate() {
        let word = word(seed, at / 8 + nth as u64).to_le_bytes();
        bytes.copy_from_slice(&word[..bytes.len()]);
    }
}

/// Compares the first whole word of what came.
fn check(bytes: &[u8], cut: BenchRead, seed: u64, object: &dyn Object) -> Result<()> {
    let nth = cut.offset.div_ceil(8);
    let at = (nth * 8 - cut.offset) as usize; // fits: below 8
    let Some(found) = bytes.get(at..at + 8) else { return Ok(()) };
    ensure!(
        found == word(seed, nth).to_le_bytes(),
        "cannot read {}: expected the bytes that were written, found others at byte {} (hint: the \
         store corrupts data; check its disks and memory)",
        object.display(),
        nth * 8
    );
    Ok(())
}

/// Makes requests and waits for all of them.
///
/// # Errors
/// The first that fails, or that it is time to stop.
pub fn drive(
    load: &ReadWorkload<'_>,
    pace: ArrivalProcess,
    next: &mut dyn FnMut() -> BenchRead,
) -> Result<PatternRun> {
    let object = open_data(load.place)?;
    if load.len_max < READ_AHEAD_FROM {
        object.advise_random();
    }
    let room = BufferPool::bytes_of(load.len_max as u64) as usize; // fits: of memory
    let pool = BufferPool::new(room * load.depth);
    let mut options = ReaderOptions::new(&pool);
    options.depth = Some(load.depth);
    options.timeout = load.timeout;
    let mut reader = load.place.store.reader(&options)?;
    let depth = load.depth.min(reader.depth_max());
    // A buffer for each request in flight, for as long as it lasts.
    let spare = std::iter::repeat_with(|| pool.take(load.len_max)).take(depth);
    let spare = spare
        .collect::<Option<Vec<_>>>()
        .with_context(|| format!("cannot allocate {depth} buffers"))?;
    let resident = resident(load.place, object.as_ref());
    let before = Counters::now();
    let begun = Instant::now();
    let mut flight = BenchInFlight {
        schedule: Schedule { pace, begun, seconds: load.seconds },
        free: (0..depth).rev().collect(),
        spare,
        waiting: vec![(begun, BenchRead { offset: 0, len: 0 }); depth],
        sent: 0,
        run: PatternRun::default(),
    };
    let mut came = Vec::new();
    loop {
        load.stop.check()?;
        let now = Instant::now();
        let (wake, is_over) = flight.send(now, &object, reader.as_mut(), next)?;
        if reader.in_flight() == 0 {
            if is_over {
                break;
            }
            thread::sleep(wake.saturating_duration_since(now));
            continue;
        }
        reader.wait(wake, &mut came)?;
        let now = Instant::now();
        for came in came.drain(..) {
            let cut = flight.land(now, &came);
            let Completion { buf, data, outcome, .. } = came;
            outcome?;
            check(&buf[data], cut, load.seed, object.as_ref())?;
            flight.spare.push(buf);
        }
    }
    let mut run = flight.end();
    let taken = Counters::since(&before);
    run.took(&taken);
    run.moved_bytes = match load.place.witness {
        CounterSource::Kernel => taken.read_bytes,
        _ => reader.counters().moved_bytes,
    };
    run.more.extend(resident);
    Ok(run)
}

/// The share of an object that lies in the page cache, where reads pass that.
#[must_use]
pub fn resident(place: &TargetFolder, object: &dyn Object) -> Option<(String, f64)> {
    let passes = !place.store.profile().direct && place.simulation.is_none();
    let share = passes.then(|| cached_share(object)).flatten()?;
    Some((RESIDENT.to_owned(), share))
}

/// Shorter reads are from anywhere, and what the system reads ahead of them is for nothing.
const READ_AHEAD_FROM: usize = 1 << 18;

/// Longest sleep before the flag is looked at again.
const WAKE_MAX: Duration = Duration::from_millis(100);

/// A backlog is worked off for as long again, and is then given up: its wait counts as it is.
const BACKLOG_FACTOR: f64 = 2.0;

struct Schedule {
    pace: ArrivalProcess,
    begun: Instant,
    seconds: f64,
}

impl Schedule {
    /// When the next request is due; `None` if there are no more.
    fn due(&self, nth: u64, now: Instant) -> Option<Instant> {
        let past_s = (now - self.begun).as_secs_f64();
        match self.pace {
            ArrivalProcess::AsTheyCome => (past_s < self.seconds).then_some(now),
            ArrivalProcess::PerSecond(rate) => {
                let after_s = nth as f64 / rate;
                let is_due = after_s < self.seconds && past_s < BACKLOG_FACTOR * self.seconds;
                is_due.then(|| self.begun + Duration::from_secs_f64(after_s))
            }
        }
    }
}

struct BenchInFlight {
    schedule: Schedule,
    free: Vec<usize>,
    /// As many buffers.
    spare: Vec<Buffer>,
    /// When the request of each slot was due, and what it was.
    waiting: Vec<(Instant, BenchRead)>,
    sent: u64,
    run: PatternRun,
}

impl BenchInFlight {
    /// Sends what is due. Gives when to look again, and whether nothing more will be due.
    fn send(
        &mut self,
        now: Instant,
        object: &Arc<dyn Object>,
        reader: &mut dyn Reader,
        next: &mut dyn FnMut() -> BenchRead,
    ) -> Result<(Instant, bool)> {
        let wake = now + WAKE_MAX;
        loop {
            let Some(due) = self.schedule.due(self.sent, now) else { return Ok((wake, true)) };
            if due > now {
                return Ok((wake.min(due), false));
            }
            let Some(slot) = self.free.pop() else { return Ok((wake, false)) };
            let cut = next();
            let buf = self.spare.pop().context("cannot submit a read: no free buffer")?;
            self.waiting[slot] = (due, cut);
            let (object, tag) = (Arc::clone(object), slot as u64);
            reader.submit(ReadRequest {
                object,
                offset: cut.offset,
                len: cut.len,
                buf,
                tag,
                deadline: None,
            });
            self.sent += 1;
        }
    }

    /// Counts what came.
    fn land(&mut self, now: Instant, came: &Completion) -> BenchRead {
        let slot = came.tag as usize; // fits: it was one
        let (due, cut) = self.waiting[slot];
        self.run.latency.add(now - due);
        let after_s = (now - self.schedule.begun).as_secs_f64();
        self.run.came(after_s, came.data.len() as u64);
        self.run.seconds = after_s;
        self.free.push(slot);
        cut
    }

    /// Counts what was due and never sent, as it has waited until now.
    fn end(mut self) -> PatternRun {
        let ArrivalProcess::PerSecond(rate) = self.schedule.pace else { return self.run };
        let now = Instant::now();
        let all = (rate * self.schedule.seconds).ceil() as u64; // fits: a count
        for nth in self.sent..all {
            let due = self.schedule.begun + Duration::from_secs_f64(nth as f64 / rate);
            self.run.latency.add(now.saturating_duration_since(due));
        }
        self.run.more.insert("due_per_s".to_owned(), rate);
        self.run.more.insert("never_sent".to_owned(), all.saturating_sub(self.sent) as f64);
        self.run
    }
}
