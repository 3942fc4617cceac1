//! The learning rates and loss scales of imported runs, compared with the original programs.

use std::fs;

use recipe::config::{Config, Dtype};
use recipe::import::{ConfigFormat, Imported, import};
use recipe::lr::LearningRate;
use recipe::scaler::Scaler;
use serde::Deserialize;
use toml::{Table, Value};

use crate::import::refused;

const STEPS: u64 = 2000;

/// The output of `tests/golden/lr/imports.py`.
#[derive(Deserialize)]
struct Case {
    from: String,
    file: String,
    text: String,
    rates: Vec<(usize, f64)>,
    sums: Vec<f64>,
    scales: Vec<(usize, f64)>,
}

impl Case {
    fn import(&self) -> Imported {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(&self.file);
        fs::write(&file, &self.text).unwrap();
        let source: ConfigFormat = self.from.parse().unwrap();
        let ranks = (source == ConfigFormat::Deepspeed).then_some(8);
        import(source, &[file.display().to_string()], ranks).unwrap()
    }
}

/// The imported config with a model and a corpus, on which a schedule does not depend.
fn completed(imported: &Imported) -> Config {
    let mut config = imported.config.clone();
    let model = "[run]\nbudget = { steps = 2000 }\n[model]\nlayers = 1\nhidden = 8\nheads = 1\n\
                 vocab = 100\nseq_len = 8\n[data]\ntrain = 'd'\n[batch]\nglobal = 16\nmicro = 2\n";
    let defaults: Table = model.parse().unwrap();
    for (section, keys) in defaults {
        let own = config.entry(section).or_insert_with(|| Value::Table(Table::new()));
        for (key, value) in keys.as_table().unwrap() {
            own.as_table_mut().unwrap().entry(key).or_insert_with(|| value.clone());
        }
    }
    Config::from_toml("imported", &toml::to_string(&config).unwrap()).unwrap()
}

fn overflows(step: u64) -> bool {
    step % 211 == 210 || (step > 800 && step.is_multiple_of(211))
}

/// The rate and the loss scale of each step, as computed by the trainer.
fn schedule(config: &Config) -> Vec<(f64, f64)> {
    let lr = LearningRate::new(config);
    let scale = &config.precision.loss_scale;
    let scales = config.precision.dtype == Dtype::Fp16;
    let mut scaler = Scaler::new(scale);
    let batch = config.batch.global;
    let steps = 0..STEPS;
    let points = steps.map(|step| {
        let seen = (lr.at(step * batch - scaler.skipped_samples), scaler.scale);
        if scales && overflows(step) {
            assert!(scaler.bad(scale, batch));
        } else if scales {
            scaler.good(scale);
        }
        seen
    });
    points.collect()
}

#[test]
fn imported_runs_have_the_rates_and_scales_of_their_programs() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/lr");
    for (name, count) in [("deepspeed", 9), ("transformers", 10), ("megatron", 7)] {
        let text = fs::read_to_string(format!("{folder}/imports_{name}.json")).unwrap();
        let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
        assert_eq!(cases.len(), count, "{name}");
        for case in cases {
            let imported = case.import();
            assert_eq!(refused(&imported), Vec::<&str>::new(), "{imported}");
            let points = schedule(&completed(&imported));
            let near = |found: f64, expected: f64, what: &str| {
                let is_near = (found - expected).abs() <= 1e-12 * expected.abs().max(1e-12);
                assert!(is_near, "{what}: {found}, expected {expected} in\n{imported}");
            };
            for (step, rate) in case.rates {
                near(points[step].0, rate, &format!("rate of step {step}"));
            }
            let mut sum = 0.0;
            let mut sums = case.sums.iter();
            for (step, (rate, _)) in points.iter().enumerate() {
                sum += rate;
                if step % 200 == 199 {
                    near(sum, *sums.next().unwrap(), &format!("sum of rates up to {step}"));
                }
            }
            let mut changes: Vec<(usize, f64)> = Vec::new();
            for (step, (_, scale)) in points.iter().enumerate().filter(|_| !case.scales.is_empty())
            {
                if changes.last().is_none_or(|(_, last)| last != scale) {
                    changes.push((step, *scale));
                }
            }
            assert_eq!(changes, case.scales, "{imported}");
        }
    }
}
