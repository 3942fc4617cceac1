//! Defines which bytes a sample consists of: pure, no clock, no data reads.

use std::fmt;
use std::sync::Arc;

use indexed::{BlendIndex, BlockChecksums, GptIndex, IndexedDataset};
use storage::{Key, Storage};

use crate::{Error, Result};

/// The order of the samples, and the location of their bytes in files.
///
/// The same order and sample must always return the same pieces: prefetching, resuming and sharing
/// between ranks rely on it. It may read mapped index files, but no data files.
pub trait SampleOrder: fmt::Debug + Send + Sync {
    /// The files that samples are cut from. Each is opened when a sample first needs it.
    fn sources(&self) -> &[DataFile];

    /// How many samples there are.
    fn sample_count(&self) -> u64;

    /// Appends the pieces of a sample, in the order in which the sample has them. One without any
    /// is an empty sample.
    ///
    /// # Errors
    /// The index of this sample is invalid.
    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()>;

    /// The dataset of a sample. Default: the only one.
    fn origin(&self, sample: u64) -> SampleOrigin {
        SampleOrigin { dataset: 0, sample }
    }

    /// One past the last sample to read together with this one if memory allows, because their
    /// requests coalesce. Default: only this sample.
    fn together_until(&self, sample: u64) -> u64 {
        sample + 1
    }

    /// Its name in messages.
    fn name(&self) -> String;
}

/// A data file that need not be open yet.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// The store that it is in.
    pub store: Arc<dyn Storage>,
    /// Its name there.
    pub key: Key,
    /// Its length, as its index has it.
    pub len_bytes: u64,
    /// The checksums of its blocks, if it has any.
    pub checksums: Option<Arc<BlockChecksums>>,
}

/// A contiguous range of one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceRef {
    /// The file, as an index into [`SampleOrder::sources`].
    pub file: u32,
    /// First byte.
    pub offset_bytes: u64,
    /// How many.
    pub len_bytes: u64,
}

/// The dataset and number of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleOrigin {
    /// The dataset, as an index into the blend.
    pub dataset: u32,
    /// Which of that dataset's samples it is, in that dataset's own order.
    pub sample: u64,
}

impl DataFile {
    /// A file whose blocks have no checksums.
    #[must_use]
    pub fn new(store: Arc<dyn Storage>, key: Key, len_bytes: u64) -> Self {
        DataFile { store, key, len_bytes, checksums: None }
    }

    /// The `.bin` of a dataset.
    ///
    /// # Errors
    /// [`Error::Storage`] if the name of the dataset leaves no room for the ending.
    pub fn bin_of(dataset: &IndexedDataset) -> Result<Self> {
        Ok(DataFile {
            store: Arc::clone(dataset.store()),
            key: dataset.prefix().with_suffix(".bin")?,
            len_bytes: dataset.token_count() * dataset.dtype().item_bytes(),
            checksums: dataset.checksums().cloned(),
        })
    }
}

/// Megatron's order of one GPT dataset.
#[derive(Debug)]
pub struct GptOrder {
    dataset: Arc<IndexedDataset>,
    index: Arc<GptIndex>,
    tokens_max: u64,
    source: [DataFile; 1],
}

impl GptOrder {
    /// Orders a dataset by its index. `seq_len` is what the index was built for: a sample has that
    /// many tokens and the label of the last.
    ///
    /// # Errors
    /// As [`DataFile::bin_of`].
    pub fn new(dataset: Arc<IndexedDataset>, index: Arc<GptIndex>, seq_len: usize) -> Result<Self> {
        let source = [DataFile::bin_of(&dataset)?];
        Ok(GptOrder { dataset, index, tokens_max: seq_len as u64 + 1, source })
    }
}

impl SampleOrder for GptOrder {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        self.index.sample_count()
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let item_bytes = self.dataset.dtype().item_bytes();
        let mut found = 0;
        self.index.for_each_part(&self.dataset, sample, |part, offset_bytes| {
            found += part.token_count;
            let len_bytes = part.token_count * item_bytes;
            into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        })?;
        if found > self.tokens_max {
            let expected = self.tokens_max;
            return Err(Error::SampleLength { dataset: self.name(), sample, found, expected });
        }
        Ok(())
    }

    fn name(&self) -> String {
        self.dataset.display()
    }
}

/// Several orders mixed into one.
#[derive(Debug)]
pub struct BlendOrder {
    orders: Vec<Arc<dyn SampleOrder>>,
    blend: Arc<BlendIndex>,
    sources: Vec<DataFile>,
    /// The first file of each order in `sources`.
    firsts: Vec<u32>,
}

impl BlendOrder {
    /// Mixes orders by a blend index of as many datasets.
    #[must_use]
    pub fn new(orders: Vec<Arc<dyn SampleOrder>>, blend: Arc<BlendIndex>) -> Self {
        let mut sources = Vec::new();
        let mut firsts = Vec::with_capacity(orders.len());
        for order in &orders {
            firsts.push(sources.len() as u32); // fits: Megatron numbers datasets with 16 bits
            sources.extend_from_slice(order.sources());
        }
        BlendOrder { orders, blend, sources, firsts }
    }
}

impl SampleOrder for BlendOrder {
    fn sources(&self) -> &[DataFile] {
        &self.sources
    }

    fn sample_count(&self) -> u64 {
        self.blend.sample_count()
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let (dataset, inner) = self.blend.sample(sample);
        // The index may have been read from a file that belongs to other datasets.
        let found = self.orders.get(dataset).map_or(0, |order| order.sample_count());
        if inner >= found {
            return Err(Error::BlendSample { blend: self.name(), dataset, sample: inner, found });
        }
        let first = into.len();
        self.orders[dataset].pieces(inner, into)?;
        for piece in &mut into[first..] {
            piece.file += self.firsts[dataset];
        }
        Ok(())
    }

    fn origin(&self, sample: u64) -> SampleOrigin {
        let (dataset, sample) = self.blend.sample(sample);
        SampleOrigin { dataset: dataset as u32, sample } // fits: 16 bits in the index
    }

    fn name(&self) -> String {
        match &self.orders[..] {
            [first, rest @ ..] if !rest.is_empty() => {
                format!("a blend of {} and {} more", first.name(), rest.len())
            }
            [only] => only.name(),
            _ => "an empty blend".to_owned(),
        }
    }
}
