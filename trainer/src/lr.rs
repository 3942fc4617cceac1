//! The learning rate, as a function of samples consumed and nothing else.
//!
//! A resumed run needs no scheduler state: it asks for the rate at the sample where it stands.
//! Counting samples and not steps keeps the course of the rate when the batch size changes.

use std::f64::consts::PI;

use crate::config::{Config, LrStyle};

/// The course of the learning rate over a run. With `n` samples consumed, `w` samples of warm-up
/// and `d` of decay, counted from the start of the run:
///
/// | where | rate |
/// |---|---|
/// | `n < w` | `peak · n / w` |
/// | constant | `peak` |
/// | linear | `floor + (peak − floor) · (1 − r)`, with `r = (n − w) / (d − w)` |
/// | cosine | `floor + (peak − floor) · (1 + cos(π · r)) / 2` |
/// | `n ≥ d`, linear and cosine | `floor` |
///
/// These are the formulas of Megatron-core. Its `n` had been consumed *before* the step, so that
/// the first step of a warm-up has the rate 0. For example `peak = 1, w = 4, d = 12`, cosine to a
/// floor of 0: the rate is 0 at 0, 0.5 at 2, 1 at 4, 0.5 at 8 and 0 at 12.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// The way down.
    pub style: LrStyle,
    /// The rate at the end of the warm-up.
    pub peak: f64,
    /// The rate at the end of the decay and after.
    pub floor: f64,
    /// Samples of the warm-up.
    pub warmup_samples: u64,
    /// Samples from the start of the run to the end of the decay.
    pub decay_samples: u64,
}

impl LearningRate {
    /// The course that a config asks for.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let lr = &config.optim.lr;
        LearningRate {
            style: lr.style,
            peak: lr.peak,
            floor: lr.floor,
            warmup_samples: config.lr_warmup_samples(),
            decay_samples: config.lr_decay_samples(),
        }
    }

    /// The rate of the step before which `samples` had been consumed.
    #[must_use]
    pub fn at(&self, samples: u64) -> f64 {
        if samples < self.warmup_samples {
            return self.peak * samples as f64 / self.warmup_samples as f64;
        }
        if self.style == LrStyle::Constant {
            return self.peak;
        }
        if samples >= self.decay_samples {
            return self.floor;
        }
        let decay_samples = self.decay_samples - self.warmup_samples;
        let progress = (samples - self.warmup_samples) as f64 / decay_samples as f64;
        let height = match self.style {
            LrStyle::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
            LrStyle::Linear | LrStyle::Constant => 1.0 - progress,
        };
        self.floor + (self.peak - self.floor) * height
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(style: LrStyle, floor: f64, expected: &[(u64, f64)]) {
        let lr = LearningRate { style, peak: 1.0, floor, warmup_samples: 4, decay_samples: 12 };
        for (samples, rate) in expected {
            let got = lr.at(*samples);
            assert!((got - rate).abs() < 1e-15, "{style:?} at {samples}: {got}, due {rate}");
        }
    }

    /// Values from the closed forms: cos(π/4) = √2/2, cos(π/2) = 0, cos(3π/4) = −√2/2.
    #[test]
    fn follows_the_closed_forms() {
        let half_root = 0.5_f64.sqrt();
        check(
            LrStyle::Cosine,
            0.0,
            &[
                (0, 0.0),
                (1, 0.25),
                (3, 0.75),
                (4, 1.0),
                (6, (1.0 + half_root) / 2.0),
                (8, 0.5),
                (10, (1.0 - half_root) / 2.0),
                (12, 0.0),
                (1000, 0.0),
            ],
        );
        check(LrStyle::Cosine, 0.2, &[(2, 0.5), (4, 1.0), (8, 0.6), (12, 0.2), (13, 0.2)]);
        check(
            LrStyle::Linear,
            0.2,
            &[(2, 0.5), (4, 1.0), (6, 0.8), (8, 0.6), (10, 0.4), (12, 0.2)],
        );
        check(LrStyle::Constant, 0.2, &[(0, 0.0), (2, 0.5), (4, 1.0), (12, 1.0), (99, 1.0)]);
    }

    #[test]
    fn needs_no_warmup_and_no_decay() {
        let lr = LearningRate {
            style: LrStyle::Cosine,
            peak: 3e-4,
            floor: 3e-5,
            warmup_samples: 0,
            decay_samples: 10,
        };
        assert_eq!((lr.at(0), lr.at(10)), (3e-4, 3e-5));
        let all_warmup = LearningRate { warmup_samples: 10, ..lr };
        assert_eq!((all_warmup.at(5), all_warmup.at(10)), (1.5e-4, 3e-5));
    }

    /// The values that Megatron-core's `OptimizerParamScheduler` has for GPT-3 125M: peak 6e-4,
    /// floor 6e-5, 183,105 warm-up and 126,953,125 decay samples; worked out in exact arithmetic.
    #[test]
    fn keeps_its_precision_at_the_scale_of_a_real_run() {
        let lr = LearningRate {
            style: LrStyle::Linear,
            peak: 6e-4,
            floor: 6e-5,
            warmup_samples: 183_105,
            decay_samples: 126_953_125,
        };
        // Half the way down: (183105 + 126953125) / 2 = 63568115.
        assert!((lr.at(63_568_115) - 3.3e-4).abs() < 1e-18);
        assert!((lr.at(36_621) - 1.2e-4).abs() < 1e-18, "a fifth of the warm-up");
    }
}
