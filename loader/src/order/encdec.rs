use std::sync::Arc;

use indexed::{GptIndex, IndexedDataset};

use crate::batch::EncDecPart;
use crate::{DataFile, Error, PieceRef, Result, SampleOrder};

/// CPM-2's order: samples are runs of the contexts, to which the targets belong.
///
/// The pieces of a sample come in threes, as [`EncDecAssemble`](crate::batch::EncDecAssemble) needs
/// them: part of the context of a document, its complete target, its complete target offsets. The
/// spans of a part of a context are unknown until it is read, so more of a document that is much
/// longer than a sample is read than used: with 15 % masked, 0.3 tokens for each of its own.
#[derive(Debug)]
pub struct EncDecOrder {
    datasets: [Arc<IndexedDataset>; 3],
    index: Arc<GptIndex>,
    encoder_len: u64,
    sources: [DataFile; 3],
}

/// The names of the three in messages.
const PARTS: [&str; 3] = ["context", "target", "target_offset"];

impl EncDecOrder {
    /// Orders the `context`, `target` and `target_offset` of a corpus by an index of the contexts.
    /// Its samples must have `encoder_len` tokens: the index is built for one less and an extra
    /// one.
    ///
    /// # Errors
    /// [`Error::Triple`] if the three do not have the same documents; as [`DataFile::bin_of`].
    pub fn new(
        datasets: [Arc<IndexedDataset>; 3],
        index: Arc<GptIndex>,
        encoder_len: usize,
    ) -> Result<Self> {
        let expected = datasets[0].sequence_count();
        for (dataset, part) in datasets.iter().zip(PARTS) {
            let found = dataset.sequence_count();
            if found != expected {
                return Err(Error::Triple { dataset: dataset.display(), part, found, expected });
            }
        }
        let [context, target, offset] = &datasets;
        let sources =
            [DataFile::bin_of(context)?, DataFile::bin_of(target)?, DataFile::bin_of(offset)?];
        Ok(EncDecOrder { datasets, index, encoder_len: encoder_len as u64, sources })
    }

    /// The element types of the three, for the assembler.
    #[must_use]
    pub fn part(&self) -> EncDecPart {
        let [context, target, target_offset] = self.datasets.each_ref().map(|each| each.dtype());
        EncDecPart { context, target, target_offset }
    }

    /// All of a sequence of the nth dataset.
    fn whole(&self, nth: u32, sequence: u64) -> PieceRef {
        let dataset = &self.datasets[nth as usize];
        PieceRef {
            file: nth,
            offset_bytes: dataset.sequence_offset_bytes(sequence),
            len_bytes: u64::from(dataset.sequence_len(sequence)) * dataset.dtype().item_bytes(),
        }
    }
}

impl SampleOrder for EncDecOrder {
    fn sources(&self) -> &[DataFile] {
        &self.sources
    }

    fn sample_count(&self) -> u64 {
        self.index.sample_count()
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let item_bytes = self.datasets[0].dtype().item_bytes();
        let mut found = 0;
        self.index.for_each_part(&self.datasets[0], sample, |part, offset_bytes| {
            found += part.token_count;
            let mut context = self.whole(0, part.sequence);
            context.offset_bytes = offset_bytes;
            context.len_bytes = part.token_count * item_bytes;
            into.extend([context, self.whole(1, part.sequence), self.whole(2, part.sequence)]);
        })?;
        let expected = self.encoder_len;
        if found != expected {
            return Err(Error::SampleLength { dataset: self.name(), sample, found, expected });
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.datasets[0].display()
    }
}
