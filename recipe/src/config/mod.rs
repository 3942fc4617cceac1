//! One TOML file says what a run is.
//!
//! A key that is misspelt and silently ignored costs a week of a cluster, so every key is known or
//! refused, by name, with the nearest known one beside it, and every value is refused outside its
//! range. A file may stand on another (`extends = "base.toml"`) and the command line on both
//! (`--set optim.lr.peak=1e-3`). What is not given has a default, and [`Config::resolved`] writes
//! all of them down; that text goes into the run's folder and into every checkpoint.
//!
//! In reading order: the sections below, with `data`, `model`, `parallel` and `optim` in files of
//! their own, `words` and `values` are what keys take, `load` reads and merges files, `node` turns
//! TOML into these types, `check` holds the ranges, `idle` says what has no effect, `derive` what
//! follows from them, `resume` what a resumed run must share with the run that it goes on with.

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
    Activation, AnnealStyle, ComputeOn, Dtype, Family, FloorMode, LrStyle, MaskLengths, Norm,
    Objective, OnSignal, OnSpike, OptimName, Part, Positions, RecomputeMode, Reduce, ReduceDtype,
    Schedule, Timers, WarmupShape,
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
    /// How it divides among ranks.
    #[serde(default)]
    pub parallel: ParallelConfig,
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
    /// What SIGTERM, SIGINT and SIGUSR1 do: `"save-and-exit"`. Default: `"save-and-exit"`.
    #[serde(default)]
    pub on_signal: OnSignal,
    /// What a leap of the loss does.
    #[serde(default)]
    pub spike: SpikeConfig,
    /// Threads that compute. Another number rounds sums differently, so a resumed run ends in the
    /// same bits only with the same number. Default: 0, all cores; the number that was found is
    /// recorded. Minimum: 0. Maximum: 1024.
    #[serde(default)]
    pub threads: u64,
    /// What computes: `"auto"`, `"cpu"`, or `"cuda"`, a GPU a rank, for which the trainer must be
    /// built with the feature `cuda`. Default: `"auto"`, a GPU if it is so built and finds one.
    #[serde(default)]
    pub device: ComputeOn,
}

/// `[run.spike]`: when the loss of a step is above the mean of those before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpikeConfig {
    /// `"ignore"`; `"warn"`, which names the samples; or `"stop"`, which ends the run with an error
    /// that does, at the first step of a leap, before anything of it is saved. Default: `"warn"`.
    pub action: OnSpike,
    /// How far above, in nats. Default: 1. Minimum: 0. Maximum: 1000.
    pub rise: f64,
    /// Over how many steps the mean is. Default: 100. Minimum: 1. Maximum: 1000000.
    pub window: u64,
}

/// `[batch]`: `global = micro x accumulation x dp`, in samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Samples of one optimizer step. Required. Minimum: 1. Maximum: 16777216.
    pub global: u64,
    /// Samples of one forward and backward pass; must divide `global`. Larger is faster until
    /// memory ends. Required. Minimum: 1. Maximum: 65536.
    pub micro: u64,
    /// Passes of one step of one replica. Default: `global / (micro x dp)`; a given value is
    /// checked against that. Minimum: 1.
    #[serde(default)]
    pub accumulation: Option<u64>,
    /// Smaller batches at first. Default: none.
    #[serde(default)]
    pub rampup: Option<RampupConfig>,
}

/// `[batch.rampup]`: as the samples go by, batches grow from `start` to `global`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RampupConfig {
    /// The first batch; a multiple of `micro`. Required. Minimum: 1. Below `global`.
    pub start: u64,
    /// What it grows by, each time; a multiple of `micro`. Required. Minimum: 1. Divides
    /// `global - start`, at most 65536 times.
    pub increment: u64,
    /// Samples until it is `global`. Required. Minimum: 1.
    pub samples: u64,
}

/// `[checkpoint]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Folder of the checkpoints. Default: `ckpt` in `run.dir`.
    pub dir: Option<String>,
    /// When to save, besides the end of the run.
    pub every: EveryConfig,
    /// What to keep.
    pub keep: KeepConfig,
    /// Whether steps go on while a checkpoint is written. Default: true.
    #[serde(rename = "async")]
    pub background: bool,
    /// Whether a process of its own writes the copies, which are then saved even if the trainer is
    /// killed. Default: false. Needs `async`.
    pub agent: bool,
    /// After SIGTERM a save goes on for so long; one that does not fit is given up, and the last
    /// stays. Default: `"25s"`, of the 30 s that Slurm and Kubernetes give. Minimum: `"1s"`.
    pub grace: WallTime,
    /// A second folder, such as `"s3://bucket/run"`, that each checkpoint is copied to behind the
    /// run; one that is not there yet is not deleted here. Default: none.
    pub drain_to: Option<String>,
    /// Where to start: `"auto"` goes on from the newest complete checkpoint in `dir` if there is
    /// one, `"none"` starts anew, anything else is the folder of one checkpoint. Default: `"auto"`.
    pub load: LoadFrom,
    /// What is taken from the checkpoint in `load`: `"model"`, `"optim"`, `"data"`, `"rng"` and
    /// `"schedule"`; `["model"]` starts a run of its own from those weights, once: with checkpoints
    /// of its own it goes on from them. Default: all. Either all or `["model"]`.
    pub load_parts: Vec<Part>,
}

/// `[checkpoint.every]`: whichever comes first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EveryConfig {
    /// Steps from one save to the next; 0 saves at the end only. Default: 1000. Minimum: 0.
    pub steps: u64,
    /// Minutes from one save to the next, on top of `steps`. Default: no such limit. Minimum: 1.
    pub minutes: Option<u64>,
    /// Whether the end of the run is saved too. Default: true.
    pub end: bool,
}

/// `[checkpoint.keep]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KeepConfig {
    /// Newest checkpoints that stay; older ones are deleted after a save has succeeded. Default: 3.
    /// Minimum: 1.
    pub last: u64,
    /// Steps whose multiples stay for ever. Default: none. Minimum: 1.
    pub every: Option<u64>,
}

/// `[eval]`: the mean loss over validation samples; of `"mlm"` that of the hidden tokens.
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
    /// `"off"`; `"phases"`: where the time of a step went, in the log; `"trace"`: that, and every
    /// action as a Chrome trace. Default: `"phases"`.
    pub timers: Timers,
    /// What a rank can do at best, for the utilization in the log: floating-point operations a
    /// second, as `989e12` of an H100 in bf16. Default: measured at the start, on the product of
    /// two large matrices. Minimum: 1. Maximum: 1e18.
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
