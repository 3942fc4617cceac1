//! Small models of every family, a micro-batch for each, and the files of `reference/`, which have
//! the same weights and batches.

use std::collections::HashMap;

use loader::batch::{Batch, BertBatch, T5Batch};
use tch::{Kind, Tensor};
use trainer::config::{Config, ModelConfig};
use trainer::model::{LossWeights, Micro};

pub const ROWS: usize = 3;
pub const SEQ: usize = 12;
pub const ANSWER: usize = 8;
pub const VOCAB: i64 = 53;

pub fn config(text: &str) -> ModelConfig {
    let text = format!(
        "run = {{ dir = 'unused', budget = {{ steps = 1 }} }}
         data = {{ train = 'unused' }}
         batch = {{ global = 1, micro = 1 }}
         optim = {{ lr = {{ peak = 0.001 }} }}
         [model]
         vocab = {VOCAB}
         seq_len = {SEQ}
         layers = 2
         hidden = 16
         heads = 2
         ffn = 24
         {text}"
    );
    Config::from_toml("test", &text).expect("a good config").model
}

pub const LLAMA: &str = "positions = 'rope'\nnorm = 'rmsnorm'\nactivation = 'swiglu'\nbias = false
                     tie_embeddings = false";
pub const T5: &str = "family = 't5'\ndecoder_layers = 3\ndec_len = 8\nhead_dim = 6
                  relative_buckets = 8\nrelative_max = 10";
pub const T5_OLD: &str = "family = 't5'\ndecoder_layers = 3\ndec_len = 8\nhead_dim = 6
                      relative_buckets = 8\nrelative_max = 10\nactivation = 'relu'
                      tie_embeddings = true";
pub const T5_MEGATRON: &str = "family = 't5'\ndecoder_layers = 3\ndec_len = 8\nhead_dim = 6
                           positions = 'learned'\nnorm = 'layernorm'\nactivation = 'gelu-tanh'
                           bias = true\ntie_embeddings = true";
pub const BERT: &str = "family = 'bert'";

/// The numbers of `hf.py`'s batches.
pub fn ids(rows: usize, len: usize, factor: i64, first: i64) -> Vec<i64> {
    (0..(rows * len) as i64).map(|place| (place * factor + first) % VOCAB).collect()
}

/// Whether each token of some rows is not padding.
pub fn is_text(len: usize) -> Vec<bool> {
    (0..ROWS * len).map(|place| place % len < len - 2 * (place / len)).collect()
}

pub fn mask(counts: &[bool]) -> Vec<f32> {
    counts.iter().map(|counts| f32::from(u8::from(*counts))).collect()
}

pub fn numbers(values: &[bool]) -> Vec<i64> {
    values.iter().map(|value| i64::from(*value)).collect()
}

/// Every token that counts weighs the same, and so does every sample.
pub fn weights(mask: &[f32]) -> LossWeights {
    let count = mask.iter().sum::<f32>().max(1.0);
    LossWeights { token: 1.0 / f64::from(count), sample: 1.0 / ROWS as f64 }
}

pub fn gpt_batch() -> Micro {
    let batch = Batch {
        rows: ROWS,
        seq_len: SEQ,
        tokens: ids(ROWS, SEQ, 31, 7),
        labels: ids(ROWS, SEQ, 17, 3),
        loss_mask: (0..ROWS * SEQ).map(|i| f32::from(u8::from(i % 5 != 4))).collect(),
        ..Batch::default()
    };
    Micro::gpt(&batch, weights(&batch.loss_mask)).expect("a small batch")
}

pub fn t5_batch() -> Micro {
    t5_batch_where(&is_text(ANSWER))
}

/// As [`t5_batch`], with other tokens that count.
pub fn t5_batch_where(counts: &[bool]) -> Micro {
    let text = is_text(SEQ);
    let expected = ids(ROWS, ANSWER, 17, 3);
    let batch = T5Batch {
        rows: ROWS,
        encoder_len: SEQ,
        decoder_len: ANSWER,
        encoder_tokens: ids(ROWS, SEQ, 31, 7),
        decoder_tokens: ids(ROWS, ANSWER, 13, 5),
        labels: expected
            .iter()
            .zip(counts)
            .map(|(expected, counts)| if *counts { *expected } else { -1 })
            .collect(),
        loss_mask: mask(counts),
        encoder_mask: numbers(&text),
        decoder_mask: numbers(counts),
        ..T5Batch::default()
    };
    Micro::t5(&batch, weights(&batch.loss_mask)).expect("a small batch")
}

pub fn bert_batch() -> Micro {
    let text = is_text(SEQ);
    let hidden: Vec<bool> = text.iter().zip(0..).map(|(text, i)| *text && i % 4 == 1).collect();
    let types = text.iter().zip(0..).map(|(text, i)| i64::from(*text && i % SEQ >= 5));
    let batch = BertBatch {
        rows: ROWS,
        seq_len: SEQ,
        tokens: ids(ROWS, SEQ, 31, 7),
        types: types.collect(),
        labels: ids(ROWS, SEQ, 17, 3),
        padding_mask: numbers(&text),
        loss_mask: mask(&hidden),
        two_parts: true,
        is_random: (0..ROWS).map(|row| row % 2 == 1).collect(),
        ..BertBatch::default()
    };
    Micro::bert(&batch, weights(&batch.loss_mask)).expect("a small batch")
}

/// A safetensors file: the length of a JSON header, the header, the bytes.
pub fn read(file: &[u8]) -> HashMap<String, Vec<f32>> {
    let (len, rest) = file.split_first_chunk().expect("a golden file");
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: HashMap<String, serde_json::Value> =
        serde_json::from_slice(header).expect("a header");
    let tensor = |place: &serde_json::Value| {
        let at = |i: usize| place["data_offsets"][i].as_u64().expect("a tensor") as usize;
        let bytes = data[at(0)..at(1)].chunks_exact(4);
        bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    header.iter().map(|(name, place)| (name.clone(), tensor(place))).collect()
}

/// A weight: spread over [-0.5, 0.5), or around 1 if it is the gain of a norm.
pub fn weight(name: &str, shape: &[i64]) -> Tensor {
    let seed: u64 = name.bytes().zip(1..).map(|(byte, i)| u64::from(byte) * i).sum();
    let is_gain = shape.len() == 1 && name.ends_with("weight");
    let value = |place: u64| {
        let bits = ((place * 2_654_435_761 + seed * 40_503) % (1 << 32)) >> 16;
        let unit = bits as f32 / 65_536.0 - 0.5;
        if is_gain { unit * 0.25 + 1.0 } else { unit }
    };
    let values: Vec<f32> = (0..shape.iter().product::<i64>() as u64).map(value).collect();
    Tensor::from_slice(&values).view(shape)
}

pub fn values(tensor: &Tensor) -> Vec<f32> {
    Vec::try_from(tensor.to_kind(Kind::Float).flatten(0, -1)).expect("f32 on the CPU")
}

/// The largest difference, in units of the largest expected value. Some gradients are 0 except
/// for rounding: the bias of keys moves every score of a row equally.
pub fn check_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-2_f32, |max, v| max.max(v.abs()));
    let error = found.iter().zip(expected).fold(0.0_f32, |max, (a, b)| max.max((a - b).abs()));
    let is_close = error <= tolerance * scale;
    assert!(is_close, "{what}: off by {error:e}, where values reach {scale:e}");
}
