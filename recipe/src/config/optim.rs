//! `[precision]` and `[optim]`: number formats, the optimizer and the learning rate.

use serde::{Deserialize, Serialize};

use super::check::{COUNT_MAX, refused, within};
use super::node::KeyError;
use super::{
    AnnealStyle, Dtype, FloorMode, Lag, Length, LrStyle, Offload, OptimName, ReduceDtype, Warmup,
    WarmupShape,
};

/// `[precision]`: the number formats of the computation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionConfig {
    /// Number format of matrix products: `"fp32"`, `"bf16"` or `"fp16"`. Master weights, gradients
    /// and optimizer state are fp32 in all cases. Default: `"fp32"`.
    pub dtype: Dtype,
    /// Number format in which replicas exchange gradients: `"fp32"` or `"bf16"`. `"bf16"` halves
    /// the traffic, but the bits of the sums then depend on the number of replicas and on
    /// `parallel.zero`. Default: `"fp32"`.
    pub reduce_dtype: ReduceDtype,
    /// Whether only deterministic kernels are used. They may be slower, and an operation without
    /// one is an error. Default: true on the CPU, false on a GPU.
    pub deterministic: Option<bool>,
    /// Loss scaling. Only with `"fp16"`.
    pub loss_scale: LossScaleConfig,
}

/// `[precision.loss_scale]`: dynamic loss scaling of fp16. The loss is multiplied by the scale and
/// the gradients are divided by it. A step with gradients that are not finite is skipped.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScaleConfig {
    /// Initial scale. Default: 65536. Minimum: 1. Maximum: 2^32.
    pub init: f64,
    /// Consecutive steps with finite gradients after which the scale doubles; 0 keeps the scale at
    /// `init`. Default: 1000. Minimum: 0. Maximum: 2^53.
    pub window: u64,
    /// Steps with finite gradients that do not count for `window`, at the start and after a skipped
    /// step. DeepSpeed uses 1. Default: 0. Minimum: 0. Maximum: 1000.
    pub window_delay: u64,
    /// Skipped steps after which the scale halves. Default: 2. Minimum: 1. Maximum: 1000.
    pub hysteresis: u64,
    /// Smallest scale. Default: 1. Minimum: 2^-24. Maximum: `init`.
    pub min: f64,
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        LossScaleConfig { init: 65_536.0, window: 1000, window_delay: 0, hysteresis: 2, min: 1.0 }
    }
}

impl PrecisionConfig {
    pub(super) fn checked(&self) -> Result<(), KeyError> {
        let scale = &self.loss_scale;
        within("precision.loss_scale.init", scale.init, 1.0..=f64::from(2_u32.pow(31)) * 2.0)?;
        within("precision.loss_scale.window", scale.window, 0..=COUNT_MAX)?;
        within("precision.loss_scale.window_delay", scale.window_delay, 0..=1000)?;
        within("precision.loss_scale.hysteresis", scale.hysteresis, 1..=1000)?;
        within("precision.loss_scale.min", scale.min, 2.0_f64.powi(-24)..=scale.init)
    }
}

/// `[optim]`: the optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimConfig {
    /// Optimizer: `"adamw"`. Default: `"adamw"`.
    #[serde(default)]
    pub name: OptimName,
    /// Decay rates of the first and the second moment. Default: [0.9, 0.95]. Minimum: 0. Maximum:
    /// below 1.
    #[serde(default = "default_betas")]
    pub betas: [f64; 2],
    /// Term that is added to the root of the second moment. Default: 1e-8. Minimum: 1e-16. Maximum:
    /// 1.
    #[serde(default = "default_eps")]
    pub eps: f64,
    /// Decoupled weight decay of matrices and embeddings. Norms and biases have none. Default: 0.1.
    /// Minimum: 0. Maximum: 10.
    #[serde(default = "default_weight_decay")]
    pub weight_decay: f64,
    /// Largest norm of the gradient; a larger gradient is scaled down to it. 0 disables clipping.
    /// Default: 1. Minimum: 0. Maximum: 1000000.
    #[serde(default = "default_clip")]
    pub clip: f64,
    /// Where moments and master weights are kept. `"none"`: in the memory of the device. `"cpu"`:
    /// in host memory. `"nvme:/path"`: in a folder on a disk. `"nvme:/disk0,/disk1"` divides the
    /// bytes evenly between the folders. The folders must exist, and each rank makes its own folder
    /// in them. `{local_rank}` in a path is the number of the rank on its node, as in
    /// `"nvme:/disk{local_rank}"` for one disk per rank. Default: `"none"`.
    #[serde(default)]
    pub offload: Offload,
    /// The learning rate schedule.
    pub lr: LrConfig,
}

/// `[optim.lr]`: the learning rate schedule. The formulas are in [`crate::lr`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrConfig {
    /// Schedule after the warm-up: `"constant"`, `"linear"`, `"cosine"`, `"inverse-sqrt"`,
    /// `"exponential"`, `"wsd"` or `"range-test"`. Default: `"cosine"`.
    #[serde(default)]
    pub style: LrStyle,
    /// Learning rate at the end of the warm-up; in a range test, the last rate. Required. Minimum:
    /// 0. Maximum: 1000.
    pub peak: f64,
    /// Learning rate at the end of the decay and after it; in a range test, the first rate.
    /// Default: 0. Minimum: 0. Maximum: `peak`.
    #[serde(default)]
    pub floor: f64,
    /// How `"linear"` and `"cosine"` reach the floor. `"rescale"` scales the curve to end at the
    /// floor. `"clamp"` decays towards 0 and stops at the floor, as Megatron v1 and CPM-1 do.
    /// Default: `"rescale"`.
    #[serde(default)]
    pub floor_mode: FloorMode,
    /// Learning rate at the start of the warm-up. Default: 0. Minimum: 0. Maximum: `peak`.
    #[serde(default)]
    pub start: f64,
    /// Curve of the warm-up: `"linear"`, or `"log"` as in DeepSpeed. Default: `"linear"`.
    #[serde(default)]
    pub warmup_shape: WarmupShape,
    /// Part of the schedule that is one step late: `"none"`, `"warmup"` or `"all"`. DeepSpeed sets
    /// the rate after a step: `"all"` follows its `WarmupLR` and `WarmupDecayLR`. `"warmup"`
    /// follows `WarmupCosineLR`, whose first rate is 0. Not with `batch.rampup` or a range test.
    /// Default: `"none"`.
    #[serde(default)]
    pub lag: Lag,
    /// Curve of the final decay of `"wsd"`: `"linear"`, `"cosine"`, `"exponential"` or
    /// `"minus-sqrt"`. Default: `"exponential"`.
    #[serde(default)]
    pub anneal_style: AnnealStyle,
    /// Length of the warm-up: `{ steps = N }`, `{ samples = N }`, `{ tokens = N }`, or `{ fraction
    /// = F }` of the decay. A range test has none. Default: `{ fraction = 0.01 }`. Minimum: 0.
    /// Maximum: the length of the decay.
    #[serde(default)]
    pub warmup: Warmup,
    /// Length of the schedule from the start of the run, after which the rate is `floor`: `{ steps
    /// = N }`, `{ samples = N }` or `{ tokens = N }`. Default: the budget. Minimum: 1.
    #[serde(default)]
    pub decay: Option<Length>,
    /// Length of the final decay of `"wsd"`, in the forms of `warmup`. Default: a tenth of `decay`.
    /// Minimum: 1 sample. Maximum: `decay` less `warmup`.
    #[serde(default)]
    pub anneal: Option<Warmup>,
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

impl OptimConfig {
    pub(super) fn checked(&self) -> Result<(), KeyError> {
        for (name, beta) in ["optim.betas.0", "optim.betas.1"].into_iter().zip(self.betas) {
            if !(0.0..1.0).contains(&beta) {
                return Err(refused(
                    name,
                    format!("expected at least 0 and below 1, found {beta}"),
                ));
            }
        }
        within("optim.eps", self.eps, 1e-16..=1.0)?;
        within("optim.weight_decay", self.weight_decay, 0.0..=10.0)?;
        within("optim.clip", self.clip, 0.0..=1e6)?;
        self.lr.checked()
    }
}

impl LrConfig {
    fn checked(&self) -> Result<(), KeyError> {
        within("optim.lr.peak", self.peak, 0.0..=1000.0)?;
        within("optim.lr.floor", self.floor, 0.0..=self.peak)?;
        within("optim.lr.start", self.start, 0.0..=self.peak)?;
        for (key, given) in [("warmup", Some(self.warmup)), ("anneal", self.anneal)] {
            let name = |unit: &str| format!("optim.lr.{key}.{unit}");
            match given {
                None => {}
                Some(Warmup::Steps(count)) => within(&name("steps"), count, 0..=COUNT_MAX)?,
                Some(Warmup::Samples(count)) => within(&name("samples"), count, 0..=COUNT_MAX)?,
                Some(Warmup::Tokens(count)) => within(&name("tokens"), count, 0..=COUNT_MAX)?,
                Some(Warmup::Fraction(part)) => within(&name("fraction"), part, 0.0..=1.0)?,
            }
        }
        match self.decay {
            None => Ok(()),
            Some(Length::Steps(count)) => within("optim.lr.decay.steps", count, 1..=COUNT_MAX),
            Some(Length::Samples(count)) => within("optim.lr.decay.samples", count, 1..=COUNT_MAX),
            Some(Length::Tokens(count)) => within("optim.lr.decay.tokens", count, 1..=COUNT_MAX),
        }
    }
}
