//! The logged values, with their units.

use serde::Serialize;

/// A training step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRecord {
    /// Steps done, including this one.
    pub step: u64,
    /// Samples consumed, including those of this step.
    pub samples: u64,
    /// Tokens consumed.
    pub tokens: u64,
    /// Mean loss of the step's tokens, in nats, before the update.
    pub loss: f64,
    /// The learning rate of the update.
    pub lr: f64,
    /// Norm of the gradients before clipping.
    pub grad_norm: f64,
    /// With fp16, the factor of the loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Performance. The only part that differs between two bit-identical runs.
    pub perf: Perf,
}

/// The performance of the steps since the previous record, in means per step.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Perf {
    /// Tokens trained on per second of wall time.
    pub tokens_per_s: f64,
    /// Wall time of a step.
    pub step_ms: f64,
    /// The part of it spent waiting for data. This one and the next two are not measured with
    /// `log.timers = "off"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_wait_ms: Option<f64>,
    /// The part of it blocked by saving.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ckpt_stall_ms: Option<f64>,
    /// The part of it that the first rank waited for operations with other ranks: communication
    /// that does not overlap with computation, and waits for slower ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm_wait_ms: Option<f64>,
    /// Wall time since this process started to train: not a mean.
    pub elapsed_s: f64,
    /// Ranks that trained.
    pub ranks: u64,
    /// Model FLOPs utilization by PaLM's and nanoGPT's formula: `6 N + 12 L C T` operations a
    /// token, with `N` all parameters but the positions, `L` layers of width `C`, and `T` tokens of
    /// a sample; times the tokens a second, over the peak of all ranks. Recomputation does not
    /// count.
    pub mfu_12lct: f64,
    /// The same by llm.c's formula, `6 N + 6 L C T`, for causal attention.
    pub mfu_6lct: f64,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvalRecord {
    /// Steps done at that time.
    pub step: u64,
    /// Samples consumed by training at that time.
    pub samples: u64,
    /// Mean loss of the validation tokens, in nats.
    pub eval_loss: f64,
    /// Validation tokens.
    pub eval_tokens: u64,
    /// Performance. The only part that differs between two bit-identical runs.
    pub perf: EvalPerf,
}

/// The performance of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct EvalPerf {
    /// Validation tokens per second of wall time.
    pub tokens_per_s: f64,
    /// Wall time of the evaluation.
    pub eval_ms: f64,
}

impl StepRecord {
    pub(super) fn measured(&self) -> [(&'static str, f64); 3] {
        [("loss", self.loss), ("lr", self.lr), ("grad_norm", self.grad_norm)]
    }
}

impl EvalRecord {
    pub(super) fn measured(&self) -> [(&'static str, f64); 1] {
        [("eval_loss", self.eval_loss)]
    }
}
