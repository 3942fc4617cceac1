//! Reads: the test data, and requests for it, in a closed loop or at a fixed rate.

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

/// Name of the data.
const DATA: &str = "tokens.bin";

/// Size of the pieces in which the data is generated.
const PIECE_BYTES: u64 = 4 << 20;

/// A read request.
#[derive(Clone, Copy, Debug)]
pub struct BenchRead {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
}

/// When requests are made.
#[derive(Clone, Copy, Debug)]
pub enum ArrivalProcess {
    /// The next request when one completes: the maximum rate.
    ClosedLoop,
    /// Requests per second, independent of completions. Latency counts from the time at which a
    /// request is scheduled, so it includes waiting behind a stall.
    OpenLoop(f64),
}

/// The target and the limits of reads.
#[derive(Debug)]
pub struct ReadWorkload<'a> {
    /// The target that holds the data.
    pub place: &'a TargetFolder,
    /// Seed of the data.
    pub seed: u64,
    /// Requests in flight at most.
    pub depth: usize,
    /// Bytes of a request at most.
    pub len_max: usize,
    /// Duration in which requests are made.
    pub seconds: f64,
    /// A request that takes longer is an error.
    pub timeout: Duration,
    /// Set when the benchmark must stop.
    pub stop: &'a StopSignal,
}

/// Writes the data: incompressible, and each word is specific to its position.
///
/// # Errors
/// If the store fails.
pub fn write_data(place: &TargetFolder, bytes: u64, seed: u64, stop: &StopSignal) -> Result<()> {
    let with_hint = |error| place.with_hint(error);
    let mut upload = place.store.create(&data_key(place)?, bytes).map_err(with_hint)?;
    let mut piece = vec![0; PIECE_BYTES.min(bytes) as usize]; // fits: 4 MiB
    let mut at = 0;
    while at < bytes {
        stop.check()?;
        piece.truncate((bytes - at).min(PIECE_BYTES) as usize); // fits: 4 MiB
        fill(&mut piece, seed, at);
        upload.write(&piece).map_err(with_hint)?;
        at += piece.len() as u64;
    }
    upload.finish().map_err(with_hint)?;
    Ok(())
}

/// Key of the data.
///
/// # Errors
/// As [`TargetFolder::key`].
pub fn data_key(place: &TargetFolder) -> storage::Result<Key> {
    place.key(DATA)
}

/// Opens the data.
///
/// # Errors
/// If the store fails.
pub fn open_data(place: &TargetFolder) -> Result<Arc<dyn Object>> {
    Ok(place.store.open(&data_key(place)?)?)
}

/// Path of the data on this machine.
#[must_use]
pub fn data_path(place: &TargetFolder) -> Option<std::path::PathBuf> {
    place.path(DATA)
}

/// The data as a source of the loader.
///
/// # Errors
/// If the store fails.
pub fn data_source(place: &TargetFolder) -> Result<loader::DataFile> {
    let len_bytes = open_data(place)?.len_bytes();
    Ok(loader::DataFile::new(Arc::clone(&place.store), data_key(place)?, len_bytes))
}

/// Fills memory with the data at byte `at`, a multiple of 8.
pub fn fill(piece: &mut [u8], seed: u64, at: u64) {
    for (nth, bytes) in piece.chunks_mut(8).enumerate() {
        let word = word(seed, at / 8 + nth as u64).to_le_bytes();
        bytes.copy_from_slice(&word[..bytes.len()]);
    }
}

/// Compares the first complete word of a read with the data.
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
/// The first error of a read, or that the benchmark must stop.
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
    // A buffer for each request in flight, for the entire run.
    let spare = std::iter::repeat_with(|| pool.take(load.len_max)).take(depth);
    let spare = spare
        .collect::<Option<Vec<_>>>()
        .with_context(|| format!("cannot allocate {depth} buffers"))?;
    let resident = resident(load.place, object.as_ref());
    let before = Counters::now();
    let started = Instant::now();
    let mut flight = BenchInFlight {
        schedule: Schedule { pace, started, seconds: load.seconds },
        free: (0..depth).rev().collect(),
        spare,
        waiting: vec![(started, BenchRead { offset: 0, len: 0 }); depth],
        sent: 0,
        run: PatternRun::default(),
    };
    let mut completions = Vec::new();
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
        reader.wait(wake, &mut completions)?;
        let now = Instant::now();
        for completion in completions.drain(..) {
            let cut = flight.complete(now, &completion);
            let Completion { buf, data, outcome, .. } = completion;
            outcome?;
            check(&buf[data], cut, load.seed, object.as_ref())?;
            flight.spare.push(buf);
        }
    }
    let mut run = flight.end();
    let taken = Counters::since(&before);
    run.record_cpu(&taken);
    run.moved_bytes = match load.place.witness {
        CounterSource::Kernel => taken.read_bytes,
        _ => reader.counters().moved_bytes,
    };
    run.more.extend(resident);
    Ok(run)
}

/// The share of an object in the page cache, if reads are buffered.
#[must_use]
pub fn resident(place: &TargetFolder, object: &dyn Object) -> Option<(String, f64)> {
    let passes = !place.store.profile().direct && place.simulation.is_none();
    let share = passes.then(|| cached_share(object)).flatten()?;
    Some((RESIDENT.to_owned(), share))
}

/// Shorter reads are random, and the readahead of the kernel is wasted on them.
const READ_AHEAD_FROM: usize = 1 << 18;

/// Longest sleep between checks of the stop signal.
const WAKE_MAX: Duration = Duration::from_millis(100);

/// After the run, a backlog is processed for at most the same duration again. The remaining
/// requests count with their waiting time at that point.
const BACKLOG_FACTOR: f64 = 2.0;

struct Schedule {
    pace: ArrivalProcess,
    started: Instant,
    seconds: f64,
}

impl Schedule {
    /// When the next request is scheduled; `None` if there are no more.
    fn scheduled_at(&self, nth: u64, now: Instant) -> Option<Instant> {
        let past_s = (now - self.started).as_secs_f64();
        match self.pace {
            ArrivalProcess::ClosedLoop => (past_s < self.seconds).then_some(now),
            ArrivalProcess::OpenLoop(rate) => {
                let after_s = nth as f64 / rate;
                let is_scheduled = after_s < self.seconds && past_s < BACKLOG_FACTOR * self.seconds;
                is_scheduled.then(|| self.started + Duration::from_secs_f64(after_s))
            }
        }
    }
}

struct BenchInFlight {
    schedule: Schedule,
    free: Vec<usize>,
    /// A buffer for each free slot.
    spare: Vec<Buffer>,
    /// When the request of each slot was scheduled, and the request.
    waiting: Vec<(Instant, BenchRead)>,
    sent: u64,
    run: PatternRun,
}

impl BenchInFlight {
    /// Submits the requests whose time has come. Returns when to check again, and whether no
    /// request remains.
    fn send(
        &mut self,
        now: Instant,
        object: &Arc<dyn Object>,
        reader: &mut dyn Reader,
        next: &mut dyn FnMut() -> BenchRead,
    ) -> Result<(Instant, bool)> {
        let wake = now + WAKE_MAX;
        loop {
            let Some(scheduled) = self.schedule.scheduled_at(self.sent, now) else {
                return Ok((wake, true));
            };
            if scheduled > now {
                return Ok((wake.min(scheduled), false));
            }
            let Some(slot) = self.free.pop() else { return Ok((wake, false)) };
            let cut = next();
            let buf = self.spare.pop().context("cannot submit a read: no free buffer")?;
            self.waiting[slot] = (scheduled, cut);
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

    /// Records a completion.
    fn complete(&mut self, now: Instant, completion: &Completion) -> BenchRead {
        let slot = completion.tag as usize; // fits: it was a slot
        let (scheduled, cut) = self.waiting[slot];
        self.run.latency.add(now - scheduled);
        let after_s = (now - self.schedule.started).as_secs_f64();
        self.run.record_completion(after_s, completion.data.len() as u64);
        self.run.seconds = after_s;
        self.free.push(slot);
        cut
    }

    /// Records the requests that were scheduled and never submitted, with their waiting time until
    /// now.
    fn end(mut self) -> PatternRun {
        let ArrivalProcess::OpenLoop(rate) = self.schedule.pace else { return self.run };
        let now = Instant::now();
        let all = (rate * self.schedule.seconds).ceil() as u64; // fits: a count
        for nth in self.sent..all {
            let scheduled = self.schedule.started + Duration::from_secs_f64(nth as f64 / rate);
            self.run.latency.add(now.saturating_duration_since(scheduled));
        }
        self.run.more.insert("scheduled_per_s".to_owned(), rate);
        self.run.more.insert("never_sent".to_owned(), all.saturating_sub(self.sent) as f64);
        self.run
    }
}
