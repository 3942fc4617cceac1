//! The dynamic loss scale of fp16.
//!
//! Gradients smaller than 6e-8 are zero in fp16, so the loss is multiplied before the backward
//! pass, and gradients are divided after it. A step that overflows is skipped, and after a few such
//! steps the scale is halved; after a long run of good ones it is doubled (Megatron's rule).

use serde::{Deserialize, Serialize};

use crate::config::LossScaleConfig;

/// The state of the loss scale, which is part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scaler {
    /// Factor of the loss: a power of two, if the initial scale is one.
    pub scale: f64,
    /// Good steps since the last bad step, less the window for each doubling since then.
    pub good_steps: u64,
    /// Bad steps until the scale is halved.
    pub hysteresis_left: u64,
    /// Skipped steps of the run: the optimizer does not count them.
    pub skipped_steps: u64,
    /// Their samples: the learning rate does not count them.
    pub skipped_samples: u64,
}

impl Scaler {
    /// The state at the start of a run.
    #[must_use]
    pub fn new(config: &LossScaleConfig) -> Self {
        Scaler {
            scale: config.init,
            good_steps: 0,
            hysteresis_left: config.hysteresis,
            skipped_steps: 0,
            skipped_samples: 0,
        }
    }

    /// Records a step without overflow.
    pub fn good(&mut self, config: &LossScaleConfig) {
        if config.window == 0 {
            self.hysteresis_left = config.hysteresis;
            return;
        }
        self.good_steps += 1;
        if self.good_steps == config.window + config.window_delay {
            self.good_steps = config.window_delay;
            self.hysteresis_left = config.hysteresis;
            self.scale *= 2.0;
        }
    }

    /// Records an overflow in a step with this many samples. False if the scale is already the
    /// smallest: then the scale is not the cause.
    #[must_use]
    pub fn bad(&mut self, config: &LossScaleConfig, samples: u64) -> bool {
        self.good_steps = 0;
        self.skipped_steps += 1;
        self.skipped_samples += samples;
        self.hysteresis_left = self.hysteresis_left.saturating_sub(1);
        if self.hysteresis_left > 0 {
            return true;
        }
        let is_fixed = config.window == 0;
        if is_fixed || self.scale <= config.min {
            return false;
        }
        self.scale = (self.scale / 2.0).max(config.min);
        true
    }
}
