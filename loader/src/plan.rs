//! The future order as extents of the `.bin`: pure, no clock and no IO.
//!
//! A sample is cut from one or more documents, each somewhere else in the file. The pieces of all
//! samples that are fetched together are sorted by their place and merged where they touch or
//! nearly do, so that the device sees few, ascending requests; each piece then remembers which
//! extent it is in, and the tokens come back in sample order whatever order they were read in.

use indexed::{GptIndex, IndexedDataset, Part};

use crate::{Error, Result};

/// A run of bytes to be read in one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the `.bin`.
    pub offset_bytes: u64,
    /// How many.
    pub len_bytes: u64,
    /// Where the bytes go in the buffer that holds all extents of the plan, back to back.
    pub place_bytes: u64,
}

/// One part of one sample: where its tokens lie in the buffer of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte in the `.bin`.
    offset_bytes: u64,
    /// How many.
    pub len_bytes: u64,
    /// First byte in the buffer of the plan.
    pub place_bytes: u64,
}

/// What to read for a run of consecutive samples, and where each sample is in what was read.
#[derive(Debug, Default)]
pub struct Plan {
    /// Ascending and disjoint.
    pub extents: Vec<Extent>,
    /// The pieces of all samples, sample after sample, in token order.
    pub pieces: Vec<Piece>,
    /// Where each sample's pieces end in `pieces`.
    ends: Vec<usize>,
    order: Vec<usize>,
    parts: Vec<Part>,
}

/// Reading 4 KiB that nobody asked for costs less than one more request on every device that we
/// know; the page cache moves them in any case.
const GAP_BYTES_MAX: u64 = 4096;

/// An extent stops growing at 1 MiB: more does not make a device faster, and would leave the
/// requests behind it waiting.
const EXTENT_BYTES_MAX: u64 = 1 << 20;

impl Plan {
    /// Plans samples `[first, first + count)` of the shuffled order, reusing the vectors.
    /// `tokens_max` is the most that a sample may have.
    ///
    /// # Errors
    /// [`Error::SampleLength`] if the index gives a sample more tokens than that.
    pub fn fill(
        &mut self,
        dataset: &IndexedDataset,
        index: &GptIndex,
        samples: std::ops::Range<u64>,
        tokens_max: u64,
    ) -> Result<()> {
        self.pieces.clear();
        self.ends.clear();
        let item_bytes = dataset.dtype().item_bytes();
        for sample in samples {
            self.parts.clear();
            index.parts(dataset, sample, &mut self.parts);
            let got = self.parts.iter().map(|part| part.token_count).sum();
            if got > tokens_max {
                let dataset = dataset.display();
                return Err(Error::SampleLength { dataset, sample, got, due: tokens_max });
            }
            self.pieces.extend(self.parts.iter().filter(|part| part.token_count > 0).map(|part| {
                Piece {
                    offset_bytes: dataset.sequence_offset_bytes(part.sequence)
                        + part.token_offset * item_bytes,
                    len_bytes: part.token_count * item_bytes,
                    place_bytes: 0,
                }
            }));
            self.ends.push(self.pieces.len());
        }
        self.merge();
        Ok(())
    }

    /// Bytes of all extents together.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.extents.last().map_or(0, |last| last.place_bytes + last.len_bytes)
    }

    /// The pieces of the `nth` sample of the plan, in token order.
    #[must_use]
    pub fn sample(&self, nth: usize) -> &[Piece] {
        let start = if nth == 0 { 0 } else { self.ends[nth - 1] };
        &self.pieces[start..self.ends[nth]]
    }

    fn merge(&mut self) {
        self.extents.clear();
        self.order.clear();
        self.order.extend(0..self.pieces.len());
        let pieces = &mut self.pieces;
        self.order.sort_unstable_by_key(|&nth| (pieces[nth].offset_bytes, nth));
        let mut place_bytes = 0;
        for &nth in &self.order {
            let Piece { offset_bytes, len_bytes, .. } = pieces[nth];
            let end = offset_bytes + len_bytes;
            match self.extents.last_mut() {
                Some(last) if joins(last, offset_bytes, end) => {
                    last.len_bytes = last.len_bytes.max(end - last.offset_bytes);
                }
                _ => self.extents.push(Extent { offset_bytes, len_bytes, place_bytes }),
            }
            let last = self.extents.last().expect("pushed above if there was none");
            pieces[nth].place_bytes = last.place_bytes + (offset_bytes - last.offset_bytes);
            place_bytes = last.place_bytes + last.len_bytes;
        }
    }
}

/// Whether `[offset, end)`, which begins no earlier than the extent does, is read along with it.
/// What overlaps always is, so that no byte is read twice.
fn joins(extent: &Extent, offset: u64, end: u64) -> bool {
    let extent_end = extent.offset_bytes + extent.len_bytes;
    let near =
        offset <= extent_end + GAP_BYTES_MAX && end - extent.offset_bytes <= EXTENT_BYTES_MAX;
    offset < extent_end || near
}
