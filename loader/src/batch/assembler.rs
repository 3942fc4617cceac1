//! From the bytes of samples to batches.

use std::fmt;

use crate::{PieceRef, Result, SampleOrigin};

/// One sample as it was read.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// Its number in the order.
    pub number: u64,
    /// The dataset that it is from.
    pub origin: SampleOrigin,
    /// Its pieces.
    pub pieces: &'a [PieceRef],
    /// The bytes of all pieces, back to back.
    pub bytes: &'a [u8],
}

impl<'a> Sample<'a> {
    /// Each piece and its bytes, in order.
    ///
    /// # Panics
    /// If there are fewer bytes than the pieces have.
    pub fn parts(&self) -> impl Iterator<Item = (&'a PieceRef, &'a [u8])> + use<'a> {
        let mut rest = self.bytes;
        self.pieces.iter().map(move |piece| {
            let (bytes, after) = rest.split_at(piece.len_bytes as usize); // fits: it is in memory
            rest = after;
            (piece, bytes)
        })
    }
}

/// Assembles batches of one kind from samples. It runs on a thread of the loader, ahead of the
/// consumer.
pub trait Assemble: fmt::Debug + Send + 'static {
    /// The batch that a step consumes. The default is an empty one; returned batches are reused.
    type Batch: fmt::Debug + Default + Send + 'static;

    /// Makes room for `rows` rows, reusing allocated memory.
    fn begin(&mut self, batch: &mut Self::Batch, first_sample: u64, rows: usize);

    /// Sets one row. Called once for each row, in order.
    ///
    /// # Errors
    /// The sample is invalid.
    fn set_row(&mut self, batch: &mut Self::Batch, row: usize, sample: &Sample<'_>) -> Result<()>;

    /// Completes the batch, after its last row.
    ///
    /// # Errors
    /// The batch is invalid.
    fn finish(&mut self, batch: &mut Self::Batch) -> Result<()> {
        let _ = batch;
        Ok(())
    }
}
