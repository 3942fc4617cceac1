//! Runs the same requests by feedline and by fio in turn, in every round.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::Serialize;

use crate::bench::fio::FioResult;
use crate::bench::fio::requests::{self, Reads, Writes};
use crate::bench::measure::stats::{RatioEstimate, median};
use crate::bench::patterns::{Pattern, PatternRun};
use crate::bench::random::Random;
use crate::bench::rounds::{SAMPLES_DEPTH, STREAM, Settings};
use crate::bench::target::TargetFolder;
use crate::bench::workload::reads::{self, ArrivalProcess, BenchRead, ReadWorkload};
use crate::bench::workload::saves;
use crate::ui::timeout::StopSignal;

/// The result of one workload by feedline and by fio.
#[derive(Clone, Debug, Serialize)]
pub struct Peer {
    /// Name of the workload.
    pub what: String,
    /// Median of feedline, in megabytes per second.
    pub ours_mb_per_s: f64,
    /// Median of fio, in megabytes per second.
    pub fio_mb_per_s: f64,
    /// The median of the ratios of all rounds, feedline divided by fio.
    pub ours_by_fio: f64,
    /// The lower end of its interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// Whether the two are within 5 % of each other.
    pub agreement: Agreement,
    /// Median of feedline's core-seconds per gigabyte, including the kernel's on its behalf.
    pub ours_core_s_per_gb: Option<f64>,
    /// Median of fio's core-seconds per gigabyte.
    pub fio_core_s_per_gb: Option<f64>,
}

/// Whether the interval of a ratio shows a difference of at most 5 %.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agreement {
    /// The whole interval is within 5 %.
    Yes,
    /// No part of the interval is within 5 %.
    No,
    /// Part of the interval is within 5 %: more rounds are needed.
    Open,
}

impl Agreement {
    /// Classifies the interval from `low` to `high`.
    #[must_use]
    pub fn of(low: f64, high: f64) -> Self {
        const LEAST: f64 = 0.95;
        const MOST: f64 = 1.05;
        match () {
            () if low >= LEAST && high <= MOST => Agreement::Yes,
            () if high < LEAST || low > MOST => Agreement::No,
            () => Agreement::Open,
        }
    }

    /// Text of a table cell.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Agreement::Yes => "yes",
            Agreement::No => "no",
            Agreement::Open => "undecided (needs more --rounds)",
        }
    }
}

/// Rates of feedline and fio per round, for each pattern that both can run.
#[derive(Clone, Debug, Default)]
pub struct FioPairs {
    rates: BTreeMap<Pattern, (String, Vec<[FioResult; 2]>)>,
    /// The error of fio, after which it is not run again.
    failed: Option<String>,
}

impl FioPairs {
    /// Why the comparison ended early, if it did.
    #[must_use]
    pub fn failed(&self) -> Option<String> {
        self.failed.as_ref().map(|why| format!("no comparison with fio: {why}"))
    }

    /// A summary of each pattern.
    #[must_use]
    pub fn peers(&self, seed: u64) -> Vec<Peer> {
        let of = |(what, pairs): &(String, Vec<[FioResult; 2]>)| {
            let rate = |of: usize| pairs.iter().map(move |pair| pair[of].bytes_per_s).collect();
            let cores = |of: usize| {
                let per_gb = |result: &FioResult| Some(result.cores? / (result.bytes_per_s / 1e9));
                let all: Option<Vec<f64>> = pairs.iter().map(|pair| per_gb(&pair[of])).collect();
                Some(median(&all?))
            };
            let [ours, fios] = [0, 1].map(rate);
            let (ours, fios): (Vec<f64>, Vec<f64>) = (ours, fios);
            let RatioEstimate { ratio, low, high, .. } = RatioEstimate::of(&ours, &fios, seed)?;
            Some(Peer {
                what: what.clone(),
                ours_mb_per_s: median(&ours) / 1e6,
                fio_mb_per_s: median(&fios) / 1e6,
                ours_by_fio: ratio,
                low,
                high,
                agreement: Agreement::of(low, high),
                ours_core_s_per_gb: cores(0),
                fio_core_s_per_gb: cores(1),
            })
        };
        self.rates.values().filter_map(of).collect()
    }

    /// Runs one round on a target. feedline and fio go first in alternate rounds.
    ///
    /// # Errors
    /// If a request fails. A failure of fio ends the comparison, and [`FioPairs::failed`] returns
    /// it.
    pub fn round(
        &mut self,
        (settings, place): (&Arc<Settings>, &Arc<TargetFolder>),
        stop: &StopSignal,
        round: usize,
    ) -> Result<()> {
        let wanted = |pattern: &Pattern| settings.patterns.contains(pattern);
        for pattern in SHARED.into_iter().filter(wanted) {
            if reads::data_path(place).is_none() || self.failed.is_some() {
                return Ok(());
            }
            let shared = FioWorkload::of(pattern, settings);
            let mut rates = [FioResult { bytes_per_s: 0.0, cores: None }; 2];
            for turn in [round % 2, (round + 1) % 2] {
                let (settings, place) = (Arc::clone(settings), Arc::clone(place));
                let signal = stop.clone();
                let limit = settings.timeout + Duration::from_secs_f64(4.0 * settings.seconds);
                let what = format!("compare {} with fio", place.name);
                let rate = stop.guard(&what, limit, move || match turn {
                    0 => shared.run_feedline(&settings, &place, &signal).map(Ok),
                    _ => shared.run_fio(&settings, &place),
                })?;
                match rate {
                    Ok(rate) => rates[turn] = rate,
                    Err(why) => {
                        self.failed = Some(format!("{why:#}"));
                        return Ok(());
                    }
                }
            }
            let (_, pairs) =
                self.rates.entry(pattern).or_insert_with(|| (shared.name(), Vec::new()));
            pairs.push(rates);
        }
        Ok(())
    }
}

/// The patterns that fio can run too.
const SHARED: [Pattern; 4] = [Pattern::Stream, Pattern::Samples, Pattern::Save, Pattern::SaveOne];

/// Requests that feedline and fio can both make.
#[derive(Clone, Copy, Debug)]
enum FioWorkload {
    Reads(Reads),
    Writes(Writes),
}

/// Longer measurements of a device are not more precise.
const SECONDS_MAX: f64 = 3.0;

impl FioWorkload {
    fn of(pattern: Pattern, settings: &Settings) -> Self {
        let seconds = settings.seconds.min(SECONDS_MAX);
        let (in_order, bytes, depth) = match pattern {
            Pattern::Save | Pattern::SaveOne => {
                return FioWorkload::Writes(Writes {
                    apart: pattern == Pattern::Save,
                    writers: settings.writers,
                    part_bytes: settings.state.part_bytes(),
                    bytes: saves::CHUNK_BYTES,
                });
            }
            Pattern::Stream => (true, STREAM.0, STREAM.1),
            // fits: a sample is in memory
            _ => (false, settings.need.sample_bytes.next_multiple_of(4096) as usize, SAMPLES_DEPTH),
        };
        FioWorkload::Reads(Reads { in_order, bytes, depth, seconds })
    }

    fn name(&self) -> String {
        match *self {
            FioWorkload::Reads(Reads { in_order, bytes, depth, .. }) => {
                let what = if in_order { "sequential reads" } else { "random aligned reads" };
                format!("{what}, {} KiB, queue depth {depth}", bytes >> 10)
            }
            FioWorkload::Writes(Writes { apart, writers, bytes, .. }) => {
                let into = if apart { "one file per writer" } else { "one shared file" };
                format!("writes, {into}, {} MiB, {writers} writers, fsync", bytes >> 20)
            }
        }
    }

    fn run_feedline(
        &self,
        settings: &Settings,
        place: &TargetFolder,
        stop: &StopSignal,
    ) -> Result<FioResult> {
        let run = match self {
            FioWorkload::Reads(reads) => aligned(settings, place, reads, stop)?,
            FioWorkload::Writes(writes) => {
                writes.prepare(settings, place)?;
                match writes.apart {
                    true => saves::save_apart(place, &settings.state)?,
                    false => saves::save_one(place, &settings.state, 0)?,
                }
            }
        };
        let seconds = run.seconds.max(1e-9);
        Ok(FioResult { bytes_per_s: run.bytes as f64 / seconds, cores: Some(run.cpu_s / seconds) })
    }

    /// Runs the workload with fio. The inner error is a failure of fio.
    fn run_fio(&self, settings: &Settings, place: &TargetFolder) -> Result<Result<FioResult>> {
        let profile = place.store.profile();
        Ok(match self {
            FioWorkload::Reads(reads) => {
                let file = reads::data_path(place)
                    .context("cannot compare with fio: the target has no file")?;
                requests::read(&file, reads, profile)
            }
            FioWorkload::Writes(writes) => {
                writes.prepare(settings, place)?;
                let file = match writes.apart {
                    true => saves::apart_path(place),
                    false => saves::one_path(place),
                };
                requests::write(
                    &file.context("cannot compare with fio: the target has no file")?,
                    writes,
                    profile.direct,
                )
            }
        })
    }
}

impl Writes {
    /// Recreates the files before either program writes: full length, without data.
    fn prepare(&self, settings: &Settings, place: &TargetFolder) -> Result<()> {
        match self.apart {
            true => saves::prepare_apart(place, &settings.state),
            false => saves::prepare_one(place, self.writers as u64 * self.part_bytes),
        }
    }
}

/// Reads aligned blocks, as fio can too.
fn aligned(
    settings: &Settings,
    place: &TargetFolder,
    requests: &Reads,
    stop: &StopSignal,
) -> Result<PatternRun> {
    let Reads { in_order, bytes, depth, seconds } = *requests;
    let load = ReadWorkload {
        place,
        seed: settings.seed,
        depth,
        len_max: bytes,
        seconds,
        timeout: settings.timeout,
        stop,
    };
    let blocks = settings.data_bytes / bytes as u64;
    let mut random = Random::new(settings.seed ^ 3);
    let mut nth = 0;
    reads::drive(&load, ArrivalProcess::ClosedLoop, &mut || {
        let block = if in_order { nth % blocks } else { random.below(blocks) };
        nth += 1;
        BenchRead { offset: block * bytes as u64, len: bytes }
    })
}
