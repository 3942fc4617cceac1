//! From samples to rows, each equal to the row of the original program for the same sample.
//!
//! A row is a function of the settings, the bytes of one sample, and that sample's number, which
//! with the seed determines all random choices. [`GptAssemble`] is the GPT of Megatron, `masked`
//! the choice of masked tokens that [`BertAssemble`] and [`T5Assemble`] share, and
//! [`EncDecAssemble`] the encoder and decoder of CPM-2. They reuse batches, and allocate nothing
//! after the first.

pub(crate) mod assembler;
mod bert;
mod encdec;
mod gpt;
mod masked;
mod sentences;
mod sequence_bounds;
mod t5;

pub use bert::{BertAssemble, BertBatch, BertConfig};
pub use encdec::{EncDecAssemble, EncDecBatch, EncDecConfig, EncDecPart};
pub use gpt::{Batch, Documents, GptAssemble, GptConfig};
pub use masked::{Masking, NgramLengths, Vocabulary};
pub use sentences::{MaskedPart, Sentences};
pub use sequence_bounds::{Direction, SequenceBounds};
pub use t5::{T5Assemble, T5Batch, T5Config};

use indexed::Dtype;

use crate::{Error, Result, Sample, SampleOrigin};

/// The value of no label: pads labels, and also tokens if the tokenizer has no padding id of its
/// own.
pub const NO_LABEL: i64 = -1;

/// The id that Megatron pads with: the tokenizer's padding id; or -1, which is no token, if it has
/// none or shares it with another special token, which would then not count in the loss.
#[must_use]
pub fn pad_id(of_tokenizer: Option<i64>, other_special: &[i64]) -> i64 {
    of_tokenizer.filter(|pad| !other_special.contains(pad)).unwrap_or(NO_LABEL)
}

/// The entry of a sample's dataset in a list with one entry for each dataset of a blend.
fn of_dataset<'a, T>(
    each: &'a [T],
    origin: SampleOrigin,
    objective: &'static str,
) -> Result<&'a T> {
    each.get(origin.dataset as usize).ok_or_else(|| Error::Sample {
        objective,
        sample: origin.sample,
        found: format!("dataset {} of a blend", origin.dataset),
        expected: format!("one of {} datasets", each.len()),
    })
}

/// Appends the tokens of some bytes.
fn decode_into(dtype: Dtype, bytes: &[u8], tokens: &mut Vec<i64>) {
    let first = tokens.len();
    tokens.resize(first + bytes.len() / dtype.item_bytes() as usize, 0); // fits: at most 8
    dtype.decode_i64(bytes, &mut tokens[first..]);
}

/// Refuses partial tokens, and element types that are not integers.
fn check_bytes(objective: &'static str, dtype: Dtype, sample: &Sample<'_>) -> Result<()> {
    let item_bytes = dtype.item_bytes();
    let len_bytes: u64 = sample.pieces.iter().map(|piece| piece.len_bytes).sum();
    let whole = sample.pieces.iter().all(|piece| piece.len_bytes % item_bytes == 0);
    if dtype.is_integer() && whole && len_bytes == sample.bytes.len() as u64 {
        return Ok(());
    }
    Err(Error::Sample {
        objective,
        sample: sample.number,
        found: format!("{} bytes", sample.bytes.len()),
        expected: format!("{len_bytes} bytes in pieces of whole {dtype} tokens"),
    })
}

/// Writes values to the start of a row, and `rest` to the remaining elements.
fn fill_row(row: &mut [i64], values: &[i64], rest: i64) {
    let (front, back) = row.split_at_mut(values.len());
    front.copy_from_slice(values);
    back.fill(rest);
}

/// Replaces all elements equal to `from` by `to`.
fn replace(row: &mut [i64], from: i64, to: i64) {
    row.iter_mut().for_each(|value| *value = if *value == from { to } else { *value });
}

/// Sets the length of an array of a batch, reusing allocated memory.
fn resize<T: Clone + Default>(values: &mut Vec<T>, len: usize) {
    values.resize(len, T::default());
}
