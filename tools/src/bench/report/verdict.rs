//! Recommendations for a training run that follow from the measurements.

use serde::Serialize;

use crate::bench::demand::Need;
use crate::bench::measure::counters::CounterSource;
use crate::bench::measure::stats::{Estimate, ROUNDS_MIN};
use crate::bench::measure::validity::ValidityFlag;
use crate::bench::patterns::Pattern;
use crate::bench::report::{Comparison, Method, TargetReport, short};

/// The recommendations.
#[derive(Clone, Debug, Serialize)]
pub struct StoreVerdict {
    /// Summary of each target.
    pub targets: Vec<TargetSummary>,
    /// Targets for the token files: the best, and those without a significant difference from it.
    pub data: Vec<String>,
    /// Targets for the checkpoints, likewise.
    pub checkpoints: Vec<String>,
    /// The recommendations in sentences, with settings.
    pub lines: Vec<String>,
}

/// Summary of a target for the run.
#[derive(Clone, Debug, Serialize)]
pub struct TargetSummary {
    /// The target.
    pub name: String,
    /// Number of such clusters that it can supply with samples, as measured from this machine.
    pub feeds_clusters: Option<Estimate>,
    /// Seconds to save a complete checkpoint at the measured rate.
    pub checkpoint_s: Option<Estimate>,
    /// The same with one file that all writers share.
    pub checkpoint_one_file_s: Option<f64>,
    /// Seconds to read a complete checkpoint.
    pub restore_s: Option<f64>,
    /// Seconds until all ranks have started.
    pub start_s: Option<f64>,
    /// The longest wait for a sample at the cluster's rate, which prefetch must hide.
    pub look_ahead_s: Option<f64>,
    /// Whether one of these numbers is the rate of a cache.
    pub cached: bool,
    /// Whether the files are in memory, without a device.
    pub in_memory: bool,
}

/// Local file systems: their data is lost with the machine.
const LOCAL: [&str; 6] = ["ext4", "xfs", "btrfs", "f2fs", "overlay", "tmpfs"];

impl StoreVerdict {
    /// Derives the recommendations from targets and their comparisons.
    #[must_use]
    pub fn of(
        need: &Need,
        method: &Method,
        targets: &[TargetReport],
        comparisons: &[Comparison],
    ) -> Self {
        let summaries: Vec<TargetSummary> = targets.iter().map(|of| summary(need, of)).collect();
        let feeding = [Pattern::Replay, Pattern::Samples];
        let feeding = feeding.into_iter().find(|pattern| has(targets, *pattern));
        let data = feeding.map(|by| leaders(by, targets, comparisons)).unwrap_or_default();
        let saving = [Pattern::Save, Pattern::SaveOne];
        let saving = saving.into_iter().find(|pattern| has(targets, *pattern));
        let checkpoints = saving.map(|by| leaders(by, targets, comparisons)).unwrap_or_default();
        let mut lines: Vec<String> = summaries.iter().map(|of| line(need, method, of)).collect();
        if targets.len() > 1 {
            let both =
                [("best for data", feeding, &data), ("best for checkpoints", saving, &checkpoints)];
            for (what, by, leaders) in both {
                lines.extend(by.map(|by| choice(what, by, leaders, comparisons)));
            }
        }
        let cached = summaries.iter().filter(|of| of.cached && !of.in_memory);
        lines.extend(cached.map(|of| measure_again(&of.name)));
        if method.runs < ROUNDS_MIN {
            lines.push(format!(
                "{} rounds are too few for a significant difference: expected at least \
                 {ROUNDS_MIN} (hint: --rounds {ROUNDS_MIN})",
                method.runs
            ));
        }
        lines.extend(settings(targets, &summaries, &data, &checkpoints));
        StoreVerdict { targets: summaries, data, checkpoints, lines }
    }

    /// Text for the terminal.
    #[must_use]
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }
}

fn has(targets: &[TargetReport], pattern: Pattern) -> bool {
    targets.iter().any(|target| target.pattern(pattern).is_some())
}

fn summary(need: &Need, target: &TargetReport) -> TargetSummary {
    let of = |pattern| target.pattern(pattern).map(|of| of.estimate);
    let by = |estimate: Estimate, unit: f64| Estimate {
        median: estimate.median / unit,
        low: estimate.low / unit,
        high: estimate.high / unit,
    };
    let checkpoint_mb = need.checkpoint_bytes as f64 / 1e6;
    let seconds = |rate: f64| checkpoint_mb / rate.max(1e-9);
    let save = of(Pattern::Save);
    let feeds = of(Pattern::Replay).or_else(|| of(Pattern::Samples));
    let longest = target.pattern(Pattern::Rate).map(|rate| rate.latency_ms.max / 1e3);
    let cached = target.patterns.iter().any(|of| of.flag == Some(ValidityFlag::Cached));
    TargetSummary {
        name: target.name.clone(),
        feeds_clusters: feeds.map(|feeds| by(feeds, need.samples_per_s)),
        checkpoint_s: save.map(|save| Estimate {
            median: seconds(save.median),
            low: seconds(save.high),
            high: seconds(save.low),
        }),
        checkpoint_one_file_s: of(Pattern::SaveOne).map(|one| seconds(one.median)),
        restore_s: of(Pattern::Restore).map(|restore| seconds(restore.median)),
        start_s: of(Pattern::Start).map(|start| start.median),
        look_ahead_s: longest,
        cached,
        in_memory: target.witness == CounterSource::Memory,
    }
}

/// The best target, and those without a significant difference from it.
fn leaders(by: Pattern, targets: &[TargetReport], comparisons: &[Comparison]) -> Vec<String> {
    let more = by.figure().more_is_better();
    let measured = targets.iter().filter_map(|target| Some((target, target.pattern(by)?)));
    let rank = |median: f64| if more { -median } else { median };
    let mut order: Vec<_> = measured.map(|(t, of)| (rank(of.estimate.median), &t.name)).collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let Some((_, best)) = order.first() else { return Vec::new() };
    let is_apart = |name: &String| {
        pair(comparisons, by, best, name).is_some_and(|pair| pair.beside.significant)
    };
    order.iter().map(|(_, name)| (*name).clone()).filter(|name| !is_apart(name)).collect()
}

fn pair<'a>(
    comparisons: &'a [Comparison],
    pattern: Pattern,
    a: &str,
    b: &str,
) -> Option<&'a Comparison> {
    comparisons.iter().find(|of| {
        of.pattern == pattern
            && ((of.first == a && of.second == b) || (of.first == b && of.second == a))
    })
}

fn line(need: &Need, method: &Method, summary: &TargetSummary) -> String {
    let TargetSummary { name, .. } = summary;
    let mut parts = Vec::new();
    if let Some(Estimate { median, low, high }) = summary.feeds_clusters {
        let (median, low, high) = (short(median), short(low), short(high));
        parts.push(format!(
            "feeds {median} clusters of {} accelerators (95 % interval {low} to {high})",
            need.ranks
        ));
    }
    if let Some(Estimate { median, low, high }) = summary.checkpoint_s {
        let size = short(need.checkpoint_bytes as f64 / 1e9);
        let (median, low, high) = (short(median), short(low), short(high));
        parts.push(format!(
            "saves a checkpoint of {size} GB in {median} s at the measured rate ({low} to {high})"
        ));
    }
    if let Some(seconds) = summary.checkpoint_one_file_s {
        parts.push(format!("saves a checkpoint into one shared file in {} s", short(seconds)));
    }
    if let Some(seconds) = summary.restore_s {
        parts.push(format!("restores a checkpoint in {} s", short(seconds)));
    }
    if let Some(seconds) = summary.start_s {
        let ranks = method.ranks_started;
        parts.push(format!("does the start-up I/O of {ranks} ranks in {} s", short(seconds)));
    }
    if let Some(seconds) = summary.look_ahead_s {
        parts.push(format!(
            "needs {} s of prefetch to hide its longest latency, without a checkpoint save",
            short(seconds)
        ));
    }
    let but = match (summary.in_memory, summary.cached) {
        (true, _) => "; MEMORY: no device was measured",
        (_, true) => "; CACHED: a cache was measured, not the device",
        _ => "",
    };
    if parts.is_empty() {
        parts.push("no pattern was measured that a verdict uses".to_owned());
    }
    format!("{name}: {}{but}", parts.join("; "))
}

/// Recommendation for a target whose results are rates of a cache.
fn measure_again(name: &str) -> String {
    format!(
        "{name}: results are of a cache, and the data of a run does not fit in it; measure again \
         with ?direct=on at the end of its file: URL, or with --bytes above the memory size"
    )
}

/// The best targets for a purpose, with the ratios to the others.
fn choice(what: &str, by: Pattern, leaders: &[String], comparisons: &[Comparison]) -> String {
    let Some(best) = leaders.first() else { return format!("{what}: nothing was measured") };
    let others = comparisons
        .iter()
        .filter(|of| of.pattern == by && (of.first == *best || of.second == *best));
    let ratios: Vec<String> = others.map(|of| beside(by, best, of)).collect();
    let name = by.name();
    match leaders {
        [only] => format!("{what}: {only} ({name}: {})", ratios.join(", ")),
        several => {
            let names = several.join(" or ");
            format!("{what}: {names}: difference not significant ({name}: {})", ratios.join(", "))
        }
    }
}

/// How many times as fast `best` is as the other target of a comparison, with the interval.
pub fn beside(by: Pattern, best: &str, of: &Comparison) -> String {
    // At least 1 if `best` is better, in either order of the pair and for either figure.
    let is_first = of.first == best;
    let turned = is_first != by.figure().more_is_better();
    let (ratio, low, high) = match turned {
        false => (of.beside.ratio, of.beside.low, of.beside.high),
        true => (1.0 / of.beside.ratio, 1.0 / of.beside.high, 1.0 / of.beside.low),
    };
    let other = if is_first { &of.second } else { &of.first };
    format!("{ratio:.2} times as fast as {other}, 95 % interval {low:.2} to {high:.2}")
}

/// Recommended settings.
fn settings(
    targets: &[TargetReport],
    summaries: &[TargetSummary],
    data: &[String],
    checkpoints: &[String],
) -> Vec<String> {
    let mut lines = Vec::new();
    let named = |name: &String| targets.iter().find(|target| target.name == *name);
    let (data, saves) = (data.first().and_then(named), checkpoints.first().and_then(named));
    let is_local = |target: &&TargetReport| LOCAL.contains(&target.file_system.as_str());
    let kind = |target: &TargetReport| {
        target.simulated.clone().unwrap_or_else(|| target.file_system.clone())
    };
    if let Some(target) = data {
        let feeds = summaries.iter().find(|of| of.name == target.name);
        let feeds = feeds.and_then(|of| of.feeds_clusters).map(|feeds| feeds.median);
        if feeds.is_some_and(|feeds| feeds < 1.0) {
            lines.push(
                "set data.local_cache.dir to a local disk of each node: no target feeds this \
                 cluster"
                    .to_owned(),
            );
        }
        let others = summaries.iter().zip(targets).filter(|(_, of)| !is_local(of));
        let clusters = |of: &TargetSummary| of.feeds_clusters.map_or(0.0, |feeds| feeds.median);
        let shared = others.max_by(|(a, _), (b, _)| clusters(a).total_cmp(&clusters(b)));
        if is_local(&target)
            && let Some((shared, _)) = shared
        {
            lines.push(format!(
                "store the token files on {}, which feeds {} clusters, and set \
                 data.local_cache.dir on {}: a local disk serves only its own node",
                shared.name,
                short(clusters(shared)),
                target.name
            ));
        }
        if kind(target).contains("lustre") {
            lines.push(format!(
                "set stripes for token files on {}: lfs setstripe -c 8 -S 4M FOLDER",
                target.name
            ));
        }
    }
    if let Some(target) = saves {
        let shared = targets.iter().find(|target| !is_local(target));
        if is_local(&target)
            && let Some(shared) = shared
        {
            lines.push(format!(
                "set checkpoint.dir on {} and checkpoint.drain_to on {}: saves are as fast as the \
                 first store, and the second keeps the steps",
                target.name, shared.name
            ));
        }
        if kind(target).contains("lustre") {
            lines.push(format!(
                "set stripes for checkpoints on {}: lfs setstripe -c 1 FOLDER (one file per rank \
                 already spreads over the servers)",
                target.name
            ));
        }
    }
    lines.extend(targets.iter().filter_map(disturbed));
    lines
}

/// A save disturbs reads if it makes their p99 latency more than ten times as long.
const DISTURBED: f64 = 10.0;

fn disturbed(target: &TargetReport) -> Option<String> {
    let p99 = |pattern| target.pattern(pattern).map(|of| of.estimate.median);
    let (alone, beside) = (p99(Pattern::Rate)?, p99(Pattern::Mix)?);
    let longest = target.pattern(Pattern::Mix)?.latency_ms.max;
    (beside > DISTURBED * alone).then(|| {
        format!(
            "{}: p99 latency of a sample is {} ms during a checkpoint save, {} ms otherwise; put \
             data and checkpoints on different stores, or prefetch at least {} s",
            target.name,
            short(beside),
            short(alone),
            short(longest / 1e3)
        )
    })
}
