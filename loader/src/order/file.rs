//! Orders that need no tables: a block shuffle, and the order of the file.

use std::sync::Arc;

use indexed::{BlockEpoch, BlockShuffle, IndexedDataset, TokenStream};

use crate::order::sample_order::{DataFile, PieceRef, SampleOrder, SampleOrigin};
use crate::{Error, Result};

/// A native order for stores that charge per request: the blocks of a file shuffled, and the
/// samples of several blocks mixed; see [`BlockShuffle`].
///
/// A sample's [`SampleOrigin`] is its number in the [`TokenStream`].
#[derive(Debug)]
pub struct BlockOrder {
    name: String,
    stream: TokenStream,
    epochs: Vec<BlockEpoch>,
    source: [DataFile; 1],
}

impl BlockOrder {
    /// Orders the samples of a stream of this dataset for `epochs` epochs, each shuffled
    /// differently.
    ///
    /// # Errors
    /// [`Error::Option`] if the shuffle is of another number of samples than the stream has, or
    /// for more epochs than a million; as [`DataFile::bin_of`].
    pub fn new(
        dataset: &IndexedDataset,
        stream: TokenStream,
        shuffle: &BlockShuffle,
        epochs: u64,
    ) -> Result<Self> {
        let found = shuffle.sample_count();
        if found != stream.sample_count() {
            return Err(Error::Option {
                name: "block shuffle",
                found,
                expected: "as many samples as the stream has",
            });
        }
        if !(1..=1_000_000).contains(&epochs) {
            return Err(Error::Option {
                name: "epochs",
                found: epochs,
                expected: "1 to 1,000,000",
            });
        }
        let source = [DataFile::bin_of(dataset)?];
        let epochs = (0..epochs).map(|epoch| shuffle.epoch(epoch)).collect();
        Ok(BlockOrder { name: dataset.display(), stream, epochs, source })
    }

    fn number(&self, sample: u64) -> u64 {
        let per_epoch = self.stream.sample_count();
        // fits: an epoch that is in memory
        self.epochs[(sample / per_epoch) as usize].sample(sample % per_epoch)
    }
}

impl SampleOrder for BlockOrder {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        self.stream.sample_count() * self.epochs.len() as u64
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let (offset_bytes, len_bytes) = self.stream.extent(self.number(sample));
        into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        Ok(())
    }

    fn origin(&self, sample: u64) -> SampleOrigin {
        SampleOrigin { dataset: 0, sample: self.number(sample) }
    }

    fn together_until(&self, sample: u64) -> u64 {
        let per_epoch = self.stream.sample_count();
        let (epoch, position) = (sample / per_epoch, sample % per_epoch);
        // fits: an epoch that is in memory
        epoch * per_epoch + self.epochs[epoch as usize].window_end(position)
    }

    fn name(&self) -> String {
        format!("a block shuffle of {}", self.name)
    }
}

/// The sequences of a dataset as samples, in the order of the file: what `feedline materialize`
/// has written.
#[derive(Debug)]
pub struct FileOrder {
    dataset: Arc<IndexedDataset>,
    tokens_max: u64,
    source: [DataFile; 1],
}

impl FileOrder {
    /// Takes each sequence as a sample of `seq_len` tokens and the label of the last.
    ///
    /// # Errors
    /// As [`DataFile::bin_of`].
    pub fn new(dataset: Arc<IndexedDataset>, seq_len: usize) -> Result<Self> {
        let source = [DataFile::bin_of(&dataset)?];
        Ok(FileOrder { dataset, tokens_max: seq_len as u64 + 1, source })
    }
}

impl SampleOrder for FileOrder {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        self.dataset.sequence_count()
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let found = u64::from(self.dataset.sequence_len(sample));
        if found > self.tokens_max {
            let (dataset, expected) = (self.name(), self.tokens_max);
            return Err(Error::SampleLength { dataset, sample, found, expected });
        }
        let offset_bytes = self.dataset.sequence_offset_bytes(sample);
        let len_bytes = found * self.dataset.dtype().item_bytes();
        into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        self.dataset.display()
    }
}
