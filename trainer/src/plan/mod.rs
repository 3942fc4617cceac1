//! What a run will take, before it takes it: parameters, memory, arithmetic, disk and time.
//!
//! A plan is a pure function of the config and of what is [`Known`] about the corpus and the
//! machine, so it can be made anywhere, for any size. What cannot work is a refusal with its
//! reason; what will hurt is a warning. Every estimate names its formula, for efficiencies that
//! come from different formulas cannot be compared.

mod table;

use serde::Serialize;

use crate::config::{Config, Dtype, ModelConfig};
use crate::model::HEAD_CHUNK_ROWS;

/// Bytes of a parameter in f32.
const F32_BYTES: u64 = 4;
/// Past so many epochs the same text teaches less than new text would (Muennighoff et al. 2023,
/// "Scaling data-constrained language models").
const EPOCHS_MANY: f64 = 4.0;

/// What is known besides the config. All of it is optional, and what is absent is not estimated.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Known {
    /// Tokens of the corpus.
    pub corpus_tokens: Option<u64>,
    /// Memory of the machine.
    pub memory_bytes: Option<u64>,
    /// Measured speed of training.
    pub tokens_per_s: Option<f64>,
    /// Measured speed of large matrix products, in floating-point operations a second; used if
    /// `tokens_per_s` is not known.
    pub flop_per_s: Option<f64>,
}

/// What a run will take. Shown as a table for people; serialized with units in the keys.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The shape of the model, in words.
    pub model: String,
    /// Numbers that are learned.
    pub parameters: Parameters,
    /// Peak memory of training.
    pub memory_bytes: Memory,
    /// Floating-point operations.
    pub flop: Flop,
    /// How long the run is.
    pub run: Run,
    /// What it writes.
    pub checkpoint: Saving,
    /// How long it takes, if the speed is known.
    pub time: Option<Time>,
    /// The loss of a model that knows nothing: the logarithm of the vocabulary.
    pub loss_initial_nats: f64,
    /// Why it cannot run. Empty if it can.
    pub refusals: Vec<String>,
    /// What will hurt.
    pub warnings: Vec<String>,
}

/// Parameters by component. The head shares the word embedding and has none of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Parameters {
    /// A row for every token of the vocabulary.
    pub word_embedding: u64,
    /// A row for every position.
    pub position_embedding: u64,
    /// Attention of all layers: `c_attn`, `c_proj` and their biases.
    pub attention: u64,
    /// Feed-forward blocks of all layers: `c_fc`, `c_proj` and their biases.
    pub feed_forward: u64,
    /// Gains and biases of all norms.
    pub norms: u64,
    /// The sum.
    pub total: u64,
}

/// Peak memory by component, in bytes. Weights to moments are exact, the rest is an estimate: the
/// allocator and the kernels' own buffers come on top.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// f32 weights: 4 bytes a parameter.
    pub weights: u64,
    /// With bf16, the copy that computes: 2 bytes a parameter.
    pub compute_copy: u64,
    /// Gradients, 4 bytes a parameter and as many again for the word embedding in its use as the
    /// head, for every partial sum that waits in the tree over the micro-batches and the one in the
    /// making: `floor(log2(accumulation)) + 1`. With bf16 those of one pass on top.
    pub gradients: u64,
    /// Both moments of AdamW: 8 bytes a parameter.
    pub moments: u64,
    /// What the backward pass keeps of one micro-batch: `layers x tokens x (8 hidden + 2 ffn)`
    /// numbers. That is the count of Korthikanti et al. 2022 without dropout masks and without
    /// the attention matrix, which is recomputed.
    pub activations: u64,
    /// The head: logits and their log-softmax, 512 tokens at a time.
    pub head: u64,
    /// The sum.
    pub total: u64,
}

/// Floating-point operations of training: forward and backward, a multiply and an add as two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Flop {
    /// `6 N + 12 L h s` (PaLM, nanoGPT). `N` is all parameters but the positions.
    pub per_token_6n_12lhs: u64,
    /// `6 N + 6 L h s` (llm.c): attention looks back only, so half of it is never needed.
    pub per_token_6n_6lhs: u64,
    /// Of one step, by the first formula.
    pub per_step: u64,
}

/// The length of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Optimizer steps.
    pub steps: u64,
    /// Micro-batches of one step.
    pub accumulation: u64,
    /// Tokens of one step.
    pub tokens_per_step: u64,
    /// Samples in all.
    pub samples: u64,
    /// Tokens in all.
    pub tokens: u64,
    /// Passes over the training share of the corpus, if its size is known.
    pub epochs: Option<f64>,
}

/// What the run writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Saving {
    /// One checkpoint: weights and both moments in f32, 12 bytes a parameter.
    pub checkpoint_bytes: u64,
    /// Checkpoints in all, the last included.
    pub count: u64,
    /// Most that lies on the disk at once: those that are kept, and the one being written.
    pub disk_bytes_max: u64,
}

/// How long the run takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Time {
    /// The speed that this rests on.
    pub tokens_per_s: f64,
    /// The whole run, without saving and evaluation.
    pub run_s: f64,
    /// Where the speed is from.
    pub basis: String,
}

impl Parameters {
    /// Counts a model whose word embedding has so many rows: [`ModelConfig::padded_vocab`] in
    /// memory, `vocab` in a published count.
    #[must_use]
    pub fn count(model: &ModelConfig, vocab_rows: u64) -> Self {
        let (layers, h, f) = (model.layers, model.hidden, model.ffn());
        let word_embedding = vocab_rows * h;
        let position_embedding = model.seq_len * h;
        let attention = layers * ((h * 3 * h + 3 * h) + (h * h + h));
        let feed_forward = layers * ((h * f + f) + (f * h + h));
        // Two norms a layer and one at the end, each a gain and a bias.
        let norms = (2 * layers + 1) * 2 * h;
        let total = word_embedding + position_embedding + attention + feed_forward + norms;
        Parameters { word_embedding, position_embedding, attention, feed_forward, norms, total }
    }
}

impl Memory {
    fn estimate(config: &Config, parameters: &Parameters) -> Self {
        let (model, count) = (&config.model, parameters.total);
        // A copy that computes, and gradients in its dtype before they are added, bf16 alone has.
        let (number_bytes, copy_bytes) = match config.precision.dtype {
            Dtype::Fp32 => (F32_BYTES, 0),
            Dtype::Bf16 | Dtype::Fp16 => (2, 2),
        };
        let sums = u64::from(config.batch.accumulation().ilog2()) + 1;
        let tokens = config.batch.micro * model.seq_len;
        let rows = tokens.min(HEAD_CHUNK_ROWS);
        let kept = 8 * model.hidden + 2 * model.ffn();

        let weights = F32_BYTES * count;
        let compute_copy = copy_bytes * count;
        let gradients = sums * F32_BYTES * (count + parameters.word_embedding) + copy_bytes * count;
        let moments = 2 * F32_BYTES * count;
        // A config may ask for more than can be counted; it gets the most that can.
        let activations = (model.layers * kept * number_bytes).saturating_mul(tokens);
        let head =
            2 * F32_BYTES * rows * model.padded_vocab() + copy_bytes * parameters.word_embedding;
        let fixed = weights + compute_copy + gradients + moments + head;
        let total = fixed.saturating_add(activations);
        Memory { weights, compute_copy, gradients, moments, activations, head, total }
    }
}

impl Plan {
    /// Plans a checked config.
    #[must_use]
    pub fn new(config: &Config, known: &Known) -> Self {
        let model = &config.model;
        let parameters = Parameters::count(model, model.padded_vocab());
        let flop = flop(config, &parameters);
        let run = run(config, known);
        let mut plan = Plan {
            model: describe(model),
            parameters,
            memory_bytes: Memory::estimate(config, &parameters),
            flop,
            run,
            checkpoint: saving(config, &parameters),
            time: time(&run, &flop, known),
            loss_initial_nats: (model.vocab as f64).ln(),
            refusals: Vec::new(),
            warnings: Vec::new(),
        };
        plan.refuse(config, known);
        plan.warn(config, known);
        plan
    }

    fn refuse(&mut self, config: &Config, known: &Known) {
        self.refusals.extend(config.not_yet());
        let seq_len = config.model.seq_len;
        if let Some(tokens) = known.corpus_tokens.map(|tokens| training_tokens(config, tokens))
            && tokens <= seq_len as f64
        {
            self.refusals.push(format!(
                "the training share of the corpus has {tokens:.0} tokens, one sample takes {}; \
                 hint: a smaller model.seq_len, or another data.split",
                seq_len + 1
            ));
        }
        let evaluates = config.eval.every > 0 && config.eval.every <= self.run.steps;
        if evaluates && share(config, 1) == 0.0 {
            self.refusals.push(format!(
                "eval.every is {}, and data.split '{}' has no share for validation; \
                 hint: eval.every=0 never evaluates",
                config.eval.every, config.data.split.0
            ));
        }
    }

    fn warn(&mut self, config: &Config, known: &Known) {
        let need = self.memory_bytes.total;
        if let Some(have) = known.memory_bytes.filter(|have| need > *have) {
            let (need, have) = (storage::ByteSize(need), storage::ByteSize(have));
            self.warnings.push(format!(
                "training needs about {need}, the machine has {have}; \
                 hint: a smaller batch.micro first, then precision.dtype = \"bf16\""
            ));
        }
        if let Some(epochs) = self.run.epochs.filter(|epochs| *epochs > EPOCHS_MANY) {
            self.warnings.push(format!(
                "the run reads its corpus {epochs:.1} times; past {EPOCHS_MANY} times, more text \
                 helps more than more steps"
            ));
        }
        let every = config.checkpoint.every.steps;
        if config.checkpoint.every.minutes.is_none() && (every == 0 || every > self.run.steps) {
            self.warnings.push(format!(
                "checkpoint.every.steps is {every} of {} steps: the run saves at its end only, and \
                 a kill loses all of it",
                self.run.steps
            ));
        }
    }
}

fn describe(model: &ModelConfig) -> String {
    format!(
        "gpt: {} layers, hidden {}, {} heads of {}, ffn {}, vocabulary {} in {} rows, sequence {}",
        model.layers,
        model.hidden,
        model.heads,
        model.head_dim(),
        model.ffn(),
        model.vocab,
        model.padded_vocab(),
        model.seq_len
    )
}

fn flop(config: &Config, parameters: &Parameters) -> Flop {
    let model = &config.model;
    let products = 6 * (parameters.total - parameters.position_embedding);
    let attention = 6 * model.layers * model.hidden * model.seq_len;
    let per_token_6n_12lhs = products + 2 * attention;
    Flop {
        per_token_6n_12lhs,
        per_token_6n_6lhs: products + attention,
        per_step: per_token_6n_12lhs.saturating_mul(config.tokens_per_step()),
    }
}

fn run(config: &Config, known: &Known) -> Run {
    let tokens = config.steps_total() * config.tokens_per_step();
    let corpus = known.corpus_tokens.map(|corpus| training_tokens(config, corpus));
    Run {
        steps: config.steps_total(),
        accumulation: config.batch.accumulation(),
        tokens_per_step: config.tokens_per_step(),
        samples: config.samples_total(),
        tokens,
        epochs: corpus.filter(|corpus| *corpus > 0.0).map(|corpus| tokens as f64 / corpus),
    }
}

fn saving(config: &Config, parameters: &Parameters) -> Saving {
    let (steps, every) = (config.steps_total(), config.checkpoint.every.steps);
    let count = if every == 0 { 1 } else { steps.div_ceil(every) };
    let checkpoint_bytes = 3 * F32_BYTES * parameters.total;
    // The oldest goes only when the newest stands.
    let on_disk = count.min(config.checkpoint.keep.last + 1);
    Saving { checkpoint_bytes, count, disk_bytes_max: on_disk * checkpoint_bytes }
}

fn time(run: &Run, flop: &Flop, known: &Known) -> Option<Time> {
    let measured = known.tokens_per_s.map(|speed| (speed, "the measured tokens/s".to_owned()));
    let (tokens_per_s, basis) = measured.or_else(|| {
        let speed = known.flop_per_s?;
        let text = format!("matrix products at {:.1} GFLOP/s: a lower bound", speed / 1e9);
        Some((speed / flop.per_token_6n_12lhs as f64, text))
    })?;
    let run_s = run.tokens as f64 / tokens_per_s;
    run_s.is_finite().then_some(Time { tokens_per_s, run_s, basis })
}

/// The split is by documents; by tokens it holds on average.
fn training_tokens(config: &Config, corpus_tokens: u64) -> f64 {
    corpus_tokens as f64 * share(config, 0)
}

/// The part of the documents that a split gets: 0 train, 1 validation, 2 test.
fn share(config: &Config, which: usize) -> f64 {
    let shares = config.data.split.shares().unwrap_or_default();
    shares.get(which).map_or(0.0, |share| share / shares.iter().sum::<f64>())
}
