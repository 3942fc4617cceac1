//! The batch that circulates between the threads of a cleaning run.

use super::worker::FilteredBatch;
use crate::batch::document_batch::DocumentBatch;
use crate::pipeline::PipelineItem;

/// Whole lines of one input, and the results of filtering them.
#[derive(Debug, Default)]
pub(super) struct LineBatch {
    pub(super) document_batch: DocumentBatch,
    pub(super) filtered: FilteredBatch,
}

impl PipelineItem for LineBatch {
    fn document_batch(&mut self) -> &mut DocumentBatch {
        &mut self.document_batch
    }

    fn reset(&mut self) {
        self.document_batch.reset();
        self.filtered.reset();
    }
}
