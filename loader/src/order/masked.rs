use std::ops::Range;
use std::sync::Arc;

use indexed::{IndexedDataset, MaskedIndex};

use crate::batch::MaskedPart;
use crate::{DataFile, Error, PieceRef, Result, SampleOrder};

/// The order of BERT and T5: samples are runs of sentences, and each sentence is a piece.
#[derive(Debug)]
pub struct MaskedOrder {
    dataset: Arc<IndexedDataset>,
    index: Arc<MaskedIndex>,
    source: [DataFile; 1],
}

impl MaskedOrder {
    /// Orders a dataset of sentences by its index.
    ///
    /// # Errors
    /// As [`DataFile::bin_of`].
    pub fn new(dataset: Arc<IndexedDataset>, index: Arc<MaskedIndex>) -> Result<Self> {
        let source = [DataFile::bin_of(&dataset)?];
        Ok(MaskedOrder { dataset, index, source })
    }

    /// The parameters of the dataset for the assemblers of its samples.
    #[must_use]
    pub fn part(&self) -> MaskedPart {
        MaskedPart { dtype: self.dataset.dtype(), index: Arc::clone(&self.index) }
    }
}

impl SampleOrder for MaskedOrder {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        self.index.sample_count()
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let Range { start, end } = self.index.sample(sample).sentences;
        let count = self.dataset.sequence_count();
        if start > end || end > count {
            return Err(Error::Sample {
                objective: "masked",
                sample,
                found: format!(
                    "sentences {start} to {end} (hint: build the index for this dataset)"
                ),
                expected: format!("a range of the {count} sentences of {}", self.name()),
            });
        }
        let item_bytes = self.dataset.dtype().item_bytes();
        into.extend((start..end).map(|sentence| PieceRef {
            file: 0,
            offset_bytes: self.dataset.sequence_offset_bytes(sentence),
            len_bytes: u64::from(self.dataset.sequence_len(sentence)) * item_bytes,
        }));
        Ok(())
    }

    fn name(&self) -> String {
        self.dataset.display()
    }
}
