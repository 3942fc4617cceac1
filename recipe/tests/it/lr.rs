//! Learning rates, compared with those of other programs and with closed forms.

use std::f64::consts::PI;
use std::fs;

use recipe::config::{AnnealStyle, FloorMode, Lag, LrStyle, WarmupShape};
use recipe::lr::LearningRate;
use serde::Deserialize;

/// The output of `tests/golden/lr/make.py`: lengths in steps of one sample.
#[derive(Deserialize)]
struct Case {
    style: LrStyle,
    peak: f64,
    warmup: u64,
    decay: u64,
    anneal: u64,
    #[serde(default)]
    floor: f64,
    #[serde(default)]
    start: f64,
    #[serde(default)]
    warmup_shape: WarmupShape,
    #[serde(default)]
    lag: Lag,
    #[serde(default)]
    anneal_style: AnnealStyle,
    points: Vec<(u64, f64)>,
}

impl Case {
    /// The same schedule with steps of `batch` samples.
    fn rate(&self, batch: u64) -> LearningRate {
        LearningRate {
            style: self.style,
            peak: self.peak,
            floor: self.floor,
            floor_mode: FloorMode::Rescale,
            start: self.start,
            warmup_shape: self.warmup_shape,
            warmup_samples: batch * self.warmup,
            decay_samples: batch * self.decay,
            lag: self.lag,
            anneal_style: self.anneal_style,
            anneal_samples: batch * self.anneal,
            batch_samples: batch,
        }
    }
}

#[test]
fn rates_equal_megatron_transformers_and_deepspeed() {
    for (name, count) in [("megatron", 16), ("transformers", 6), ("deepspeed", 7)] {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/lr");
        let text = fs::read_to_string(format!("{folder}/{name}.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
        assert_eq!(cases.len(), count, "{name}");
        for (case, batch) in cases.iter().flat_map(|case| [1, 512].map(|batch| (case, batch))) {
            let lr = case.rate(batch);
            for (step, expected) in &case.points {
                let found = lr.at(step * batch);
                assert!(
                    (found - expected).abs() < 1e-18,
                    "{name}: {lr:?} at {step}: {found}, expected {expected}"
                );
            }
        }
    }
}

fn check(lr: LearningRate, expected: &[(u64, f64)]) {
    for (samples, rate) in expected {
        let found = lr.at(*samples);
        assert!((found - rate).abs() < 1e-15, "{lr:?} at {samples}: {found}, expected {rate}");
    }
}

const ONE: LearningRate = LearningRate {
    style: LrStyle::Cosine,
    peak: 1.0,
    floor: 0.0,
    floor_mode: FloorMode::Rescale,
    start: 0.0,
    warmup_shape: WarmupShape::Linear,
    warmup_samples: 4,
    decay_samples: 12,
    lag: Lag::None,
    anneal_style: AnnealStyle::Linear,
    anneal_samples: 2,
    batch_samples: 1,
};

/// cos(π/4) = √2/2, cos(π/2) = 0, cos(3π/4) = −√2/2.
#[test]
fn follows_the_closed_forms() {
    let half_root = 0.5_f64.sqrt();
    check(
        ONE,
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
    let with_floor = LearningRate { floor: 0.2, ..ONE };
    check(with_floor, &[(2, 0.5), (4, 1.0), (8, 0.6), (12, 0.2), (13, 0.2)]);
    let linear = LearningRate { style: LrStyle::Linear, ..with_floor };
    check(linear, &[(2, 0.5), (4, 1.0), (6, 0.8), (8, 0.6), (10, 0.4), (12, 0.2)]);
    let constant = LearningRate { style: LrStyle::Constant, ..with_floor };
    check(constant, &[(0, 0.0), (2, 0.5), (4, 1.0), (12, 1.0), (99, 1.0)]);
}

/// The first Megatron's `AnnealingLR` and CPM-1's: the phase is `m = min(n, end - warm) - warm` of
/// the whole `end`, so a cosine over 100 steps with 10 of warm-up stops at 0.8 of its half period.
#[test]
fn clamped_styles_count_as_in_the_first_megatron() {
    let one = LearningRate {
        floor: 0.05,
        floor_mode: FloorMode::Clamp,
        warmup_samples: 10,
        decay_samples: 100,
        ..ONE
    };
    let cosine = |m: f64| 0.5 * (1.0 + (PI * m).cos());
    check(one, &[(5, 0.5), (10, 1.0), (35, cosine(0.25)), (90, cosine(0.8)), (100, cosine(0.8))]);
    let high = LearningRate { floor: 0.3, ..one };
    check(high, &[(35, cosine(0.25)), (90, 0.3), (1000, 0.3)]);
    let linear = LearningRate { style: LrStyle::Linear, ..one };
    check(linear, &[(10, 1.0), (60, 0.5), (90, 0.2), (99, 0.2), (200, 0.2)]);
    let exponential = LearningRate { style: LrStyle::Exponential, ..one };
    check(exponential, &[(10, 1.0), (60, (-0.3465_f64).exp()), (500, (-0.5544_f64).exp())]);
}

#[test]
fn needs_no_warmup_and_no_decay() {
    let lr = LearningRate { peak: 3e-4, floor: 3e-5, warmup_samples: 0, decay_samples: 10, ..ONE };
    assert_eq!((lr.at(0), lr.at(10)), (3e-4, 3e-5));
    let all_warmup = LearningRate { warmup_samples: 10, ..lr };
    assert_eq!((all_warmup.at(5), all_warmup.at(10)), (1.5e-4, 3e-5));
}

/// The settings of Megatron-core's `OptimizerParamScheduler` for GPT-3 125M: peak 6e-4, floor 6e-5,
/// 183,105 warm-up and 126,953,125 decay samples; computed in exact arithmetic.
#[test]
fn keeps_its_precision_at_the_scale_of_a_real_run() {
    let lr = LearningRate {
        style: LrStyle::Linear,
        peak: 6e-4,
        floor: 6e-5,
        warmup_samples: 183_105,
        decay_samples: 126_953_125,
        ..ONE
    };
    // Half of the decay: (183105 + 126953125) / 2 = 63568115.
    assert!((lr.at(63_568_115) - 3.3e-4).abs() < 1e-18);
    assert!((lr.at(36_621) - 1.2e-4).abs() < 1e-18, "a fifth of the warm-up");
}
