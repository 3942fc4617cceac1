//! The corpora of a run: their token files, the order of their samples, and batches.
//!
//! The order is one for all ranks, and a rank's micro-batches are a function of it, of its place in
//! the mesh and of the samples consumed. Ranks that compute one replica read the same samples.

mod batches;

use std::sync::Arc;

use indexed::{
    BlendConfig, BlendIndex, BlendWeights, GptIndex, GptIndexConfig, IndexedDataset, Split,
    blend_sizes, normalize_weights,
};
use loader::batch::{GptAssemble, GptConfig};
use loader::cache::{AtFirstUse, CacheOptions};
use loader::{BlendOrder, GptOrder, Near, Order};
use preprocess::{Tokenizer, TokenizerSpec};
use serde_json::{Value, json};
use storage::{Crc64, Key, Read, Storage};

use crate::Result;
use crate::comm::Comm;
use crate::config::Config;
use crate::log::thousands;

pub use batches::{Batches, Neighbours};

/// How much of each end of the `.bin` tells one corpus from another.
const FINGERPRINT_BYTES: u64 = 1 << 20;

/// The token files of a run.
#[derive(Debug)]
pub struct Corpora(Vec<Arc<IndexedDataset>>);

impl Corpora {
    /// Tokens of all of them.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.0.iter().map(|corpus| corpus.token_count()).sum()
    }
}

/// Opens the token files of a run.
///
/// # Errors
/// [`Error::Indexed`].
pub fn open_corpus(config: &Config) -> Result<Corpora> {
    let open = |corpus: &crate::config::Corpus| {
        let (store, prefix) = storage::locate(&corpus.path)?;
        let corpus = IndexedDataset::open(&store, &prefix)?;
        log::info!(
            "data: {} has {} tokens in {} documents",
            corpus.display(),
            thousands(corpus.token_count() as f64),
            thousands(corpus.document_count() as f64)
        );
        Ok(Arc::new(corpus))
    };
    Ok(Corpora(config.data.train.iter().map(open).collect::<Result<_>>()?))
}

/// Corpora and the order in which a run reads them.
#[derive(Debug)]
pub struct Data {
    corpora: Corpora,
    train: Arc<dyn Order>,
    /// `None` if the run never evaluates.
    valid: Option<Arc<dyn Order>>,
    gpt: GptConfig,
    neighbours: Option<Neighbours>,
    /// Training samples on this node's own disk.
    local: Option<Arc<AtFirstUse>>,
}

impl Data {
    /// Maps or builds the sample orders that a run of this length needs.
    ///
    /// # Errors
    /// [`Error::Indexed`], or [`Error::Tokenizer`] for a tokenizer that is not known.
    pub fn new(corpora: Corpora, config: &Config) -> Result<Self> {
        let tokenizer = tokenizer_of(config)?;
        let cache = storage::open_url(&config.cache_dir())?;
        let orders = Orders { corpora: &corpora, config, tokenizer: &*tokenizer, cache: &*cache };
        let train = orders.open(Split::Train, config.samples_total())?;
        let evaluates = config.eval.every > 0;
        let valid = evaluates.then(|| orders.open(Split::Valid, config.eval_samples()));
        let valid = valid.transpose()?;
        let gpt = GptConfig {
            eod: tokenizer.eod().map(i64::from),
            eod_mask_loss: config.data.mask_eod_loss,
            reset_position_ids: config.data.reset_at_document,
            reset_attention_mask: config.data.reset_at_document,
            ..GptConfig::new(config.model.seq_len as usize) // fits: the config refuses more
        };
        let local = local_cache(config, &train)?;
        Ok(Data { corpora, train, valid, gpt, neighbours: None, local })
    }

    /// The cache of training samples on this node's own disk, if the run has one: it is to be told
    /// of checkpoints.
    #[must_use]
    pub fn local_cache(&self) -> Option<Arc<AtFirstUse>> {
        self.local.clone()
    }

    /// From now on one rank of the node reads for all of them.
    pub fn share(&mut self, neighbours: Neighbours) {
        self.neighbours = Some(neighbours);
    }

    /// What tells these corpora from others, wherever they lie: of each its counts, and a checksum
    /// of its first and last MiB.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn fingerprint(&self) -> Result<Value> {
        let each = self.corpora.0.iter().map(|corpus| fingerprint(corpus));
        let mut each = each.collect::<Result<Vec<Value>>>()?;
        Ok(if each.len() == 1 { each.remove(0) } else { Value::Array(each) })
    }

    /// A rank's training batches after `samples_consumed` samples, to the end of the run.
    ///
    /// # Errors
    /// [`Error::Loader`] if the order has too few samples.
    pub fn train_batches(
        &self,
        config: &Config,
        comm: &Comm,
        samples_consumed: u64,
    ) -> Result<Batches> {
        let samples = samples_consumed..config.samples_total();
        let node = self.neighbours.as_ref().map(|node| node.job("train"));
        let near = self.local.clone().map(|local| local as Arc<dyn Near>);
        let order = Arc::clone(&self.train);
        Batches::new(order, self.assemble()?, config, comm, samples, node, near)
    }

    /// A rank's validation batches: the same ones at every call. None if the run never evaluates.
    ///
    /// # Errors
    /// As [`Data::train_batches`].
    pub fn valid_batches(&self, config: &Config, comm: &Comm) -> Result<Option<Batches>> {
        let Some(order) = &self.valid else { return Ok(None) };
        // As long as all others: without the smaller batches of a ramp.
        let mut even = config.clone();
        even.batch.rampup = None;
        let samples = 0..config.eval_samples();
        let order = Arc::clone(order);
        Batches::new(order, self.assemble()?, &even, comm, samples, None, None).map(Some)
    }

    fn assemble(&self) -> Result<impl Fn() -> loader::Result<GptAssemble> + use<>> {
        let dtypes: Vec<_> = self.corpora.0.iter().map(|corpus| corpus.dtype()).collect();
        let gpt = self.gpt.clone();
        Ok(move || GptAssemble::new(gpt.clone(), dtypes.clone()))
    }
}

/// What orders are made of.
struct Orders<'a> {
    corpora: &'a Corpora,
    config: &'a Config,
    tokenizer: &'a dyn Tokenizer,
    cache: &'a dyn Storage,
}

impl Orders<'_> {
    fn open(&self, which: Split, samples: u64) -> Result<Arc<dyn Order>> {
        let needed = thousands(samples as f64);
        let tell = |count: u64| {
            let count = thousands(count as f64);
            log::info!("index: {count} samples for {}, {needed} needed", which.name());
        };
        if let [corpus] = &self.corpora.0[..] {
            let order = self.one(corpus, self.config.corpus(), which, samples)?.0;
            tell(order.sample_count());
            return Ok(Arc::new(order));
        }
        let corpora = &self.config.data.train;
        let weights = corpora.iter().map(|corpus| corpus.weight).collect::<Vec<_>>();
        let weights = normalize_weights(&weights)?;
        let (sizes, size) = blend_sizes(&weights, samples);
        let (mut orders, mut datasets, mut available) = (Vec::new(), Vec::new(), Vec::new());
        for ((corpus, told), size) in self.corpora.0.iter().zip(corpora).zip(sizes) {
            let (order, description) = self.one(corpus, &told.path, which, size)?;
            available.push(order.sample_count());
            datasets.push(description);
            orders.push(Arc::new(order) as Arc<dyn Order>);
        }
        let weights = BlendWeights::Weighted { weights, size };
        let blend = BlendConfig { datasets, which, weights, available };
        let blend = BlendIndex::load_or_build(&blend, self.cache, &Key::root())?;
        tell(blend.sample_count());
        Ok(Arc::new(BlendOrder::new(orders, Arc::new(blend))))
    }

    /// The order of one corpus, and what its cache is called after.
    fn one(
        &self,
        corpus: &Arc<IndexedDataset>,
        path: &str,
        which: Split,
        samples: u64,
    ) -> Result<(GptOrder, Value)> {
        let config = self.config;
        let order = GptIndexConfig {
            dataset_path: path.to_owned(),
            split: Some(config.data.split.0.clone()),
            seq_len: config.model.seq_len,
            seed: config.run.seed as u32, // fits: the config refuses a larger one
            num_samples: Some(samples),
            add_extra_token: true,
            drop_last_partial_valid: true,
            tokenizer: self.tokenizer.identifiers(),
        };
        let index = GptIndex::load_or_build(corpus, which, &order, self.cache, &Key::root())?;
        let seq_len = config.model.seq_len as usize; // fits: the config refuses more than 2^20
        let description = order.description(which)?;
        Ok((GptOrder::new(Arc::clone(corpus), Arc::new(index), seq_len)?, description))
    }
}

/// The manifests of the data are part of its identity; the order tells itself apart by the seed.
fn local_cache(config: &Config, order: &Arc<dyn Order>) -> Result<Option<Arc<AtFirstUse>>> {
    let Some(local) = &config.data.local_cache else { return Ok(None) };
    let limit_bytes = local.limit.map_or(u64::MAX, |limit| limit.0);
    let options = CacheOptions { limit_bytes, salt: config.run.seed };
    let folder = storage::open_url(&local.dir)?;
    Ok(Some(Arc::new(AtFirstUse::new(folder, Arc::clone(order), options))))
}

fn fingerprint(corpus: &IndexedDataset) -> Result<Value> {
    let bin = corpus.bin();
    let mut buf = vec![0; FINGERPRINT_BYTES.min(bin.len_bytes()) as usize]; // fits: 1 MiB
    let mut crc = Crc64::new();
    for offset in [0, bin.len_bytes() - buf.len() as u64] {
        bin.read_many(&mut [Read { offset, buf: &mut buf }])?;
        crc.update(&buf);
    }
    Ok(json!({
        "tokens": corpus.token_count(),
        "sequences": corpus.sequence_count(),
        "documents": corpus.document_count(),
        "ends_crc64": format!("{:016x}", crc.value()),
    }))
}

/// Opens a tokenizer by its kind, alone or with its file behind a colon: `gpt2`,
/// `gpt2:vocab.json,merges.txt`, `hf:tokenizer.json`, `encdec:vocab.txt`.
///
/// # Errors
/// [`Error::Tokenizer`].
pub fn open_tokenizer(text: &str) -> Result<Arc<dyn Tokenizer>> {
    let (kind, files) = text.split_once(':').unwrap_or((text, ""));
    let mut files = files.split(',').filter(|file| !file.is_empty()).map(str::to_owned);
    let (file, merge_file) = (files.next(), files.next());
    // Each kind looks at the one that it knows.
    let spec = TokenizerSpec {
        kind: kind.to_owned(),
        model: file.clone(),
        vocab_file: file,
        merge_file,
        ..Default::default()
    };
    Ok(preprocess::open_tokenizer(&spec)?)
}

/// The tokenizer that made the corpus, whose description is part of an index cache's name.
fn tokenizer_of(config: &Config) -> Result<Arc<dyn Tokenizer>> {
    let tokenizer = open_tokenizer(&config.data.tokenizer)?;
    if u64::from(tokenizer.vocab_size()) > config.model.vocab {
        log::warn!(
            "data: the tokenizer '{}' has {} tokens, model.vocab is {}",
            tokenizer.name(),
            tokenizer.vocab_size(),
            config.model.vocab
        );
    }
    Ok(tokenizer)
}
