//! The samples of one part of the data, for callers that bring their own training loop.

use std::cell::RefCell;
use std::sync::Arc;

use indexed::{BlockShuffle, Split, TokenStream};
use loader::cache::LazyCache;
use loader::{BlockOrder, FileOrder, Loader, LoaderOptions, RandomReader, SampleOrder};
use recipe::Incompatible;
use recipe::config::{Config, Objective};
use serde_json::{Value, json};

use crate::orders::{Assembly, CorpusAssembly, Orders};
use crate::{AnyAssemble, Corpora, Error, Result, open_corpus, open_tokenizer};

/// In which order samples are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OrderKind {
    /// Megatron's order of the objective, byte for byte; blends as Megatron mixes them.
    #[default]
    Megatron,
    /// Blocks of consecutive samples, shuffled, and samples shuffled within a window of blocks. It
    /// needs no tables. Of one corpus of objective `"lm"`.
    Blocks,
    /// The sequences of the file in its order, each a sample, as `feedline materialize` wrote them.
    /// Of one corpus of objective `"lm"`.
    File,
}

/// Which samples of a run's data.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SamplesOptions {
    /// The part of the corpora.
    pub which: Split,
    /// Samples that the order is built for, as Megatron's `num_samples`. `None`: one epoch.
    pub count: Option<u64>,
    /// The order.
    pub order: OrderKind,
    /// Whether a sample index is cached in [`Config::cache_dir`]; else it is built in memory.
    pub cached: bool,
    /// The identifiers of the tokenizer in the name of the cache. `None`: those of the config's
    /// tokenizer, which is opened for it.
    pub identifiers: Option<Value>,
}

impl SamplesOptions {
    /// Megatron's order of a part, cached.
    #[must_use]
    pub fn new(which: Split, count: Option<u64>) -> Self {
        let (order, identifiers) = (OrderKind::default(), None);
        SamplesOptions { which, count, order, cached: true, identifiers }
    }
}

/// The samples of a part of the data in their order, and the settings of their assemblers.
#[derive(Clone, Debug)]
pub struct Samples {
    pub(super) order: Arc<dyn SampleOrder>,
    pub(super) assembly: Assembly,
    /// The local cache of samples.
    pub(super) local: Option<Arc<LazyCache>>,
    /// The fingerprint of the tokenizer, if the objective needs one.
    pub(super) tokenizer: Option<String>,
}

impl Samples {
    /// Opens the corpora of a config, and maps or builds the order of a part of them. Of the config
    /// only `[data]`, the sequence lengths, the vocabulary and the seed are used.
    ///
    /// # Errors
    /// As [`open_corpus`] and [`Data::new`](crate::Data::new).
    pub fn open(config: &Config, options: &SamplesOptions) -> Result<(Self, Corpora)> {
        let corpora = open_corpus(config)?;
        let tokenizer = match (config.objective(), &options.identifiers) {
            (Objective::Lm, Some(_)) => None,
            _ => Some(open_tokenizer(&config.data.tokenizer)?),
        };
        let mut assembly = Assembly::new(config, tokenizer.as_deref())?;
        let identifiers = options.identifiers.clone();
        let identifiers = identifiers.or_else(|| tokenizer.as_ref().map(|it| it.identifiers()));
        let (order, parts) = match options.order {
            OrderKind::Megatron => {
                let cache = storage::open_url(&config.cache_dir())?;
                let orders = Orders {
                    corpora: &corpora,
                    config,
                    tokenizer: identifiers.unwrap_or(Value::Null),
                    cache: options.cached.then_some(&cache),
                    checks: RefCell::default(),
                };
                orders.open(options.which, options.count)?
            }
            other => plain(&corpora, config, options, other)?,
        };
        parts.into_iter().for_each(|part| assembly.add_corpus(part));
        let needed = tokenizer.filter(|_| config.objective() != Objective::Lm);
        let tokenizer = needed.map(|tokenizer| tokenizer.fingerprint());
        Ok((Samples { order, assembly, local: None, tokenizer }, corpora))
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.order.sample_count()
    }

    /// Their order.
    #[must_use]
    pub fn order(&self) -> &Arc<dyn SampleOrder> {
        &self.order
    }

    /// Starts to read ahead.
    ///
    /// # Errors
    /// As [`Loader::start`].
    pub fn load(&self, options: LoaderOptions) -> Result<Loader<AnyAssemble>> {
        self.load_as(Arc::clone(&self.order), options)
    }

    /// Starts to read ahead in another order, which was derived from this one.
    ///
    /// # Errors
    /// As [`Loader::start`].
    pub fn load_as(
        &self,
        order: Arc<dyn SampleOrder>,
        options: LoaderOptions,
    ) -> Result<Loader<AnyAssemble>> {
        Ok(Loader::start(order, self.assembly.assemble()?, options)?)
    }

    /// A reader of any of them.
    ///
    /// # Errors
    /// [`Error::Loader`] for an objective that is not usable.
    pub fn reader(&self, verify: bool) -> Result<RandomReader<AnyAssemble>> {
        Ok(RandomReader::new(Arc::clone(&self.order), self.assembly.assemble()?, verify))
    }

    /// The identity of these samples, independent of the location of their files: the corpora, and
    /// all settings that determine their order and their batches. The arguments are those of
    /// [`Samples::open`] and its corpora.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage) if the corpora cannot be read.
    pub fn identity(
        &self,
        config: &Config,
        corpora: &Corpora,
        options: &SamplesOptions,
    ) -> Result<Value> {
        let order = match options.order {
            OrderKind::Megatron => "megatron",
            OrderKind::Blocks => "blocks",
            OrderKind::File => "file",
        };
        let mut identity = json!({
            "corpora": corpora.fingerprint(config.data.verify)?,
            "weights": weights(config),
            "order": order,
            "index_split": options.which.name(),
            "split": split_text(config),
            "num_samples": options.count,
            "random_seed": config.run.seed,
            "sequence_length": config.model.seq_len,
            "sequence_length_decoder": config.model.dec_len,
            "objective": config.objective(),
        });
        for (name, value) in self.objective_settings(config) {
            identity[name] = value;
        }
        Ok(identity)
    }

    /// Settings that only some objectives have. Those of `"lm"` are present if they are set.
    fn objective_settings(&self, config: &Config) -> Vec<(&'static str, Value)> {
        let data = &config.data;
        if let Assembly::Lm(lm, _) = &self.assembly {
            let flags = [
                ("reset_at_document", data.reset_at_document),
                ("mask_eod_loss", data.mask_eod_loss),
            ];
            let settings: Vec<_> = flags.into_iter().filter(|(_, is_set)| *is_set).collect();
            let eod = (!settings.is_empty()).then(|| ("eod", json!(lm.eod)));
            return settings
                .into_iter()
                .map(|(name, is_set)| (name, json!(is_set)))
                .chain(eod)
                .collect();
        }
        let mut settings =
            vec![("special", json!(data.special)), ("tokenizer", json!(self.tokenizer))];
        if config.objective().hides() {
            settings.push(("mask_prob", json!(data.mask_prob)));
            settings.push(("mask_ngram_max", json!(config.mask_ngram_max())));
            settings.push(("mask_lengths", json!(config.mask_lengths())));
            settings.push(("mask_full_words", json!(config.mask_full_words())));
            settings.push(("short_seq_prob", json!(data.short_seq_prob)));
            settings.push(("sentence_order", json!(config.sentence_order())));
        } else {
            settings.push(("reset_at_document", json!(data.reset_at_document)));
        }
        settings
    }
}

/// The weights of the corpora, of which only the ratios count.
fn weights(config: &Config) -> Vec<f64> {
    let weights: Vec<f64> = config.data.train.iter().map(|corpus| corpus.weight).collect();
    indexed::normalize_weights(&weights).unwrap_or(weights)
}

/// The shares of the parts: the same for all spellings of them.
fn split_text(config: &Config) -> String {
    let text = &config.data.split;
    let shares = text.shares().map(|shares| shares.iter().map(f64::to_string).collect());
    shares.map_or_else(|_| text.0.clone(), |shares: Vec<_>| shares.join(","))
}

/// Orders of the running text of one corpus that have no tables.
fn plain(
    corpora: &Corpora,
    config: &Config,
    options: &SamplesOptions,
    kind: OrderKind,
) -> Result<(Arc<dyn SampleOrder>, Vec<CorpusAssembly>)> {
    let [dataset] = &corpora.files[..] else { return Err(refused(config)) };
    if config.objective() != Objective::Lm {
        return Err(refused(config));
    }
    let seq_len = config.model.seq_len;
    let order: Arc<dyn SampleOrder> = if kind == OrderKind::File {
        // fits: the config refuses more than 2^20
        Arc::new(FileOrder::new(Arc::clone(dataset), seq_len as usize)?)
    } else {
        let split = Some(config.data.split.0.as_str());
        let stream = TokenStream::new(dataset, options.which, split, seq_len, true)?;
        let (block, window) = (BlockShuffle::BLOCK_SAMPLES, BlockShuffle::WINDOW_BLOCKS);
        let per_epoch = stream.sample_count();
        let shuffle = BlockShuffle::new(per_epoch, block, window, config.run.seed)?;
        let epochs = options.count.unwrap_or(per_epoch).div_ceil(per_epoch).max(1);
        Arc::new(BlockOrder::new(dataset, stream, &shuffle, epochs)?)
    };
    Ok((order, vec![CorpusAssembly::Lm(dataset.dtype())]))
}

fn refused(config: &Config) -> Error {
    let found = match config.data.train.len() {
        1 => format!("objective {}", json!(config.objective())),
        corpora => format!("a blend of {corpora} corpora"),
    };
    Error::Mismatch(Incompatible::new(
        "cannot order samples without an index".to_owned(),
        format!("expected one corpus of objective \"lm\", found {found}"),
        "read it in Megatron's order",
    ))
}
