//! Keys that are given and have no effect.
//!
//! A key of another model or objective is an error, because the run would not do what the key says
//! (`check_foreign`). A key that depends on a switch, such as the loss scale on `"fp16"`, is only
//! reported ([`Config::idle`]), so that a user can turn the switch off without removing the key.
//! Keys with their default value are not reported.

use super::check::refused;
use super::node::KeyError;
use super::{
    AnnealStyle, Config, ConfigError, Dtype, Family, FloorMode, Lag, LoadFrom, LossScaleConfig,
    LrConfig, LrStyle, Part, Positions, Warmup, WarmupShape, data, model,
};

/// Whether a key is set and has no effect, its name, and the reason.
type UnusedKey = (bool, &'static str, &'static str);

impl Config {
    /// Keys that are set but have no effect without another key, each with the reason.
    #[must_use]
    pub fn idle(&self) -> Vec<String> {
        let (precision, checkpoint) = (&self.precision, &self.checkpoint);
        let scales = precision.loss_scale != LossScaleConfig::default();
        let names_one = matches!(checkpoint.load, LoadFrom::Path(_));
        let keys = [
            (
                scales && precision.dtype != Dtype::Fp16,
                "precision.loss_scale",
                "precision.dtype is not \"fp16\"",
            ),
            (
                checkpoint.load_parts == [Part::Model] && !names_one,
                "checkpoint.load_parts",
                "checkpoint.load names no checkpoint, and a resumed run loads all parts",
            ),
        ];
        let rises = self.lr_warmup_samples() > 0;
        let idle = self.optim.lr.idle(rises).into_iter().chain(keys).filter(|key| key.0);
        idle.map(|(_, key, reason)| format!("{key} has no effect: {reason}")).collect()
    }

    /// The check that [`Config::load`] makes in addition to [`Config::check`].
    pub(crate) fn refuse_foreign(&self) -> Result<(), ConfigError> {
        Ok(self.check_foreign()?)
    }

    /// Refuses keys of another model or objective than that of the run.
    pub(super) fn check_foreign(&self) -> Result<(), KeyError> {
        let (model, data, objective) = (&self.model, &self.data, self.objective());
        let turns = model.positions() == Positions::Rope;
        let is_relative = model.positions() == Positions::RelativeBias;
        let (rope, relative) = ("positions \"rope\"", "positions \"relative-bias\"");
        let hiding = "objective \"span-corruption\" or \"mlm\"";
        let theta = model.rope_theta != model::default_rope_theta();
        let buckets = model.relative_buckets != model::default_relative_buckets();
        let distance = model.relative_max != model::default_relative_max();
        let types = model.token_types != model::default_token_types();
        let part = data.mask_prob != data::default_mask_prob();
        let short = data.short_seq_prob != data::default_short_seq_prob();
        let keys = [
            (theta && !turns, "model.rope_theta", rope),
            (buckets && !is_relative, "model.relative_buckets", relative),
            (distance && !is_relative, "model.relative_max", relative),
            (types && model.family != Family::Bert, "model.token_types", "family \"bert\""),
            (part && !objective.hides(), "data.mask_prob", hiding),
            (short && !objective.hides(), "data.short_seq_prob", hiding),
        ];
        match keys.into_iter().find(|key| key.0) {
            Some((_, key, of)) => Err(refused(key, format!("only valid with {of}"))),
            None => Ok(()),
        }
    }
}

impl LrConfig {
    /// `rises` if there is a warm-up.
    fn idle(&self, rises: bool) -> [UnusedKey; 9] {
        use LrStyle::{Constant, Cosine, Exponential, Linear, RangeTest, Wsd};
        let is_of = |styles: &[LrStyle]| styles.contains(&self.style);
        let is_test = self.style == RangeTest;
        let flat = if is_test { "a range test has no warm-up" } else { "there is no warm-up" };
        let anneal = "it only applies to optim.lr.style \"wsd\"";
        let is_log = self.warmup_shape == WarmupShape::Log;
        let clamps = self.floor_mode == FloorMode::Clamp;
        let has_warmup = self.warmup != Warmup::default() && !self.warmup.is_zero();
        let has_style = self.anneal_style != AnnealStyle::default();
        // A sweep is a range test over the config of another run.
        let anneals = is_of(&[Wsd, RangeTest]);
        let may_clamp = is_of(&[Linear, Cosine, Exponential, RangeTest]);
        let constant = "optim.lr.style \"constant\" stays at the peak";
        let clamp = "it only applies to optim.lr.style \"linear\" and \"cosine\"";
        let from_0 = "with optim.lr.floor = 0 a range test rises linearly";
        [
            (self.floor > 0.0 && is_of(&[Constant]), "optim.lr.floor", constant),
            (clamps && !may_clamp, "optim.lr.floor_mode", clamp),
            (self.start > 0.0 && !rises, "optim.lr.start", flat),
            (is_log && !rises && !is_test, "optim.lr.warmup_shape", flat),
            (is_log && is_test && self.floor == 0.0, "optim.lr.warmup_shape", from_0),
            (has_warmup && is_test, "optim.lr.warmup", flat),
            (self.lag == Lag::Warmup && !rises, "optim.lr.lag", flat),
            (self.anneal.is_some() && !anneals, "optim.lr.anneal", anneal),
            (has_style && !anneals, "optim.lr.anneal_style", anneal),
        ]
    }
}
