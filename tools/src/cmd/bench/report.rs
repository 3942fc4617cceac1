//! What was measured, as `--json` prints it, and as tables; the page is made of the same.

use std::collections::BTreeMap;

use serde::Serialize;

use super::counters::Witness;
use super::need::Need;
use super::pattern::{Direction, Figure, Pattern, Run, TICK_S};
use super::stats::{Beside, Estimate};
use super::verdict::Verdict;
use crate::report::table;

/// The version of the JSON. It grows when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// Below, a cache was measured.
const CACHED_BELOW: f64 = 0.9;

/// Above, more came than was asked for.
const AMPLIFIED_ABOVE: f64 = 1.2;

/// All of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// See [`SCHEMA`].
    pub schema: u32,
    /// Whether a target was a model of a store. Then no number here is of the real one.
    pub simulated: bool,
    /// What it was measured for.
    pub need: Need,
    /// How.
    pub method: Method,
    /// The targets, in the order in which they were given.
    pub targets: Vec<TargetReport>,
    /// Every pair of them, by pattern.
    pub comparisons: Vec<Comparison>,
    /// What to do.
    pub verdict: Verdict,
}

/// How it was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Method {
    /// Rounds that count; one before them warmed up.
    pub runs: usize,
    /// Seconds of a run whose length is chosen.
    pub seconds: f64,
    /// Bytes that were read from.
    pub data_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Processes that measured at the same time.
    pub processes: usize,
    /// Writers and readers of checkpoints in each.
    pub writers: usize,
    /// Ranks that started at once, over all processes.
    pub ranks_started: usize,
    /// The seed of all that was drawn.
    pub seed: u64,
    /// Whose order was replayed.
    pub order: String,
    /// The machine: cores and kernel.
    pub machine: String,
}

/// One target.
#[derive(Clone, Debug, Serialize)]
pub struct TargetReport {
    /// How it is called here.
    pub name: String,
    /// As it was given.
    pub url: String,
    /// What it is a model of, if it is one.
    pub simulated: Option<String>,
    /// Its file system, or `s3`.
    pub file_system: String,
    /// Where that is mounted.
    pub mount_point: String,
    /// What moved the bytes.
    pub engine: String,
    /// Whether large transfers went around the page cache.
    pub direct: bool,
    /// Who counted what was moved.
    pub witness: Witness,
    /// What a reader of the numbers must know.
    pub notes: Vec<String>,
    /// By pattern.
    pub patterns: Vec<PatternReport>,
    /// fio beside us.
    pub peers: Vec<Peer>,
}

/// A pattern on a target.
#[derive(Clone, Debug, Serialize)]
pub struct PatternReport {
    /// Which.
    pub pattern: Pattern,
    /// What its figure is.
    pub figure: Figure,
    /// The figure.
    pub estimate: Estimate,
    /// Of each round.
    pub values: Vec<f64>,
    /// Of the round that does not count.
    pub warm_up: f64,
    /// Operations of all rounds.
    pub ops: u64,
    /// How long operations took, in milliseconds: the share that took no longer, and the longest.
    pub latency_ms: Latency,
    /// Bytes moved by bytes delivered, if both were seen.
    pub moved_per_delivered: Option<f64>,
    /// `cached` or `amplified`.
    pub flag: Option<&'static str>,
    /// Cores that this program kept busy.
    pub own_cores: f64,
    /// Seconds of a core that it took for a gigabyte.
    pub own_core_s_per_gb: Option<f64>,
    /// What else was told, medians over the rounds.
    pub more: BTreeMap<String, f64>,
    /// Milliseconds, and the share of operations that took no longer.
    pub distribution_ms: Vec<(f64, f64)>,
    /// Seconds of the last round, and megabytes a second then.
    pub timeline: Vec<(f64, f64)>,
}

/// Latencies in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "percentiles are called what they are")]
pub struct Latency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// The same requests by fio and by us, in turn.
#[derive(Clone, Debug, Serialize)]
pub struct Peer {
    /// What was read.
    pub what: String,
    /// Our median, in megabytes a second.
    pub ours_mb_per_s: f64,
    /// Its median.
    pub fio_mb_per_s: f64,
    /// The median of the ratios of all rounds.
    pub ours_by_fio: f64,
}

/// Two targets in one pattern.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The pattern.
    pub pattern: Pattern,
    /// A target.
    pub first: String,
    /// Another.
    pub second: String,
    /// The first by the second.
    #[serde(flatten)]
    pub beside: Beside,
    /// Which is better, if they are told apart.
    pub better: Option<String>,
}

impl PatternReport {
    /// Of the runs of all rounds, the first of which warmed up.
    #[must_use]
    pub fn of(pattern: Pattern, runs: &[Run], witness: Witness, seed: u64) -> Self {
        let figure = pattern.figure();
        let empty = Run::default();
        let (warm_up, counted) = runs.split_first().unwrap_or((&empty, &[]));
        let values: Vec<f64> = counted.iter().map(|run| figure.of(run)).collect();
        let all = Run::joined(counted.to_vec());
        let seconds: f64 = counted.iter().map(|run| run.seconds).sum();
        let share = |share| all.latency.quantile_ms(share);
        let (moved, flag) = honesty(pattern, &all, witness);
        let gigabytes = all.bytes as f64 / 1e9;
        let mut more: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, value) in counted.iter().flat_map(|run| &run.more) {
            more.entry(name.clone()).or_default().push(*value);
        }
        let timeline = counted.last().map(timeline_of).unwrap_or_default();
        PatternReport {
            pattern,
            figure,
            estimate: Estimate::of(&values, seed),
            values,
            warm_up: figure.of(warm_up),
            ops: all.ops,
            latency_ms: Latency {
                p50: share(0.5),
                p90: share(0.9),
                p99: share(0.99),
                p999: share(0.999),
                max: all.latency.max_ms(),
            },
            moved_per_delivered: moved,
            flag,
            own_cores: all.cpu_s / seconds.max(1e-9),
            own_core_s_per_gb: (gigabytes > 0.001).then(|| all.cpu_s / gigabytes),
            more: more.into_iter().map(|(k, v)| (k, super::stats::median(&v))).collect(),
            distribution_ms: all.latency.distribution(),
            timeline,
        }
    }
}

fn timeline_of(run: &Run) -> Vec<(f64, f64)> {
    // The last tick is not whole.
    let ticks = run.timeline.iter().take(run.timeline.len().saturating_sub(1)).enumerate();
    ticks.map(|(nth, bytes)| (nth as f64 * TICK_S, *bytes as f64 / 1e6 / TICK_S)).collect()
}

/// Moved by delivered, and what that says of the number.
fn honesty(pattern: Pattern, all: &Run, witness: Witness) -> (Option<f64>, Option<&'static str>) {
    if pattern.direction() == Direction::Both || all.bytes == 0 || witness == Witness::Memory {
        return (None, None);
    }
    let ratio = all.moved_bytes as f64 / all.bytes as f64;
    let is_long = !matches!(pattern, Pattern::Samples | Pattern::Rate | Pattern::Replay);
    let flag = match ratio {
        ratio if ratio < CACHED_BELOW => Some("cached"),
        ratio if ratio > AMPLIFIED_ABOVE && is_long => Some("amplified"),
        _ => None,
    };
    (Some(ratio), flag)
}

impl TargetReport {
    /// A pattern of it, if that was measured.
    #[must_use]
    pub fn pattern(&self, pattern: Pattern) -> Option<&PatternReport> {
        self.patterns.iter().find(|of| of.pattern == pattern)
    }

    /// Finds what must be told beside its numbers.
    pub fn note(&mut self) {
        let mut notes = std::mem::take(&mut self.notes);
        if let Some(label) = &self.simulated {
            notes.insert(0, format!("{label}: a model, not a measurement of one"));
        }
        match self.witness {
            Witness::Memory => notes.push("its files are in memory: no device was measured".into()),
            Witness::Requests => notes.push(
                "what happens below our requests is not seen: caches of the mount or of its \
                 servers may have answered some"
                    .into(),
            ),
            Witness::Kernel if !self.direct => notes.push("reads pass the page cache".into()),
            Witness::Kernel => {}
        }
        for of in &self.patterns {
            let (name, moved) = (of.pattern.name(), of.moved_per_delivered.unwrap_or(0.0));
            match of.flag {
                Some("cached") => notes.push(format!(
                    "{name} is CACHED: the device moved {moved:.2} of what was delivered"
                )),
                Some(_) => notes.push(format!(
                    "{name} is AMPLIFIED: {moved:.2} bytes were moved for each delivered"
                )),
                None => {}
            }
        }
        self.notes = notes;
    }
}

/// Every pair of targets in every pattern.
#[must_use]
pub fn compared(targets: &[TargetReport], seed: u64) -> Vec<Comparison> {
    let mut all = Vec::new();
    for pattern in Pattern::ALL {
        for (nth, first) in targets.iter().enumerate() {
            for second in &targets[nth + 1..] {
                let pair = first.pattern(pattern).zip(second.pattern(pattern));
                let beside = pair.and_then(|(a, b)| Beside::of(&a.values, &b.values, seed));
                let Some(beside) = beside else { continue };
                let first_wins = (beside.ratio > 1.0) == pattern.figure().more_is_better();
                let winner = if first_wins { first } else { second };
                let better = beside.told_apart.then(|| winner.name.clone());
                let (first, second) = (first.name.clone(), second.name.clone());
                all.push(Comparison { pattern, first, second, beside, better });
            }
        }
    }
    all
}

impl Report {
    /// Of targets that are measured: compares them, and says what to do.
    #[must_use]
    pub fn new(need: Need, method: Method, mut targets: Vec<TargetReport>) -> Self {
        targets.iter_mut().for_each(TargetReport::note);
        let comparisons = compared(&targets, method.seed);
        let verdict = Verdict::of(&need, &method, &targets, &comparisons);
        let simulated = targets.iter().any(|target| target.simulated.is_some());
        Report { schema: SCHEMA, simulated, need, method, targets, comparisons, verdict }
    }

    /// For a person.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        if self.simulated {
            text += "SIMULATED: these are numbers of models of stores\n\n";
        }
        text += &self.verdict.text();
        text += "\n";
        text += &self.rows();
        let peers: Vec<_> = self.targets.iter().flat_map(peer_rows).collect();
        if !peers.is_empty() {
            text += "\n";
            text += &table(&["beside fio", "", "ours MB/s", "fio MB/s", "ours by fio"], &peers);
        }
        for target in &self.targets {
            for note in &target.notes {
                text += &format!("\n  {}: {note}", target.name);
            }
        }
        let Method { runs, seconds, processes, machine, .. } = &self.method;
        text += &format!(
            "\n  medians of {runs} rounds with 95 % intervals, targets in turn; runs of \
             {seconds} s by {processes} processes; {machine}\n"
        );
        text
    }

    fn rows(&self) -> String {
        let mut rows = Vec::new();
        for pattern in Pattern::ALL {
            for target in &self.targets {
                rows.extend(target.pattern(pattern).map(|of| row(target, of)));
            }
        }
        let head = [
            "pattern",
            "target",
            "median",
            "95 %",
            "",
            "p50 ms",
            "p99 ms",
            "max ms",
            "moved",
            "own cores",
            "s/GB",
        ];
        table(&head, &rows)
    }
}

fn row(target: &TargetReport, of: &PatternReport) -> Vec<String> {
    let Estimate { median, low, high } = of.estimate;
    let moved =
        of.moved_per_delivered.map_or_else(|| "-".to_owned(), |moved| format!("{moved:.2}"));
    let flag = of.flag.map(|flag| format!(" {}", flag.to_uppercase())).unwrap_or_default();
    vec![
        of.pattern.name().to_owned(),
        target.name.clone(),
        short(median),
        format!("{} to {}", short(low), short(high)),
        of.figure.unit().to_owned(),
        short(of.latency_ms.p50),
        short(of.latency_ms.p99),
        short(of.latency_ms.max),
        moved + &flag,
        format!("{:.2}", of.own_cores),
        of.own_core_s_per_gb.map_or_else(|| "-".to_owned(), |s| format!("{s:.2}")),
    ]
}

fn peer_rows(target: &TargetReport) -> Vec<Vec<String>> {
    let row = |peer: &Peer| {
        vec![
            target.name.clone(),
            peer.what.clone(),
            short(peer.ours_mb_per_s),
            short(peer.fio_mb_per_s),
            format!("{:.3}", peer.ours_by_fio),
        ]
    };
    target.peers.iter().map(row).collect()
}

/// A number to three digits.
#[must_use]
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        a if a >= 99.95 => crate::report::thousands(value.round().max(0.0) as u64), // fits: shown
        a if a >= 9.995 => format!("{value:.1}"),
        a if a >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
