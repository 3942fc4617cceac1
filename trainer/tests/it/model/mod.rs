//! The network, its loss and its gradients against `reference/gpt2.py`, which has them in float64
//! with numpy alone; and the equality of gradients for all divisions of a batch.

mod documents;
mod dropout;
mod families;
mod tolerance;

use loader::Batch;
use tch::{Kind, Tensor};
use trainer::Trainer;
use trainer::config::Config;
use trainer::model::{LossWeights, Micro, Model, ParamSpec};
use trainer::parallel::accumulate::{Contribution, TreeSum};
use trainer::parallel::norm::block_sums;
use trainer::plan::Parameters;
use trainer::step::optim::clip_divisor;

const GOLDEN: &[u8] = include_bytes!("../../golden/gpt2.safetensors");
const ROWS: usize = 3;
const SEQ: usize = 12;
const VOCAB: i64 = 53;

fn config(dtype: &str) -> Config {
    let text = format!(
        "run = {{ dir = 'unused', budget = {{ steps = 1 }} }}
         model.vocab = {VOCAB}
         model.seq_len = {SEQ}
         model.layers = 2
         model.hidden = 16
         model.heads = 2
         model.ffn = 48
         data = {{ train = 'unused' }}
         batch = {{ global = {ROWS}, micro = {ROWS} }}
         precision = {{ dtype = '{dtype}' }}
         optim = {{ lr = {{ peak = 0.001 }} }}"
    );
    Config::from_toml("test", &text).expect("a good config")
}

/// The weights of `gpt2.py`.
fn golden_value(name: &str, len: usize) -> Vec<u8> {
    let seed: u64 = name.bytes().zip(1..).map(|(byte, i)| u64::from(byte) * i).sum();
    let is_gain = name.contains(".ln_") && name.ends_with("weight");
    let value = |place: u64| {
        let bits = ((place * 2_654_435_761 + seed * 40_503) % (1 << 32)) >> 16;
        let unit = bits as f32 / 65_536.0 - 0.5;
        if is_gain { unit * 0.25 + 1.0 } else { unit }
    };
    (0..len as u64).flat_map(|place| value(place).to_le_bytes()).collect()
}

fn golden_trainer(dtype: &str) -> Trainer {
    let mut trainer = Trainer::new(&config(dtype)).expect("a small model");
    let specs = trainer.specs().to_vec();
    for (spec, param) in specs.iter().zip(trainer.state_mut()[0].iter_mut()) {
        let bytes = bridge::bytes_mut(param).expect("the only handle");
        let values = golden_value(&spec.name, spec.numel());
        let (values_place, padding) = bytes.split_at_mut(values.len());
        values_place.copy_from_slice(&values);
        // The values in the padding of the vocabulary must not matter.
        padding.fill(0x3f);
    }
    trainer
}

/// The batch of `gpt2.py`.
fn golden_batch() -> Batch {
    let places = || 0..(ROWS * SEQ) as i64;
    Batch {
        first_sample: 0,
        rows: ROWS,
        seq_len: SEQ,
        tokens: places().map(|i| (i * 31 + 7) % VOCAB).collect(),
        labels: places().map(|i| (i * 17 + 3) % VOCAB).collect(),
        loss_mask: places().map(|i| f32::from(i % 5 != 4)).collect(),
        ..Batch::default()
    }
}

fn rows(batch: &Batch, rows: std::ops::Range<usize>) -> Batch {
    let places = rows.start * SEQ..rows.end * SEQ;
    Batch {
        first_sample: batch.first_sample + rows.start as u64,
        rows: rows.len(),
        seq_len: SEQ,
        tokens: batch.tokens[places.clone()].to_vec(),
        labels: batch.labels[places.clone()].to_vec(),
        loss_mask: batch.loss_mask[places].to_vec(),
        ..Batch::default()
    }
}

fn micro(batch: &Batch) -> Micro {
    Micro::gpt(batch, LossWeights { token: 1.0, sample: 1.0 }).expect("a small batch")
}

/// A tensor of a safetensors file: the length of a JSON header, the header, the bytes.
fn golden(name: &str) -> Vec<f32> {
    let (len, rest) = GOLDEN.split_first_chunk().expect("a golden file");
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: serde_json::Value = serde_json::from_slice(header).expect("a header");
    let place = |i: usize| header[name]["data_offsets"][i].as_u64().expect("a tensor") as usize;
    let bytes = &data[place(0)..place(1)];
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).expect("f32 on the CPU")
}

/// The largest difference, in units of the largest expected value.
fn check_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0.0_f32, |max, v| max.max(v.abs()));
    let error = found.iter().zip(expected).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
    assert!(error <= tolerance * scale, "{what}: off by {error:e}, where values reach {scale:e}");
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).into_iter().map(f32::to_bits).collect()
}

#[test]
fn logits_are_those_of_the_reference() {
    let trainer = golden_trainer("fp32");
    let stage = trainer.stage();
    let leaves = stage.leaves(trainer.state()[0], Kind::Float).unwrap();
    let outs = stage.infer(&leaves, &micro(&golden_batch()), Vec::new()).unwrap();
    let logits = stage.logits(&leaves, &outs[0]).unwrap();
    assert_eq!(logits.size(), [(ROWS * SEQ) as i64, VOCAB]);
    check_close("logits", &values(&logits), &golden("logits"), 1e-5);
}

#[test]
fn loss_and_gradients_are_those_of_the_reference() {
    // bf16 has 8 significant bits, and these gradients are sums of a few dozen products.
    for (dtype, tolerance) in [("fp32", 1e-5), ("bf16", 0.06)] {
        let trainer = golden_trainer(dtype);
        let Contribution { loss, grads } = trainer.gradient(&[golden_batch()]).unwrap();
        check_close("loss", &[loss as f32], &golden("loss"), tolerance / 4.0);
        assert_eq!(grads.len(), trainer.specs().len());
        for (spec, grad) in trainer.specs().iter().zip(&grads) {
            assert_eq!((grad.size(), grad.kind()), (spec.local_shape(1), Kind::Float));
            // The key bias moves all scores of a row equally: its gradient is 0 but for rounding.
            let what = format!("{dtype} {}", spec.name);
            let values = values(grad);
            let (values, padding) = values.split_at(spec.numel());
            check_close(&what, values, &golden(&spec.name), tolerance);
            assert!(padding.iter().all(|value| *value == 0.0), "{what}: padding has a gradient");
        }
    }
}

/// The head computes its rows in chunks; autograd does not.
#[test]
fn head_gradients_match_autograd() {
    let mut config = config("fp32");
    config.model.hidden = 8;
    let trainer = Trainer::new(&config).unwrap();
    let stage = trainer.stage();
    let leaves = stage.leaves(trainer.state()[0], Kind::Float).unwrap();
    let (tokens, options) = (1100, (Kind::Float, tch::Device::Cpu));
    let spread = |len: i64, step: f64| Tensor::arange(len, options) * step;
    let hidden = (spread(tokens * 8, 0.3).cos() * 2.0).view([tokens, 8]);
    let weights = spread(tokens, 0.01).sin().square();
    let labels: Vec<i64> = (0..tokens).map(|i| i % VOCAB).collect();
    let batch = Batch {
        rows: 1,
        seq_len: tokens as usize,
        tokens: labels.clone(),
        labels: labels.clone(),
        loss_mask: values(&weights),
        ..Batch::default()
    };
    let micro = micro(&batch);

    let found = stage.loss_and_grad(&leaves, &micro, &[hidden.shallow_clone()]).unwrap();
    let alone = stage.loss(&leaves, &micro, &[hidden.shallow_clone()]).unwrap();
    let hidden = hidden.set_requires_grad(true);
    let log_probs = stage.logits(&leaves, &hidden).unwrap().log_softmax(1, Kind::Float);
    let labels = Tensor::from_slice(&labels).unsqueeze(1);
    let picked = log_probs.gather(1, &labels, false).squeeze();
    let expected = -(picked * &weights).sum(Kind::Float);
    expected.backward();

    assert_eq!(found.loss, alone);
    check_close("loss", &values(&found.loss), &values(&expected), 1e-5);
    check_close("hidden", &values(&found.outs[0]), &values(&hidden.grad()), 1e-5);
    let [(place, wte)] = &found.uses[..] else { panic!("the head has one parameter") };
    check_close("wte", &values(wte), &values(&leaves[*place].grad()), 1e-5);
}

#[test]
fn every_token_of_a_step_weighs_the_same() {
    let trainer = golden_trainer("fp32");
    let batch = golden_batch();
    let whole = trainer.gradient(std::slice::from_ref(&batch)).unwrap();
    // Its rows differ in how many of their tokens count.
    let split = trainer.gradient(&[rows(&batch, 0..1), rows(&batch, 1..3)]).unwrap();
    assert!((whole.loss - split.loss).abs() < 1e-6);
    for ((spec, whole), split) in trainer.specs().iter().zip(&whole.grads).zip(&split.grads) {
        check_close(&spec.name, &values(split), &values(whole), 2e-6);
    }
}

/// Eight micro-batches, summed by 1, 2, 4 and 8 ranks that then sum one another: the same bits.
#[test]
fn any_division_among_ranks_gives_the_same_bits() {
    let trainer = golden_trainer("fp32");
    let batch = golden_batch();
    let batches: Vec<Batch> = (0..8).map(|i| rows(&batch, i % 3..i % 3 + 1)).collect();
    let whole = trainer.sum(&batches, 1.0 / 77.0).unwrap();
    for ranks in [2, 4, 8] {
        let mut among = TreeSum::new();
        for share in batches.chunks(8 / ranks) {
            among.push(trainer.sum(share, 1.0 / 77.0).unwrap(), Contribution::absorb).unwrap();
        }
        let found = among.finish(Contribution::absorb).unwrap().unwrap();
        assert_eq!(found.loss.to_bits(), whole.loss.to_bits(), "{ranks} ranks");
        assert_eq!(found.grads.len(), whole.grads.len());
        for (a, b) in found.grads.iter().zip(&whole.grads) {
            assert_eq!(bits(a), bits(b), "{ranks} ranks");
        }
    }
    // The order matters, otherwise the test would prove nothing: a chain has other bits.
    let mut chain = trainer.sum(&batches[..1], 1.0 / 77.0).unwrap();
    for one in &batches[1..] {
        let one = trainer.sum(std::slice::from_ref(one), 1.0 / 77.0).unwrap();
        chain.absorb(&one).unwrap();
    }
    assert!(chain.grads.iter().zip(&whole.grads).any(|(a, b)| bits(a) != bits(b)));
}

#[test]
fn the_plan_counts_all_parameters() {
    for (hidden, layers, ffn) in [(16, 2, Some(48)), (24, 5, None)] {
        let mut config = config("fp32");
        (config.model.hidden, config.model.layers, config.model.ffn) = (hidden, layers, ffn);
        let model = Model::new(&config.model, 1);
        let expected: usize = model.params().iter().map(ParamSpec::numel).sum();
        let counted = Parameters::of(&Model::new(&config.model, 1));
        assert_eq!(counted.total, expected as u64);
    }
}

#[test]
fn the_initial_loss_is_that_of_uniform_predictions() {
    let mut config = config("fp32");
    config.model.vocab = 50_257;
    let mut trainer = Trainer::new(&config).unwrap();
    let batch = golden_batch();
    let report = trainer.step(&config.optim, &[batch], 1, 0.0).unwrap();
    let expected = 50_257_f64.ln();
    assert!(
        (report.loss - expected).abs() < 0.05,
        "found {}, expected about {expected}",
        report.loss
    );
}

#[test]
fn initial_weights_have_the_documented_deviations() {
    let mut config = config("fp32");
    config.model.hidden = 64;
    let trainer = Trainer::new(&config).unwrap();
    for (spec, param) in trainer.specs().iter().zip(trainer.state()[0]) {
        let std = values(param).iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        let std = (std / spec.numel() as f64).sqrt();
        let expected = match spec.name.as_str() {
            name if name.ends_with("bias") => 0.0,
            name if name.contains(".ln_") => 1.0,
            name if name.ends_with("c_proj.weight") => 0.02 / 4.0_f64.sqrt(),
            _ => 0.02,
        };
        // Five standard errors of a deviation that is estimated from this many numbers.
        let tolerance = 5.0 / (2.0 * spec.numel() as f64).sqrt();
        assert!(
            (std - expected).abs() <= tolerance * expected,
            "{}: found {std}, expected {expected}",
            spec.name
        );
    }
}

#[test]
fn a_non_finite_step_changes_nothing() {
    let config = config("fp32");
    let mut trainer = golden_trainer("fp32");
    trainer.step(&config.optim, &[golden_batch()], 1, 1e-3).unwrap();
    let before: Vec<Vec<u32>> = trainer.state().into_iter().flatten().map(bits).collect();
    let mut poison = golden_batch();
    poison.first_sample = 96;
    poison.loss_mask[3] = f32::INFINITY;
    let error = trainer.step(&config.optim, &[poison], 2, 1e-3).unwrap_err().to_string();
    assert!(error.starts_with("cannot complete step 2: the loss (NaN) is not finite"), "{error}");
    assert!(error.contains("samples 96 to 98"), "{error}");
    let after: Vec<Vec<u32>> = trainer.state().into_iter().flatten().map(bits).collect();
    assert_eq!(before, after);
}

/// The 2-norm of some tensors, of the sums of their blocks.
fn norm(tensors: &[Tensor]) -> f64 {
    let square = |tensor: &Tensor| {
        let blocks = block_sums(tensor, tensor.numel() as u64).expect("f32 on the CPU");
        Vec::<f64>::try_from(&blocks).expect("f64 on the CPU").iter().sum::<f64>()
    };
    tensors.iter().map(square).sum::<f64>().sqrt()
}

#[test]
fn norm_and_clip() {
    let ones = Tensor::ones([100_000], (Kind::Float, tch::Device::Cpu));
    let five = norm(&[&ones * 3.0, &ones * 4.0]);
    assert!((five - 5.0 * 1e5_f64.sqrt()).abs() < 1e-9 * five, "{five}");
    assert_eq!(norm(&[Tensor::zeros([7], (Kind::Float, tch::Device::Cpu))]), 0.0);
    // A number whose square is beyond f32.
    assert!((norm(&[&ones * 1e30]) / (1e30 * 1e5_f64.sqrt()) - 1.0).abs() < 1e-6);
    for (norm, clip, expected) in
        [(0.5, 1.0, 1.0), (3.0, 1.0, 3.0), (3.0, 0.0, 1.0), (3.0, 6.0, 1.0)]
    {
        assert!((clip_divisor(norm, clip) - expected).abs() < 1e-5, "norm {norm}, clip {clip}");
    }
}
