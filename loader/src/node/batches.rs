use std::sync::Arc;

use super::{BatchSource, NodeClient, NodeError, NodeOptions, Open, RawAssemble, RawBatch};
use crate::{Assemble, Error, Loader, LoaderOptions, PieceRef, Result, Sample, SampleOrder};

/// Batches of one kind, assembled from the samples of a [`NodeClient`].
#[derive(Debug)]
pub struct NodeBatches<A: Assemble> {
    reader: NodeClient,
    order: Arc<dyn SampleOrder>,
    assemble: A,
    pieces: Vec<PieceRef>,
    spent: Vec<A::Batch>,
}

impl<A: Assemble> NodeBatches<A> {
    /// Joins the ranks of a node that read an order; the first of them runs a [`Loader`] for all.
    ///
    /// `options` are those of that loader: its `ranks` are those of the node, and its samples start
    /// at what this rank has consumed. The number of rows, their range and the samples per
    /// step in `node` are set from it, and the order is added to the identity of `node`.
    ///
    /// # Errors
    /// [`Error::Option`] if `node` has not as many blocks as `options` has ranks; the errors
    /// of [`NodeClient::join`].
    pub fn start(
        order: Arc<dyn SampleOrder>,
        assemble: A,
        options: LoaderOptions,
        mut node: NodeOptions,
    ) -> Result<Self> {
        let found = node.blocks.iter().max().map_or(0, |block| u64::from(*block) + 1);
        if found != u64::from(options.ranks.count) {
            return Err(Error::Option {
                name: "blocks",
                found,
                expected: "as many as ranks.count",
            });
        }
        let ranks = options.ranks;
        node.micro_batch = options.micro_batch;
        node.step_samples = (options.micro_batch as u64).saturating_mul(ranks.of.into());
        (node.samples_consumed, node.samples_end) = (options.samples.start, options.samples.end);
        node.identity = format!(
            "{}; {}, ranks from {} of {}",
            node.identity,
            order.name(),
            ranks.first,
            ranks.of
        );
        let reader_order = Arc::clone(&order);
        let open: Open = Arc::new(move |samples_consumed| {
            let mut options = options.clone();
            options.samples.start = samples_consumed.min(options.samples.end);
            Ok(Box::new(Loader::start(Arc::clone(&reader_order), RawAssemble, options)?))
        });
        Ok(Self::new(NodeClient::join(node, open)?, order, assemble))
    }

    /// `order` must be the order that the reader reads.
    pub fn new(reader: NodeClient, order: Arc<dyn SampleOrder>, assemble: A) -> Self {
        NodeBatches { reader, order, assemble, pieces: Vec::new(), spent: Vec::new() }
    }

    /// This rank's batch of the next step, or `None` after the last.
    ///
    /// # Errors
    /// As [`NodeClient::next`], and the errors of the assembler; [`NodeError::Sample`] if a sample
    /// has another length than in the order.
    pub fn next_batch(&mut self) -> Result<Option<A::Batch>> {
        let Some(samples) = self.reader.next()? else { return Ok(None) };
        let mut batch = self.spent.pop().unwrap_or_default();
        self.assemble.begin(&mut batch, samples.first_sample(), samples.rows());
        for (row, (number, bytes)) in samples.iter().enumerate() {
            self.pieces.clear();
            self.order.pieces(number, &mut self.pieces)?;
            let expected = self.pieces.iter().map(|piece| piece.len_bytes).sum();
            if bytes.len() as u64 != expected {
                let (order, found) = (self.order.name(), bytes.len() as u64);
                return Err(NodeError::Sample { order, sample: number, found, expected }.into());
            }
            let origin = self.order.origin(number);
            let sample = Sample { number, origin, pieces: &self.pieces, bytes };
            self.assemble.set_row(&mut batch, row, &sample)?;
        }
        self.assemble.finish(&mut batch)?;
        Ok(Some(batch))
    }

    /// Returns a batch's memory for reuse.
    pub fn recycle(&mut self, batch: A::Batch) {
        self.spent.push(batch);
    }

    /// Samples consumed by all ranks: the whole state to save.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.reader.samples_consumed()
    }
}

impl BatchSource for Loader<RawAssemble> {
    fn next(&mut self, into: &mut RawBatch) -> Result<bool> {
        let Some(batch) = self.next_batch()? else { return Ok(false) };
        self.recycle(std::mem::replace(into, batch));
        Ok(true)
    }
}
