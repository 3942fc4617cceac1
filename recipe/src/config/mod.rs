//! The config of a run: one TOML file.
//!
//! A misspelt key that is silently ignored costs a week of a cluster. So an unknown key is an error
//! that names the nearest known key, and a value outside its range is an error. A file may extend
//! another (`extends = "base.toml"`), and the command line overrides both
//! (`--set optim.lr.peak=1e-3`). [`Config::resolved`] fills in all defaults; its text is written to
//! the folder of the run and into every checkpoint.
//!
//! In reading order: the sections are below, and in the files `data`, `model`, `parallel` and
//! `optim`. `words` and `values` are the types of values. `load` reads and merges files, `node`
//! turns TOML into these types, `check` holds the ranges, `idle` finds keys without an effect,
//! `derive` computes what follows from the keys, and `resume` compares the configs of a resumed
//! run.

mod check;
mod data;
mod derive;
mod error;
mod idle;
mod load;
mod model;
mod node;
mod optim;
mod parallel;
mod resume;
mod values;
mod words;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use data::{DataConfig, LocalCacheConfig, SpecialConfig};
pub use error::ConfigError;
pub(crate) use load::read as read_text;
pub use model::{InitConfig, ModelConfig};
pub use node::nearest;
pub use optim::{LossScaleConfig, LrConfig, OptimConfig, PrecisionConfig};
pub use parallel::{Division, ParallelConfig, RecomputeConfig};
pub use resume::{Difference, ResumeEffect};
pub use values::{
    Budget, Corpus, LOCAL_RANK, Length, LoadFrom, Offload, Size, SplitText, WallTime, Warmup,
};
pub use words::{
    Activation, AnnealStyle, ComputeOn, Dtype, Family, FloorMode, Lag, LrStyle, MaskLengths, Norm,
    Objective, OnSignal, OnSpike, OptimName, Part, Positions, RecomputeMode, Reduce, ReduceDtype,
    Schedule, Timers, WarmupShape,
};

/// The config of a run. [`Config::load`] and [`Config::from_toml`] read it and check every value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The folder, the length and the seed of the run.
    pub run: RunConfig,
    /// The shape of the network.
    pub model: ModelConfig,
    /// The corpora, the objective and the special tokens.
    pub data: DataConfig,
    /// The number of samples in a step.
    pub batch: BatchConfig,
    /// How the run is divided among ranks.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// The number formats of the computation.
    #[serde(default)]
    pub precision: PrecisionConfig,
    /// The optimizer and the learning rate.
    pub optim: OptimConfig,
    /// When and where checkpoints are saved, and which are kept.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// When the run is evaluated on validation data.
    #[serde(default)]
    pub eval: EvalConfig,
    /// What the run logs.
    #[serde(default)]
    pub log: LogConfig,
    /// `[corpora]`: names of corpora, such as `wikipedia = "/data/wiki_text_document"`. A name may
    /// replace a prefix in `data.train`. Runs may share a file of names with `extends`. A name has
    /// no `/`; a prefix of the same name in the working directory is written `./wikipedia`. Unused
    /// names are allowed. The recorded config has the prefixes: a run can be resumed with names or
    /// with prefixes. Default: no names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub corpora: BTreeMap<String, String>,
}

/// `[run]`: the folder, the length and the seed of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Folder of the run. It holds the resolved config, the logs, and the checkpoints unless
    /// `checkpoint.dir` names another folder. Relative to the working directory. A bucket is
    /// possible without logs. Required.
    pub dir: String,
    /// Seed of the initial weights, of dropout and of the sample order. Default: 1234. Minimum: 0.
    /// Maximum: 4294967295, the largest seed of numpy; 2147483646 with `"span-corruption"` and
    /// `"mlm"`.
    #[serde(default = "default_seed")]
    pub seed: u64,
    /// Length of the run: exactly one of `{ steps = N }`, `{ samples = N }` and `{ tokens = N }`.
    /// Rounded down to whole steps. Required. Minimum: 1 step.
    pub budget: Budget,
    /// Wall time after which the run saves a checkpoint and exits, such as `"23h50m"`. For job
    /// queues with a time limit. Default: no limit. Minimum: `"1s"`.
    #[serde(default)]
    pub max_wall: Option<WallTime>,
    /// Action on SIGTERM, SIGINT and SIGUSR1. `"save-and-exit"` finishes the step, saves a
    /// checkpoint and exits with code 75. Default: `"save-and-exit"`.
    #[serde(default)]
    pub on_signal: OnSignal,
    /// Detection of loss spikes.
    #[serde(default)]
    pub spike: SpikeConfig,
    /// CPU threads that compute. The number determines the order of floating-point sums: a resumed
    /// run reproduces the same bits only with the same number. Default: 0, one thread per core; the
    /// detected number is recorded. Minimum: 0. Maximum: 1024.
    #[serde(default)]
    pub threads: u64,
    /// Device that computes: `"auto"`, `"cpu"` or `"cuda"`. `"cuda"` uses one GPU per rank and
    /// needs a trainer built with the feature `cuda`. Default: `"auto"`, a GPU if the trainer is
    /// built for GPUs and finds one, else the CPU.
    #[serde(default)]
    pub device: ComputeOn,
}

/// `[run.spike]`: detection of a loss that rises above the mean of the previous steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpikeConfig {
    /// Action at the first step of a spike. `"ignore"` does nothing. `"warn"` logs the samples of
    /// the step. `"stop"` ends the run with an error that names them, before the step is saved.
    /// Default: `"warn"`.
    pub action: OnSpike,
    /// Rise of the loss above the mean that counts as a spike, in nats. Default: 1. Minimum: 0.
    /// Maximum: 1000.
    pub rise: f64,
    /// Number of previous steps that the mean covers. Default: 100. Minimum: 1. Maximum: 1000000.
    pub window: u64,
}

/// `[batch]`: the number of samples in a step. `global = micro x accumulation x dp`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Samples of one optimizer step, over all replicas. Required. Minimum: 1. Maximum: 16777216.
    pub global: u64,
    /// Samples of one forward and backward pass. Must divide `global`. A larger value is faster and
    /// takes more memory. Required. Minimum: 1. Maximum: 65536.
    pub micro: u64,
    /// Micro-batches of one replica in one step. Default: `global / (micro x dp)`; another value is
    /// an error. Minimum: 1.
    #[serde(default)]
    pub accumulation: Option<u64>,
    /// Batch size ramp at the start of the run. Default: none.
    #[serde(default)]
    pub rampup: Option<RampupConfig>,
}

/// `[batch.rampup]`: the batch size grows from `start` to `batch.global` over the first `samples`
/// samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RampupConfig {
    /// Samples of the first batch. A multiple of `micro`. Required. Minimum: 1. Maximum: below
    /// `global`.
    pub start: u64,
    /// Samples that each increase adds to the batch. A multiple of `micro`. Must divide `global -
    /// start`, at most 65536 times. Required. Minimum: 1.
    pub increment: u64,
    /// Samples after which the batch has `global` samples. Required. Minimum: 1. Maximum: 2^53.
    pub samples: u64,
}

/// `[checkpoint]`: when and where checkpoints are saved, and which are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Folder or URL of the checkpoints. Default: `ckpt` in `run.dir`.
    pub dir: Option<String>,
    /// When a checkpoint is saved.
    pub every: EveryConfig,
    /// Which checkpoints are kept.
    pub keep: KeepConfig,
    /// Whether training continues while a checkpoint is written. Default: true.
    #[serde(rename = "async")]
    pub background: bool,
    /// Whether a separate process writes the checkpoints. It completes a save even if the trainer
    /// is killed. Needs `async = true`. Default: false.
    pub agent: bool,
    /// Time for the last save after SIGTERM, SIGINT or SIGUSR1. A save that takes longer is
    /// abandoned, and the previous checkpoint stays the newest. Default: `"25s"`, below the 30 s
    /// that Slurm and Kubernetes allow. Minimum: `"1s"`.
    pub grace: WallTime,
    /// Second folder or URL, such as `"s3://bucket/run"`. Each checkpoint is copied there in the
    /// background, and is not deleted from `dir` before its copy is complete. Default: none.
    pub drain_to: Option<String>,
    /// Where the run starts. `"auto"` resumes from the newest complete checkpoint in `dir` or
    /// `drain_to`, or starts from scratch if there is none. `"none"` starts from scratch, and fails
    /// if `dir` has checkpoints. Any other value is the folder of one checkpoint. Default:
    /// `"auto"`.
    pub load: LoadFrom,
    /// Parts of the checkpoint in `load` that are used: `"model"`, `"optim"`, `"data"`, `"rng"` and
    /// `"schedule"`. Either all of them, or `["model"]`, which starts a new run from those weights.
    /// Such a run resumes from its own checkpoints as soon as it has any. Default: all.
    pub load_parts: Vec<Part>,
}

/// `[checkpoint.every]`: when a checkpoint is saved. Several conditions may hold; the earliest
/// counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EveryConfig {
    /// Steps between two saves; 0 saves only at the end. Default: 1000. Minimum: 0. Maximum: 2^53.
    pub steps: u64,
    /// Minutes between two saves, in addition to `steps`. Default: no such limit. Minimum: 1.
    /// Maximum: 1000000.
    pub minutes: Option<u64>,
    /// Whether a checkpoint is saved at the end of the run. Default: true.
    pub end: bool,
}

/// `[checkpoint.keep]`: which checkpoints are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeepConfig {
    /// Number of newest checkpoints that are kept. Older ones are deleted after a successful save.
    /// Default: 3. Minimum: 1. Maximum: 1000000.
    pub last: u64,
    /// Checkpoints of steps that are multiples of this number are never deleted. Default: none.
    /// Minimum: 1. Maximum: 2^53.
    pub every: Option<u64>,
}

/// `[eval]`: evaluation on the validation split. The result is the mean loss; with `"mlm"` over the
/// masked tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EvalConfig {
    /// Steps between two evaluations; 0 disables evaluation. Default: 1000. Minimum: 0. Maximum:
    /// 2^53.
    pub every: u64,
    /// Global batches of one evaluation. Every evaluation uses the same samples. Default: 10.
    /// Minimum: 1. Maximum: 1000000.
    pub iters: u64,
}

/// `[log]`: what the run logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Steps between two progress lines. Default: 10. Minimum: 1. Maximum: 2^53.
    pub every: u64,
    /// Whether `log.jsonl` is written to `run.dir`, with one line per logged step. Default: true.
    pub jsonl: bool,
    /// Whether TensorBoard event files are written to `tb` in `run.dir`. Default: true.
    pub tensorboard: bool,
    /// How a step is timed. `"off"` measures nothing. `"phases"` logs the time of each phase of a
    /// step. `"trace"` also writes every action as a Chrome trace. Default: `"phases"`.
    pub timers: Timers,
    /// Peak rate of one rank in floating-point operations per second, such as `989e12` for an H100
    /// in bf16. The logged utilization is relative to it. Default: measured at startup with the
    /// product of two large matrices. Minimum: 1. Maximum: 1e18.
    pub peak_flop_per_s: Option<f64>,
}

fn default_seed() -> u64 {
    1234
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        CheckpointConfig {
            dir: None,
            every: EveryConfig::default(),
            keep: KeepConfig::default(),
            background: true,
            load: LoadFrom::default(),
            agent: false,
            grace: WallTime(Duration::from_secs(25)),
            drain_to: None,
            load_parts: Part::ALL.to_vec(),
        }
    }
}

impl Default for EveryConfig {
    fn default() -> Self {
        EveryConfig { steps: 1000, minutes: None, end: true }
    }
}

impl Default for KeepConfig {
    fn default() -> Self {
        KeepConfig { last: 3, every: None }
    }
}

impl Default for SpikeConfig {
    fn default() -> Self {
        SpikeConfig { action: OnSpike::default(), rise: 1.0, window: 100 }
    }
}

impl Default for EvalConfig {
    fn default() -> Self {
        EvalConfig { every: 1000, iters: 10 }
    }
}

impl Default for LogConfig {
    fn default() -> Self {
        LogConfig {
            every: 10,
            jsonl: true,
            tensorboard: true,
            timers: Timers::default(),
            peak_flop_per_s: None,
        }
    }
}
