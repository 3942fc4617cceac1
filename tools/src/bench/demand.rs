//! The requirements of a training run for a store.

use anyhow::{Context as _, Result, ensure};
use recipe::config::Config;
use recipe::plan::{PlanInputs, RunPlan};
use serde::Serialize;

/// A cluster that trains one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Need {
    /// Name in the report.
    pub name: String,
    /// Trainable parameters.
    pub parameters: u64,
    /// Accelerators.
    pub ranks: u64,
    /// Tokens of a sample.
    pub seq_len: u64,
    /// Bytes of a sample: its tokens and the label of the last.
    pub sample_bytes: u64,
    /// Samples per second that the cluster consumes.
    pub samples_per_s: f64,
    /// Bytes of one checkpoint: weights, masters and both moments.
    pub checkpoint_bytes: u64,
}

/// Token ids of smaller vocabularies take two bytes, as in Megatron.
const SHORT_VOCABULARY: u64 = 65_500;

/// bf16 weights, fp32 masters and two fp32 moments.
const BYTES_PER_PARAMETER: u64 = 2 + 4 + 4 + 4;

impl Need {
    /// From a model size such as `11b`, two-byte tokens, and the floating-point operations per
    /// second of one accelerator: a token takes six operations per parameter.
    ///
    /// # Errors
    /// If `size` is not a model size, or another argument is out of range.
    pub fn of_size(size: &str, ranks: u64, seq_len: u64, flop_per_s: f64) -> Result<Self> {
        let parameters = parameters_of(size).with_context(|| {
            format!(
                "cannot use --parameters {size}: expected a number with m, b or t, such as 350m, \
                 1.3b or 11b"
            )
        })?;
        let name = format!("{} parameters on {ranks} accelerators", size.to_ascii_uppercase());
        let tokens_per_s = flop_per_s / (6.0 * parameters as f64) * ranks as f64;
        let need = Need {
            name,
            parameters,
            ranks,
            seq_len,
            sample_bytes: seq_len.saturating_add(1).saturating_mul(2),
            samples_per_s: tokens_per_s / seq_len.max(1) as f64,
            checkpoint_bytes: parameters.saturating_mul(BYTES_PER_PARAMETER),
        };
        need.checked(flop_per_s)
    }

    /// From the config of a run.
    ///
    /// # Errors
    /// If an argument or the sequence length is out of range.
    pub fn of_config(config: &Config, ranks: u64, flop_per_s: f64) -> Result<Self> {
        let plan = RunPlan::new(config, &PlanInputs::default());
        let (model, parameters) = (&config.model, plan.parameters.total);
        let name = format!("{}, {parameters} parameters, on {ranks} accelerators", plan.model);
        let token_bytes = if model.vocab < SHORT_VOCABULARY { 2 } else { 4 };
        let need = Need {
            name,
            parameters,
            ranks,
            seq_len: model.seq_len,
            sample_bytes: (model.seq_len + 1) * token_bytes,
            samples_per_s: flop_per_s / plan.flop.per_token_6n_12lhs as f64 * ranks as f64
                / model.tokens_per_sample() as f64,
            checkpoint_bytes: plan.checkpoint.checkpoint_bytes,
        };
        need.checked(flop_per_s)
    }

    fn checked(self, flop_per_s: f64) -> Result<Self> {
        let (ranks, seq_len) = (self.ranks, self.seq_len);
        ensure!(ranks > 0, "cannot use --ranks 0: expected at least 1");
        ensure!(
            (1..=1 << 20).contains(&seq_len),
            "cannot use --seq-length {seq_len}: expected 1 to 1048576"
        );
        let is_rate = flop_per_s.is_finite() && flop_per_s > 0.0;
        ensure!(is_rate, "cannot use --flops {flop_per_s}: expected a number above 0");
        Ok(self)
    }
}

pub(crate) fn parameters_of(size: &str) -> Option<u64> {
    let size = size.to_ascii_lowercase();
    let units = [("m", 1e6), ("b", 1e9), ("t", 1e12)];
    let (digits, unit) =
        units.iter().find_map(|(end, unit)| Some((size.strip_suffix(end)?, unit)))?;
    let count = digits.parse::<f64>().ok()? * unit;
    // fits: below 2^64 by far
    (1e6..=1e15).contains(&count).then_some(count.round() as u64)
}
