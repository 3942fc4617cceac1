use indexed::rng::RandomState;

use super::masked::{Masker, Masking};
use super::sentences::{Decoded, MaskedPart, Sentences};
use super::{NO_LABEL, fill_row, replace, resize};
use crate::{Assemble, Error, Result, Sample};

/// One micro-batch of BERT. Arrays per token have the shape `[rows, seq_len]`, row-major; arrays
/// per sample the shape `[rows]`. All values, also in the padding, equal those of Megatron's
/// `BERTMaskedWordPieceDataset`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BertBatch {
    /// The sample in row 0, as a position in the shuffled order. Rows are consecutive samples.
    pub first_sample: u64,
    /// Samples in the batch.
    pub rows: usize,
    /// Tokens a row.
    pub seq_len: usize,
    /// CLS, the first part, SEP, and if there is a second part, that part and SEP; some tokens are
    /// masked. 0 in the padding.
    pub tokens: Vec<i64>,
    /// 0 in the first part, 1 in the second, the padding id in the padding.
    pub types: Vec<i64>,
    /// The original token at each masked position, -1 elsewhere; 0 in place of the padding id.
    pub labels: Vec<i64>,
    /// 1 where there is a token, the padding id elsewhere.
    pub padding_mask: Vec<i64>,
    /// 1 at masked positions, 0 elsewhere.
    pub loss_mask: Vec<f32>,
    /// Whether samples have two parts, so that `is_random` is meaningful.
    pub two_parts: bool,
    /// Whether the second part precedes the first in the text.
    pub is_random: Vec<bool>,
    /// Whether the sentences had more tokens than the target length.
    pub truncated: Vec<bool>,
}

/// The settings of Megatron's `BERTMaskedWordPieceDatasetConfig` that determine the row of a
/// sample.
#[derive(Clone, Debug, PartialEq)]
pub struct BertConfig {
    /// Tokens a row, CLS and SEP counted in.
    pub seq_len: usize,
    /// The id of the padding, from [`pad_id`](super::pad_id).
    pub pad: i64,
    /// The seed of the run.
    pub seed: u32,
    /// Whether a sample has two parts, for which the model predicts whether they are in order
    /// (`classification_head`).
    pub two_parts: bool,
    /// How tokens are masked.
    pub masking: Masking,
}

/// Assembles [`BertBatch`]es from runs of sentences.
#[derive(Debug)]
pub struct BertAssemble {
    config: BertConfig,
    masker: Masker,
    parts: Vec<MaskedPart>,
    decoded: Decoded,
    /// The tokens of the current sample, none of them masked.
    text: Vec<i64>,
}

/// The objective in messages.
const OBJECTIVE: &str = "BERT";

/// A chosen token is replaced by the mask token with this probability ...
const MASKED: f64 = 0.8;

/// ... and of the others, this share stays unchanged.
const UNCHANGED: f64 = 0.5;

impl BertAssemble {
    /// Sets up batches of samples of one dataset, or of a blend of several.
    ///
    /// # Errors
    /// [`Error::Option`] for a setting out of its range.
    pub fn new(config: BertConfig, parts: Vec<MaskedPart>) -> Result<Self> {
        if config.seq_len < 4 {
            let found = config.seq_len as u64;
            return Err(Error::Option {
                name: "seq_len",
                found,
                expected: "at least 4, for a token between special tokens",
            });
        }
        let masker = Masker::new(config.masking.clone())?;
        Ok(BertAssemble { config, masker, parts, decoded: Decoded::default(), text: Vec::new() })
    }

    /// Sets one row from its sentences.
    ///
    /// # Errors
    /// [`Error::Sample`] if there is only one sentence where two parts are required, if the row is
    /// too short for it, or for an id outside the vocabulary.
    ///
    /// # Panics
    /// If the batch has no such row, or the sentences do not end within their tokens.
    pub fn set(&mut self, batch: &mut BertBatch, row: usize, text: &Sentences<'_>) -> Result<()> {
        let BertConfig { seq_len, pad, .. } = self.config;
        let mut rng = text.rng(self.config.seed);
        let (first_part, is_random, truncated) = self.join(text, &mut rng)?;
        let len = self.text.len();
        if len > seq_len {
            let found = format!("{len} tokens for a target length of {}", text.target_len);
            return Err(text.error(OBJECTIVE, found, format!("at most {seq_len} tokens")));
        }
        let place = row * seq_len..(row + 1) * seq_len;
        let tokens = &mut batch.tokens[place.clone()];
        fill_row(tokens, &self.text, pad);

        let Masking { mask, ref vocabulary, .. } = self.config.masking;
        let ids = vocabulary.len();
        let mask_token = |rng: &mut RandomState, at: usize| {
            if rng.random_sample() < MASKED {
                tokens[at] = mask;
            } else if rng.random_sample() >= UNCHANGED {
                tokens[at] = rng.randint(0, ids as i64); // fits: it is in memory
            }
        };
        self.masker
            .choose(&self.text, text.target_len, &mut rng, mask_token)
            .map_err(|id| text.unknown(OBJECTIVE, id, ids))?;

        let types = &mut batch.types[place.clone()];
        types[..first_part].fill(0);
        types[first_part..len].fill(1);
        types[len..].fill(pad);
        let padding_mask = &mut batch.padding_mask[place.clone()];
        for (is_token, &token) in padding_mask.iter_mut().zip(&*tokens) {
            *is_token = if token == pad { pad } else { 1 };
        }
        let labels = &mut batch.labels[place.clone()];
        labels.fill(NO_LABEL);
        let loss_mask = &mut batch.loss_mask[place];
        loss_mask.fill(0.0);
        for at in self.masker.chosen() {
            labels[at] = self.text[at];
            loss_mask[at] = 1.0;
        }
        replace(tokens, pad, 0);
        replace(labels, pad, 0);
        (batch.is_random[row], batch.truncated[row]) = (is_random, truncated);
        Ok(())
    }

    /// Writes the two parts of a sample to `text`. Returns where the first one ends with its SEP,
    /// whether they are swapped, and whether tokens were cut off.
    fn join(&mut self, text: &Sentences<'_>, rng: &mut RandomState) -> Result<(usize, bool, bool)> {
        let sentences = text.ends.len();
        let (mut a, mut b) = (0..text.tokens.len(), 0..0);
        let mut is_random = false;
        if self.config.two_parts {
            if sentences < 2 {
                let expected = "at least 2 sentences for two parts".to_owned();
                return Err(text.error(OBJECTIVE, sentences.to_string(), expected));
            }
            let pivot = if sentences > 2 { rng.randint(1, sentences as i64) as usize } else { 1 };
            let pivot = text.ends[pivot - 1]; // fits: between 1 and the sentences
            (a, b) = (0..pivot, pivot..text.tokens.len());
            is_random = rng.random_sample() < 0.5;
            if is_random {
                (a, b) = (b, a);
            }
        }
        let target = text.target_len as usize; // fits: 64 bits
        let truncated = a.len() + b.len() > target;
        while a.len() + b.len() > target {
            let longer = if a.len() > b.len() { &mut a } else { &mut b };
            if rng.random_sample() < 0.5 {
                longer.start += 1;
            } else {
                longer.end -= 1;
            }
        }
        let Masking { cls, sep, .. } = self.config.masking;
        self.text.clear();
        self.text.push(cls);
        self.text.extend_from_slice(&text.tokens[a]);
        self.text.push(sep);
        let first_part = self.text.len();
        if !b.is_empty() {
            self.text.extend_from_slice(&text.tokens[b]);
            self.text.push(sep);
        }
        Ok((first_part, is_random, truncated))
    }
}

impl Assemble for BertAssemble {
    type Batch = BertBatch;

    fn begin(&mut self, batch: &mut BertBatch, first_sample: u64, rows: usize) {
        let seq_len = self.config.seq_len;
        (batch.first_sample, batch.rows, batch.seq_len) = (first_sample, rows, seq_len);
        batch.two_parts = self.config.two_parts;
        let elements = rows * seq_len;
        resize(&mut batch.tokens, elements);
        resize(&mut batch.types, elements);
        resize(&mut batch.labels, elements);
        resize(&mut batch.padding_mask, elements);
        resize(&mut batch.loss_mask, elements);
        resize(&mut batch.is_random, rows);
        resize(&mut batch.truncated, rows);
    }

    fn set_row(&mut self, batch: &mut BertBatch, row: usize, sample: &Sample<'_>) -> Result<()> {
        let mut decoded = std::mem::take(&mut self.decoded);
        let text = decoded.fill(OBJECTIVE, &self.parts, sample);
        let set = text.and_then(|text| self.set(batch, row, &text));
        self.decoded = decoded;
        set
    }
}
