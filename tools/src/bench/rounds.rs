//! The rounds: every pattern on every target, with the targets in another random order each time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use loader::SampleOrder;

use super::demand::Need;
use super::fio::comparison::FioPairs;
use super::patterns::{Pattern, PatternRun};
use super::processes::BenchProcesses;
use super::random::{Random, word};
use super::target::TargetFolder;
use super::workload::metadata;
use super::workload::reads::{self, ArrivalProcess, BenchRead, ReadWorkload};
use super::workload::replay::{Replay, replay};
use super::workload::saves::{self, WriterBuffers};
use crate::ui::terminal::ProgressLine;
use crate::ui::timeout::StopSignal;

/// Settings of all processes.
#[derive(Debug)]
pub struct Settings {
    /// The training run that the stores are measured for.
    pub need: Need,
    /// Sample order of a run, if a config was given.
    pub order: Option<Arc<dyn SampleOrder>>,
    /// Processes that measure at the same time.
    pub processes: usize,
    /// Patterns to measure.
    pub patterns: Vec<Pattern>,
    /// Counted rounds, after one warm-up round.
    pub runs: usize,
    /// Seconds of a run whose length can be chosen.
    pub seconds: f64,
    /// Bytes to read from.
    pub data_bytes: u64,
    /// Data of the writers of this process.
    pub state: WriterBuffers,
    /// Writers, and readers of checkpoints, of this process.
    pub writers: usize,
    /// Small objects of this process.
    pub files: usize,
    /// Ranks that this process starts.
    pub ranks: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// A request that takes longer counts as stuck.
    pub timeout: Duration,
    /// Whether fio runs too.
    pub fio: bool,
}

/// Size and count of a stream's requests: as large as the loader's largest, and as many as an
/// upload has in flight.
pub(crate) const STREAM: (usize, usize) = (1 << 20, 32);

/// Samples in flight: enough for 60,000 per second from a device with a latency of a millisecond.
pub(crate) const SAMPLES_DEPTH: usize = 64;

/// Samples in flight at the cluster's rate: enough that requests do not wait in the client.
const RATE_DEPTH: usize = 256;

/// Minimum rate, for small clusters: at a lower one, a run of seconds has too few samples for a
/// 99th percentile.
const RATE_MIN: f64 = 200.0;

/// All runs, by target and pattern; the first of each is the warm-up.
pub type Measured = Vec<BTreeMap<Pattern, Vec<PatternRun>>>;

/// A running benchmark.
#[derive(Debug)]
pub struct Session<'a> {
    /// The settings.
    pub settings: Arc<Settings>,
    /// The targets.
    pub places: Vec<Arc<TargetFolder>>,
    /// The processes of the benchmark.
    pub group: &'a BenchProcesses,
    /// Set when the benchmark must stop.
    pub stop: StopSignal,
}

impl Session<'_> {
    /// Writes the test data.
    ///
    /// # Errors
    /// The first error of a target.
    pub fn prepare(&self, line: &mut ProgressLine) -> Result<()> {
        let Settings { data_bytes, timeout, state, writers, .. } = &*self.settings;
        let saved_bytes = state.part_bytes() * (writers * self.group.members) as u64;
        let need_bytes = data_bytes + 4 * saved_bytes;
        let places = || self.places.iter().filter(|_| self.group.member == 0);
        // All targets are checked first: an error of the last one is then reported within seconds.
        for place in places() {
            line.show(&format!("checking {}", place.name));
            let own = Arc::clone(place);
            let what = format!("prepare {}", place.name);
            self.stop.guard(&what, *timeout, move || own.begin(need_bytes))?;
        }
        for place in places() {
            line.show(&format!("writing test data to {}", place.name));
            let (settings, own, stop) =
                (Arc::clone(&self.settings), Arc::clone(place), self.stop.clone());
            // A store that writes 10 MB/s is slow, not stuck.
            let limit = *timeout + Duration::from_secs(data_bytes / 10_000_000);
            let what = format!("write test data to {}", place.name);
            self.stop.guard(&what, limit, move || {
                reads::write_data(&own, settings.data_bytes, settings.seed, &stop)?;
                metadata::prepare_start(&own)?;
                saves::prepare_restore(&own, &settings.state)
            })?;
        }
        self.group.exchange("ready", ())?;
        Ok(())
    }

    /// Runs all rounds.
    ///
    /// # Errors
    /// The first error of a run.
    pub fn rounds(&self, line: &mut ProgressLine) -> Result<(Measured, Vec<FioPairs>)> {
        let Settings { runs, patterns, .. } = &*self.settings;
        let mut measured: Measured = vec![BTreeMap::new(); self.places.len()];
        let mut peers = vec![FioPairs::default(); self.places.len()];
        let all = (runs + 1) * patterns.len() * self.places.len();
        let (started, mut done) = (Instant::now(), 0_u32);
        for round in 0..=*runs {
            for (nth, pattern) in patterns.iter().enumerate() {
                let mut turn: Vec<usize> = (0..self.places.len()).collect();
                let draw = word(self.settings.seed, (round * Pattern::ALL.len() + nth) as u64);
                Random::new(draw).shuffle(&mut turn);
                for at in turn {
                    let left = started.elapsed().div_f64(f64::from(done.max(1)));
                    let left = left.as_secs_f64() * (all as f64 - f64::from(done));
                    let (name, at_name) = (pattern.name(), &self.places[at].name);
                    let left = if done > 0 { format!(", {left:.0} s left") } else { String::new() };
                    line.show(&format!("round {round} of {runs}: {name} on {at_name}{left}"));
                    let run = self.one(*pattern, at, round)?;
                    measured[at].entry(*pattern).or_default().push(run);
                    done += 1;
                }
            }
            if self.settings.fio && round > 0 {
                for (place, pairs) in self.places.iter().zip(&mut peers) {
                    line.show(&format!("round {round} of {runs}: fio on {}", place.name));
                    pairs.round((&self.settings, place), &self.stop, round)?;
                }
            }
        }
        Ok((measured, peers))
    }

    /// Runs a pattern once in all processes.
    fn one(&self, pattern: Pattern, at: usize, round: usize) -> Result<PatternRun> {
        let (settings, place) = (Arc::clone(&self.settings), Arc::clone(&self.places[at]));
        let part = (self.group.member, self.group.members);
        let step = format!("{round}-{}-{at}", pattern.name());
        let what = format!("measure {} on {}", pattern.name(), place.name);
        if pattern == Pattern::SaveOne {
            if part.0 == 0 {
                let bytes = settings.state.part_bytes() * (settings.writers * part.1) as u64;
                let place = Arc::clone(&place);
                let make = move || saves::prepare_one(&place, bytes);
                self.stop.guard(&what, self.settings.timeout, make)?;
            }
            self.group.exchange(&format!("{step}-made"), ())?;
        }
        self.group.exchange(&format!("{step}-go"), ())?;
        let stop = self.stop.clone();
        let limit = self.settings.timeout + Duration::from_secs_f64(4.0 * self.settings.seconds);
        let run = self.stop.guard(&what, limit, move || {
            ProcessRun { settings: &settings, place: &place, part, round, stop: &stop }.run(pattern)
        })?;
        Ok(PatternRun::joined(self.group.exchange(&format!("{step}-done"), run)?))
    }
}

/// One run of a pattern in one process.
struct ProcessRun<'a> {
    settings: &'a Settings,
    place: &'a TargetFolder,
    /// Index of this process, and the count of processes.
    part: (usize, usize),
    round: usize,
    stop: &'a StopSignal,
}

impl ProcessRun<'_> {
    fn run(&self, pattern: Pattern) -> Result<PatternRun> {
        let Settings { state, writers, files, ranks, need, .. } = self.settings;
        let (place, (member, _)) = (self.place, self.part);
        let step = self.round as u64 + 1;
        let sample = usize::try_from(need.sample_bytes).context("cannot use --seq-length")?;
        match pattern {
            Pattern::Stream => self.stream(),
            Pattern::Samples => self.samples(ArrivalProcess::ClosedLoop, SAMPLES_DEPTH),
            Pattern::Rate => self.samples(ArrivalProcess::OpenLoop(self.rate()), RATE_DEPTH),
            Pattern::Replay => self.replay(),
            Pattern::Save => saves::save_each(place, state, member, step),
            Pattern::SaveOne => saves::save_one(place, state, member),
            Pattern::Restore => saves::restore(place, state.part_bytes(), *writers),
            Pattern::Names => metadata::names(place, *files, *writers, member),
            Pattern::Start => metadata::start(place, *ranks, sample),
            Pattern::Mix => self.mix(),
        }
    }

    fn load(&self, depth: usize, len_max: usize) -> ReadWorkload<'_> {
        let Settings { seed, seconds, timeout, .. } = *self.settings;
        ReadWorkload { place: self.place, seed, depth, len_max, seconds, timeout, stop: self.stop }
    }

    /// Samples per second that this process reads.
    fn rate(&self) -> f64 {
        self.settings.need.samples_per_s.max(RATE_MIN) / self.part.1 as f64
    }

    /// Reads from the start of this process's share to the end, then from the beginning.
    fn stream(&self) -> Result<PatternRun> {
        let (bytes, depth) = STREAM;
        let blocks = (self.settings.data_bytes / bytes as u64).max(1);
        let mut nth = blocks * self.part.0 as u64 / self.part.1 as u64;
        reads::drive(&self.load(depth, bytes), ArrivalProcess::ClosedLoop, &mut || {
            let block = nth % blocks;
            nth += 1;
            BenchRead { offset: block * bytes as u64, len: bytes }
        })
    }

    /// Reads samples of two-byte tokens from random positions.
    fn samples(&self, pace: ArrivalProcess, depth: usize) -> Result<PatternRun> {
        let sample_bytes = self.settings.need.sample_bytes;
        let len = usize::try_from(sample_bytes).context("cannot use --seq-length")?;
        let places = (self.settings.data_bytes - sample_bytes) / 2 + 1;
        let draw = word(self.settings.seed, (self.round * 1000 + self.part.0) as u64);
        let mut random = Random::new(draw);
        reads::drive(&self.load(depth, len), pace, &mut || BenchRead {
            offset: random.below(places) * 2,
            len,
        })
    }

    fn replay(&self) -> Result<PatternRun> {
        let sample_bytes = self.settings.need.sample_bytes;
        let len = usize::try_from(sample_bytes).context("cannot use --seq-length")?;
        let part = (self.part.0 as u32, self.part.1 as u32); // fits: processes
        let round = (self.round as u64, self.settings.runs as u64 + 2);
        let order = self.settings.order.as_ref();
        replay(&self.load(SAMPLES_DEPTH, len), &Replay { order, sample_bytes, part, round })
    }

    /// Reads at the cluster's rate while checkpoints are saved one after another.
    fn mix(&self) -> Result<PatternRun> {
        let over = StopSignal::default();
        let Settings { state, .. } = self.settings;
        std::thread::scope(|scope| {
            let stops = [&over, self.stop];
            let place = self.place;
            let save = move || saves::save_until(place, state, self.part.0, &stops);
            let saving = std::thread::Builder::new().spawn_scoped(scope, save);
            let saving = saving.context("cannot start a thread that saves")?;
            let run = self.samples(ArrivalProcess::OpenLoop(self.rate()), RATE_DEPTH);
            over.set();
            let saved =
                saving.join().ok().context("cannot save during reads: a thread panicked")??;
            let mut run = run?;
            run.more.insert("saved_mb".to_owned(), saved as f64 / 1e6);
            Ok(run)
        })
    }
}
