//! Divides a stream of documents into samples of equal length.

use std::ops::ControlFlow;

use crate::block_prefetch::{BLOCK, generate_in_blocks};
use crate::cache::npy::{Element, Npy, NpyBuilder};
use crate::mmididx::idx::I32Le;
use crate::{Error, Lengths, Result};

/// How a stream of tokens is divided into samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleRule {
    /// Tokens between the starts of two consecutive samples.
    pub seq_len: u64,
    /// Whether a sample has an extra token, the label of its last; it is also the first of the next
    /// sample.
    pub add_extra_token: bool,
    /// Whether the tokens after the last full sample are a short sample.
    pub keep_last_partial: bool,
}

impl SampleRule {
    /// 1 or 0.
    #[must_use]
    pub fn extra_tokens(&self) -> u64 {
        u64::from(self.add_extra_token)
    }

    /// The number of samples in this many tokens.
    ///
    /// If the last short sample is kept, Megatron divides in single precision: it counts 14,285,714
    /// samples of 7 in 100,000,001 tokens, and not 14,285,715. Compatible files need the same
    /// count, so this function does the same. If that would count samples without tokens, it is an
    /// error, as is Megatron's assertion.
    ///
    /// # Errors
    /// [`Error::TooBig`].
    pub fn sample_count(&self, tokens: u64) -> Result<u64> {
        let tokens = tokens.saturating_sub(self.extra_tokens());
        if !self.keep_last_partial {
            return Ok(tokens / self.seq_len);
        }
        let exact = tokens.div_ceil(self.seq_len);
        let count = (tokens as f32 / self.seq_len as f32).ceil() as u64; // fits: not negative
        if count > exact {
            let object = "samples (counted in single precision, as Megatron does)";
            return Err(Error::TooBig { object, found: count.into(), most: exact.into() });
        }
        if count < exact {
            log::warn!(
                "sample index: {} of {exact} samples dropped; Megatron keeps the last partial \
                 sample and divides {tokens} tokens by {} in single precision",
                exact - count,
                self.seq_len
            );
        }
        Ok(count)
    }
}

/// Megatron's `build_sample_idx`: rows of (position in the document index, token in that document)
/// at which samples start; the last row is the end of the last sample. Row 0 is (0, 0).
///
/// `lengths` are the tokens of each sequence and `document_index` the order of the sequences, both
/// 32 bits, little-endian; `tokens` is how many there are in that order.
///
/// # Errors
/// [`Error::TooBig`] as [`SampleRule::sample_count`]; [`Error::OutOfMemory`].
///
/// # Panics
/// If the document index names a sequence that has no length, or there are fewer tokens.
pub fn build_sample_index<T: Element>(
    lengths: &[I32Le],
    document_index: &[I32Le],
    tokens: u64,
    rule: &SampleRule,
) -> Result<Npy> {
    build_rows::<T>(lengths, document_index, rule, rule.sample_count(tokens)?)
}

/// Looks up the length of a sequence in tokens.
pub(crate) trait LengthOf: Sync {
    fn length_of(&self, seq: u32) -> u32;
}

impl LengthOf for [I32Le] {
    fn length_of(&self, seq: u32) -> u32 {
        u32::from_le_bytes(self[seq as usize])
    }
}

impl LengthOf for Lengths {
    fn length_of(&self, seq: u32) -> u32 {
        self.sequence_len(seq.into())
    }
}

/// [`build_sample_index`] with a known number of samples.
pub(crate) fn build_rows<T: Element>(
    lengths: &(impl LengthOf + ?Sized),
    document_index: &[I32Le],
    rule: &SampleRule,
    sample_count: u64,
) -> Result<Npy> {
    let mut rows = NpyBuilder::<T>::new("sample index", &[sample_count + 1, 2])?;
    let missing = walk(lengths, document_index, rule, sample_count, |place, token| {
        rows.push(place);
        rows.push(token);
    });
    assert_eq!(missing, 0, "as many samples as there are tokens for");
    Ok(rows.finish())
}

/// Calls `row` with each row in order, and returns for how many samples there were no tokens. The
/// work is linear in documents and samples. Lengths are read at random positions of the table: in a
/// separate loop, their cache misses overlap.
pub(crate) fn walk(
    lengths: &(impl LengthOf + ?Sized),
    document_index: &[I32Le],
    rule: &SampleRule,
    sample_count: u64,
    mut row: impl FnMut(i64, i64),
) -> u64 {
    let extra = rule.extra_tokens();
    let mut left = sample_count;
    // Tokens of the stream before the current document's end, and before the current sample's end.
    let (mut document_end, mut sample_end) = (0_u64, rule.seq_len + extra);
    row(0, 0);
    let fetch = |block: usize, fetched: &mut Vec<u32>| {
        let documents = document_index[block * BLOCK..].iter().take(BLOCK);
        fetched.extend(documents.map(|seq| lengths.length_of(u32::from_le_bytes(*seq))));
    };
    generate_in_blocks(document_index.len().div_ceil(BLOCK), fetch, |block, fetched| {
        for (&length, place) in fetched.iter().zip((block * BLOCK) as i64..) {
            let document_start = document_end;
            document_end += u64::from(length);
            while sample_end <= document_end {
                if left == 0 {
                    return ControlFlow::Break(());
                }
                row(place, (sample_end - extra - document_start) as i64); // fits: in a document
                sample_end += rule.seq_len;
                left -= 1;
            }
        }
        ControlFlow::Continue(())
    });
    match document_index.last() {
        Some(last) if left > 0 && rule.keep_last_partial => {
            // The short last sample. After an empty document this is -1, in Megatron's files too.
            let length = i64::from(lengths.length_of(u32::from_le_bytes(*last)));
            row(document_index.len() as i64 - 1, length - extra as i64);
            left - 1
        }
        _ => left,
    }
}
