//! Samples of the tokens in the order of the file: no shuffle, no tables.

use crate::split::part_of;
use crate::{Error, IndexedDataset, Result, Split};

/// The tokens of one part of a dataset in the order of the file, cut into samples of equal length.
///
/// Sample k starts at token `k * seq_len` of the part, regardless of documents: it is one byte
/// range of the `.bin`. A [`BlockShuffle`](crate::BlockShuffle) orders these samples. Tokens after
/// the last full sample are dropped, as in Megatron in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenStream {
    first_byte: u64,
    item_bytes: u64,
    seq_len: u64,
    extra_tokens: u64,
    samples: u64,
}

impl TokenStream {
    /// Lays out the samples of a part: `split` as
    /// [`GptIndexConfig::split`](crate::GptIndexConfig::split) has it.
    ///
    /// # Errors
    /// [`Error::BadSetting`], [`Error::EmptySplit`]; [`Error::NoTokens`] if there is no sample.
    pub fn new(
        dataset: &IndexedDataset,
        which: Split,
        split: Option<&str>,
        seq_len: u64,
        add_extra_token: bool,
    ) -> Result<Self> {
        if seq_len == 0 {
            let (found, expected) = ("0".to_owned(), "at least 1".to_owned());
            return Err(Error::BadSetting { name: "seq_len", found, expected });
        }
        let sequences_all = dataset.sequence_count();
        let sequences = part_of(split, which, sequences_all)?;
        let extra_tokens = u64::from(add_extra_token);
        let samples = dataset.tokens_in(&sequences).saturating_sub(extra_tokens) / seq_len;
        if samples == 0 {
            let (file, sequences) = (dataset.display(), sequences.end - sequences.start);
            return Err(Error::NoTokens { file, which, sequences, sequences_all, samples: 1 });
        }
        let first_byte = dataset.sequence_offset_bytes(sequences.start);
        let item_bytes = dataset.dtype().item_bytes();
        Ok(TokenStream { first_byte, item_bytes, seq_len, extra_tokens, samples })
    }

    /// Number of samples, at least 1.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.samples
    }

    /// The bytes of a sample in the `.bin`: offset and length.
    ///
    /// # Panics
    /// If there is no such sample.
    #[must_use]
    pub fn extent(&self, sample: u64) -> (u64, u64) {
        assert!(sample < self.samples, "sample {sample} of {}", self.samples);
        let offset = self.first_byte + sample * self.seq_len * self.item_bytes;
        (offset, (self.seq_len + self.extra_tokens) * self.item_bytes)
    }
}
