use std::sync::Arc;

use indexed::{GptIndex, IndexedDataset};

use crate::batch::{GptAssemble, GptConfig};
use crate::{Batch, GptOrder, Loader, LoaderOptions, Metrics, Result, SampleOrder};

/// What a loader of GPT batches is to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptLoaderOptions {
    /// Tokens a row. Minimum: 1. The index must have been built for the same length.
    pub seq_len: usize,
    /// Rows a batch. Minimum: 1.
    pub micro_batch: usize,
    /// The first sample to deliver: what a checkpoint remembers.
    pub samples_consumed: u64,
    /// One past the last sample to deliver.
    pub samples_end: u64,
    /// Batches that are read ahead of the one that is being consumed, at least: how many more is a
    /// matter of time and memory, see [`LoaderOptions::window`]. Minimum: 1.
    pub window_batches: usize,
}

/// Batches of one GPT corpus in the shuffled order, for one rank.
#[derive(Debug)]
pub struct GptBatches(Loader<GptAssemble>);

impl GptBatches {
    /// Starts reading at `options.samples_consumed`.
    ///
    /// # Errors
    /// [`Error::Option`] for a size of zero, [`Error::TooFewSamples`] if the index ends too soon.
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

    /// The next batch in order, or `None` after the last. Waits if it has not been read yet.
    ///
    /// # Errors
    /// As [`Loader::next_batch`].
    pub fn next_batch(&mut self) -> Result<Option<Batch>> {
        self.0.next_batch()
    }

    /// Gives a batch's memory back, to be filled again. After the first window nothing is
    /// allocated.
    pub fn recycle(&self, batch: Batch) {
        self.0.recycle(batch);
    }

    /// Samples delivered by now, those before the start counted in: all that there is to remember.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.0.samples_consumed()
    }

    /// What was done since the start.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.0.metrics()
    }
}
