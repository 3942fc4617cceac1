use std::sync::Arc;

use indexed::{GptIndex, IndexedDataset};

use crate::batch::{GptAssemble, GptConfig};
use crate::{Batch, GptOrder, Loader, LoaderOptions, Metrics, Result, SampleOrder};

/// Options of a GPT loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptLoaderOptions {
    /// Tokens a row. Minimum: 1. The index must have been built for the same length.
    pub seq_len: usize,
    /// Rows a batch. Minimum: 1.
    pub micro_batch: usize,
    /// The first sample to deliver: the state in a checkpoint.
    pub samples_consumed: u64,
    /// One past the last sample to deliver.
    pub samples_end: u64,
    /// The fewest batches to read ahead of the consumer: how many more depends on time and memory,
    /// see [`LoaderOptions::window`]. Minimum: 1.
    pub window_batches: usize,
}

/// Batches of one GPT corpus in the shuffled order, for one rank.
#[derive(Debug)]
pub struct GptBatches(Loader<GptAssemble>);

impl GptBatches {
    /// Starts reading at `options.samples_consumed`.
    ///
    /// # Errors
    /// [`Error::Option`](crate::Error::Option) for a size of zero,
    /// [`Error::TooFewSamples`](crate::Error::TooFewSamples) if the index ends too soon.
    pub fn start(
        dataset: Arc<IndexedDataset>,
        index: Arc<GptIndex>,
        options: GptLoaderOptions,
    ) -> Result<Self> {
        let GptLoaderOptions {
            seq_len,
            micro_batch,
            samples_consumed,
            samples_end,
            window_batches,
        } = options;
        let assemble = GptAssemble::new(GptConfig::new(seq_len), vec![dataset.dtype()])?;
        let order: Arc<dyn SampleOrder> = Arc::new(GptOrder::new(dataset, index, seq_len)?);
        let mut options = LoaderOptions::new(micro_batch, samples_consumed..samples_end);
        options.batches_min = window_batches as u64;
        Ok(GptBatches(Loader::start(order, assemble, options)?))
    }

    /// The next batch in order, or `None` after the last. Waits until it has been read.
    ///
    /// # Errors
    /// As [`Loader::next_batch`].
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        self.0.next_batch()
    }

    /// Returns a batch's memory for reuse. After the first window nothing is allocated.
    pub fn recycle(&self, batch: Batch) {
        self.0.recycle(batch);
    }

    /// Samples delivered so far, including those before the start: the whole state to save.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.0.samples_consumed()
    }

    /// Metrics since the start.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.0.metrics()
    }
}
