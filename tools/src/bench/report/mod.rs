//! The results of a benchmark. `--json`, the tables and the page are made from them.

pub mod page;
pub mod tables;
pub mod verdict;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::demand::Need;
use super::fio::comparison::Peer;
use super::measure::counters::CounterSource;
use super::measure::stats::{Estimate, RatioEstimate};
use super::measure::validity::{
    ClientOverhead, OWN_CORE_S_PER_GB_MAX, RESIDENT, ValidityFlag, judged,
};
use super::patterns::{Figure, Pattern, PatternRun, TICK_S};
use super::report::tables::{peers, rows};
use super::report::verdict::StoreVerdict;

/// The version of the JSON. It is increased when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// Maximum number of points of a timeline: more cannot be distinguished.
const POINTS_MAX: usize = 80;

/// The results of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// See [`SCHEMA`].
    pub schema: u32,
    /// Whether a target was simulated. Then no number here is of a real store.
    pub simulated: bool,
    /// The training run that the stores are measured for.
    pub need: Need,
    /// The method.
    pub method: Method,
    /// The targets, in the order in which they were given.
    pub targets: Vec<TargetReport>,
    /// Every pair of them, by pattern.
    pub comparisons: Vec<Comparison>,
    /// The recommendations.
    pub verdict: StoreVerdict,
    /// The page that was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page: Option<PathBuf>,
}

/// Method of the measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Method {
    /// Counted rounds, after one warm-up round.
    pub runs: usize,
    /// Seconds of a run of a timed pattern.
    pub seconds: f64,
    /// Size of the file that was read.
    pub data_bytes: u64,
    /// Bytes of a checkpoint.
    pub checkpoint_bytes: u64,
    /// Processes that measured at the same time.
    pub processes: usize,
    /// Writers and readers of checkpoints in each.
    pub writers: usize,
    /// Ranks that started at once, over all processes.
    pub ranks_started: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Sample order that was replayed.
    pub order: String,
    /// The machine: cores and kernel.
    pub machine: String,
}

/// One target.
#[derive(Clone, Debug, Serialize)]
pub struct TargetReport {
    /// Name in the report.
    pub name: String,
    /// URL from the command line.
    pub url: String,
    /// Label of the model, if it was simulated.
    pub simulated: Option<String>,
    /// Its file system, or `s3`.
    pub file_system: String,
    /// Mount point of the file system.
    pub mount_point: String,
    /// I/O engine.
    pub engine: String,
    /// Whether large transfers used direct I/O.
    pub direct: bool,
    /// Source of the count of moved bytes.
    pub witness: CounterSource,
    /// Caveats of the numbers.
    pub notes: Vec<String>,
    /// By pattern.
    pub patterns: Vec<PatternReport>,
    /// Comparisons with fio.
    pub peers: Vec<Peer>,
}

/// Results of a pattern on a target.
#[derive(Clone, Debug, Serialize)]
pub struct PatternReport {
    /// The pattern.
    pub pattern: Pattern,
    /// Kind of the main figure.
    pub figure: Figure,
    /// The main figure over all rounds.
    pub estimate: Estimate,
    /// The main figure of each round.
    pub values: Vec<f64>,
    /// The main figure of the warm-up round.
    pub warm_up: f64,
    /// Operations of all rounds.
    pub ops: u64,
    /// Percentiles and maximum of latency, in milliseconds.
    pub latency_ms: Latency,
    /// Bytes moved per byte delivered, if both are known.
    pub moved_per_delivered: Option<f64>,
    /// Why the number is not that of the device.
    pub flag: Option<ValidityFlag>,
    /// CPU time of the benchmark itself.
    #[serde(flatten)]
    pub own: ClientOverhead,
    /// Further metrics, medians over the rounds.
    pub more: BTreeMap<String, f64>,
    /// Cumulative distribution of latency: milliseconds, and the share of operations up to them.
    pub distribution_ms: Vec<(f64, f64)>,
    /// Timeline of the last round: seconds, and megabytes per second.
    pub timeline: Vec<(f64, f64)>,
}

/// Latencies in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "the names are the percentiles")]
pub struct Latency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// Comparison of two targets in one pattern.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The pattern.
    pub pattern: Pattern,
    /// The first target.
    pub first: String,
    /// The second target.
    pub second: String,
    /// The first divided by the second.
    #[serde(flatten)]
    pub beside: RatioEstimate,
    /// The better target, if the difference is significant.
    pub better: Option<String>,
}

impl PatternReport {
    /// Summarizes the runs of all rounds; the first is the warm-up.
    #[must_use]
    pub fn of(pattern: Pattern, runs: &[PatternRun], witness: CounterSource, seed: u64) -> Self {
        let figure = pattern.figure();
        let empty = PatternRun::default();
        let (warm_up, counted) = runs.split_first().unwrap_or((&empty, &[]));
        let values: Vec<f64> = counted.iter().map(|run| figure.of(run)).collect();
        let all = PatternRun::joined(counted.to_vec());
        let seconds: f64 = counted.iter().map(|run| run.seconds).sum();
        let share = |share| all.latency.quantile_ms(share);
        let (moved, flag) = judged(pattern, &all, witness);
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
            own: ClientOverhead::of(pattern, &all, seconds),
            more: more.into_iter().map(|(k, v)| (k, super::measure::stats::median(&v))).collect(),
            distribution_ms: all.latency.distribution(),
            timeline,
        }
    }
}

fn timeline_of(run: &PatternRun) -> Vec<(f64, f64)> {
    let each = run.timeline.len().div_ceil(POINTS_MAX).max(1);
    let point_s = each as f64 * TICK_S;
    let point = |(nth, ticks): (usize, &[u64])| {
        let begin_s = nth as f64 * point_s;
        // The last point may be incomplete; less than half of one gives no rate.
        let long_s = (ticks.len() as f64 * TICK_S).min(run.seconds - begin_s);
        let bytes: u64 = ticks.iter().sum();
        (long_s > point_s / 2.0).then(|| (begin_s, bytes as f64 / 1e6 / long_s))
    };
    run.timeline.chunks(each).enumerate().filter_map(point).collect()
}

impl TargetReport {
    /// The results of a pattern, if it was measured.
    #[must_use]
    pub fn pattern(&self, pattern: Pattern) -> Option<&PatternReport> {
        self.patterns.iter().find(|of| of.pattern == pattern)
    }

    /// Adds the caveats that follow from the numbers.
    pub fn note(&mut self) {
        let mut notes = std::mem::take(&mut self.notes);
        if let Some(label) = &self.simulated {
            notes.insert(0, format!("{label}: results of a model, not of a real store"));
        }
        match self.witness {
            CounterSource::Memory => {
                notes.push("the file system is in memory: no device was measured".into());
            }
            CounterSource::Requests => notes.push(
                "only requests are counted, not device I/O: caches of the mount or of its servers \
                 may have served some"
                    .into(),
            ),
            CounterSource::Kernel if !self.direct => {
                notes.push("reads go through the page cache".into());
            }
            CounterSource::Kernel => {}
        }
        notes.extend(self.patterns.iter().filter_map(PatternReport::doubt));
        notes.extend(self.own_cost());
        self.notes = notes;
    }

    /// CPU time of the benchmark where it exceeds the limit.
    fn own_cost(&self) -> Option<String> {
        let over = self.patterns.iter().filter(|of| of.own.is_over);
        let each: Vec<String> = over
            .map(|of| {
                let ClientOverhead { core_s_per_gb, us_per_op, .. } = of.own;
                let (all, kernel) = (core_s_per_gb, of.own.kernel_core_s_per_gb);
                let [all, kernel] = [all, kernel].map(|cores| cores.unwrap_or(0.0));
                let text = format!("{} {all:.2} ({kernel:.2} in the kernel)", of.pattern.name());
                // With small requests, CPU time per request is the useful figure.
                if us_per_op < 100.0 {
                    format!("{text}, {us_per_op:.1} µs of CPU per request")
                } else {
                    text
                }
            })
            .collect();
        let http = if self.file_system == "s3" { " (HTTP included)" } else { "" };
        (!each.is_empty()).then(|| {
            format!(
                "more than {OWN_CORE_S_PER_GB_MAX} cores per GB/s{http}, the kernel's part \
                 included: {}",
                each.join("; ")
            )
        })
    }
}

impl PatternReport {
    /// Why the number is not that of the device.
    fn doubt(&self) -> Option<String> {
        let (name, moved) = (self.pattern.name(), self.moved_per_delivered.unwrap_or(0.0));
        let flag = self.flag?;
        let mut why = match flag {
            // Reported once for the target.
            ValidityFlag::Memory => return None,
            ValidityFlag::Cached | ValidityFlag::Amplified => {
                format!("the device moved {moved:.2} bytes for each byte delivered")
            }
        };
        if let Some(share) = self.more.get(RESIDENT).filter(|_| flag == ValidityFlag::Cached) {
            let cached = share * 100.0;
            let cached = format!("{cached:.0} % of the file was in the page cache before the run");
            // A ratio of at least 1 says nothing about caches.
            why = if moved < 1.0 { format!("{why}; {cached}") } else { cached };
        }
        Some(format!("{name} is {}: {why}", flag.name()))
    }
}

/// Compares every pair of targets in every pattern.
#[must_use]
pub fn compared(targets: &[TargetReport], seed: u64) -> Vec<Comparison> {
    let mut all = Vec::new();
    for pattern in Pattern::ALL {
        for (nth, first) in targets.iter().enumerate() {
            for second in &targets[nth + 1..] {
                let pair = first.pattern(pattern).zip(second.pattern(pattern));
                let beside = pair.and_then(|(a, b)| RatioEstimate::of(&a.values, &b.values, seed));
                let Some(beside) = beside else { continue };
                let first_wins = (beside.ratio > 1.0) == pattern.figure().more_is_better();
                let winner = if first_wins { first } else { second };
                let better = beside.significant.then(|| winner.name.clone());
                let (first, second) = (first.name.clone(), second.name.clone());
                all.push(Comparison { pattern, first, second, beside, better });
            }
        }
    }
    all
}

impl Report {
    /// Compares the measured targets and derives the verdict.
    #[must_use]
    pub fn new(need: Need, method: Method, mut targets: Vec<TargetReport>) -> Self {
        targets.iter_mut().for_each(TargetReport::note);
        let comparisons = compared(&targets, method.seed);
        let verdict = StoreVerdict::of(&need, &method, &targets, &comparisons);
        let simulated = targets.iter().any(|target| target.simulated.is_some());
        let page = None;
        Report { schema: SCHEMA, simulated, need, method, targets, comparisons, verdict, page }
    }

    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        if self.simulated {
            text += "SIMULATED: results of models of stores, not of real stores\n\n";
        }
        text += &self.verdict.text();
        text += "\n";
        text += &rows(&self.targets);
        text += &peers(&self.targets);
        for target in &self.targets {
            for note in &target.notes {
                text += &format!("\n  {}: {note}", target.name);
            }
        }
        let Method { runs, seconds, processes, machine, .. } = &self.method;
        text += &format!(
            "\n  medians of {runs} rounds with 95 % bootstrap intervals, targets in turn; timed \
             patterns run {seconds} s a round; processes: {processes}; {machine}\n"
        );
        if let Some(page) = &self.page {
            text += &format!("  HTML page: {}\n", page.display());
        }
        text
    }
}

/// A number with three digits.
#[must_use]
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        // fits: shown
        a if a >= 99.95 => crate::ui::terminal::thousands(value.round().max(0.0) as u64),
        a if a >= 9.995 => format!("{value:.1}"),
        a if a >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
