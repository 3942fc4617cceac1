//! The batch that circulates between the threads of a cleaning run.

use super::worker::FilteredBatch;
use crate::batch::document_batch::DocumentBatch;
use crate::pipeline::PipelineItem;

/// Whole lines of one input, and what is known about them.
#[derive(Debug, Default)]
pub(super) struct LineBatch {
    pub(super) parcel: DocumentBatch,
    pub(super) judged: FilteredBatch,
}

impl PipelineItem for LineBatch {
    fn parcel(&mut self) -> &mut DocumentBatch {
        &mut self.parcel
    }

    fn reset(&mut self) {
        self.parcel.reset();
        self.judged.reset();
    }
}
