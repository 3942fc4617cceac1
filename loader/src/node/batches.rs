use std::sync::Arc;

use super::{NodeError, NodeReader};
use crate::{Assemble, Order, PieceRef, Result, Sample};

/// Batches of one kind, out of the node's one reader: what a [`NodeReader`] gives, assembled here.
#[derive(Debug)]
pub struct NodeBatches<A: Assemble> {
    reader: NodeReader,
    order: Arc<dyn Order>,
    assemble: A,
    pieces: Vec<PieceRef>,
    spent: Vec<A::Batch>,
}

impl<A: Assemble> NodeBatches<A> {
    /// The order must be the one that the reader reads.
    pub fn new(reader: NodeReader, order: Arc<dyn Order>, assemble: A) -> Self {
        NodeBatches { reader, order, assemble, pieces: Vec::new(), spent: Vec::new() }
    }

    /// This rank's batch of the next step, or `None` after the last.
    ///
    /// # Errors
    /// As [`NodeReader::next`], and what the assembler says; [`NodeError::Sample`] if a sample is
    /// not as long as the order has it.
    pub fn next_batch(&mut self) -> Result<Option<A::Batch>> {
        let Some(samples) = self.reader.next()? else { return Ok(None) };
        let mut batch = self.spent.pop().unwrap_or_default();
        self.assemble.begin(&mut batch, samples.first_sample(), samples.rows());
        for (row, (number, bytes)) in samples.iter().enumerate() {
            self.pieces.clear();
            self.order.pieces(number, &mut self.pieces)?;
            let due = self.pieces.iter().map(|piece| piece.len_bytes).sum();
            if bytes.len() as u64 != due {
                let (order, got) = (self.order.name(), bytes.len() as u64);
                return Err(NodeError::Sample { order, sample: number, got, due }.into());
            }
            let origin = self.order.origin(number);
            let sample = Sample { number, origin, pieces: &self.pieces, bytes };
            self.assemble.set_row(&mut batch, row, &sample)?;
        }
        self.assemble.finish(&mut batch)?;
        Ok(Some(batch))
    }

    /// Gives a batch's memory back, to be filled again.
    pub fn recycle(&mut self, batch: A::Batch) {
        self.spent.push(batch);
    }

    /// Samples consumed by all ranks: all that there is to remember.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.reader.samples_consumed()
    }
}
