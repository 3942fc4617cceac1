use indexed::Dtype;

use super::sequence_bounds::{self, Direction, SequenceBounds};
use super::{decode_into, fill_row, of_dataset, resize};
use crate::{Assemble, Error, PieceRef, Result, Sample};

/// One micro-batch of CPM-2. Arrays of the encoder have the shape `[rows, encoder_len]`, arrays of
/// the decoder `[rows, decoder_len]`, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EncDecBatch {
    /// The sample in row 0, as a position in the shuffled order. Rows are consecutive samples.
    pub first_sample: u64,
    /// Samples in the batch.
    pub rows: usize,
    /// Tokens a row of the encoder.
    pub encoder_len: usize,
    /// Tokens a row of the decoder.
    pub decoder_len: usize,
    /// The text, with a sentinel in place of each masked span. There is no padding.
    pub encoder_tokens: Vec<i64>,
    /// Whether a token of the encoder is the sentinel of a span in which a document ends
    /// (`ctx_eod_mask`).
    pub encoder_eod: Vec<bool>,
    /// 1, then each sentinel and its span, then the sentinel after the last; cut where the row
    /// ends, or padded.
    pub decoder_tokens: Vec<i64>,
    /// The token that follows each token of the decoder, padded.
    pub labels: Vec<i64>,
    /// 0 where the decoder's token ends a document or the label is padding, 1 elsewhere.
    pub loss_mask: Vec<f32>,
    /// Position of each token of the encoder in its document. Empty unless
    /// [`EncDecConfig::reset_position_ids`] is set.
    pub encoder_position_ids: Vec<i64>,
    /// Position of each token of the decoder in its document. Empty unless
    /// [`EncDecConfig::reset_position_ids`] is set.
    pub decoder_position_ids: Vec<i64>,
    /// Where documents start in the encoder. None unless [`EncDecConfig::reset_attention_mask`] is
    /// set.
    pub encoder_bounds: SequenceBounds,
    /// Where documents start in the decoder: the n-th run of a row attends to the n-th of the
    /// encoder.
    pub decoder_bounds: SequenceBounds,
    /// Whether a row of the decoder was cut.
    pub truncated: Vec<bool>,
}

/// The settings that determine the row of a sample, as in CPM-2's `EncDecDataset` and
/// `get_masks_and_position_ids`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncDecConfig {
    /// Tokens a row of the encoder. The index is built for one less, and an extra token.
    pub encoder_len: usize,
    /// Tokens a row of the decoder.
    pub decoder_len: usize,
    /// The size of the vocabulary for which the files were generated: higher ids are not tokens,
    /// but number the spans of their document.
    pub vocab_size: i64,
    /// The id that starts the decoder's tokens: 1 in CPM-2.
    pub bos: i64,
    /// The id that ends a document.
    pub eod: i64,
    /// The id of the padding.
    pub pad: i64,
    /// The ids that stand for spans, in the order of their use within a sample: 190 in CPM-2. One
    /// more is used than there are spans.
    pub sentinels: Vec<i64>,
    /// Whether positions restart with each document.
    pub reset_position_ids: bool,
    /// Whether a token attends to its own document only.
    pub reset_attention_mask: bool,
}

/// The element types of the three files of one dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncDecPart {
    /// Of the encoder's input.
    pub context: Dtype,
    /// Of the decoder's output.
    pub target: Dtype,
    /// Of the offsets of the spans in the target.
    pub target_offset: Dtype,
}

/// Assembles [`EncDecBatch`]es from CPM-2's three datasets.
///
/// The pieces of a sample come in threes: part of the context of a document, all of its target, and
/// all of its target offsets. The spans of the part are known only once it is read.
#[derive(Debug)]
pub struct EncDecAssemble {
    config: EncDecConfig,
    parts: Vec<EncDecPart>,
    context: Vec<i64>,
    encoder: Vec<i64>,
    encoder_eod: Vec<bool>,
    decoder: Vec<i64>,
    spans: usize,
    starts: Vec<u32>,
}

/// The objective in messages.
const OBJECTIVE: &str = "EncDec";

impl EncDecBatch {
    /// The mask of the encoder's attention in a row, `true` for masked pairs:
    /// shape `[encoder_len, encoder_len]`.
    #[must_use]
    pub fn encoder_mask(&self, row: usize) -> Vec<bool> {
        let runs = self.encoder_bounds.runs_of_row(row, self.encoder_len);
        SequenceBounds::blocked(&runs, &runs, Direction::Both)
    }

    /// The mask of the decoder's attention in a row, `true` for masked pairs:
    /// shape `[decoder_len, decoder_len]`.
    #[must_use]
    pub fn decoder_mask(&self, row: usize) -> Vec<bool> {
        let runs = self.decoder_bounds.runs_of_row(row, self.decoder_len);
        SequenceBounds::blocked(&runs, &runs, Direction::LeftToRight)
    }

    /// The mask of the decoder's attention to the encoder in a row, `true` for masked pairs: shape
    /// `[decoder_len, encoder_len]`.
    #[must_use]
    pub fn cross_mask(&self, row: usize) -> Vec<bool> {
        let decoder = self.decoder_bounds.runs_of_row(row, self.decoder_len);
        let encoder = self.encoder_bounds.runs_of_row(row, self.encoder_len);
        SequenceBounds::blocked(&decoder, &encoder, Direction::Both)
    }
}

impl EncDecAssemble {
    /// Sets up batches of samples of one dataset, or of a blend of several.
    ///
    /// # Errors
    /// [`Error::Option`] for a setting out of its range.
    pub fn new(config: EncDecConfig, parts: Vec<EncDecPart>) -> Result<Self> {
        for (name, len) in
            [("enc_seq_len", config.encoder_len), ("dec_seq_len", config.decoder_len)]
        {
            if len < 2 || i32::try_from(len).is_err() {
                return Err(Error::Option { name, found: len as u64, expected: "2 to 2147483647" });
            }
        }
        if config.sentinels.len() < 2 {
            let found = config.sentinels.len() as u64;
            return Err(Error::Option { name: "sentinels", found, expected: "at least 2" });
        }
        Ok(EncDecAssemble {
            config,
            parts,
            context: Vec::new(),
            encoder: Vec::new(),
            encoder_eod: Vec::new(),
            decoder: Vec::new(),
            spans: 0,
            starts: Vec::new(),
        })
    }

    /// Joins the parts of a sample to the encoder's input and the decoder's output.
    fn join(&mut self, sample: &Sample<'_>) -> Result<()> {
        let part = *of_dataset(&self.parts, sample.origin, OBJECTIVE)?;
        check(part, sample)?;
        self.encoder.clear();
        self.encoder_eod.clear();
        self.decoder.clear();
        self.decoder.push(self.config.bos);
        self.spans = 0;
        let mut pieces = sample.parts().map(|(_, bytes)| bytes);
        while let (Some(context), Some(target), Some(offsets)) =
            (pieces.next(), pieces.next(), pieces.next())
        {
            let mut tokens = std::mem::take(&mut self.context);
            tokens.clear();
            decode_into(part.context, context, &mut tokens);
            let target = EncDecTarget { part, target, offsets };
            let joined = tokens.iter().try_for_each(|&token| self.push(token, &target, sample));
            self.context = tokens;
            joined?;
        }
        let last = self.sentinel(sample)?;
        self.decoder.push(last);
        Ok(())
    }

    fn push(&mut self, token: i64, target: &EncDecTarget<'_>, sample: &Sample<'_>) -> Result<()> {
        let EncDecConfig { vocab_size, eod, .. } = self.config;
        if token == eod {
            let found = format!("end-of-document token {eod} in the context");
            let expected = "end-of-document tokens in the target only".to_owned();
            return Err(error(sample, found, expected));
        }
        if token < vocab_size {
            self.encoder.push(token);
            self.encoder_eod.push(false);
            return Ok(());
        }
        let sentinel = self.sentinel(sample)?;
        let first = self.decoder.len();
        if !target.append_span(token - vocab_size, &mut self.decoder)
            || self.decoder.get(first) != Some(&token)
        {
            let found = format!(
                "none as span {} of a document (hint: use files made for a vocabulary of \
                 {vocab_size} ids; 16-bit offsets overflow in long documents)",
                token - vocab_size
            );
            let expected = format!("a span of the target that starts with token {token}");
            return Err(error(sample, found, expected));
        }
        self.decoder[first] = sentinel;
        self.encoder.push(sentinel);
        self.encoder_eod.push(self.decoder[first..].contains(&eod));
        self.spans += 1;
        Ok(())
    }

    /// The sentinel of the next span.
    fn sentinel(&self, sample: &Sample<'_>) -> Result<i64> {
        let sentinels = &self.config.sentinels;
        sentinels.get(self.spans).copied().ok_or_else(|| {
            let expected = format!("fewer spans than the {} sentinels", sentinels.len());
            error(sample, format!("at least {} spans", self.spans), expected)
        })
    }
}

/// The target spans of one document.
struct EncDecTarget<'a> {
    part: EncDecPart,
    target: &'a [u8],
    offsets: &'a [u8],
}

impl EncDecTarget<'_> {
    /// Appends the nth span, its marker first. False if there is no such span.
    fn append_span(&self, nth: i64, tokens: &mut Vec<i64>) -> bool {
        let span = || {
            let nth = u64::try_from(nth).ok()?;
            let pair = bytes_of(self.part.target_offset, self.offsets, nth.checked_mul(2)?, 2)?;
            let mut pair_of = [0; 2];
            self.part.target_offset.decode_i64(pair, &mut pair_of);
            let [start, len] = pair_of.map(u64::try_from);
            bytes_of(self.part.target, self.target, start.ok()?, len.ok()?)
        };
        let Some(bytes) = span() else { return false };
        decode_into(self.part.target, bytes, tokens);
        true
    }
}

/// The bytes of some items, if there are as many.
fn bytes_of(dtype: Dtype, bytes: &[u8], first: u64, count: u64) -> Option<&[u8]> {
    let item_bytes = dtype.item_bytes();
    let start = first.checked_mul(item_bytes)?;
    let end = start.checked_add(count.checked_mul(item_bytes)?)?;
    bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
}

/// Refuses what cannot be decoded.
fn check(part: EncDecPart, sample: &Sample<'_>) -> Result<()> {
    let dtypes = [part.context, part.target, part.target_offset];
    let len_bytes: u64 = sample.pieces.iter().map(|piece| piece.len_bytes).sum();
    let whole = |(piece, dtype): (&PieceRef, &Dtype)| piece.len_bytes % dtype.item_bytes() == 0;
    if dtypes.iter().all(|dtype| dtype.is_integer())
        && sample.pieces.len().is_multiple_of(3)
        && len_bytes == sample.bytes.len() as u64
        && sample.pieces.iter().zip(dtypes.iter().cycle()).all(whole)
    {
        return Ok(());
    }
    let found = format!("{} bytes in {} pieces", sample.bytes.len(), sample.pieces.len());
    let expected = format!(
        "{len_bytes} bytes in pieces of context, target and offsets, each of whole integers"
    );
    Err(error(sample, found, expected))
}

fn error(sample: &Sample<'_>, found: String, expected: String) -> Error {
    Error::Sample { objective: OBJECTIVE, sample: sample.number, found, expected }
}

impl Assemble for EncDecAssemble {
    type Batch = EncDecBatch;

    fn begin(&mut self, batch: &mut EncDecBatch, first_sample: u64, rows: usize) {
        let EncDecConfig { encoder_len, decoder_len, .. } = self.config;
        (batch.first_sample, batch.rows) = (first_sample, rows);
        (batch.encoder_len, batch.decoder_len) = (encoder_len, decoder_len);
        let (encoder, decoder) = (rows * encoder_len, rows * decoder_len);
        resize(&mut batch.encoder_tokens, encoder);
        resize(&mut batch.encoder_eod, encoder);
        resize(&mut batch.decoder_tokens, decoder);
        resize(&mut batch.labels, decoder);
        resize(&mut batch.loss_mask, decoder);
        let wanted = usize::from(self.config.reset_position_ids);
        resize(&mut batch.encoder_position_ids, encoder * wanted);
        resize(&mut batch.decoder_position_ids, decoder * wanted);
        batch.encoder_bounds.begin(self.config.reset_attention_mask);
        batch.decoder_bounds.begin(self.config.reset_attention_mask);
        resize(&mut batch.truncated, rows);
    }

    fn set_row(&mut self, batch: &mut EncDecBatch, row: usize, sample: &Sample<'_>) -> Result<()> {
        self.join(sample)?;
        let EncDecConfig { encoder_len, decoder_len, eod, pad, .. } = self.config;
        if self.encoder.len() != encoder_len {
            let found = self.encoder.len().to_string();
            return Err(error(sample, found, format!("{encoder_len} tokens of context")));
        }
        let place = row * encoder_len..(row + 1) * encoder_len;
        batch.encoder_tokens[place.clone()].copy_from_slice(&self.encoder);
        batch.encoder_eod[place.clone()].copy_from_slice(&self.encoder_eod);
        let ends = self.encoder_eod.iter().copied();
        sequence_bounds::starts_after(ends, encoder_len, &mut self.starts);
        batch.encoder_bounds.push_row(&self.starts, encoder_len)?;
        if self.config.reset_position_ids {
            sequence_bounds::positions(&self.starts, &mut batch.encoder_position_ids[place]);
        }

        batch.truncated[row] = self.decoder.len() > decoder_len + 1;
        self.decoder.truncate(decoder_len + 1);
        let place = row * decoder_len..(row + 1) * decoder_len;
        let tokens = &mut batch.decoder_tokens[place.clone()];
        fill_row(tokens, &self.decoder[..self.decoder.len() - 1], pad);
        let labels = &mut batch.labels[place.clone()];
        fill_row(labels, &self.decoder[1..], pad);
        let counts =
            tokens.iter().zip(&*labels).map(|(&token, &label)| token != eod && label != pad);
        for (place, counts) in batch.loss_mask[place.clone()].iter_mut().zip(counts) {
            *place = f32::from(u8::from(counts));
        }
        let ends = tokens.iter().map(|&token| token == eod);
        sequence_bounds::starts_after(ends, decoder_len, &mut self.starts);
        batch.decoder_bounds.push_row(&self.starts, decoder_len)?;
        if self.config.reset_position_ids {
            sequence_bounds::positions(&self.starts, &mut batch.decoder_position_ids[place]);
        }
        Ok(())
    }
}
