//! The I/O patterns of a training run, and the measurements of one run of a pattern.

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::histogram::Histogram;
use super::measure::counters::Counters;

/// A pattern. They are run in this order, in every round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// Sequential reads of a file, in requests of 1 MiB.
    Stream,
    /// Random reads of samples at full speed, with 64 requests in flight per process.
    Samples,
    /// Random reads of samples at the rate of the entire cluster; the latency of a read counts from
    /// its scheduled time.
    Rate,
    /// The sample order of a run through the loader, at full speed.
    Replay,
    /// A durable checkpoint with one file for each writer.
    Save,
    /// A durable checkpoint with one file that all writers write to.
    SaveOne,
    /// A verified read of a checkpoint by all processes.
    Restore,
    /// Small objects that are created, queried, opened, read, listed and removed.
    Names,
    /// All ranks open index and data at the same time and read their first sample.
    Start,
    /// Samples at the rate of the cluster while checkpoints are saved.
    Mix,
}

/// Main figure of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// Megabytes (10^6 bytes) per second; more is better.
    MbPerS,
    /// Operations or samples per second; more is better.
    PerS,
    /// 99th percentile of latency, in milliseconds; less is better.
    P99Ms,
    /// Seconds until the last operation was done; less is better.
    Seconds,
}

impl Pattern {
    /// All of them, in their order.
    pub const ALL: [Pattern; 10] = [
        Pattern::Stream,
        Pattern::Samples,
        Pattern::Rate,
        Pattern::Replay,
        Pattern::Save,
        Pattern::SaveOne,
        Pattern::Restore,
        Pattern::Names,
        Pattern::Start,
        Pattern::Mix,
    ];

    /// Name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Pattern::Stream => "stream",
            Pattern::Samples => "samples",
            Pattern::Rate => "rate",
            Pattern::Replay => "replay",
            Pattern::Save => "save",
            Pattern::SaveOne => "save-one",
            Pattern::Restore => "restore",
            Pattern::Names => "names",
            Pattern::Start => "start",
            Pattern::Mix => "mix",
        }
    }

    /// Title for headings.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Pattern::Stream => "Sequential reads",
            Pattern::Samples => "Shuffled samples at full speed",
            Pattern::Rate => "Shuffled samples at the rate of the cluster",
            Pattern::Replay => "Samples through the loader",
            Pattern::Save => "Checkpoint save, one file per writer",
            Pattern::SaveOne => "Checkpoint save, one shared file",
            Pattern::Restore => "Checkpoint restore, each reader reads and verifies all of it",
            Pattern::Names => "Metadata of small objects: create, stat, open, read, list, delete",
            Pattern::Start => "Start-up I/O of all ranks: indexes, first sample",
            Pattern::Mix => "Shuffled samples at the rate of the cluster, during a checkpoint save",
        }
    }

    /// The main figure.
    #[must_use]
    pub fn figure(self) -> Figure {
        match self {
            Pattern::Stream | Pattern::Save | Pattern::SaveOne | Pattern::Restore => Figure::MbPerS,
            Pattern::Samples | Pattern::Replay | Pattern::Names => Figure::PerS,
            Pattern::Rate | Pattern::Mix => Figure::P99Ms,
            Pattern::Start => Figure::Seconds,
        }
    }

    /// Direction of its bytes.
    #[must_use]
    pub fn direction(self) -> Direction {
        match self {
            Pattern::Save | Pattern::SaveOne => Direction::Write,
            Pattern::Names | Pattern::Start | Pattern::Mix => Direction::Both,
            _ => Direction::Read,
        }
    }
}

/// Direction of the bytes of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the store.
    Read,
    /// To the store.
    Write,
    /// Both: the ratio of moved to delivered bytes has no meaning.
    Both,
}

impl Figure {
    /// Its unit.
    #[must_use]
    pub fn unit(self) -> &'static str {
        match self {
            Figure::MbPerS => "MB/s",
            Figure::PerS => "/s",
            Figure::P99Ms => "ms",
            Figure::Seconds => "s",
        }
    }

    /// Whether more is better.
    #[must_use]
    pub fn more_is_better(self) -> bool {
        matches!(self, Figure::MbPerS | Figure::PerS)
    }

    /// The figure of a run.
    #[must_use]
    pub fn of(self, run: &PatternRun) -> f64 {
        let seconds = run.seconds.max(1e-9);
        match self {
            Figure::MbPerS => run.bytes as f64 / 1e6 / seconds,
            Figure::PerS => run.ops as f64 / seconds,
            Figure::P99Ms => run.latency.quantile_ms(0.99),
            Figure::Seconds => run.seconds,
        }
    }
}

/// Interval of the timeline of a run: short, because a save may take a few hundredths of a second.
pub const TICK_S: f64 = 0.01;

/// Measurements of one run of a pattern, in one process or merged over all.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PatternRun {
    /// Seconds from the first request to the last completion, in the slowest process.
    pub seconds: f64,
    /// Bytes delivered.
    pub bytes: u64,
    /// Operations.
    pub ops: u64,
    /// Bytes that were moved for them, as the counter of the target reports.
    pub moved_bytes: u64,
    /// CPU seconds of this program.
    pub cpu_s: f64,
    /// The kernel's part of them.
    pub kernel_cpu_s: f64,
    /// Latency of each operation; at a fixed rate, from its scheduled time.
    pub latency: Histogram,
    /// Bytes read or written in each interval of [`TICK_S`].
    pub timeline: Vec<u64>,
    /// Further metrics, with the unit in the name.
    pub more: BTreeMap<String, f64>,
}

impl PatternRun {
    /// Merges the runs of all processes. Of further metrics the largest value counts.
    #[must_use]
    pub fn joined(runs: Vec<PatternRun>) -> Self {
        let mut all = PatternRun::default();
        for run in runs {
            all.seconds = all.seconds.max(run.seconds);
            all.bytes += run.bytes;
            all.ops += run.ops;
            all.moved_bytes += run.moved_bytes;
            all.cpu_s += run.cpu_s;
            all.kernel_cpu_s += run.kernel_cpu_s;
            all.latency.join(&run.latency);
            if all.timeline.len() < run.timeline.len() {
                all.timeline.resize(run.timeline.len(), 0);
            }
            for (tick, bytes) in all.timeline.iter_mut().zip(&run.timeline) {
                *tick += bytes;
            }
            for (name, value) in run.more {
                let most = all.more.entry(name).or_insert(value);
                *most = most.max(value);
            }
        }
        all
    }

    /// Records the CPU time.
    pub fn record_cpu(&mut self, taken: &Counters) {
        (self.cpu_s, self.kernel_cpu_s) = (taken.cpu_s, taken.kernel_cpu_s);
    }

    /// Records an operation that completed `after_s` after the start.
    pub fn record_completion(&mut self, after_s: f64, bytes: u64) {
        self.bytes += bytes;
        self.ops += 1;
        self.record_progress(after_s, after_s, bytes);
    }

    /// Adds bytes that moved between two times to the timeline. They are counted elsewhere.
    pub fn record_progress(&mut self, from_s: f64, to_s: f64, bytes: u64) {
        // fits: a run is bounded by its time-out
        let [first, last] = [from_s, to_s].map(|at| (at / TICK_S) as usize);
        if self.timeline.len() <= last {
            self.timeline.resize(last + 1, 0);
        }
        let each = bytes / (last - first + 1) as u64;
        self.timeline[first..=last].iter_mut().for_each(|tick| *tick += each);
        self.timeline[last] += bytes - each * (last - first + 1) as u64;
    }
}
