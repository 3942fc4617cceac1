use super::masked::{Masker, Masking};
use super::sentences::{Decoded, MaskedPart, Sentences};
use super::{NO_LABEL, fill_row, replace, resize};
use crate::{Assemble, Error, Result, Sample};

/// One micro-batch of T5. Arrays of the encoder have the shape `[rows, encoder_len]`, arrays of the
/// decoder `[rows, decoder_len]`, row-major. All values, also in the padding, equal those of
/// Megatron's `T5MaskedWordPieceDataset`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct T5Batch {
    /// The sample in row 0, as a position in the shuffled order. Rows are consecutive samples.
    pub first_sample: u64,
    /// Samples in the batch.
    pub rows: usize,
    /// Tokens a row of the encoder.
    pub encoder_len: usize,
    /// Tokens a row of the decoder.
    pub decoder_len: usize,
    /// The text, with a sentinel in place of each masked span. 0 in the padding.
    pub encoder_tokens: Vec<i64>,
    /// BOS, then each sentinel and its span. 0 in the padding.
    pub decoder_tokens: Vec<i64>,
    /// The token that follows each token of the decoder, and EOS after the last. Padding is -1, or
    /// 0 if -1 is the padding id.
    pub labels: Vec<i64>,
    /// 1 where a label counts in the loss, 0 in the padding.
    pub loss_mask: Vec<f32>,
    /// 1 where the encoder has a token, 0 in the padding.
    pub encoder_mask: Vec<i64>,
    /// 1 where the decoder has a token, 0 in the padding.
    pub decoder_mask: Vec<i64>,
    /// Whether the sentences of each row had more tokens than the target length.
    pub truncated: Vec<bool>,
}

/// The settings of Megatron's `T5MaskedWordPieceDatasetConfig` that determine the row of a sample.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Config {
    /// Tokens a row of the encoder.
    pub encoder_len: usize,
    /// Tokens a row of the decoder.
    pub decoder_len: usize,
    /// The id of the padding, from [`pad_id`](super::pad_id).
    pub pad: i64,
    /// The id that starts the decoder's tokens.
    pub bos: i64,
    /// The id that ends the labels.
    pub eos: i64,
    /// The ids that replace masked spans, in the order of their use. At least one.
    pub sentinels: Vec<i64>,
    /// The seed of the run.
    pub seed: u32,
    /// How tokens are masked.
    pub masking: Masking,
}

/// Assembles [`T5Batch`]es from runs of sentences.
#[derive(Debug)]
pub struct T5Assemble {
    config: T5Config,
    masker: Masker,
    parts: Vec<MaskedPart>,
    decoded: Decoded,
    encoder: Vec<i64>,
    decoder: Vec<i64>,
}

/// The objective in messages.
const OBJECTIVE: &str = "T5";

impl T5Assemble {
    /// Sets up batches of samples of one dataset, or of a blend of several.
    ///
    /// # Errors
    /// [`Error::Option`] for a setting out of its range.
    pub fn new(config: T5Config, parts: Vec<MaskedPart>) -> Result<Self> {
        for (name, len) in
            [("seq_len", config.encoder_len), ("decoder_seq_len", config.decoder_len)]
        {
            if len < 3 {
                return Err(Error::Option { name, found: len as u64, expected: "at least 3" });
            }
        }
        if config.sentinels.is_empty() {
            return Err(Error::Option { name: "sentinels", found: 0, expected: "at least 1" });
        }
        let masker = Masker::new(config.masking.clone())?;
        let (encoder, decoder) = (Vec::new(), Vec::new());
        Ok(T5Assemble { config, masker, parts, decoded: Decoded::default(), encoder, decoder })
    }

    /// Sets one row from its sentences.
    ///
    /// # Errors
    /// [`Error::Sample`] if there are more masked spans than sentinels, if a row is too short for
    /// its tokens, or for an id outside the vocabulary.
    ///
    /// # Panics
    /// If the batch has no such row.
    pub fn set(&mut self, batch: &mut T5Batch, row: usize, text: &Sentences<'_>) -> Result<()> {
        let target = text.target_len as usize; // fits: 64 bits
        let tokens = &text.tokens[..text.tokens.len().min(target)];
        let mut rng = text.rng(self.config.seed);
        self.masker
            .choose(tokens, text.target_len, &mut rng, |_, _| {}) // all chosen tokens are masked
            .map_err(|id| text.unknown(OBJECTIVE, id, self.config.masking.vocabulary.len()))?;
        self.split(tokens, text)?;

        let T5Config { encoder_len, decoder_len, pad, eos, .. } = self.config;
        let place = row * encoder_len..(row + 1) * encoder_len;
        let encoder = &mut batch.encoder_tokens[place.clone()];
        fill_row(encoder, &self.encoder, pad);
        mask_row(&mut batch.encoder_mask[place], encoder, pad);
        replace(encoder, pad, 0);

        let place = row * decoder_len..(row + 1) * decoder_len;
        let len = self.decoder.len();
        let labels = &mut batch.labels[place.clone()];
        fill_row(labels, &self.decoder[1..], NO_LABEL);
        labels[len - 1] = eos;
        replace(labels, pad, 0);
        let loss_mask = &mut batch.loss_mask[place.clone()];
        loss_mask[..len].fill(1.0);
        loss_mask[len..].fill(0.0);
        let decoder = &mut batch.decoder_tokens[place.clone()];
        fill_row(decoder, &self.decoder, pad);
        mask_row(&mut batch.decoder_mask[place], decoder, pad);
        replace(decoder, pad, 0);
        batch.truncated[row] = text.tokens.len() > target;
        Ok(())
    }

    /// Divides a text into the encoder's input and the decoder's output.
    fn split(&mut self, tokens: &[i64], text: &Sentences<'_>) -> Result<()> {
        let T5Config { encoder_len, decoder_len, bos, ref sentinels, .. } = self.config;
        self.encoder.clear();
        self.decoder.clear();
        self.decoder.push(bos);
        let mut begin = 0;
        let mut sentinels_left = sentinels.iter();
        for span in self.masker.spans() {
            let Some(&sentinel) = sentinels_left.next() else {
                let expected = format!("at most {} masked spans", sentinels.len());
                let found = "more spans than sentinels".to_owned();
                return Err(text.error(OBJECTIVE, found, expected));
            };
            // A span has at least one token.
            let [first, last] = [span[0] as usize, span[span.len() - 1] as usize];
            self.encoder.extend_from_slice(&tokens[begin..first]);
            self.encoder.push(sentinel);
            self.decoder.push(sentinel);
            self.decoder.extend(span.iter().map(|&place| tokens[place as usize]));
            begin = last + 1;
        }
        self.encoder.extend_from_slice(&tokens[begin..]);
        for (name, found, most) in [
            ("encoder", self.encoder.len(), encoder_len),
            ("decoder", self.decoder.len(), decoder_len),
        ] {
            if found > most {
                let expected = format!("at most {most} tokens for the {name}");
                return Err(text.error(OBJECTIVE, found.to_string(), expected));
            }
        }
        Ok(())
    }
}

/// Writes 1 for each token, 0 for the padding id.
fn mask_row(mask: &mut [i64], tokens: &[i64], pad: i64) {
    for (is_token, &token) in mask.iter_mut().zip(tokens) {
        *is_token = i64::from(token != pad);
    }
}

impl Assemble for T5Assemble {
    type Batch = T5Batch;

    fn begin(&mut self, batch: &mut T5Batch, first_sample: u64, rows: usize) {
        let T5Config { encoder_len, decoder_len, .. } = self.config;
        (batch.first_sample, batch.rows) = (first_sample, rows);
        (batch.encoder_len, batch.decoder_len) = (encoder_len, decoder_len);
        resize(&mut batch.encoder_tokens, rows * encoder_len);
        resize(&mut batch.encoder_mask, rows * encoder_len);
        resize(&mut batch.decoder_tokens, rows * decoder_len);
        resize(&mut batch.decoder_mask, rows * decoder_len);
        resize(&mut batch.labels, rows * decoder_len);
        resize(&mut batch.loss_mask, rows * decoder_len);
        resize(&mut batch.truncated, rows);
    }

    fn set_row(&mut self, batch: &mut T5Batch, row: usize, sample: &Sample<'_>) -> Result<()> {
        let mut decoded = std::mem::take(&mut self.decoded);
        let text = decoded.fill(OBJECTIVE, &self.parts, sample);
        let set = text.and_then(|text| self.set(batch, row, &text));
        self.decoded = decoded;
        set
    }
}
