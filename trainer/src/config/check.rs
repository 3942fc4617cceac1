//! The ranges of every value, and what values must say together.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::node::Refusal;
use super::{Budget, Config, ConfigError, Length, LrConfig, Warmup};

/// What a config counts (steps, samples, tokens) stays below 2^53, so that it is exact in a float,
/// in JSON, and in every product made of it here.
const COUNT_MAX: u64 = 1 << 53;

impl Config {
    /// Checks every value. [`Config::load`] and [`Config::from_toml`] have done so; this is for a
    /// config that was built or changed in memory.
    ///
    /// # Errors
    /// [`ConfigError::Key`] with the first key that is out of range.
    pub fn check(&self) -> Result<(), ConfigError> {
        Ok(self.checked()?)
    }

    pub(super) fn checked(&self) -> Result<(), Refusal> {
        self.check_run()?;
        self.check_model()?;
        self.check_data()?;
        self.check_batch()?;
        self.check_optim()?;
        self.check_rhythm()?;
        self.check_lengths()
    }

    fn check_run(&self) -> Result<(), Refusal> {
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
        match run.max_wall {
            Some(wall) if wall.0 < Duration::from_secs(1) => {
                Err(refused("run.max_wall", format!("got {wall}, due 1s or more")))
            }
            _ => Ok(()),
        }
    }

    fn check_model(&self) -> Result<(), Refusal> {
        let model = &self.model;
        within("model.layers", model.layers, 1..=1024)?;
        within("model.hidden", model.hidden, 1..=1 << 17)?;
        within("model.heads", model.heads, 1..=1024)?;
        within("model.ffn", model.ffn(), 1..=1 << 20)?;
        within("model.vocab", model.vocab, 2..=1 << 24)?;
        within("model.seq_len", model.seq_len, 1..=1 << 20)?;
        within("model.init.std", model.init.std, 0.0..=1.0)?;
        if !model.hidden.is_multiple_of(model.heads) {
            let problem = format!("{} heads do not divide hidden {}", model.heads, model.hidden);
            return Err(refused("model.heads", problem));
        }
        Ok(())
    }

    fn check_data(&self) -> Result<(), Refusal> {
        let data = &self.data;
        let [corpus] = &data.train[..] else {
            let problem = format!("got {} corpora, due exactly one", data.train.len());
            return Err(refused("data.train", problem).hint("merge them into one .bin/.idx pair"));
        };
        not_empty("data.train.0.path", &corpus.path)?;
        if !(corpus.weight > 0.0 && corpus.weight.is_finite()) {
            let problem = format!("got {}, due more than 0", corpus.weight);
            return Err(refused("data.train.0.weight", problem));
        }
        data.split.shares().map_err(|problem| refused("data.split", problem))?;
        not_empty("data.tokenizer", &data.tokenizer)?;
        within("data.prefetch_batches", data.prefetch_batches, 1..=1024)?;
        data.cache_dir.as_ref().map_or(Ok(()), |folder| not_empty("data.cache_dir", folder))
    }

    fn check_batch(&self) -> Result<(), Refusal> {
        let batch = &self.batch;
        within("batch.global", batch.global, 1..=1 << 24)?;
        within("batch.micro", batch.micro, 1..=1 << 16)?;
        if !batch.global.is_multiple_of(batch.micro) {
            let problem = format!("micro {} does not divide global {}", batch.micro, batch.global);
            return Err(refused("batch.micro", problem));
        }
        match batch.accumulation {
            Some(given) if given != batch.global / batch.micro => {
                let due = batch.global / batch.micro;
                Err(refused(
                    "batch.accumulation",
                    format!("got {given}, due global / micro = {due}"),
                ))
            }
            _ => Ok(()),
        }
    }

    fn check_optim(&self) -> Result<(), Refusal> {
        let optim = &self.optim;
        for (name, beta) in ["optim.betas.0", "optim.betas.1"].into_iter().zip(optim.betas) {
            if !(0.0..1.0).contains(&beta) {
                return Err(refused(name, format!("got {beta}, due 0 or more, and less than 1")));
            }
        }
        within("optim.eps", optim.eps, 1e-16..=1.0)?;
        within("optim.weight_decay", optim.weight_decay, 0.0..=10.0)?;
        within("optim.clip", optim.clip, 0.0..=1e6)?;
        check_lr(&optim.lr)
    }

    fn check_rhythm(&self) -> Result<(), Refusal> {
        let checkpoint = &self.checkpoint;
        checkpoint.dir.as_ref().map_or(Ok(()), |dir| not_empty("checkpoint.dir", dir))?;
        not_empty("checkpoint.load", &checkpoint.load.to_string())?;
        within("checkpoint.every.steps", checkpoint.every.steps, 0..=COUNT_MAX)?;
        if let Some(minutes) = checkpoint.every.minutes {
            within("checkpoint.every.minutes", minutes, 1..=1_000_000)?;
        }
        within("checkpoint.keep.last", checkpoint.keep.last, 1..=1_000_000)?;
        within("eval.every", self.eval.every, 0..=COUNT_MAX)?;
        within("eval.iters", self.eval.iters, 1..=1_000_000)?;
        within("log.every", self.log.every, 1..=COUNT_MAX)
    }

    /// What the budget, the batch and the learning rate must say together.
    fn check_lengths(&self) -> Result<(), Refusal> {
        let samples = self.samples_of_budget().filter(|samples| *samples <= COUNT_MAX);
        let tokens = samples.and_then(|samples| samples.checked_mul(self.model.seq_len));
        if tokens.is_none_or(|tokens| tokens > COUNT_MAX) {
            return Err(refused("run.budget", format!("is more than {COUNT_MAX} tokens")));
        }
        if self.steps_total() == 0 {
            let problem = format!("is less than one step of {} samples", self.batch.global);
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
        Ok(())
    }
}

fn check_lr(lr: &LrConfig) -> Result<(), Refusal> {
    within("optim.lr.peak", lr.peak, 0.0..=1000.0)?;
    within("optim.lr.floor", lr.floor, 0.0..=lr.peak)?;
    match lr.warmup {
        Warmup::Steps(count) => within("optim.lr.warmup.steps", count, 0..=COUNT_MAX)?,
        Warmup::Samples(count) => within("optim.lr.warmup.samples", count, 0..=COUNT_MAX)?,
        Warmup::Fraction(part) => within("optim.lr.warmup.fraction", part, 0.0..=1.0)?,
    }
    match lr.decay {
        None => Ok(()),
        Some(Length::Steps(count)) => within("optim.lr.decay.steps", count, 1..=COUNT_MAX),
        Some(Length::Samples(count)) => within("optim.lr.decay.samples", count, 1..=COUNT_MAX),
    }
}

fn within<T: Copy + PartialOrd + Display>(
    key: &str,
    value: T,
    due: RangeInclusive<T>,
) -> Result<(), Refusal> {
    if due.contains(&value) {
        return Ok(());
    }
    Err(refused(key, format!("got {value}, due {} to {}", due.start(), due.end())))
}

fn not_empty(key: &str, text: &str) -> Result<(), Refusal> {
    if text.is_empty() { Err(refused(key, "is empty")) } else { Ok(()) }
}

fn refused(key: &str, problem: impl Display) -> Refusal {
    Refusal::new(key, problem)
}
