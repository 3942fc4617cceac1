//! What follows from a config.

use std::thread::available_parallelism;

use super::{BatchConfig, Budget, Config, Length, ModelConfig, Warmup};

/// Rows of the word embedding come in this many: matrix units want whole tiles, and 128 is what
/// Megatron pads to.
const VOCAB_MULTIPLE: u64 = 128;

impl ModelConfig {
    /// Width inside the feed-forward block.
    #[must_use]
    pub fn ffn(&self) -> u64 {
        self.ffn.unwrap_or(4 * self.hidden)
    }

    /// Width of one attention head.
    #[must_use]
    pub fn head_dim(&self) -> u64 {
        self.hidden / self.heads
    }

    /// Rows of the word embedding: `vocab`, rounded up to a multiple of 128. No token has the
    /// rows above `vocab`; they are there for the speed of the matrix product alone.
    #[must_use]
    pub fn padded_vocab(&self) -> u64 {
        self.vocab.next_multiple_of(VOCAB_MULTIPLE)
    }
}

impl BatchConfig {
    /// Forward and backward passes of one step.
    #[must_use]
    pub fn accumulation(&self) -> u64 {
        self.global / self.micro
    }
}

impl Config {
    /// The same run with every default written down: what is recorded. Threads are counted here,
    /// once; paths stay as they were given.
    #[must_use]
    pub fn resolved(&self) -> Self {
        let mut all = self.clone();
        if all.run.threads == 0 {
            all.run.threads = available_parallelism().map_or(1, |count| count.get() as u64);
        }
        all.model.ffn = Some(self.model.ffn());
        all.batch.accumulation = Some(self.batch.accumulation());
        all.checkpoint.dir = Some(self.checkpoint_dir());
        all.data.cache_dir = Some(self.cache_dir());
        all.optim.lr.decay = Some(Length::Samples(self.lr_decay_samples()));
        all.optim.lr.warmup = Warmup::Samples(self.lr_warmup_samples());
        all
    }

    /// Folder of the checkpoints.
    #[must_use]
    pub fn checkpoint_dir(&self) -> String {
        let below_run = || format!("{}/ckpt", self.run.dir.trim_end_matches('/'));
        self.checkpoint.dir.clone().unwrap_or_else(below_run)
    }

    /// Prefix of the `.bin/.idx` pair.
    ///
    /// # Panics
    /// If the config was built in memory without a corpus and not checked.
    #[must_use]
    pub fn corpus(&self) -> &str {
        &self.data.train[0].path
    }

    /// Folder of the sample-index cache: below the corpus's prefix, as Megatron has it, unless the
    /// config says else.
    #[must_use]
    pub fn cache_dir(&self) -> String {
        let below = || format!("{}/cache/GPTDataset_indices", self.corpus());
        self.data.cache_dir.clone().unwrap_or_else(below)
    }

    /// Optimizer steps of the run.
    #[must_use]
    pub fn steps_total(&self) -> u64 {
        self.samples_of_budget().unwrap_or(u64::MAX) / self.batch.global
    }

    /// Samples of the run: those of its whole steps.
    #[must_use]
    pub fn samples_total(&self) -> u64 {
        self.steps_total() * self.batch.global
    }

    /// Tokens of one step.
    #[must_use]
    pub fn tokens_per_step(&self) -> u64 {
        self.batch.global * self.model.seq_len
    }

    /// Samples over which the learning rate comes down, warm-up included.
    #[must_use]
    pub fn lr_decay_samples(&self) -> u64 {
        match self.optim.lr.decay {
            None => self.samples_total(),
            Some(Length::Samples(samples)) => samples,
            Some(Length::Steps(steps)) => steps.saturating_mul(self.batch.global),
        }
    }

    /// Samples over which the learning rate goes up.
    #[must_use]
    pub fn lr_warmup_samples(&self) -> u64 {
        match self.optim.lr.warmup {
            Warmup::Samples(samples) => samples,
            Warmup::Steps(steps) => steps.saturating_mul(self.batch.global),
            // fits: both factors are exact, and the product is at most the decay.
            Warmup::Fraction(part) => (self.lr_decay_samples() as f64 * part) as u64,
        }
    }

    /// Validation samples of one evaluation.
    #[must_use]
    pub fn eval_samples(&self) -> u64 {
        self.eval.iters * self.batch.global
    }

    /// The budget in samples, or `None` if that is beyond counting.
    pub(super) fn samples_of_budget(&self) -> Option<u64> {
        match self.run.budget {
            Budget::Samples(samples) => Some(samples),
            Budget::Steps(steps) => steps.checked_mul(self.batch.global),
            Budget::Tokens(tokens) => Some(tokens / self.model.seq_len),
        }
    }
}
