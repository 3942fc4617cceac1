//! The range of every value, and the relations between values.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use storage::Location;

use super::node::KeyError;
use super::{Budget, Config, ConfigError, Lag, LrStyle, Offload, Part, Timers};

/// Counts of steps, samples and tokens are at most 2^53, so that they are exact in a float, in JSON
/// and in every product that is computed here.
pub(super) const COUNT_MAX: u64 = 1 << 53;
/// Largest number of batch sizes in a ramp.
const GROWTHS_MAX: u64 = 1 << 16;

impl Config {
    /// Checks every value. [`Config::load`] and [`Config::from_toml`] call it; use it for a config
    /// that was built or changed in memory.
    ///
    /// # Errors
    /// [`ConfigError::Key`] with the first key that is out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        Ok(self.checked()?)
    }

    pub(super) fn checked(&self) -> Result<(), KeyError> {
        self.check_run()?;
        self.model.checked()?;
        self.check_data()?;
        self.check_batch()?;
        self.check_parallel()?;
        self.precision.checked()?;
        self.optim.checked()?;
        self.check_offload()?;
        self.check_rhythm()?;
        self.check_lengths()
    }

    fn check_run(&self) -> Result<(), KeyError> {
        let run = &self.run;
        not_empty("run.dir", &run.dir)?;
        let (dir, log) = (Location::new(&run.dir), &self.log);
        if dir.local_path().is_none()
            && (log.jsonl || log.tensorboard || log.timers == Timers::Trace)
        {
            let problem = format!("expected a path, because the logs are files, found {dir}");
            return Err(refused("run.dir", problem)
                .hint("set checkpoint.dir to the URL, or turn the logs off"));
        }
        within("run.seed", run.seed, 0..=u64::from(u32::MAX))?;
        within("run.threads", run.threads, 0..=1024)?;
        let (name, count) = match run.budget {
            Budget::Steps(count) => ("run.budget.steps", count),
            Budget::Samples(count) => ("run.budget.samples", count),
            Budget::Tokens(count) => ("run.budget.tokens", count),
        };
        within(name, count, 1..=COUNT_MAX)?;
        within("run.spike.rise", run.spike.rise, 0.0..=1000.0)?;
        within("run.spike.window", run.spike.window, 1..=1_000_000)?;
        match run.max_wall {
            Some(wall) if wall.0 < Duration::from_secs(1) => {
                Err(refused("run.max_wall", format!("expected at least 1s, found {wall}")))
            }
            _ => Ok(()),
        }
    }

    fn check_batch(&self) -> Result<(), KeyError> {
        let batch = &self.batch;
        within("batch.global", batch.global, 1..=1 << 24)?;
        within("batch.micro", batch.micro, 1..=1 << 16)?;
        if !batch.global.is_multiple_of(batch.micro) {
            let problem =
                format!("expected a divisor of global {}, found {}", batch.global, batch.micro);
            return Err(refused("batch.micro", problem));
        }
        let micro_batches = batch.micro_batches();
        match batch.accumulation {
            Some(given) if given == 0 || !micro_batches.is_multiple_of(given) => {
                let problem = format!(
                    "expected a divisor of global / micro = {micro_batches}, found {given}"
                );
                return Err(refused("batch.accumulation", problem));
            }
            _ => {}
        }
        let Some(ramp) = &batch.rampup else { return Ok(()) };
        within("batch.rampup.start", ramp.start, 1..=batch.global.saturating_sub(1).max(1))?;
        within("batch.rampup.increment", ramp.increment, 1..=batch.global)?;
        within("batch.rampup.samples", ramp.samples, 1..=COUNT_MAX)?;
        for (key, size) in [("start", ramp.start), ("increment", ramp.increment)] {
            if !size.is_multiple_of(batch.micro) {
                let problem = format!("expected a multiple of micro {}, found {size}", batch.micro);
                return Err(refused(&format!("batch.rampup.{key}"), problem));
            }
        }
        let whole =
            batch.global > ramp.start && (batch.global - ramp.start).is_multiple_of(ramp.increment);
        if !whole || ramp.growths(batch.global) > GROWTHS_MAX {
            let (difference, increment) = (batch.global - ramp.start, ramp.increment);
            let problem = format!(
                "expected a divisor of global - start = {difference}, at least 1/{GROWTHS_MAX} of \
                 it, found {increment}"
            );
            return Err(refused("batch.rampup.increment", problem));
        }
        Ok(())
    }

    fn check_offload(&self) -> Result<(), KeyError> {
        if self.optim.offload != Offload::None && self.parallel.zero > 1 {
            let problem = format!("expected parallel.zero of 0 or 1, found {}", self.parallel.zero);
            return Err(refused("optim.offload", problem));
        }
        Ok(())
    }

    fn check_rhythm(&self) -> Result<(), KeyError> {
        let checkpoint = &self.checkpoint;
        checkpoint.dir.as_ref().map_or(Ok(()), |dir| not_empty("checkpoint.dir", dir))?;
        not_empty("checkpoint.load", &checkpoint.load.to_string())?;
        within("checkpoint.every.steps", checkpoint.every.steps, 0..=COUNT_MAX)?;
        if let Some(minutes) = checkpoint.every.minutes {
            within("checkpoint.every.minutes", minutes, 1..=1_000_000)?;
        }
        within("checkpoint.keep.last", checkpoint.keep.last, 1..=1_000_000)?;
        if let Some(steps) = checkpoint.keep.every {
            within("checkpoint.keep.every", steps, 1..=COUNT_MAX)?;
        }
        let has_all = Part::ALL.iter().all(|part| checkpoint.load_parts.contains(part));
        if checkpoint.load_parts != [Part::Model] && !has_all {
            let problem = "expected all parts or [\"model\"], found other parts";
            return Err(refused("checkpoint.load_parts", problem));
        }
        if checkpoint.agent && !checkpoint.background {
            return Err(refused(
                "checkpoint.agent",
                "expected checkpoint.async = true, found false",
            ));
        }
        if checkpoint.grace.0 < Duration::from_secs(1) {
            let problem = format!("expected at least 1s, found {}", checkpoint.grace);
            return Err(refused("checkpoint.grace", problem));
        }
        checkpoint.drain_to.as_ref().map_or(Ok(()), |url| not_empty("checkpoint.drain_to", url))?;
        within("eval.every", self.eval.every, 0..=COUNT_MAX)?;
        within("eval.iters", self.eval.iters, 1..=1_000_000)?;
        within("log.every", self.log.every, 1..=COUNT_MAX)?;
        let peak = self.log.peak_flop_per_s;
        peak.map_or(Ok(()), |peak| within("log.peak_flop_per_s", peak, 1.0..=1e18))
    }

    /// Checks that the budget, the batch and the learning rate agree.
    fn check_lengths(&self) -> Result<(), KeyError> {
        let samples = Some(self.samples_of_budget()).filter(|samples| *samples <= COUNT_MAX);
        let tokens = samples.and_then(|n| n.checked_mul(self.model.tokens_per_sample()));
        if tokens.is_none_or(|tokens| tokens > COUNT_MAX) {
            return Err(refused(
                "run.budget",
                format!("expected at most {COUNT_MAX} tokens, found more"),
            ));
        }
        if self.steps_total() == 0 {
            let problem = format!("expected at least one step of {} samples", self.batch.at(0));
            return Err(refused("run.budget", problem));
        }
        let (decay, warmup) = (self.lr_decay_samples(), self.lr_warmup_samples());
        if decay > COUNT_MAX {
            let problem = format!("expected at most {COUNT_MAX} samples, found {decay}");
            return Err(refused("optim.lr.decay", problem));
        }
        if warmup > decay {
            let problem = format!("expected at most the {decay} samples of decay, found {warmup}");
            return Err(refused("optim.lr.warmup", problem));
        }
        let lags = self.optim.lr.lag != Lag::None;
        if lags && (self.batch.rampup.is_some() || self.optim.lr.style == LrStyle::RangeTest) {
            let problem = "not valid with batch.rampup or optim.lr.style \"range-test\"";
            return Err(refused("optim.lr.lag", problem));
        }
        match self.optim.lr.style {
            LrStyle::InverseSqrt if warmup == 0 => {
                let problem = "expected at least 1 sample with \"inverse-sqrt\", found 0";
                Err(refused("optim.lr.warmup", problem))
            }
            LrStyle::Wsd => within("optim.lr.anneal", self.lr_anneal_samples(), 1..=decay - warmup),
            _ => Ok(()),
        }
    }
}

pub(super) fn within<T: Copy + PartialOrd + Display>(
    key: &str,
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), KeyError> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(refused(key, format!("expected {} to {}, found {value}", range.start(), range.end())))
}

pub(super) fn not_empty(key: &str, text: &str) -> Result<(), KeyError> {
    let problem = "expected a non-empty string, found \"\"";
    if text.is_empty() { Err(refused(key, problem)) } else { Ok(()) }
}

pub(super) fn refused(key: &str, problem: impl Display) -> KeyError {
    KeyError::new(key, problem)
}
