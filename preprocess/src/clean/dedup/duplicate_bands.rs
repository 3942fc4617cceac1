//! Finds the bands that several documents share: the first of two passes.

use std::path::Path;

use crate::Result;
use crate::clean::dedup::hash::fold;
use crate::clean::dedup::text_spool::TextSpool;

/// Rows that are written at a time, band by band, so that one band can be read without the others:
/// with 20 bands 640 KiB, and reads of 32 KiB.
const BLOCK_ROWS: usize = 4096;

/// Collects the hashes of all bands of all documents in a temporary file: 8 bytes for each.
#[derive(Debug)]
pub(in crate::clean) struct Bands {
    bands: usize,
    scratch: TextSpool,
    /// Rows of the block that is not full yet, one after another.
    pending: Vec<u64>,
    rows: u64,
    sum: u64,
}

impl Bands {
    pub(in crate::clean) fn create(bands: usize, folder: Option<&Path>) -> Result<Self> {
        let scratch = TextSpool::create(folder)?;
        Ok(Bands { bands, scratch, pending: Vec::new(), rows: 0, sum: 0 })
    }

    /// Adds the next document that has bands.
    pub(in crate::clean) fn add(&mut self, hashes: &[u64]) -> Result<()> {
        assert_eq!(hashes.len(), self.bands, "a document has a hash for every band");
        self.rows += 1;
        self.sum = fold(self.sum, hashes[0]);
        self.pending.extend_from_slice(hashes);
        if self.pending.len() == BLOCK_ROWS * self.bands { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<()> {
        let mut bytes = Vec::with_capacity(self.pending.len() * 8);
        for band in 0..self.bands {
            for row in self.pending.chunks_exact(self.bands) {
                bytes.extend_from_slice(&row[band].to_le_bytes());
            }
        }
        self.pending.clear();
        self.scratch.append(&bytes).map(drop)
    }

    /// Sorts the hashes of each band, in 16 bytes a document, and marks those that occur twice.
    pub(in crate::clean) fn find(mut self) -> Result<DuplicateBands> {
        self.flush()?;
        let bands = self.bands as u64;
        // fits: a bit for each of the hashes that are sorted in memory below
        let marks = vec![0; (self.rows * bands).div_ceil(64) as usize];
        let mut twice = DuplicateBands { bands, marks, rows: self.rows, sum: self.sum };
        let mut column = Vec::new();
        for band in 0..self.bands {
            self.read_band(band, &mut column)?;
            column.sort_unstable();
            for pair in column.windows(2) {
                if pair[0].0 == pair[1].0 {
                    twice.mark(pair[0].1, band);
                    twice.mark(pair[1].1, band);
                }
            }
        }
        Ok(twice)
    }

    /// The hashes of one band, each with its row.
    fn read_band(&self, band: usize, column: &mut Vec<(u64, u64)>) -> Result<()> {
        column.clear();
        let mut bytes = Vec::new();
        for first in (0..self.rows).step_by(BLOCK_ROWS) {
            let rows = (self.rows - first).min(BLOCK_ROWS as u64) as usize; // fits: a block's
            let start = first * self.bands as u64 + (band * rows) as u64;
            self.scratch.read(start * 8, rows * 8, &mut bytes)?;
            let hashes = bytes.as_chunks().0.iter().map(|hash| u64::from_le_bytes(*hash));
            column.extend(hashes.zip(first..));
        }
        Ok(())
    }

    pub(in crate::clean) fn scratch_bytes(&self) -> u64 {
        self.scratch.len_bytes()
    }
}

/// A bit for each band of each document: 20 bands take 2.5 bytes a document.
#[derive(Debug)]
pub(in crate::clean) struct DuplicateBands {
    bands: u64,
    marks: Vec<u64>,
    pub(in crate::clean) rows: u64,
    /// A hash of the documents of this pass, with which the second pass is compared.
    pub(in crate::clean) sum: u64,
}

impl DuplicateBands {
    fn mark(&mut self, row: u64, band: usize) {
        let bit = row * self.bands + band as u64;
        self.marks[(bit / 64) as usize] |= 1 << (bit % 64); // fits: within the marks
    }

    /// Whether another document has this band too. True for rows that the first pass did not have,
    /// so that they are compared.
    pub(in crate::clean) fn has(&self, row: u64, band: usize) -> bool {
        let bit = row * self.bands + band as u64;
        let marks = usize::try_from(bit / 64).ok().and_then(|at| self.marks.get(at));
        marks.is_none_or(|marks| marks >> (bit % 64) & 1 == 1)
    }

    pub(in crate::clean) fn table_bytes(&self) -> u64 {
        self.marks.len() as u64 * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clean::dedup::hash::scatter;

    #[test]
    fn shared_bands_are_marked() {
        for row_count in [0, 1, 5, BLOCK_ROWS, 2 * BLOCK_ROWS + 7] {
            let mut bands = Bands::create(3, None).unwrap();
            let hash = |row: u64, band: u64| scatter(row * 3 + band) % (row_count as u64 + 2);
            let rows: Vec<[u64; 3]> =
                (0..row_count as u64).map(|row| [0, 1, 2].map(|band| hash(row, band))).collect();
            let mut counts = vec![[0; 3]; row_count + 2];
            for row in &rows {
                bands.add(row).unwrap();
                (0..3).for_each(|band| counts[row[band] as usize][band] += 1);
            }
            let twice = bands.find().unwrap();
            for (nth, row) in rows.iter().enumerate() {
                for band in 0..3 {
                    let expected = counts[row[band] as usize][band] > 1;
                    assert_eq!(twice.has(nth as u64, band), expected, "row {nth}, band {band}");
                }
            }
        }
    }
}
