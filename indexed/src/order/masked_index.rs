//! The samples of BERT and T5: runs of whole sentences, in Megatron's order and its cache files.
//!
//! Each sequence of the dataset is a sentence. Samples are runs of sentences of one document that
//! fill a target length, which is shorter for a random part of them; see [`crate::build_mapping`].
//! The tokens of a sample are masked when it is read, depending on its position in this order.

use std::ops::Range;

use serde_json::{Value, json};
use storage::{Key, Storage};

use crate::cache::file_stamp::dataset_stamp;
use crate::cache::index_cache::{self, IfNotKept, Names};
use crate::cache::npy::{Descr, Npy};
use crate::mmididx::idx::{I32Le, I64Le};
use crate::order::gpt_verify::shape_is;
use crate::order::mapping::{MappingConfig, build_mapping, mapping_rows};
use crate::split::{SplitMatrix, part_of};
use crate::{Error, IndexedDataset, Result, Split};

/// Megatron's limit on epochs if a number of samples is requested.
const EPOCHS_MAX: u64 = i32::MAX as u64 - 1;

/// Documents are counted with signed 32 bits. The seed is too, and one is added to it.
const COUNT_MAX: u64 = i32::MAX as u64;

/// A table of 2^36 rows would be 800 GB; such a request is a mistake.
const SAMPLES_MAX: u64 = 1 << 36;

/// Which model the samples are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskedKind {
    /// BERT, whose samples may be pairs.
    Bert {
        /// Whether the order of two halves is an objective, so that a sample has at least two
        /// sentences.
        classification_head: bool,
    },
    /// T5 with its spans hidden behind sentinels.
    T5 {
        /// Tokens of the decoder, which do not change the order.
        sequence_length_decoder: u64,
    },
}

/// The settings of the samples, all of which are part of a cache's name. Those marked * decide the
/// order; the others control how a sample is masked when it is read.
#[derive(Clone, Debug, PartialEq)]
pub struct MaskedConfig {
    /// * The model.
    pub kind: MaskedKind,
    /// The dataset's prefix, as it was given to the training run.
    pub dataset_path: String,
    /// * The shares of train, valid and test, of documents. `None`: each part has its own dataset.
    pub split: Option<String>,
    /// * Tokens of a sample, including special tokens.
    pub seq_len: u64,
    /// * The seed of target lengths and shuffle. At most 2^31 - 2, as Megatron adds one to it.
    pub seed: u32,
    /// * No epoch is started after this many samples. `None`: one epoch, which Megatron cannot
    ///   build, but can read.
    pub num_samples: Option<u64>,
    /// The description of the tokenizer.
    pub tokenizer: Value,
    /// The share of tokens to mask.
    pub masking_probability: f64,
    /// * The share of samples with a shorter target.
    pub short_sequence_probability: f64,
    /// The longest run of words that is masked at once.
    pub masking_max_ngram: u32,
    /// Whether the pieces of a word are masked together.
    pub masking_do_full_word: bool,
    /// Whether some runs are also permuted.
    pub masking_do_permutation: bool,
    /// Whether longer runs are more likely.
    pub masking_use_longer_ngrams: bool,
    /// Whether the length of a run has a geometric distribution.
    pub masking_use_geometric_distribution: bool,
}

/// The order of the samples of one part of a dataset of sentences.
#[derive(Debug)]
pub struct MaskedIndex {
    /// Rows of first sentence, sentence after the last, and target length.
    rows: Npy,
}

/// One sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskedSample {
    /// Its sentences: sequences of the dataset.
    pub sentences: Range<u64>,
    /// Tokens to which it is truncated, without special tokens.
    pub target_len: u32,
}

impl MaskedKind {
    /// The name of Megatron's class.
    #[must_use]
    pub fn class(self) -> &'static str {
        match self {
            MaskedKind::Bert { .. } => "BERTMaskedWordPieceDataset",
            MaskedKind::T5 { .. } => "T5MaskedWordPieceDataset",
        }
    }

    /// Special tokens of a sample: CLS and two SEP, or BOS and EOS.
    fn special_tokens(self) -> u64 {
        match self {
            MaskedKind::Bert { .. } => 3,
            MaskedKind::T5 { .. } => 2,
        }
    }

    fn sentences_min(self) -> u32 {
        match self {
            MaskedKind::Bert { classification_head: true } => 2,
            _ => 1,
        }
    }
}

impl MaskedConfig {
    /// The description that names the cache, as in Megatron. It does not depend on the data.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for the split.
    pub fn description(&self, which: Split) -> Result<Value> {
        let matrix = self.split.as_deref().map(SplitMatrix::parse).transpose()?;
        let mut text = json!({
            "class": self.kind.class(),
            "dataset_path": self.dataset_path,
            "num_samples": self.num_samples,
            "index_split": which.name(),
            "random_seed": self.seed,
            "sequence_length": self.seq_len,
            "split": self.split,
            "split_matrix": matrix.map_or(Value::Null, |matrix| matrix.to_json()),
            "tokenizer": self.tokenizer,
            "masking_probability": self.masking_probability,
            "short_sequence_probability": self.short_sequence_probability,
            "masking_max_ngram": self.masking_max_ngram,
            "masking_do_full_word": self.masking_do_full_word,
            "masking_do_permutation": self.masking_do_permutation,
            "masking_use_longer_ngrams": self.masking_use_longer_ngrams,
            "masking_use_geometric_distribution": self.masking_use_geometric_distribution,
        });
        match self.kind {
            MaskedKind::Bert { classification_head } => {
                text["classification_head"] = classification_head.into();
            }
            MaskedKind::T5 { sequence_length_decoder } => {
                text["sequence_length_decoder"] = sequence_length_decoder.into();
            }
        }
        Ok(text)
    }

    fn mapping(&self) -> Result<MappingConfig> {
        let refuse = |name, found: String, expected: String| {
            Err(Error::BadSetting { name, found, expected })
        };
        let special = self.kind.special_tokens();
        if !(special + 2..=COUNT_MAX).contains(&self.seq_len) {
            let expected = format!("{} to {COUNT_MAX}", special + 2);
            return refuse("seq_len", self.seq_len.to_string(), expected);
        }
        let prob = self.short_sequence_probability;
        // Megatron cannot represent one in more than 2^31.
        if !(0.0..=1.0).contains(&prob) || prob > 0.0 && 1.0 / prob > COUNT_MAX as f64 {
            return refuse("short_sequence_probability", prob.to_string(), "0 to 1".to_owned());
        }
        if u64::from(self.seed) >= COUNT_MAX {
            return refuse("seed", self.seed.to_string(), format!("below {COUNT_MAX}"));
        }
        if let Some(found) = self.num_samples.filter(|&samples| samples > SAMPLES_MAX) {
            return Err(Error::TooBig {
                object: "samples",
                found: found.into(),
                most: SAMPLES_MAX.into(),
            });
        }
        Ok(MappingConfig {
            num_epochs: if self.num_samples.is_some() { EPOCHS_MAX } else { 1 },
            max_num_samples: self.num_samples.unwrap_or(u64::MAX),
            max_seq_length: (self.seq_len - special) as u32, // fits: checked above
            short_seq_prob: prob,
            seed: self.seed,
            min_num_sent: self.kind.sentences_min(),
        })
    }
}

impl MaskedIndex {
    /// Builds the order of a part.
    ///
    /// # Errors
    /// [`Error::NoSamples`] if samples are requested of documents that yield none,
    /// [`Error::EmptySplit`] if the split gives the part no share, [`Error::BadSetting`],
    /// [`Error::TooBig`], [`Error::OutOfMemory`]; [`Error::Malformed`] for the dataset.
    pub fn build(dataset: &IndexedDataset, which: Split, config: &MaskedConfig) -> Result<Self> {
        let recipe = MaskedIndexSpec::new(dataset, which, config, None)?;
        index_cache::CachedIndex::build(&recipe)
    }

    /// Maps the order from cached files, written by Megatron or by this crate, or builds and saves
    /// it, as [`GptIndex::load_or_build`](crate::GptIndex::load_or_build) does.
    ///
    /// # Errors
    /// As [`MaskedIndex::build`], and [`Error::Storage`] if a file that exists cannot be read.
    pub fn load_or_build(
        dataset: &IndexedDataset,
        which: Split,
        config: &MaskedConfig,
        store: &dyn Storage,
        folder: &Key,
    ) -> Result<Self> {
        let recipe = MaskedIndexSpec::new(dataset, which, config, Some(store))?;
        let names = Names::new(&config.description(which)?, folder, config.kind.class());
        index_cache::load_or_build(&recipe, store, &names, IfNotKept::Warn)
    }

    /// As [`GptIndex::load_or_keep`](crate::GptIndex::load_or_keep).
    ///
    /// # Errors
    /// As there.
    pub fn load_or_keep(
        dataset: &IndexedDataset,
        which: Split,
        config: &MaskedConfig,
        store: &dyn Storage,
        folder: &Key,
    ) -> Result<Self> {
        let recipe = MaskedIndexSpec::new(dataset, which, config, Some(store))?;
        let names = Names::new(&config.description(which)?, folder, config.kind.class());
        index_cache::load_or_build(&recipe, store, &names, IfNotKept::Fail)
    }

    /// As [`GptIndex::verify_cache`](crate::GptIndex::verify_cache).
    ///
    /// # Errors
    /// As there.
    pub fn verify_cache(
        dataset: &IndexedDataset,
        which: Split,
        config: &MaskedConfig,
        store: &dyn Storage,
        folder: &Key,
    ) -> Result<Self> {
        let recipe = MaskedIndexSpec::new(dataset, which, config, Some(store))?;
        let names = Names::new(&config.description(which)?, folder, config.kind.class());
        index_cache::verify(&recipe, store, &names)
    }

    /// Number of samples, in whole epochs.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.rows.shape()[0]
    }

    /// A sample, by its position in the shuffled order.
    ///
    /// # Panics
    /// If there is no such sample.
    #[must_use]
    pub fn sample(&self, sample: u64) -> MaskedSample {
        let [from, to, target] = [0, 1, 2].map(|column| self.rows.at(3 * sample + column));
        // fits: sentences are counted from 0, and targets are 32 bits
        MaskedSample { sentences: from as u64..to as u64, target_len: target as u32 }
    }

    /// All rows, uint32 or uint64, shape `[samples, 3]`.
    #[must_use]
    pub fn sample_index(&self) -> &Npy {
        &self.rows
    }
}

/// The inputs of an index.
struct MaskedIndexSpec<'a> {
    dataset: &'a IndexedDataset,
    which: Split,
    documents: Range<u64>,
    mapping: MappingConfig,
    samples: Option<u64>,
    store: Option<&'a dyn Storage>,
}

impl<'a> MaskedIndexSpec<'a> {
    fn new(
        dataset: &'a IndexedDataset,
        which: Split,
        config: &MaskedConfig,
        store: Option<&'a dyn Storage>,
    ) -> Result<Self> {
        let mapping = config.mapping()?;
        let documents = part_of(config.split.as_deref(), which, dataset.document_count())?;
        let (found, most) = (documents.end.into(), COUNT_MAX.into());
        if found > most {
            return Err(Error::TooBig { object: "documents", found, most });
        }
        let samples = config.num_samples;
        Ok(MaskedIndexSpec { dataset, which, documents, mapping, samples, store })
    }

    /// The documents of the part, and the tokens of all sentences.
    fn tables(&self) -> (&'a [I64Le], &'a [I32Le]) {
        let tables = self.dataset.tables();
        // fits: they are in a table; the one after the last is the end of the last document
        let range = self.documents.start as usize..self.documents.end as usize + 1;
        (&tables.documents[range], tables.lengths)
    }

    fn descr(&self) -> Descr {
        let is_small = u32::try_from(self.dataset.sequence_count()).is_ok();
        if is_small { Descr::U32 } else { Descr::U64 }
    }

    fn refuse_none(&self, rows: u64) -> Result<()> {
        match self.samples {
            Some(samples) if samples > 0 && rows == 0 => Err(Error::NoSamples {
                file: self.dataset.display(),
                which: self.which,
                documents: self.documents.end - self.documents.start,
                documents_all: self.dataset.document_count(),
                samples,
            }),
            _ => Ok(()),
        }
    }
}

impl index_cache::CachedIndex<1> for MaskedIndexSpec<'_> {
    type Index = MaskedIndex;

    const ARRAYS: [&'static str; 1] = ["sample_index"];

    fn made_from(&self) -> Result<Value> {
        let stamp = self.store.map(|store| dataset_stamp(self.dataset, store)).transpose()?;
        Ok(json!({ "data": [stamp] }))
    }

    fn assemble(&self, [rows]: [Npy; 1]) -> std::result::Result<MaskedIndex, String> {
        let samples = rows.shape()[0];
        shape_is("sample_index", &rows, self.descr(), &[samples, 3])?;
        Ok(MaskedIndex { rows })
    }

    /// The rows must be those that would be built; their order is not checked.
    fn check(&self, index: &MaskedIndex) -> Result<Option<String>> {
        self.dataset.check_tables()?;
        let (documents, sizes) = self.tables();
        let (mut expected, mut found) = (RowMultisetHash::default(), RowMultisetHash::default());
        mapping_rows(documents, sizes, &self.mapping, |row| expected.add(row));
        self.refuse_none(expected.count)?;
        for sample in 0..index.sample_count() {
            found.add([0, 1, 2].map(|column| index.rows.at(3 * sample + column)));
        }
        let (samples, samples_expected) = (found.count, expected.count);
        let wrong = || {
            format!(
                "expected the {samples_expected} samples of the dataset, found {samples} others"
            )
        };
        Ok((found != expected).then(wrong))
    }

    fn build(&self) -> Result<MaskedIndex> {
        self.dataset.check_tables()?;
        let (documents, sizes) = self.tables();
        let rows = match self.descr() {
            Descr::U32 => build_mapping::<u32>(documents, sizes, &self.mapping)?,
            _ => build_mapping::<u64>(documents, sizes, &self.mapping)?,
        };
        self.refuse_none(rows.shape()[0])?;
        Ok(MaskedIndex { rows })
    }

    fn arrays(index: &MaskedIndex) -> [&Npy; 1] {
        [&index.rows]
    }
}

/// A hash of rows that does not depend on their order. Other rows have the same hash with a
/// probability of 2^-64.
#[derive(Debug, Default, PartialEq, Eq)]
struct RowMultisetHash {
    count: u64,
    sum: u64,
}

impl RowMultisetHash {
    fn add(&mut self, row: [i64; 3]) {
        let fold = |hash: u64, value: &i64| crate::order::feistel::mix(hash ^ *value as u64);
        self.sum = self.sum.wrapping_add(row.iter().fold(0x5eed, fold));
        self.count += 1;
    }
}
