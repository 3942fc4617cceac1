//! The learning rate, as a function of samples consumed and nothing else.
//!
//! A resumed run needs no scheduler state: it computes the rate at its current sample. Counting
//! samples instead of steps keeps the schedule when the batch size changes.

use std::f64::consts::PI;

use crate::config::{AnnealStyle, Config, FloorMode, Lag, LrStyle, WarmupShape};

/// The learning rate schedule of a run. With `n` samples consumed, `w` samples of warm-up and `d`
/// of decay, counted from the start of the run, `b` of a step, and the mean `mix(x) = floor + (peak
/// − floor) · x`:
///
/// | where | rate |
/// |---|---|
/// | `n < w` | `start + (peak − start) · n / w` |
/// | `n < w`, log | `start + (peak − start) · ln(n/b + 1) / ln(w/b)` |
/// | constant | `peak` |
/// | linear | `mix(1 − r)`, with `r = (n − w) / (d − w)` |
/// | cosine | `mix((1 + cos(π · r)) / 2)` |
/// | inverse-sqrt | `peak · √(w / n)`, at least `floor` |
/// | wsd | `peak`, and over the last `a` samples of the decay, with `q = (n − d + a) / a`: |
/// | | linear `mix(1 − q)`, cosine `mix((1 + cos(π · q)) / 2)`, |
/// | | exponential `mix(2 · 2^(−q) − 1)`, minus-sqrt `mix(1 − √q)` |
/// | `n ≥ d` | `floor`, in the four styles above |
/// | linear, clamp | `peak · (1 − m / d)`, at least `floor`, with `m = min(n, d − w) − w` |
/// | cosine, clamp | `peak · (1 + cos(π · m / d)) / 2`, at least `floor` |
/// | exponential | `peak · exp(−0.693 · m / d)`, at least `floor` |
/// | range-test | `mix(n / d)` |
/// | range-test, log | `floor · (peak / floor)^(n / d)`, if the floor is not 0 |
///
/// The first are the formulas of Megatron-core; `clamp` and exponential are those of the first
/// Megatron and of CPM-1, whose cosine therefore ends before its half period; the logarithm and the
/// range test are DeepSpeed's. `n` counts the samples *before* the step, so that the first step of
/// a warm-up has the rate `start`. For example `peak = 1, w = 4, d = 12`, cosine to a floor of 0:
/// the rate is 0 at 0, 0.5 at 2, 1 at 4, 0.5 at 8 and 0 at 12.
///
/// With a lag the rates of the warm-up, or all rates, are those of the step before, because the
/// engine of DeepSpeed sets a rate after a step. Its cosine counts one step more, so it has no lag.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LearningRate {
    /// The style of the decay.
    pub style: LrStyle,
    /// The rate at the end of the warm-up.
    pub peak: f64,
    /// The rate at the end of the decay and after it.
    pub floor: f64,
    /// How the decay reaches the floor.
    pub floor_mode: FloorMode,
    /// The rate before the first sample.
    pub start: f64,
    /// The curve of the warm-up.
    pub warmup_shape: WarmupShape,
    /// Samples of the warm-up.
    pub warmup_samples: u64,
    /// Samples from the start of the run to the end of the decay.
    pub decay_samples: u64,
    /// The part of the schedule that is one step late.
    pub lag: Lag,
    /// The curve of the final decay of `wsd`.
    pub anneal_style: AnnealStyle,
    /// Samples of the final decay of `wsd`.
    pub anneal_samples: u64,
    /// Samples of a step: the unit of the logarithm of a `log` warm-up and of a lag.
    pub batch_samples: u64,
}

impl LearningRate {
    /// The schedule of a config.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let lr = &config.optim.lr;
        LearningRate {
            style: lr.style,
            peak: lr.peak,
            floor: lr.floor,
            floor_mode: lr.floor_mode,
            start: lr.start,
            warmup_shape: lr.warmup_shape,
            warmup_samples: config.lr_warmup_samples(),
            decay_samples: config.lr_decay_samples(),
            lag: lr.lag,
            anneal_style: lr.anneal_style,
            anneal_samples: config.lr_anneal_samples(),
            batch_samples: config.batch.global,
        }
    }

    /// The rate of the step that starts after `samples` consumed samples.
    #[must_use]
    pub fn at(&self, samples: u64) -> f64 {
        let late = samples.saturating_sub(self.batch_samples);
        match self.lag {
            Lag::All => self.on_time(late),
            Lag::Warmup if self.warmup_samples > 0 && samples < self.batch_samples => 0.0,
            Lag::Warmup if late < self.warmup_samples => self.on_time(late),
            Lag::Warmup | Lag::None => self.on_time(samples),
        }
    }

    fn on_time(&self, samples: u64) -> f64 {
        if samples < self.warmup_samples {
            return self.warming(samples as f64);
        }
        let (n, w, d) = (samples as f64, self.warmup_samples as f64, self.decay_samples as f64);
        // The samples that the first Megatron counted.
        let m = (n.min(d - w) - w).max(0.0) / d;
        match (self.style, self.floor_mode) {
            (LrStyle::Constant, _) => return self.peak,
            (LrStyle::RangeTest, _)
                if self.warmup_shape == WarmupShape::Log && self.floor > 0.0 =>
            {
                return self.floor * (self.peak / self.floor).powf((n / d).min(1.0));
            }
            (LrStyle::Exponential, _) => return self.clamped((-0.693 * m).exp()),
            (LrStyle::Linear, FloorMode::Clamp) => return self.clamped(1.0 - m),
            (LrStyle::Cosine, FloorMode::Clamp) => return self.clamped(half_cosine(m)),
            _ => {}
        }
        let height = match self.style {
            LrStyle::RangeTest => (n / d).min(1.0),
            LrStyle::InverseSqrt if n <= d => return self.clamped((w / n).sqrt()),
            _ if samples >= self.decay_samples => 0.0,
            LrStyle::Cosine => half_cosine((n - w) / (d - w)),
            LrStyle::Wsd => self.annealing(samples),
            _ => 1.0 - (n - w) / (d - w),
        };
        self.floor + (self.peak - self.floor) * height
    }

    fn warming(&self, n: f64) -> f64 {
        let rise = self.peak - self.start;
        let (w, batch) = (self.warmup_samples as f64, self.batch_samples as f64);
        match self.warmup_shape {
            WarmupShape::Linear => self.start + rise * n / w,
            // DeepSpeed's warm-up has two steps at least.
            WarmupShape::Log => self.start + rise * (n / batch).ln_1p() / (w / batch).max(2.0).ln(),
        }
    }

    fn clamped(&self, height: f64) -> f64 {
        (self.peak * height).max(self.floor)
    }

    /// The height of `wsd` between the floor and the peak.
    fn annealing(&self, samples: u64) -> f64 {
        let since = (samples + self.anneal_samples).saturating_sub(self.decay_samples);
        let q = since as f64 / self.anneal_samples as f64;
        match self.anneal_style {
            AnnealStyle::Linear => 1.0 - q,
            AnnealStyle::Cosine => half_cosine(q),
            AnnealStyle::Exponential => 2.0 * 0.5_f64.powf(q) - 1.0,
            AnnealStyle::MinusSqrt => 1.0 - q.sqrt(),
        }
    }
}

/// From 1 at 0 to 0 at 1.
fn half_cosine(part: f64) -> f64 {
    0.5 * (1.0 + (PI * part).cos())
}
