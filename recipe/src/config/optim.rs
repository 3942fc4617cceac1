//! `[precision]` and `[optim]`: in what numbers a run computes, and how it learns.

use serde::{Deserialize, Serialize};

use super::check::{COUNT_MAX, refused, within};
use super::node::KeyError;
use super::{
    AnnealStyle, Dtype, FloorMode, Length, LrStyle, Offload, OptimName, ReduceDtype, Warmup,
    WarmupShape,
};

/// `[precision]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrecisionConfig {
    /// Numbers of the matrix multiplications: `"fp32"`, or `"bf16"` or `"fp16"` with weights,
    /// gradients and moments kept in fp32. Default: `"fp32"`.
    pub dtype: Dtype,
    /// Numbers in which replicas send gradients: `"fp32"`, or `"bf16"` for half the traffic; the
    /// bits then depend on how many replicas there are, and on `zero`. Default: `"fp32"`.
    pub reduce_dtype: ReduceDtype,
    /// Whether a kernel that gives other bits each time is passed over for a slower one, or is an
    /// error where there is none. Default: true on the CPU, false on a GPU.
    pub deterministic: Option<bool>,
    /// What keeps the gradients of `"fp16"` above its smallest number.
    pub loss_scale: LossScaleConfig,
}

/// `[precision.loss_scale]`: the loss is multiplied by this, gradients are divided by it. A step
/// whose gradients are not finite changes nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScaleConfig {
    /// The first scale. Default: 65536. Minimum: 1. Maximum: 2^32.
    pub init: f64,
    /// Good steps in a row after which it doubles; 0 leaves it at `init` for ever. Default: 1000.
    /// Minimum: 0.
    pub window: u64,
    /// Bad steps after which it halves. Default: 2. Minimum: 1. Maximum: 1000.
    pub hysteresis: u64,
    /// It never falls below this. Default: 1. Minimum: 2^-24. Maximum: `init`.
    pub min: f64,
}

impl Default for LossScaleConfig {
    fn default() -> Self {
        LossScaleConfig { init: 65_536.0, window: 1000, hysteresis: 2, min: 1.0 }
    }
}

impl PrecisionConfig {
    pub(super) fn checked(&self) -> Result<(), KeyError> {
        let scale = &self.loss_scale;
        within("precision.loss_scale.init", scale.init, 1.0..=f64::from(2_u32.pow(31)) * 2.0)?;
        within("precision.loss_scale.window", scale.window, 0..=COUNT_MAX)?;
        within("precision.loss_scale.hysteresis", scale.hysteresis, 1..=1000)?;
        within("precision.loss_scale.min", scale.min, 2.0_f64.powi(-24)..=scale.init)
    }
}

/// `[optim]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimConfig {
    /// The optimizer: `"adamw"`. Default: `"adamw"`.
    #[serde(default)]
    pub name: OptimName,
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
    /// Where moments and master weights lie: `"none"`, beside the weights; `"cpu"`, in the host's
    /// memory; `"nvme:/path"`, in a folder; `"nvme:/disk0,/disk1"`, spread over folders of several
    /// disks, the same bytes on each. Every rank has folders of its own below them. Where each is
    /// to have a disk of its own, `"nvme:/disk{local_rank}"` has the rank's number on its node.
    /// Default: `"none"`.
    #[serde(default)]
    pub offload: Offload,
    /// The learning rate over the run.
    pub lr: LrConfig,
}

/// `[optim.lr]`; the formulas are in [`crate::lr`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrConfig {
    /// The way after the warm-up: `"constant"`, `"linear"`, `"cosine"`, `"inverse-sqrt"`,
    /// `"exponential"`, `"wsd"` or `"range-test"`. Default: `"cosine"`.
    #[serde(default)]
    pub style: LrStyle,
    /// The rate at the end of the warm-up; of a range test the last. Required. Minimum: 0. Maximum:
    /// 1000.
    pub peak: f64,
    /// The rate at the end of the decay and after; of a range test the first. Default: 0. Minimum:
    /// 0. Maximum: `peak`.
    #[serde(default)]
    pub floor: f64,
    /// Whether `"linear"` and `"cosine"` end at the floor, `"rescale"`, or are cut off there and
    /// counted as Megatron v1 and CPM-1 did, `"clamp"`. Default: `"rescale"`.
    #[serde(default)]
    pub floor_mode: FloorMode,
    /// The rate before the first sample, from which the warm-up rises. Default: 0. Minimum: 0.
    /// Maximum: `peak`.
    #[serde(default)]
    pub start: f64,
    /// The way up: `"linear"`, or `"log"` as DeepSpeed has it. Default: `"linear"`.
    #[serde(default)]
    pub warmup_shape: WarmupShape,
    /// The last fall of `"wsd"`: `"linear"`, `"cosine"`, `"exponential"` or `"minus-sqrt"`.
    /// Default: `"exponential"`.
    #[serde(default)]
    pub anneal_style: AnnealStyle,
    /// The way up from `start`: `{ steps = N }`, `{ samples = N }`, `{ tokens = N }`, or
    /// `{ fraction = F }` of the decay. Default: `{ fraction = 0.01 }`; none for a range test.
    /// Minimum: 0. Maximum: the length of the decay.
    #[serde(default)]
    pub warmup: Warmup,
    /// Where the rate reaches `floor`, counted from the start of the run: `{ steps = N }`,
    /// `{ samples = N }` or `{ tokens = N }`. Default: the budget. Minimum: 1.
    #[serde(default)]
    pub decay: Option<Length>,
    /// How long the last fall of `"wsd"` is, of the decay: as `warmup`. Default: a tenth of the
    /// decay. Minimum: 1 sample. Maximum: what the warm-up leaves.
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
                return Err(refused(name, format!("got {beta}, due 0 or more, and less than 1")));
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
