//! Samples as they were read: the data sent from the node reader to the ranks.
//!
//! They stay encoded, which is smaller than any batch made of them: 2 or 4 bytes a token, where a
//! batch of GPT has 20. A message has the first sample's number (u64), the number of rows (u64),
//! the bytes of each row (u64 each), and the rows back to back, all little-endian.

use std::ops::Range;

use super::NodeError;
use crate::{Assemble, Error, Result, Sample};

/// Samples in a row, as bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawBatch {
    /// The number of the first.
    pub first_sample: u64,
    ends: Vec<usize>,
    bytes: Vec<u8>,
}

/// Collects samples as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct RawAssemble;

/// A rank's samples of one step, read in place in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Samples<'a> {
    first_sample: u64,
    lens: &'a [u8],
    bytes: &'a [u8],
}

const HEADER_BYTES: usize = 16;
const LEN_BYTES: usize = 8;

pub(super) fn message_bytes_max(rows: usize, sample_bytes_max: usize) -> usize {
    // A length beyond a usize is refused as too large for a slot.
    rows.saturating_mul(sample_bytes_max.saturating_add(LEN_BYTES)).saturating_add(HEADER_BYTES)
}

impl RawBatch {
    /// Clears it, keeping its memory.
    pub fn begin(&mut self, first_sample: u64) {
        self.first_sample = first_sample;
        self.ends.clear();
        self.bytes.clear();
    }

    /// Appends a row.
    pub fn push(&mut self, sample: &[u8]) {
        self.bytes.extend_from_slice(sample);
        self.ends.push(self.bytes.len());
    }

    /// How many rows there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.ends.len()
    }

    /// Bytes of all rows.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Writes a range of the rows as a message, and returns its length.
    pub(super) fn write(&self, rows: Range<usize>, into: &mut [u8]) -> Result<usize> {
        let end_of = |row: usize| if row == 0 { 0 } else { self.ends[row - 1] };
        let bytes = &self.bytes[end_of(rows.start)..end_of(rows.end)];
        let head = HEADER_BYTES + LEN_BYTES * rows.len();
        let expected = into.len();
        let Some(into) = into.get_mut(..head + bytes.len()) else {
            return Err(NodeError::Slot {
                first_sample: self.first_sample + rows.start as u64,
                rows: rows.len(),
                found: head + bytes.len(),
                expected,
            }
            .into());
        };
        let (lens, body) = into.split_at_mut(head);
        let first_sample = self.first_sample + rows.start as u64;
        lens[..8].copy_from_slice(&first_sample.to_le_bytes());
        lens[8..HEADER_BYTES].copy_from_slice(&(rows.len() as u64).to_le_bytes());
        for (row, place) in rows.zip(lens[HEADER_BYTES..].chunks_exact_mut(LEN_BYTES)) {
            let len = (end_of(row + 1) - end_of(row)) as u64;
            place.copy_from_slice(&len.to_le_bytes());
        }
        body.copy_from_slice(bytes);
        Ok(head + bytes.len())
    }
}

impl<'a> Samples<'a> {
    /// Parses a message, which another process wrote.
    pub(super) fn parse(message: &'a [u8]) -> Result<Self> {
        let broken = || Error::from(NodeError::Message { found: message.len() });
        let (first_sample, rest) = number(message).ok_or_else(broken)?;
        let (rows, rest) = number(rest).ok_or_else(broken)?;
        let lens_len = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(LEN_BYTES));
        let (lens, bytes) =
            lens_len.and_then(|len| rest.split_at_checked(len)).ok_or_else(broken)?;
        let mut expected = 0_u64;
        for len in lens.chunks_exact(LEN_BYTES) {
            let (len, _) = number(len).ok_or_else(broken)?;
            expected = expected.checked_add(len).ok_or_else(broken)?;
        }
        if expected != bytes.len() as u64 {
            return Err(broken());
        }
        Ok(Samples { first_sample, lens, bytes })
    }

    /// The number of the first sample.
    #[must_use]
    pub fn first_sample(&self) -> u64 {
        self.first_sample
    }

    /// How many there are.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.lens.len() / LEN_BYTES
    }

    /// Each sample's number and bytes, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let mut rest = self.bytes;
        let lens = self.lens.chunks_exact(LEN_BYTES);
        (self.first_sample..).zip(lens).map(move |(nth, len)| {
            let (len, _) = number(len).expect("a chunk of 8 bytes");
            let (sample, after) = rest.split_at(len as usize); // fits: checked in `parse`
            rest = after;
            (nth, sample)
        })
    }
}

impl Assemble for RawAssemble {
    type Batch = RawBatch;

    fn begin(&mut self, batch: &mut RawBatch, first_sample: u64, _rows: usize) {
        batch.begin(first_sample);
    }

    fn set_row(&mut self, batch: &mut RawBatch, _row: usize, sample: &Sample<'_>) -> Result<()> {
        batch.push(sample.bytes);
        Ok(())
    }
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_malformed_ones_are_refused() {
        let mut batch = RawBatch::default();
        batch.begin(40);
        for sample in [&b"one"[..], b"", b"three"] {
            batch.push(sample);
        }
        let mut slot = vec![0; message_bytes_max(3, 5)];
        let len = batch.write(1..3, &mut slot).unwrap();
        let samples = Samples::parse(&slot[..len]).unwrap();
        let all: Vec<_> = samples.iter().collect();
        assert_eq!((samples.rows(), all), (2, vec![(41, &b""[..]), (42, &b"three"[..])]));
        for cut in 0..len {
            Samples::parse(&slot[..cut]).unwrap_err();
        }
        Samples::parse(&slot[..=len]).unwrap_err();
        for huge in [u64::MAX, 1 << 61, 3] {
            let mut broken = slot.clone();
            broken[8..16].copy_from_slice(&huge.to_le_bytes());
            Samples::parse(&broken[..len]).unwrap_err();
        }
        let error = batch.write(0..3, &mut slot[..40]).unwrap_err().to_string();
        assert!(error.contains("48 bytes") && error.contains("40"), "{error}");
    }
}
