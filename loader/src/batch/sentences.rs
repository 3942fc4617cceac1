use std::sync::Arc;

use indexed::rng::RandomState;
use indexed::{Dtype, MaskedIndex};

use super::{check_bytes, decode_into, of_dataset};
use crate::{Error, Result, Sample};

/// Consecutive sentences that are one sample of BERT or T5.
#[derive(Clone, Copy, Debug)]
pub struct Sentences<'a> {
    /// The number of the sample in its dataset. With the seed it determines all random choices.
    pub sample: u64,
    /// Its target length in tokens, from the index.
    pub target_len: u32,
    /// The tokens of all sentences.
    pub tokens: &'a [i64],
    /// Where in `tokens` each sentence ends.
    pub ends: &'a [usize],
}

/// One dataset of a blend, as the assemblers of BERT and T5 need it.
#[derive(Clone, Debug)]
pub struct MaskedPart {
    /// The element type of its tokens.
    pub dtype: Dtype,
    /// Its samples and their target lengths.
    pub index: Arc<MaskedIndex>,
}

impl MaskedPart {
    /// The target length of a sample in tokens.
    fn target_len(&self, objective: &'static str, sample: u64) -> Result<u32> {
        let samples = self.index.sample_count();
        if sample >= samples {
            let (found, expected) =
                (format!("sample {sample}"), format!("a sample below {samples}"));
            return Err(Error::Sample { objective, sample, found, expected });
        }
        Ok(self.index.sample(sample).target_len)
    }
}

impl Sentences<'_> {
    /// The random number generator of this sample.
    pub(super) fn rng(&self, seed: u32) -> RandomState {
        RandomState::new(u64::from(seed).wrapping_add(self.sample) as u32) // modulo 2^32
    }

    /// An error about this sample.
    pub(super) fn error(&self, objective: &'static str, found: String, expected: String) -> Error {
        Error::Sample { objective, sample: self.sample, found, expected }
    }

    /// An error about an id outside the vocabulary.
    pub(super) fn unknown(&self, objective: &'static str, id: i64, ids: usize) -> Error {
        self.error(
            objective,
            format!("token {id}"),
            format!("a token below {ids}, the vocabulary size"),
        )
    }
}

/// The sentences of a sample that was read, decoded.
#[derive(Debug, Default)]
pub(super) struct Decoded {
    tokens: Vec<i64>,
    ends: Vec<usize>,
}

impl Decoded {
    /// Decodes a sample whose pieces are sentences.
    pub(super) fn fill<'a>(
        &'a mut self,
        objective: &'static str,
        parts: &[MaskedPart],
        sample: &Sample<'_>,
    ) -> Result<Sentences<'a>> {
        let part = of_dataset(parts, sample.origin, objective)?;
        check_bytes(objective, part.dtype, sample)?;
        self.tokens.clear();
        self.ends.clear();
        decode_into(part.dtype, sample.bytes, &mut self.tokens);
        let item_bytes = part.dtype.item_bytes();
        let mut end = 0;
        self.ends.extend(sample.pieces.iter().map(|piece| {
            end += (piece.len_bytes / item_bytes) as usize; // fits: it is in memory
            end
        }));
        let target_len = part.target_len(objective, sample.origin.sample)?;
        let sample = sample.origin.sample;
        Ok(Sentences { sample, target_len, tokens: &self.tokens, ends: &self.ends })
    }
}
