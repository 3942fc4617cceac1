//! Values that follow from a config.

use std::path::PathBuf;
use std::thread::available_parallelism;

use storage::Location;

use super::{BatchConfig, Budget, Config, Length, LrStyle, Objective, RampupConfig, Warmup};

impl BatchConfig {
    /// Micro-batches of one step, over all replicas.
    #[must_use]
    pub fn micro_batches(&self) -> u64 {
        self.global / self.micro
    }

    /// Every batch size of the run, the smallest first.
    pub(super) fn sizes(&self) -> impl Iterator<Item = u64> {
        let (first, by) = self.rampup.map_or((self.global, 1), |ramp| (ramp.start, ramp.increment));
        (first..=self.global).step_by(by.max(1) as usize) // fits: at most 2^24
    }

    /// Samples of the step that starts after `samples` consumed samples.
    #[must_use]
    pub fn at(&self, samples: u64) -> u64 {
        match &self.rampup {
            Some(ramp) if samples < ramp.samples => {
                ramp.start + ramp.increment * ramp.level(self.global, samples)
            }
            _ => self.global,
        }
    }

    /// The ramp as runs of equal batches: the size, and the number of its steps. All later batches
    /// have `global` samples.
    fn levels(&self) -> Vec<(u64, u64)> {
        let Some(ramp) = &self.rampup else { return Vec::new() };
        let (mut levels, mut consumed) = (Vec::new(), 0);
        while consumed < ramp.samples {
            let size = self.at(consumed);
            let next = ramp.first_sample(self.global, ramp.level(self.global, consumed) + 1);
            let steps = (next - consumed).div_ceil(size);
            levels.push((size, steps));
            consumed += steps * size;
        }
        levels
    }

    /// Whole steps in the first `samples` samples of the run.
    #[must_use]
    pub fn steps_in(&self, samples: u64) -> u64 {
        let (mut steps, mut left) = (0, samples);
        for (size, count) in self.levels() {
            let here = count.min(left / size);
            steps += here;
            left -= here * size;
            if here < count {
                return steps;
            }
        }
        steps + left / self.global
    }

    /// Samples in the first `steps` steps of the run; saturates at `u64::MAX`.
    #[must_use]
    pub fn samples_after(&self, steps: u64) -> u64 {
        let (mut samples, mut left) = (0, steps);
        for (size, count) in self.levels() {
            let here = count.min(left);
            samples += here * size;
            left -= here;
        }
        left.saturating_mul(self.global).saturating_add(samples)
    }
}

impl RampupConfig {
    /// How many times the batch grows.
    pub(super) fn growths(&self, global: u64) -> u64 {
        (global - self.start) / self.increment
    }

    /// How many times the batch has grown after `samples` samples, which are fewer than
    /// `self.samples`. The ramp is divided evenly, as in Megatron.
    fn level(&self, global: u64, samples: u64) -> u64 {
        let passed = u128::from(samples) * u128::from(self.growths(global));
        (passed / u128::from(self.samples)) as u64 // fits: below the number of growths
    }

    /// The first sample at which the batch has grown `level` times.
    fn first_sample(&self, global: u64, level: u64) -> u64 {
        let scaled = u128::from(level) * u128::from(self.samples);
        scaled.div_ceil(u128::from(self.growths(global))) as u64 // fits: at most `self.samples`
    }
}

impl Config {
    /// The same run with every default filled in, as it is recorded. Threads are counted here,
    /// once. Paths remain as they are written, and keys that depend on the layout remain unset.
    #[must_use]
    pub fn resolved(&self) -> Self {
        let mut all = self.clone();
        if all.run.threads == 0 {
            all.run.threads = available_parallelism().map_or(1, |count| count.get() as u64);
        }
        all.model.resolve();
        all.resolve_objective();
        all.batch.accumulation = None;
        all.checkpoint.dir = Some(self.checkpoint_dir());
        all.data.cache_dir = Some(self.cache_dir());
        all.optim.lr.decay = Some(Length::Samples(self.lr_decay_samples()));
        all.optim.lr.warmup = Warmup::Samples(self.lr_warmup_samples());
        let anneals = self.optim.lr.style == LrStyle::Wsd;
        all.optim.lr.anneal = anneals.then(|| Warmup::Samples(self.lr_anneal_samples()));
        all
    }

    /// Folder of the checkpoints.
    #[must_use]
    pub fn checkpoint_dir(&self) -> String {
        let below_run = || Location::new(&self.run.dir).join("ckpt").to_string();
        self.checkpoint.dir.clone().unwrap_or_else(below_run)
    }

    /// Folder of the logs, in a file system.
    ///
    /// # Panics
    /// If the config was built in memory with a bucket in `run.dir` and not checked.
    #[must_use]
    pub fn log_dir(&self) -> PathBuf {
        let dir = Location::new(&self.run.dir);
        dir.local_path().expect("checked with the config").to_owned()
    }

    /// Prefix of the first `.bin/.idx` pair.
    ///
    /// # Panics
    /// If the config was built in memory without a corpus and not checked.
    #[must_use]
    pub fn corpus(&self) -> &str {
        &self.data.train[0].path
    }

    /// Folder of the sample-index cache: `data.cache_dir`, or as in Megatron a folder below the
    /// prefix of the corpus.
    #[must_use]
    pub fn cache_dir(&self) -> String {
        let class = match self.objective() {
            Objective::Lm | Objective::Encdec => "GPTDataset",
            Objective::SpanCorruption => "T5MaskedWordPieceDataset",
            Objective::Mlm => "BERTMaskedWordPieceDataset",
        };
        let name = format!("cache/{class}_indices");
        let below = || Location::new(self.corpus()).join(&name).to_string();
        self.data.cache_dir.clone().unwrap_or_else(below)
    }

    /// Optimizer steps of the run.
    #[must_use]
    pub fn steps_total(&self) -> u64 {
        self.batch.steps_in(self.samples_of_budget())
    }

    /// Samples of the run: those of its whole steps.
    #[must_use]
    pub fn samples_total(&self) -> u64 {
        self.batch.samples_after(self.steps_total())
    }

    /// Tokens of one step of `batch.global` samples.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.batch.global * self.model.tokens_per_sample()
    }

    /// Samples from the start of the run to the end of the decay of the learning rate.
    #[must_use]
    pub fn lr_decay_samples(&self) -> u64 {
        match self.optim.lr.decay {
            None => self.samples_total(),
            Some(Length::Samples(samples)) => samples,
            Some(Length::Steps(steps)) => self.batch.samples_after(steps),
            Some(Length::Tokens(tokens)) => tokens / self.model.tokens_per_sample(),
        }
    }

    /// Samples of the warm-up.
    #[must_use]
    pub fn lr_warmup_samples(&self) -> u64 {
        match self.optim.lr.style {
            LrStyle::RangeTest => 0,
            _ => self.lr_samples(self.optim.lr.warmup),
        }
    }

    /// Samples of the final decay of `"wsd"`.
    #[must_use]
    pub fn lr_anneal_samples(&self) -> u64 {
        self.lr_samples(self.optim.lr.anneal.unwrap_or(Warmup::Fraction(0.1)))
    }

    fn lr_samples(&self, length: Warmup) -> u64 {
        match length {
            Warmup::Samples(samples) => samples,
            Warmup::Steps(steps) => self.batch.samples_after(steps),
            Warmup::Tokens(tokens) => tokens / self.model.tokens_per_sample(),
            // fits: both factors are exact, and the product is at most the decay.
            Warmup::Fraction(part) => (self.lr_decay_samples() as f64 * part) as u64,
        }
    }

    /// Validation samples of one evaluation.
    #[must_use]
    pub fn eval_samples(&self) -> u64 {
        self.eval.iters * self.batch.global
    }

    /// The budget in samples; saturates at `u64::MAX`.
    pub(super) fn samples_of_budget(&self) -> u64 {
        match self.run.budget {
            Budget::Samples(samples) => samples,
            Budget::Steps(steps) => self.batch.samples_after(steps),
            Budget::Tokens(tokens) => tokens / self.model.tokens_per_sample(),
        }
    }
}
