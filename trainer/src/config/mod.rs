//! One TOML file says what a run is.
//!
//! A key that is misspelt and silently ignored costs a week of a cluster, so every key is known or
//! refused, by name, with the nearest known one beside it, and every value is refused outside its
//! range. A file may stand on another (`extends = "base.toml"`) and the command line on both
//! (`--set optim.lr.peak=1e-3`). What is not given has a default, and [`Config::resolved`] writes
//! all of them down; that text goes into the run's folder and into every checkpoint.
//!
//! In reading order: the sections below, `load` reads and merges files, `node` turns TOML into
//! these types, `check` holds the ranges, `derive` what follows from them, `resume` what a resumed
//! run must share with the run that it goes on with.

mod check;
mod derive;
mod error;
mod load;
mod node;
mod resume;
mod values;

use serde::{Deserialize, Serialize};

pub use error::ConfigError;
pub use resume::{Difference, Effect};
pub use values::{
    Activation, Budget, Corpus, Dtype, Family, Length, Load, LrStyle, SplitText, WallTime, Warmup,
};

/// A run, from its data to its last checkpoint. [`Config::load`] and [`Config::from_toml`] read it
/// and check every value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where the run lives and how long it is.
    pub run: RunConfig,
    /// The shape of the network.
    pub model: ModelConfig,
    /// What it reads.
    pub data: DataConfig,
    /// How many samples make a step.
    pub batch: BatchConfig,
    /// In what numbers it computes.
    #[serde(default)]
    pub precision: PrecisionConfig,
    /// How it learns.
    pub optim: OptimConfig,
    /// When it saves.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// When it measures itself on held-out data.
    #[serde(default)]
    pub eval: EvalConfig,
    /// What it writes down.
    #[serde(default)]
    pub log: LogConfig,
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Folder of the run: resolved config, logs, and checkpoints unless `checkpoint.dir` says else.
    /// Relative to the working directory. Required.
    pub dir: String,
    /// Seed of the initial weights and of the sample order. Default: 1234. Minimum: 0. Maximum:
    /// 4294967295, the seeds that numpy takes.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// When the run is done: `{ steps = N }`, `{ samples = N }` or `{ tokens = N }`, exactly one.
    /// Rounded down to whole steps. Required. Minimum: 1 step.
    pub budget: Budget,
    /// Save and stop after this long, as `"23h50m"`; for queues with a time limit. Default: no
    /// limit. Minimum: `"1s"`.
    #[serde(default)]
    pub max_wall: Option<WallTime>,
    /// Threads that compute. Another number rounds sums differently, so a resumed run ends in the
    /// same bits only with the same number. Default: 0, all cores; the number that was found is
    /// recorded. Minimum: 0. Maximum: 1024.
    #[serde(default)]
    pub threads: u64,
}

/// `[model]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The architecture: `"gpt"`, that of GPT-2: learned positions, norm before each block, biases,
    /// head tied to the word embedding. Default: `"gpt"`.
    #[serde(default)]
    pub family: Family,
    /// Transformer layers. Required. Minimum: 1. Maximum: 1024.
    pub layers: u64,
    /// Width of the residual stream. Required. Minimum: 1. Maximum: 131072.
    pub hidden: u64,
    /// Attention heads; must divide `hidden`. Required. Minimum: 1. Maximum: 1024.
    pub heads: u64,
    /// Width inside the feed-forward block. Default: 4 x `hidden`. Minimum: 1. Maximum: 1048576.
    #[serde(default)]
    pub ffn: Option<u64>,
    /// What stands between the two matrices of the feed-forward block: `"gelu-tanh"`, the GELU of
    /// GPT-2 by its tanh formula. Default: `"gelu-tanh"`.
    #[serde(default)]
    pub activation: Activation,
    /// Tokens of the vocabulary, as the tokenizer counts them. Required. Minimum: 2. Maximum:
    /// 16777216.
    pub vocab: u64,
    /// Tokens that the model sees at once. Required. Minimum: 1. Maximum: 1048576.
    pub seq_len: u64,
    /// The initial weights.
    #[serde(default)]
    pub init: InitConfig,
}

/// `[model.init]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InitConfig {
    /// Standard deviation of the normal distribution that weights are drawn from. Default: 0.02.
    /// Minimum: 0. Maximum: 1.
    pub std: f64,
    /// Whether the two matrices that write into the residual stream are drawn with
    /// `std / sqrt(2 x layers)`, so that its variance does not grow with depth. Default: true.
    pub scaled_output: bool,
}

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The corpus: the prefix of a `.bin/.idx` pair, alone (`"data/wiki_text_document"`) or as
    /// `[{ path = "..." }]`. Required. Exactly one.
    #[serde(deserialize_with = "values::corpora")]
    pub train: Vec<Corpus>,
    /// Shares of the documents for training, validation and test, as Megatron writes them:
    /// `"949,50,1"` or `[949, 50, 1]`. Default: `"949,50,1"`. Minimum: 1 share that is not 0.
    #[serde(default)]
    pub split: SplitText,
    /// The tokenizer that made the corpus; generation needs it, and the name of the index cache
    /// depends on it. Default: `"gpt2"`.
    #[serde(default = "default_tokenizer")]
    pub tokenizer: String,
    /// Micro-batches read ahead of the one in use. Fewer stall on a slow store, more cost
    /// `micro x seq_len` tokens each. Default: 8. Minimum: 1. Maximum: 1024.
    #[serde(default = "default_prefetch_batches")]
    pub prefetch_batches: u64,
    /// Folder of the sample-index cache. Default: `cache/GPTDataset_indices` in a folder named as
    /// the corpus, where Megatron has it.
    #[serde(default)]
    pub cache_dir: Option<String>,
}

/// `[batch]`: `global = micro x accumulation`, in samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Samples of one optimizer step. Required. Minimum: 1. Maximum: 16777216.
    pub global: u64,
    /// Samples of one forward and backward pass; must divide `global`. Larger is faster until
    /// memory ends. Required. Minimum: 1. Maximum: 65536.
    pub micro: u64,
    /// Passes of one step. Default: `global / micro`; a given value is checked against that.
    /// Minimum: 1.
    #[serde(default)]
    pub accumulation: Option<u64>,
}

/// `[precision]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionConfig {
    /// Numbers of the matrix multiplications: `"fp32"`, or `"bf16"` with weights, gradients and
    /// moments kept in fp32. Default: `"fp32"`.
    pub dtype: Dtype,
}

/// `[optim]`: AdamW.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimConfig {
    /// Decay of the first and the second moment. Default: [0.9, 0.95]. Minimum: 0. Below 1.
    #[serde(default = "default_betas")]
    pub betas: [f64; 2],
    /// What keeps the update finite where the second moment is 0. Default: 1e-8. Minimum: 1e-16.
    /// Maximum: 1.
    #[serde(default = "default_eps")]
    pub eps: f64,
    /// Decoupled decay of matrices and embeddings; never of norms and biases. Default: 0.1.
    /// Minimum: 0. Maximum: 10.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: f64,
    /// Gradients of a longer norm are scaled down to this one; 0 leaves them alone. Default: 1.
    /// Minimum: 0. Maximum: 1000000.
    #[serde(default = "default_clip")]
    pub clip: f64,
    /// The learning rate over the run.
    pub lr: LrConfig,
}

/// `[optim.lr]`; the formulas are in [`crate::lr`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrConfig {
    /// The way down after the warm-up: `"constant"`, `"linear"` or `"cosine"`. Default: `"cosine"`.
    #[serde(default)]
    pub style: LrStyle,
    /// The rate at the end of the warm-up. Required. Minimum: 0. Maximum: 1000.
    pub peak: f64,
    /// The rate at the end of the decay and after. Default: 0. Minimum: 0. Maximum: `peak`.
    #[serde(default)]
    pub floor: f64,
    /// The way up from 0: `{ steps = N }`, `{ samples = N }`, or `{ fraction = F }` of the decay.
    /// Default: `{ fraction = 0.01 }`. Minimum: 0. Maximum: the length of the decay.
    #[serde(default)]
    pub warmup: Warmup,
    /// Where the rate reaches `floor`, counted from the start of the run: `{ steps = N }` or
    /// `{ samples = N }`. Default: the budget. Minimum: 1.
    #[serde(default)]
    pub decay: Option<Length>,
}

/// `[checkpoint]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Folder of the checkpoints. Default: `ckpt` in `run.dir`.
    pub dir: Option<String>,
    /// When to save, besides the end of the run.
    pub every: EveryConfig,
    /// What to keep.
    pub keep: KeepConfig,
    /// Where to start: `"auto"` goes on from the newest complete checkpoint in `dir` if there is
    /// one, `"none"` starts anew, anything else is the folder of one checkpoint. Default: `"auto"`.
    pub load: Load,
}

/// `[checkpoint.every]`: whichever comes first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EveryConfig {
    /// Steps from one save to the next; 0 saves at the end only. Default: 1000. Minimum: 0.
    pub steps: u64,
    /// Minutes from one save to the next, on top of `steps`. Default: no such limit. Minimum: 1.
    pub minutes: Option<u64>,
}

/// `[checkpoint.keep]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeepConfig {
    /// Newest checkpoints that stay; older ones are deleted after a save has succeeded. Default: 3.
    /// Minimum: 1.
    pub last: u64,
}

/// `[eval]`: the mean loss over validation samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Steps from one evaluation to the next; 0 never evaluates. Default: 1000. Minimum: 0.
    pub every: u64,
    /// Global batches of one evaluation, the same ones each time. Default: 10. Minimum: 1.
    pub iters: u64,
}

/// `[log]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Steps from one progress line to the next. Default: 10. Minimum: 1.
    pub every: u64,
    /// Whether `log.jsonl` is written to `run.dir`, one line a logged step. Default: true.
    pub jsonl: bool,
    /// Whether TensorBoard event files are written to `tb` in `run.dir`. Default: true.
    pub tensorboard: bool,
}

fn default_seed() -> u64 {
    1234
}

fn default_tokenizer() -> String {
    "gpt2".to_owned()
}

fn default_prefetch_batches() -> u64 {
    8
}

fn default_betas() -> [f64; 2] {
    [0.9, 0.95]
}

fn default_eps() -> f64 {
    1e-8
}

fn default_weight_decay() -> f64 {
    0.1
}

fn default_clip() -> f64 {
    1.0
}

impl Default for InitConfig {
    fn default() -> Self {
        InitConfig { std: 0.02, scaled_output: true }
    }
}

impl Default for EveryConfig {
    fn default() -> Self {
        EveryConfig { steps: 1000, minutes: None }
    }
}

impl Default for KeepConfig {
    fn default() -> Self {
        KeepConfig { last: 3 }
    }
}

impl Default for EvalConfig {
    fn default() -> Self {
        EvalConfig { every: 1000, iters: 10 }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        LogConfig { every: 10, jsonl: true, tensorboard: true }
    }
}
