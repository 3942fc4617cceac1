use indexed::Dtype;

use super::sequence_bounds::{self, Direction, SequenceBounds};
use super::{check_bytes, of_dataset, replace, resize};
use crate::{Assemble, Error, Result, Sample};

/// One micro-batch of language-model training. `tokens`, `labels` and `loss_mask`
/// have the shape `[rows, seq_len]`, row-major; position 0 is the oldest token of its row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The sample in row 0, as a position in the shuffled order. Rows are consecutive samples.
    pub first_sample: u64,
    /// Samples in the batch: the micro-batch size, or fewer in the last batch of a run.
    pub rows: usize,
    /// Tokens a row.
    pub seq_len: usize,
    /// Input token ids; 0 where a short sample was padded.
    pub tokens: Vec<i64>,
    /// The token that follows each input token; 0 where a short sample was padded.
    pub labels: Vec<i64>,
    /// 1 where the label counts in the loss, 0 where it is padding, or follows the end of a
    /// document and [`GptConfig::eod_mask_loss`] is set.
    pub loss_mask: Vec<f32>,
    /// Position of each token in its document, shape as `tokens`. Empty unless
    /// [`GptConfig::reset_position_ids`] is set: they are 0 to `seq_len - 1` then.
    pub position_ids: Vec<i64>,
    /// Where documents start. None unless [`GptConfig::reset_attention_mask`] is set.
    pub bounds: SequenceBounds,
}

/// The settings of Megatron's `GPTDatasetConfig` that determine the row of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GptConfig {
    /// Tokens a row. Minimum: 1.
    pub seq_len: usize,
    /// The id that short samples are padded with, from [`pad_id`](super::pad_id). Labels with this
    /// id do not count, and become 0. Default: -1.
    pub pad: i64,
    /// The id that ends a document. `None` only if none of the three settings below needs it.
    pub eod: Option<i64>,
    /// Whether the token after the end of a document does not count in the loss. (Megatron masks
    /// where the INPUT is the end, not where the label is.)
    pub eod_mask_loss: bool,
    /// Whether positions restart with each document.
    pub reset_position_ids: bool,
    /// Whether a token attends to its own document only: see [`Batch::bounds`].
    pub reset_attention_mask: bool,
    /// How the two settings above find the start of documents.
    pub documents: Documents,
}

/// How to find the start of a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Documents {
    /// After each token that ends one, as `reset_position_ids` and `reset_attention_mask` do.
    #[default]
    AfterEod,
    /// Where the sample continues with another sequence of the file, as `inter_document_masking`
    /// does: for files without end-of-document tokens. Padding is a run of its own.
    AsStored,
}

impl GptConfig {
    /// Rows of `seq_len` tokens, without special handling of documents.
    #[must_use]
    pub fn new(seq_len: usize) -> Self {
        GptConfig {
            seq_len,
            pad: super::NO_LABEL,
            eod: None,
            eod_mask_loss: false,
            reset_position_ids: false,
            reset_attention_mask: false,
            documents: Documents::default(),
        }
    }

    fn finds_documents(&self) -> bool {
        self.reset_position_ids || self.reset_attention_mask
    }

    fn needs_eod(&self) -> bool {
        self.eod_mask_loss || self.finds_documents() && self.documents == Documents::AfterEod
    }
}

impl Batch {
    /// The attention mask of a row, `true` for masked pairs: shape `[seq_len, seq_len]`, row-major.
    /// Megatron's `attention_mask`, for kernels that need it dense.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn attention_mask(&self, row: usize) -> Vec<bool> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let runs = self.bounds.runs_of_row(row, self.seq_len);
        SequenceBounds::blocked(&runs, &runs, Direction::LeftToRight)
    }
}

/// Assembles [`Batch`]es from GPT samples.
#[derive(Debug)]
pub struct GptAssemble {
    config: GptConfig,
    /// The element type of each dataset.
    dtypes: Vec<Dtype>,
    /// Starts of the documents in the current row, without the first.
    starts: Vec<u32>,
}

impl GptAssemble {
    /// Sets up batches of samples of one dataset, or of a blend of several: `dtypes` are theirs.
    ///
    /// # Errors
    /// [`Error::Option`] for rows of no tokens, or without the id of the end of a document if one
    /// is needed.
    pub fn new(config: GptConfig, dtypes: Vec<Dtype>) -> Result<Self> {
        if config.seq_len == 0 || i32::try_from(config.seq_len).is_err() {
            let found = config.seq_len as u64;
            return Err(Error::Option { name: "seq_len", found, expected: "1 to 2147483647" });
        }
        if config.eod.is_none() && config.needs_eod() {
            let expected = "an end-of-document id for the reset and mask options";
            return Err(Error::Option { name: "eod", found: 0, expected });
        }
        Ok(GptAssemble { config, dtypes, starts: Vec::new() })
    }

    fn find_documents(&mut self, tokens: &[i64], dtype: Dtype, sample: &Sample<'_>) {
        let (seq_len, starts) = (self.config.seq_len, &mut self.starts);
        match self.config.documents {
            Documents::AfterEod => {
                let ends = tokens.iter().map(|&token| Some(token) == self.config.eod);
                sequence_bounds::starts_after(ends, seq_len, starts);
            }
            Documents::AsStored => {
                starts.clear();
                let mut end = 0;
                let lens = sample.pieces.iter().map(|piece| piece.len_bytes / dtype.item_bytes());
                starts.extend(lens.filter(|&len| len > 0).map_while(|len| {
                    end += len;
                    (end < seq_len as u64).then_some(end as u32) // fits: seen here
                }));
            }
        }
    }
}

impl Assemble for GptAssemble {
    type Batch = Batch;

    fn begin(&mut self, batch: &mut Batch, first_sample: u64, rows: usize) {
        let GptConfig { seq_len, reset_position_ids, reset_attention_mask, .. } = self.config;
        (batch.first_sample, batch.rows, batch.seq_len) = (first_sample, rows, seq_len);
        let elements = rows * seq_len;
        resize(&mut batch.tokens, elements);
        resize(&mut batch.labels, elements);
        resize(&mut batch.loss_mask, elements);
        resize(&mut batch.position_ids, if reset_position_ids { elements } else { 0 });
        batch.bounds.begin(reset_attention_mask);
    }

    /// The sample has `seq_len` tokens and the label of the last; or no such label
    /// (`add_extra_token_to_sequence` off); or fewer tokens, and is padded.
    fn set_row(&mut self, batch: &mut Batch, row: usize, sample: &Sample<'_>) -> Result<()> {
        let dtype = *of_dataset(&self.dtypes, sample.origin, "GPT")?;
        check_bytes("GPT", dtype, sample)?;
        let GptConfig { seq_len, pad, eod, .. } = self.config;
        let item_bytes = dtype.item_bytes() as usize; // fits: at most 8
        let text_len = sample.bytes.len() / item_bytes;
        if text_len > seq_len + 1 {
            return Err(Error::Sample {
                objective: "GPT",
                sample: sample.number,
                found: format!("{text_len} tokens"),
                expected: format!("at most {seq_len} tokens and the label of the last"),
            });
        }
        let place = row * seq_len..(row + 1) * seq_len;
        let tokens = &mut batch.tokens[place.clone()];
        let labels = &mut batch.labels[place.clone()];
        let loss_mask = &mut batch.loss_mask[place.clone()];

        let (text_end, labels_end) = (text_len.min(seq_len), text_len.saturating_sub(1));
        decode_row(dtype, sample.bytes, &mut tokens[..text_end]);
        tokens[text_end..].fill(pad);
        // The label of a token is the next one, which is decoded already except for the last:
        // copying is several times faster than decoding again.
        let shifted = labels_end.min(text_end.saturating_sub(1));
        let next = tokens[1..][..shifted].chunks(COPY_TOKENS);
        for (labels, tokens) in labels[..shifted].chunks_mut(COPY_TOKENS).zip(next) {
            labels.copy_from_slice(tokens);
        }
        let last = sample.bytes.get((shifted + 1) * item_bytes..).unwrap_or_default();
        decode_row(dtype, last, &mut labels[shifted..labels_end]);
        labels[labels_end..].fill(pad);
        // Skipped if the padding id cannot be a token: the search would take half of the time.
        let is_pad_distinct = pad < 0 && matches!(dtype, Dtype::U8 | Dtype::U16 | Dtype::U32);
        if is_pad_distinct {
            loss_mask[..labels_end].fill(1.0);
            loss_mask[labels_end..].fill(0.0);
        } else {
            for (counts, &label) in loss_mask.iter_mut().zip(&*labels) {
                *counts = f32::from(u8::from(label != pad));
            }
        }
        if let (true, Some(eod)) = (self.config.eod_mask_loss, eod) {
            for (counts, &token) in loss_mask.iter_mut().zip(&*tokens) {
                *counts = if token == eod { 0.0 } else { *counts };
            }
        }
        if self.config.finds_documents() {
            self.find_documents(tokens, dtype, sample);
            batch.bounds.push_row(&self.starts, seq_len)?;
        }
        if self.config.reset_position_ids {
            sequence_bounds::positions(&self.starts, &mut batch.position_ids[place]);
        }
        let (text_end, labels_end) = if is_pad_distinct { (text_end, labels_end) } else { (0, 0) };
        replace(&mut tokens[text_end..], pad, 0);
        replace(&mut labels[labels_end..], pad, 0);
        Ok(())
    }
}

/// Tokens per copy: 2 KiB. glibc makes longer copies by `rep movsb`, which is 10 to 20 times slower
/// on AMD's Zen 3 and 4 if source and destination have unequal alignment, as here: one token apart.
/// <https://lunnova.dev/articles/ryzen-slow-short-rep-mov>
const COPY_TOKENS: usize = 256;

/// Decodes as many tokens as the row has.
fn decode_row(dtype: Dtype, bytes: &[u8], row: &mut [i64]) {
    let len = row.len() * dtype.item_bytes() as usize; // fits: at most 8
    dtype.decode_i64(&bytes[..len], row);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PieceRef, SampleOrigin};

    /// Labels are copied in parts, and the last one is decoded: around each boundary, and for each
    /// end of a padded row, a label is the next token.
    #[test]
    fn labels_of_long_rows_are_the_next_tokens() {
        let seq_len = 3 * COPY_TOKENS + 5;
        let mut assemble = GptAssemble::new(GptConfig::new(seq_len), vec![Dtype::U16]).unwrap();
        let mut batch = Batch::default();
        let around = |parts: usize| (parts * COPY_TOKENS - 2)..=(parts * COPY_TOKENS + 3);
        for len in (1..=3).flat_map(around).chain([1, 2, seq_len, seq_len + 1]) {
            let ids: Vec<u16> = (0..len).map(|place| (7 * place + 1) as u16).collect();
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let origin = SampleOrigin { dataset: 0, sample: 0 };
            assemble.begin(&mut batch, 0, 1);
            let len_bytes = bytes.len() as u64;
            let pieces = [PieceRef { file: 0, offset_bytes: 0, len_bytes }];
            let sample = Sample { number: 0, origin, pieces: &pieces, bytes: &bytes };
            assemble.set_row(&mut batch, 0, &sample).unwrap();
            let mut expected: Vec<i64> = ids.iter().map(|&id| id.into()).collect();
            expected.resize(seq_len + 1, 0); // padding becomes 0
            assert_eq!(batch.tokens, expected[..seq_len], "{len} tokens");
            assert_eq!(batch.labels, expected[1..], "{len} tokens");
        }
    }
}
