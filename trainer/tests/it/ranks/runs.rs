//! Short runs of small models, and their final state.

use std::collections::BTreeMap;

use loader::Batch;
use loader::batch::{BertBatch, T5Batch};
use tch::Device;
use trainer::Trainer;
use trainer::config::Config;
use trainer::model::input::Input;
use trainer::rng::Stream;

use super::{Layout, assemble, on_devices, pieces};

pub const MICRO: usize = 2;
pub const MICRO_BATCHES: usize = 8;
pub const SEQ: usize = 12;
pub const DEC: usize = 6;
pub const VOCAB: u64 = 211;

pub fn steps() -> u64 {
    std::env::var("FEEDLINE_STEPS").ok().and_then(|text| text.parse().ok()).unwrap_or(2)
}

/// The dtypes of a run's computation and gradient exchange, and more keys of its model.
#[derive(Clone, Copy, Debug)]
pub struct How {
    pub dtype: &'static str,
    pub reduce: &'static str,
    pub model: &'static str,
}

pub const FP32: How = How { dtype: "fp32", reduce: "fp32", model: "" };
pub const BF16: How = How { dtype: "bf16", ..FP32 };
pub const FP16: How = How { dtype: "fp16", ..FP32 };
pub const DROPPING: How = How { model: "dropout = 0.1\nattention_dropout = 0.2", ..FP32 };
pub const DROPPING_BF16: How = How { dtype: "bf16", ..DROPPING };

pub fn config(family: &str, how: How, layout: &Layout, more: &str) -> Config {
    let How { dtype, reduce, model: keys } = how;
    let model = match family {
        "gpt" => format!("layers = 8\nseq_len = {SEQ}"),
        "bert" => format!("layers = 4\nseq_len = {SEQ}"),
        _ => format!("layers = 4\nseq_len = {SEQ}\ndec_len = {DEC}\nhead_dim = 8"),
    };
    let global = MICRO * MICRO_BATCHES;
    let text = format!(
        "run = {{ dir = 'unused', budget = {{ steps = 100 }} }}
         data = {{ train = 'unused' }}
         batch = {{ global = {global}, micro = {MICRO} }}
         optim = {{ clip = 0.1, lr = {{ peak = 0.01 }} }}
         [model]
         family = '{family}'
         {model}
         {keys}
         hidden = 32
         heads = 2
         ffn = 80
         vocab = {VOCAB}
         [precision]
         dtype = '{dtype}'
         reduce_dtype = '{reduce}'
         {more}
         [parallel]
         {}",
        layout.toml()
    );
    Config::from_toml("test", &text).expect("a good config")
}

/// Tokens that are a function only of the place; some do not count.
pub fn tokens(first: u64, count: usize, salt: u64) -> (Vec<i64>, Vec<f32>) {
    let random = Stream::new(7 + salt, "tokens");
    let at = |i: usize| first * 1000 + i as u64;
    let token = |i: usize| (random.uniform(at(i)) * VOCAB as f64) as i64;
    let counts = |i: usize| f32::from(random.uniform(at(i) + 500) < 0.8);
    ((0..count).map(token).collect(), (0..count).map(counts).collect())
}

pub trait Family: Input + Sized {
    const NAME: &'static str;
    fn batch(step: u64, micro: usize) -> Self;
}

impl Family for Batch {
    const NAME: &'static str = "gpt";

    fn batch(step: u64, micro: usize) -> Self {
        let first_sample = (step * MICRO_BATCHES as u64 + micro as u64) * MICRO as u64;
        let (tokens_in, loss_mask) = tokens(first_sample, MICRO * SEQ, 0);
        let labels = tokens(first_sample, MICRO * SEQ, 1).0;
        let (rows, seq_len) = (MICRO, SEQ);
        Batch {
            first_sample,
            rows,
            seq_len,
            tokens: tokens_in,
            labels,
            loss_mask,
            ..Batch::default()
        }
    }
}

impl Family for T5Batch {
    const NAME: &'static str = "t5";

    fn batch(step: u64, micro: usize) -> Self {
        let first_sample = (step * MICRO_BATCHES as u64 + micro as u64) * MICRO as u64;
        let (decoder_tokens, loss_mask) = tokens(first_sample, MICRO * DEC, 1);
        T5Batch {
            first_sample,
            rows: MICRO,
            encoder_len: SEQ,
            decoder_len: DEC,
            encoder_tokens: tokens(first_sample, MICRO * SEQ, 0).0,
            labels: tokens(first_sample, MICRO * DEC, 2).0,
            encoder_mask: (0..MICRO * SEQ).map(|i| i64::from(i % SEQ < SEQ - 2)).collect(),
            decoder_mask: vec![1; MICRO * DEC],
            decoder_tokens,
            loss_mask,
            truncated: vec![false; MICRO],
        }
    }
}

impl Family for BertBatch {
    const NAME: &'static str = "bert";

    fn batch(step: u64, micro: usize) -> Self {
        let first_sample = (step * MICRO_BATCHES as u64 + micro as u64) * MICRO as u64;
        let (tokens_in, loss_mask) = tokens(first_sample, MICRO * SEQ, 0);
        BertBatch {
            first_sample,
            rows: MICRO,
            seq_len: SEQ,
            tokens: tokens_in,
            types: (0..MICRO * SEQ).map(|i| i64::from(i % SEQ > 5)).collect(),
            labels: tokens(first_sample, MICRO * SEQ, 1).0,
            padding_mask: (0..MICRO * SEQ).map(|i| i64::from(i % SEQ < SEQ - 2)).collect(),
            loss_mask,
            two_parts: true,
            is_random: (0..MICRO).map(|row| row % 2 == 1).collect(),
            ..BertBatch::default()
        }
    }
}

/// The end of a run: every tensor of the state by its place among the specs, and the reports.
#[derive(Clone, PartialEq)]
pub struct End {
    pub tensors: BTreeMap<usize, Vec<u32>>,
    pub reports: Vec<(u64, u64)>,
}

pub fn run<F: Family>(how: How, layout: &Layout) -> End {
    run_on::<F>(|_| Device::Cpu, how, layout)
}

/// As [`run`], with a device for each rank.
pub fn run_on<F: Family>(
    device: impl Fn(usize) -> Device + Sync,
    how: How,
    layout: &Layout,
) -> End {
    let config = config(F::NAME, how, layout, "");
    let mesh = layout.mesh();
    let ends = on_devices(device, mesh, |comm| {
        let replica = comm.place().dp;
        let mut trainer = Trainer::on_mesh(&config, comm).expect("a small model");
        let share = mesh.share(config.share(mesh.dp), replica, MICRO_BATCHES);
        let mut reports = Vec::new();
        for step in 0..steps() {
            let batches: Vec<F> = share.iter().map(|micro| F::batch(step, *micro)).collect();
            let report = trainer.step(&config.optim, &batches, step + 1, 0.01).expect("a step");
            assert!(report.grad_norm > 0.1, "the gradient is clipped");
            reports.push((report.loss.to_bits(), report.grad_norm.to_bits()));
        }
        (pieces(&trainer), reports)
    });
    let shapes = {
        let trainer = Trainer::new(&config_alone::<F>(how)).expect("a small model");
        trainer
            .layout()
            .specs()
            .iter()
            .map(|spec| spec.shape.iter().product())
            .collect::<Vec<u64>>()
    };
    let mut tensors = BTreeMap::new();
    for (pieces, reports) in &ends {
        assert_eq!(reports, &ends[0].1, "{layout:?}: ranks report different things");
        assemble(&shapes, pieces, &mut tensors, &format!("{layout:?}"));
    }
    let whole = |(at, values): (usize, Vec<Option<u32>>)| {
        let values = values.into_iter().map(|value| value.expect("some rank has it"));
        (at, values.collect())
    };
    let tensors = tensors.into_iter().map(whole).collect();
    End { tensors, reports: ends[0].1.clone() }
}

pub fn config_alone<F: Family>(how: How) -> Config {
    config(F::NAME, how, &Layout::ALONE, "")
}
