//! The order in which a GPT reads a dataset: Megatron's document, sample and shuffle index.
//!
//! The sequences of a part, once for each epoch, are shuffled into one stream of tokens (the
//! document index). The stream is cut into samples of equal length (the sample index), and those
//! are shuffled again (the shuffle index). The sequence lengths and the settings determine all
//! three, byte for byte.

use serde_json::Value;
use storage::{Key, Storage};

use crate::cache::file_stamp::dataset_stamp;
use crate::cache::index_cache::{self, IfNotKept, Names};
use crate::cache::npy::{Descr, Element, Npy, NpyBuilder, RUN_MAX};
use crate::mmididx::idx::I32Le;
use crate::order::gpt_counts::Plan;
use crate::order::gpt_verify::{shapes_fit, verify};
use crate::order::sample_index::build_rows;
use crate::rng::RandomState;
use crate::split::SplitMatrix;
use crate::{Error, IndexedDataset, Lengths, Result, Split};

/// The settings that decide the order. Those marked * are part of the name of a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct GptIndexConfig {
    /// * The dataset's prefix, as it was given to the training run.
    pub dataset_path: String,
    /// * The shares of train, valid and test, such as `949,50,1`. `None`: each part is a whole
    ///   dataset, as with Megatron's `--train-data-path`.
    pub split: Option<String>,
    /// * Tokens of a sample, without the extra one.
    pub seq_len: u64,
    /// * The seed of both shuffles.
    pub seed: u32,
    /// * Required samples, which determine the number of epochs. `None`: one epoch.
    pub num_samples: Option<u64>,
    /// Whether a sample has one token more than `seq_len`, the label of its last.
    pub add_extra_token: bool,
    /// Whether the validation part drops the tokens after its last full sample, as the others do.
    pub drop_last_partial_valid: bool,
    /// * The description of the tokenizer.
    pub tokenizer: Value,
}

/// The order of the samples of one part of a dataset.
#[derive(Debug)]
pub struct GptIndex {
    /// The sequences in the order of the stream of tokens.
    document: Npy,
    /// Where in the stream each sample starts, and where the last one ends.
    sample: Npy,
    /// The order of the samples.
    shuffle: Npy,
    extra_tokens: u64,
}

/// Consecutive tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSpan {
    /// The sequence.
    pub sequence: u64,
    /// The first of the tokens, counted from the start of the sequence.
    pub token_offset: u64,
    /// Number of tokens, at least 1.
    pub token_count: u64,
}

impl GptIndexConfig {
    /// The description that names the cache of an index, as in Megatron. It has neither the
    /// settings without a star nor anything that depends on the data.
    ///
    /// # Errors
    /// [`Error::BadSetting`](crate::Error::BadSetting) for the split.
    pub fn description(&self, which: Split) -> Result<Value> {
        let matrix = self.split.as_deref().map(SplitMatrix::parse).transpose()?;
        let matrix = matrix.map_or(Value::Null, |matrix| matrix.to_json());
        Ok(serde_json::json!({
            "class": "GPTDataset",
            "dataset_path": self.dataset_path,
            "num_samples": self.num_samples,
            "index_split": which.name(),
            "random_seed": self.seed,
            "sequence_length": self.seq_len,
            "split": self.split,
            "split_matrix": matrix,
            "tokenizer": self.tokenizer,
        }))
    }
}

impl GptIndex {
    /// Builds the index of a part. The same lengths and settings give the same bytes.
    ///
    /// # Errors
    /// [`Error::NoTokens`](crate::Error::NoTokens) if samples are requested of a part without
    /// tokens, [`Error::EmptySplit`](crate::Error::EmptySplit) if the split gives it no share,
    /// [`Error::BadSetting`](crate::Error::BadSetting), and [`Error::TooBig`](crate::Error::TooBig)
    /// and [`Error::OutOfMemory`](crate::Error::OutOfMemory) if it would have too many samples.
    pub fn build(dataset: &IndexedDataset, which: Split, config: &GptIndexConfig) -> Result<Self> {
        dataset.check_tables()?;
        build_planned(dataset, &Plan::new(dataset, which, config)?, config.seed)
    }

    /// Maps the index from cached files in a folder, written by Megatron or by this crate, or
    /// builds and saves it. Files are used only if every number in them is right: the name of a
    /// cache does not depend on the data, and a killed writer leaves short files. Checked files are
    /// sealed, and not read again as long as neither the data nor the cache changes. Wrong files
    /// are rebuilt with a warning. A cache that cannot be written is also only a warning.
    ///
    /// # Errors
    /// As [`GptIndex::build`], and [`Error::Storage`](crate::Error::Storage) if a file that exists
    /// cannot be read.
    pub fn load_or_build(
        dataset: &IndexedDataset,
        which: Split,
        config: &GptIndexConfig,
        store: &dyn Storage,
        folder: &Key,
    ) -> Result<Self> {
        let (spec, names) = GptIndexSpec::new(dataset, which, config, store, folder)?;
        index_cache::load_or_build(&spec, store, &names, IfNotKept::Warn)
    }

    /// As [`GptIndex::load_or_build`], but files that cannot be written are an error.
    ///
    /// # Errors
    /// [`Error::NotKept`](crate::Error::NotKept), else as [`GptIndex::load_or_build`].
    pub fn load_or_keep(
        dataset: &IndexedDataset,
        which: Split,
        config: &GptIndexConfig,
        store: &dyn Storage,
        folder: &Key,
    ) -> Result<Self> {
        let (spec, names) = GptIndexSpec::new(dataset, which, config, store, folder)?;
        index_cache::load_or_build(&spec, store, &names, IfNotKept::Fail)
    }

    /// Checks every number of the files that [`GptIndex::load_or_build`] uses, whatever their seal
    /// says. It reads all of them, so call it on a background thread.
    ///
    /// # Errors
    /// [`Error::BadCache`](crate::Error::BadCache) and [`Error::NoCache`](crate::Error::NoCache);
    /// as [`GptIndex::load_or_build`].
    pub fn verify_cache(
        dataset: &IndexedDataset,
        which: Split,
        config: &GptIndexConfig,
        store: &dyn Storage,
        folder: &Key,
    ) -> Result<Self> {
        let (spec, names) = GptIndexSpec::new(dataset, which, config, store, folder)?;
        index_cache::verify(&spec, store, &names)
    }

    /// Number of samples: at least those requested, up to the end of the last epoch.
    #[must_use]
    pub fn sample_count(&self) -> u64 {
        self.shuffle.shape()[0]
    }

    /// The tokens of a sample: `seq_len` of them and the extra one, if there is one; fewer only in
    /// a last partial sample. `sample` is the position in the shuffled order; `parts` is cleared
    /// first.
    ///
    /// # Panics
    /// If there is no such sample, or the index is of another dataset.
    pub fn parts(&self, dataset: &IndexedDataset, sample: u64, parts: &mut Vec<TokenSpan>) {
        parts.clear();
        let outcome = self.for_each_part(dataset, sample, |part, _| parts.push(part));
        outcome.expect("an index of this dataset");
    }

    /// Calls `visit` with the parts of a sample in order, as [`Self::parts`] returns them, and with
    /// the start of each in the `.bin`.
    ///
    /// # Errors
    /// [`Error::BadPlace`](crate::Error::BadPlace) if an entry of a table is out of range: the
    /// files were damaged after they were sealed, or the index is of another dataset;
    /// [`Error::Storage`](crate::Error::Storage) if a table cannot be read. Discard the parts
    /// visited before an error.
    ///
    /// # Panics
    /// If there is no such sample.
    #[inline]
    pub fn for_each_part(
        &self,
        dataset: &IndexedDataset,
        sample: u64,
        mut visit: impl FnMut(TokenSpan, u64),
    ) -> Result<()> {
        let bad = |table: &'static str, place: u64, found: i64| Error::BadPlace {
            file: dataset.display(),
            table,
            place,
            found,
        };
        let (mut number, mut rows) = ([0], [0; 4]);
        self.shuffle.numbers(sample, &mut number)?;
        let [number] = number;
        if !(0..self.sample.shape()[0] as i64 - 1).contains(&number) {
            return Err(bad("shuffle index", sample, number));
        }
        let row = 2 * number as u64; // fits: checked to be positive
        self.sample.numbers(row, &mut rows)?;
        let [first, start, last, end] = rows;
        let documents = self.document.shape()[0] as i64; // fits: as many are in the file
        if first < 0 || start < 0 || !(first..documents).contains(&last) {
            return Err(bad("sample index", row, first));
        }
        let mut sequences = [0; RUN_MAX];
        let item_bytes = dataset.dtype().item_bytes();
        for place in first..=last {
            let nth = (place - first) as usize % RUN_MAX; // fits: not negative
            if nth == 0 {
                let count = RUN_MAX.min((last - place + 1) as usize); // fits: as above
                self.document.numbers(place as u64, &mut sequences[..count])?;
            }
            let sequence = sequences[nth];
            if !(0..dataset.sequence_count() as i64).contains(&sequence) {
                return Err(bad("document index", place as u64, sequence));
            }
            let sequence = sequence as u64; // fits: checked above, as are those below
            let (start_bytes, len) = dataset.span(sequence)?;
            let len = len as i64;
            let token_offset = if place == first { start } else { 0 };
            let end = if place == last { end + self.extra_tokens as i64 } else { len };
            if end > len {
                return Err(bad("sample index", row + 3, end));
            }
            // If samples meet at the end of a document, one of the parts has no tokens.
            if end > token_offset {
                let (token_offset, end) = (token_offset as u64, end as u64);
                let part = TokenSpan { sequence, token_offset, token_count: end - token_offset };
                visit(part, start_bytes + token_offset * item_bytes);
            }
        }
        Ok(())
    }

    /// The document index, int32, shape `[sequences * epochs]`.
    #[must_use]
    pub fn document_index(&self) -> &Npy {
        &self.document
    }

    /// Where samples start, shape `[samples + 1, 2]`: position in the document index, and token.
    #[must_use]
    pub fn sample_index(&self) -> &Npy {
        &self.sample
    }

    /// The order of the samples, shape `[samples]`.
    #[must_use]
    pub fn shuffle_index(&self) -> &Npy {
        &self.shuffle
    }
}

/// The inputs of an index.
struct GptIndexSpec<'a> {
    dataset: &'a IndexedDataset,
    plan: Plan,
    seed: u32,
    store: &'a dyn Storage,
}

impl<'a> GptIndexSpec<'a> {
    fn new(
        dataset: &'a IndexedDataset,
        which: Split,
        config: &GptIndexConfig,
        store: &'a dyn Storage,
        folder: &Key,
    ) -> Result<(Self, Names)> {
        let plan = Plan::new(dataset, which, config).or_else(|error| {
            // A wrong file can make the settings look wrong; the fault of the file is reported.
            dataset.check_tables()?;
            Err(error)
        })?;
        let names = Names::new(&config.description(which)?, folder, &format!("GPTDataset-{which}"));
        Ok((GptIndexSpec { dataset, plan, seed: config.seed, store }, names))
    }
}

impl index_cache::CachedIndex<3> for GptIndexSpec<'_> {
    type Index = GptIndex;

    const ARRAYS: [&'static str; 3] = ["document_index", "sample_index", "shuffle_index"];

    fn made_from(&self) -> Result<Value> {
        Ok(serde_json::json!({
            "data": [dataset_stamp(self.dataset, self.store)?],
            "add_extra_token": self.plan.rule.add_extra_token,
            "keep_last_partial": self.plan.rule.keep_last_partial,
        }))
    }

    fn assemble(&self, arrays: [Npy; 3]) -> std::result::Result<GptIndex, String> {
        let [document, sample, shuffle] = arrays;
        let extra_tokens = self.plan.rule.extra_tokens();
        let index = GptIndex { document, sample, shuffle, extra_tokens };
        shapes_fit(&index, &self.plan).map(|()| index)
    }

    fn check(&self, index: &GptIndex) -> Result<Option<String>> {
        Ok(verify(index, &Lengths::of(self.dataset)?, &self.plan).err())
    }

    fn build(&self) -> Result<GptIndex> {
        build_planned(self.dataset, &self.plan, self.seed)
    }

    fn arrays(index: &GptIndex) -> [&Npy; 3] {
        [&index.document, &index.sample, &index.shuffle]
    }
}

fn build_planned(dataset: &IndexedDataset, plan: &Plan, seed: u32) -> Result<GptIndex> {
    let lengths = Lengths::of(dataset)?;
    let mut rng = RandomState::new(seed); // one generator for both shuffles, in this order
    let document = document_index(plan, &mut rng)?;
    let documents: &[I32Le] = document.data().as_chunks().0;
    let count = plan.sample_count;
    let rows = || match plan.sample_descr() {
        Descr::I64 => build_rows::<i64>(&lengths, documents, &plan.rule, count),
        _ => build_rows::<i32>(&lengths, documents, &plan.rule, count),
    };
    let mut order = || match plan.shuffle_descr() {
        Descr::I64 => shuffle_index::<i64, 8>(plan, &mut rng),
        _ => shuffle_index::<u32, 4>(plan, &mut rng),
    };
    // The number of samples is known before their starts, so both tables are built concurrently.
    let (sample, shuffle) = std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("index".to_owned());
        match builder.spawn_scoped(scope, &mut order) {
            Err(_) => (rows(), None),
            Ok(shuffle) => (rows(), Some(shuffle.join().expect("a shuffle does not panic"))),
        }
    });
    let shuffle = shuffle.unwrap_or_else(order)?;
    let sample = sample?;
    Ok(GptIndex { document, sample, shuffle, extra_tokens: plan.rule.extra_tokens() })
}

fn document_index(plan: &Plan, rng: &mut RandomState) -> Result<Npy> {
    let len = plan.document_index_len();
    let mut documents = NpyBuilder::<i32>::new("document index", &[len])?;
    for _ in 0..plan.epochs {
        plan.sequences.clone().for_each(|seq| documents.push(seq.into()));
    }
    let in_last_epoch = match plan.samples_before_last_epoch {
        None => 0,
        Some(_) => plan.sequences.len(),
    };
    let items = documents.data_mut().as_chunks_mut::<4>().0;
    shuffle_in_two(items, items.len() - in_last_epoch, rng);
    Ok(documents.finish())
}

/// `N` is the size of `T`.
fn shuffle_index<T: Element, const N: usize>(plan: &Plan, rng: &mut RandomState) -> Result<Npy> {
    let count = plan.sample_count;
    let mut samples = NpyBuilder::<T>::new("shuffle index", &[count])?;
    (0..count).for_each(|sample| samples.push(sample as i64)); // fits: as many are in memory
    let before_last_epoch = plan.samples_before_last_epoch.unwrap_or(count) as usize; // as above
    shuffle_in_two(samples.data_mut().as_chunks_mut::<N>().0, before_last_epoch, rng);
    Ok(samples.finish())
}

/// Shuffles the items before an index, then the rest.
fn shuffle_in_two<T>(items: &mut [T], place: usize, rng: &mut RandomState) {
    let (before, rest) = items.split_at_mut(place);
    rng.shuffle(before);
    rng.shuffle(rest);
}
