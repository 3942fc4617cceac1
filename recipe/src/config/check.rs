//! The range of every value, and the relations between values.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::node::KeyError;
use super::{Budget, Config, ConfigError, LrStyle, Offload, Part};

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
                Err(refused("run.max_wall", format!("got {wall}, due 1s or more")))
            }
            _ => Ok(()),
        }
    }

    fn check_batch(&self) -> Result<(), KeyError> {
        let batch = &self.batch;
        within("batch.global", batch.global, 1..=1 << 24)?;
        within("batch.micro", batch.micro, 1..=1 << 16)?;
        if !batch.global.is_multiple_of(batch.micro) {
            let problem = format!("micro {} does not divide global {}", batch.micro, batch.global);
            return Err(refused("batch.micro", problem));
        }
        let micro_batches = batch.micro_batches();
        match batch.accumulation {
            Some(given) if given == 0 || !micro_batches.is_multiple_of(given) => {
                let problem =
                    format!("got {given}, due a divisor of global / micro = {micro_batches}");
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
                let problem = format!("{size} is no multiple of micro {}", batch.micro);
                return Err(refused(&format!("batch.rampup.{key}"), problem));
            }
        }
        let whole =
            batch.global > ramp.start && (batch.global - ramp.start).is_multiple_of(ramp.increment);
        if !whole || ramp.growths(batch.global) > GROWTHS_MAX {
            let (from, to) = (ramp.start, batch.global);
            let problem = format!(
                "steps of {} from {from} do not end at {to}, or are more than {GROWTHS_MAX}",
                ramp.increment
            );
            return Err(refused("batch.rampup.increment", problem));
        }
        Ok(())
    }

    fn check_offload(&self) -> Result<(), KeyError> {
        if self.optim.offload != Offload::None && self.parallel.zero > 1 {
            let problem = format!("goes with parallel.zero 0 and 1, got {}", self.parallel.zero);
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
        if !checkpoint.load_parts.contains(&Part::Model) {
            let problem = "is without \"model\": nothing would be left of the checkpoint";
            return Err(refused("checkpoint.load_parts", problem));
        }
        let has_all = Part::ALL.iter().all(|part| checkpoint.load_parts.contains(part));
        if checkpoint.load_parts != [Part::Model] && !has_all {
            let problem = "is neither all nor [\"model\"]: the moments are those of a step";
            return Err(refused("checkpoint.load_parts", problem));
        }
        if checkpoint.agent && !checkpoint.background {
            return Err(refused("checkpoint.agent", "needs checkpoint.async"));
        }
        if checkpoint.grace.0 < Duration::from_secs(1) {
            let problem = format!("got {}, due 1s or more", checkpoint.grace);
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
            return Err(refused("run.budget", format!("is more than {COUNT_MAX} tokens")));
        }
        if self.steps_total() == 0 {
            let problem = format!("is less than one step of {} samples", self.batch.at(0));
            return Err(refused("run.budget", problem));
        }
        let (decay, warmup) = (self.lr_decay_samples(), self.lr_warmup_samples());
        if decay > COUNT_MAX {
            return Err(refused("optim.lr.decay", format!("is more than {COUNT_MAX} samples")));
        }
        if warmup > decay {
            let problem = format!("{warmup} samples are more than the decay's {decay}");
            return Err(refused("optim.lr.warmup", problem));
        }
        match self.optim.lr.style {
            LrStyle::InverseSqrt if warmup == 0 => {
                let problem = "is 0, and \"inverse-sqrt\" takes its scale from it";
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
    due: RangeInclusive<T>,
) -> Result<(), KeyError> {
    if due.contains(&value) {
        return Ok(());
    }
    Err(refused(key, format!("got {value}, due {} to {}", due.start(), due.end())))
}

pub(super) fn not_empty(key: &str, text: &str) -> Result<(), KeyError> {
    if text.is_empty() { Err(refused(key, "is empty")) } else { Ok(()) }
}

pub(super) fn refused(key: &str, problem: impl Display) -> KeyError {
    KeyError::new(key, problem)
}
