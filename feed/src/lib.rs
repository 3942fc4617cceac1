//! What a run reads: the token files of its corpora, the order of their samples, and batches.
//!
//! All ranks share one order, and a rank's micro-batches are a function of it, of the rank's place
//! in the mesh and of the samples consumed. Ranks that compute one replica read the same samples.
//!
//! In reading order: `special` finds the ids that an objective needs, `orders` builds the order of
//! samples and the settings of their assemblers, `order_check` verifies cached orders in the
//! background, `any` is a batch of any objective, `batches` reads them. `samples` is for callers
//! with their own training loop.

#![forbid(unsafe_code)]

mod any;
mod batches;
mod error;
mod order_check;
mod orders;
mod samples;
mod special;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use indexed::{IndexedDataset, Split};
use loader::SampleOrder;
use loader::cache::{CacheOptions, LazyCache};
use preprocess::Tokenizer;
use recipe::Incompatible;
use recipe::config::{Config, Objective};
use recipe::mesh::MeshRank;
use recipe::text::thousands;
use serde_json::{Value, json};
use storage::{Crc64, Key, Manifest, RangeRead, Storage};

use order_check::OrderCheck;
use orders::{Assembly, Orders};

pub use any::{AnyAssemble, AnyBatch};
pub use batches::{Batches, NodePeers};
pub use error::{Error, Result};
pub use samples::{OrderKind, Samples, SamplesOptions};
pub use special::{open_tokenizer, tokenizer_spec, with_special};

/// How much of each end of the `.bin` is part of a corpus's fingerprint.
const FINGERPRINT_BYTES: u64 = 1 << 20;
/// The three token files of a corpus of CPM-2.
const TRIPLE: [&str; 3] = ["_context", "_target", "_target_offset"];
/// Ranks of a node share a node reader only for samples up to this size: each rank may have a
/// hundred of them in memory.
const SHARED_SAMPLE_BYTES_MAX: u64 = 16 << 20;

/// The token files of a run.
#[derive(Debug)]
pub struct Corpora {
    /// The files of all corpora, corpus after corpus.
    files: Vec<Arc<IndexedDataset>>,
    /// Files of each corpus.
    files_each: usize,
}

impl Corpora {
    /// Tokens of all corpora; for encoder-decoder corpora those of the contexts.
    #[must_use]
    pub fn token_count(&self) -> u64 {
        self.each().map(|files| files[0].token_count()).sum()
    }

    fn fingerprint(&self, verify: bool) -> Result<Value> {
        let each = self.files.iter().map(|file| fingerprint(file, verify));
        let mut each = each.collect::<Result<Vec<Value>>>()?;
        Ok(if each.len() == 1 { each.remove(0) } else { Value::Array(each) })
    }

    /// The token files of each corpus.
    fn each(&self) -> impl Iterator<Item = &[Arc<IndexedDataset>]> {
        self.files.chunks(self.files_each)
    }
}

/// Opens the token files of a run.
///
/// # Errors
/// [`Error::Indexed`]; [`Error::Mismatch`] for a corpus of another kind than the objective reads.
pub fn open_corpus(config: &Config) -> Result<Corpora> {
    let objective = config.objective();
    let endings = if objective == Objective::Encdec { &TRIPLE[..] } else { &[""] };
    let mut files = Vec::new();
    for corpus in &config.data.train {
        let (store, prefix) = storage::locate(&corpus.path)?;
        check_kind(&*store, &prefix, &corpus.path, objective)?;
        for ending in endings {
            let file = IndexedDataset::open_tokens(&store, &prefix.with_suffix(ending)?)?;
            log::info!(
                "data: {} has {} tokens in {} documents",
                file.display(),
                thousands(file.token_count() as f64),
                thousands(file.document_count() as f64)
            );
            check_sentences(&file, objective)?;
            files.push(Arc::new(file));
        }
    }
    Ok(Corpora { files, files_each: endings.len() })
}

/// Refuses one token file where three are expected, and the reverse. Opening reports missing files.
fn check_kind(store: &dyn Storage, prefix: &Key, path: &str, objective: Objective) -> Result<()> {
    let exists = |ending: &str| {
        let index = prefix.with_suffix(&format!("{ending}.idx"));
        index.is_ok_and(|index| store.open(&index).is_ok())
    };
    let expects_three = objective == Objective::Encdec;
    let (expected, other) = if expects_three { (TRIPLE[0], "") } else { ("", TRIPLE[0]) };
    if exists(expected) || !exists(other) {
        return Ok(());
    }
    let (detail, hint) = if expects_three {
        (
            "expected three token files that end in _context, _target and _target_offset, found \
             one token file",
            "create them with `preprocess --objective cpm2`, or set data.objective = \
             \"span-corruption\" for one file of sentences",
        )
    } else {
        (
            "expected one token file, found three with contexts and targets",
            "set data.objective = \"encdec\" and model.family = \"t5\" to read three",
        )
    };
    let operation = format!("cannot open corpus {path}");
    Err(Error::Mismatch(Incompatible::new(operation, detail, hint)))
}

/// Refuses documents where sentences are expected: tokens beyond the sample length would be lost,
/// and there would be no parts whose order a model could predict.
fn check_sentences(corpus: &IndexedDataset, objective: Objective) -> Result<()> {
    let (documents, sequences) = (corpus.document_count(), corpus.sequence_count());
    if !objective.hides() || sequences > documents {
        return Ok(());
    }
    let detail = format!(
        "expected a sequence for each sentence, found {sequences} sequences in {documents} \
         documents"
    );
    Err(Error::Mismatch(Incompatible::new(
        format!("cannot open corpus {}", corpus.display()),
        detail,
        "tokenize it again with `preprocess --split-sentences`, as for Megatron's BERT and T5",
    )))
}

/// The order in which a run reads its samples, built in memory and not cached: for callers that
/// need the location of samples and no batches.
///
/// # Errors
/// As [`open_corpus`], and what is wrong with an index.
pub fn order_of(config: &Config) -> Result<Arc<dyn SampleOrder>> {
    let corpora = &open_corpus(config)?;
    let tokenizer = Value::Null;
    let orders = Orders { corpora, config, tokenizer, cache: None, checks: RefCell::default() };
    orders.open(Split::Train, Some(config.samples_total())).map(|(order, _)| order)
}

/// Corpora and the order in which a run reads them.
#[derive(Debug)]
pub struct Data {
    corpora: Corpora,
    train: Samples,
    /// `None` if the run never evaluates.
    valid: Option<Samples>,
    order_check: OrderCheck,
    peers: Option<NodePeers>,
    doubts: Vec<String>,
    /// Whether tokens are verified.
    verify: bool,
}

impl Data {
    /// Maps or builds the sample orders that a run of this length needs.
    ///
    /// # Errors
    /// [`Error::Indexed`], [`Error::Tokenizer`] for an unknown tokenizer, [`Error::Mismatch`] for
    /// one without the tokens that the objective needs.
    pub fn new(corpora: Corpora, config: &Config) -> Result<Self> {
        let tokenizer = open_tokenizer(&config.data.tokenizer)?;
        let doubts = doubts(&corpora, config, &*tokenizer)?;
        let assembly = Assembly::new(config, Some(&*tokenizer))?;
        let cache = storage::open_url(&config.cache_dir())?;
        let (tokenizer, cache, checks) =
            (tokenizer.identifiers(), Some(&cache), RefCell::default());
        let orders = Orders { corpora: &corpora, config, tokenizer, cache, checks };
        let open = |which, samples| -> Result<Samples> {
            let (order, parts) = orders.open(which, Some(samples))?;
            let mut assembly = assembly.clone();
            parts.into_iter().for_each(|part| assembly.add_corpus(part));
            Ok(Samples { order, assembly, local: None, tokenizer: None })
        };
        let mut train = open(Split::Train, config.samples_total())?;
        train.local = local_cache(config, &train.order)?;
        let evaluates = config.eval.every > 0;
        let valid = evaluates.then(|| open(Split::Valid, config.eval_samples())).transpose()?;
        let (checks, verify) = (orders.checks.take(), config.data.verify);
        let (order_check, peers) = (OrderCheck::new(checks), None);
        Ok(Data { corpora, train, valid, order_check, peers, doubts, verify })
    }

    /// Warnings about the data, which can be read nevertheless.
    #[must_use]
    pub fn doubts(&self) -> &[String] {
        &self.doubts
    }

    /// The local cache of training samples, if the run has one. The caller must report checkpoints
    /// to it.
    #[must_use]
    pub fn local_cache(&self) -> Option<Arc<LazyCache>> {
        self.train.local.clone()
    }

    /// Lets one rank of the node read for all `peers`.
    pub fn share(&mut self, peers: NodePeers) {
        self.peers = Some(peers);
    }

    /// Starts to check every number of the cached orders on a background thread, even if their
    /// seals match: on one rank, for all. [`Batches::fill`] returns its error.
    pub fn start_order_check(&self) {
        self.order_check.start();
    }

    /// Waits for that check, until it ends or `stop` is set.
    ///
    /// # Errors
    /// [`Error::Indexed`] for a corrupt order, unless [`Batches::fill`] has returned it.
    pub fn finish_order_check(&self, stop: &AtomicBool) -> Result<()> {
        self.order_check.wait(stop)
    }

    /// The identity of these corpora, independent of their location: of each file its counts, and a
    /// checksum of its first and last MiB.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn fingerprint(&self) -> Result<Value> {
        self.corpora.fingerprint(self.verify)
    }

    /// A rank's training batches after `samples_consumed` samples, to the end of the run.
    ///
    /// # Errors
    /// [`Error::Loader`] if the order has too few samples.
    pub fn train_batches(
        &self,
        config: &Config,
        mesh_rank: MeshRank,
        samples_consumed: u64,
    ) -> Result<Batches> {
        let samples = samples_consumed..config.samples_total();
        let node = self.peers.as_ref().and_then(|peers| {
            let sample_bytes_max = 8 * self.sample_tokens_max(config.model.seq_len);
            let is_small = sample_bytes_max <= SHARED_SAMPLE_BYTES_MAX;
            // fits: it is small.
            is_small.then(|| (peers.job("train"), sample_bytes_max as usize))
        });
        Batches::new(&self.train, config, mesh_rank, samples, node, Some(self.order_check.clone()))
    }

    /// A rank's validation batches: the same ones at every call. None if the run never evaluates.
    ///
    /// # Errors
    /// As [`Data::train_batches`].
    pub fn valid_batches(&self, config: &Config, mesh_rank: MeshRank) -> Result<Option<Batches>> {
        let Some(valid) = &self.valid else { return Ok(None) };
        // Without the smaller batches of a ramp-up.
        let mut without_rampup = config.clone();
        without_rampup.batch.rampup = None;
        let samples = 0..config.eval_samples();
        Batches::new(valid, &without_rampup, mesh_rank, samples, None, None).map(Some)
    }

    /// The maximum number of tokens read for a sample.
    fn sample_tokens_max(&self, seq_len: u64) -> u64 {
        match &self.train.assembly {
            Assembly::Lm(..) => seq_len + 1,
            // The sentence that fills a sample is read completely.
            Assembly::Spans(..) | Assembly::Masked(..) => {
                let of = |file: &IndexedDataset| {
                    (0..file.sequence_count()).map(|at| u64::from(file.sequence_len(at))).max()
                };
                seq_len + self.corpora.files.iter().filter_map(|file| of(file)).max().unwrap_or(0)
            }
            // With each part of a context the complete target of its document is read: of the
            // documents at both ends, and of those between, which are no longer than the sample.
            Assembly::Triple(..) => {
                let (mut longest, mut densest) = (0, 0);
                for files in self.corpora.each() {
                    let len = |file: usize, at| u64::from(files[file].sequence_len(at));
                    for at in 0..files[0].sequence_count() {
                        let target = len(1, at) + len(2, at);
                        longest = longest.max(target);
                        densest = densest.max(target.div_ceil(len(0, at).max(1)));
                    }
                }
                seq_len + seq_len * densest + 2 * longest
            }
        }
    }
}

/// Warnings about a tokenizer that differs from that of the corpora according to their manifests,
/// and about missing checksums.
fn doubts(corpora: &Corpora, config: &Config, tokenizer: &dyn Tokenizer) -> Result<Vec<String>> {
    let (name, vocab) = (&config.data.tokenizer, config.model.vocab);
    let count = thousands(f64::from(tokenizer.vocab_size()));
    let mut doubts = Vec::new();
    if u64::from(tokenizer.vocab_size()) > vocab {
        doubts.push(format!(
            "data.tokenizer '{name}' has {count} tokens, model.vocab is {vocab}; the model can \
             neither read nor generate the ids from {vocab} on"
        ));
    }
    for files in corpora.each() {
        let manifests = files.iter().map(|file| manifest_of(file)).collect::<Result<Vec<_>>>()?;
        for (file, manifest) in files.iter().zip(&manifests) {
            let listed = manifest.iter().flat_map(|manifest| &manifest.files);
            if file.checksums().is_none() && listed.into_iter().any(|it| it.path.ends_with(".crc"))
            {
                doubts.push(format!(
                    "{}.crc is listed in the manifest but absent; the tokens are not verified \
                     (hint: copy it, or create it with `feedline check --add-checksums`)",
                    file.display()
                ));
            }
        }
        let manifest = manifests.into_iter().next().flatten();
        let made_by = manifest.map_or(Value::Null, |manifest| manifest.meta["tokenizer"].clone());
        if made_by.is_null() || made_by["fingerprint"] == tokenizer.fingerprint() {
            continue;
        }
        doubts.push(format!(
            "{} was made with tokenizer {} of {} tokens, data.tokenizer '{name}' has {count} \
             tokens; special tokens and generated text use data.tokenizer",
            files[0].display(),
            made_by["name"],
            made_by["vocab_size"]
        ));
    }
    Ok(doubts)
}

/// The manifest of a dataset, if it has one. Its file lengths must match.
fn manifest_of(dataset: &IndexedDataset) -> Result<Option<Manifest>> {
    let key = dataset.prefix().with_suffix(".manifest.json")?;
    let manifest = match Manifest::read(&**dataset.store(), &key) {
        Err(storage::Error::NotFound { .. }) => return Ok(None),
        other => other?,
    };
    let (bin, name) = (dataset.bin(), dataset.prefix().name());
    let entry = manifest.files.iter().find(|file| file.path == format!("{name}.bin"));
    let expected = entry.map_or(bin.len_bytes(), |entry| entry.bytes);
    if bin.len_bytes() != expected {
        let found = bin.len_bytes();
        return Err(Error::Mismatch(Incompatible::new(
            format!("cannot open corpus {}", dataset.display()),
            format!(
                "expected a .bin of {expected} bytes as listed in its manifest, found {found} bytes"
            ),
            "one of them was replaced; compare both with `feedline check`",
        )));
    }
    Ok(Some(manifest))
}

/// The identity of the cache includes the manifests of the data; the seed distinguishes orders.
fn local_cache(config: &Config, order: &Arc<dyn SampleOrder>) -> Result<Option<Arc<LazyCache>>> {
    let Some(local) = &config.data.local_cache else { return Ok(None) };
    let limit_bytes = local.limit.map_or(u64::MAX, |limit| limit.0);
    let options = CacheOptions { limit_bytes, salt: config.run.seed };
    let folder = storage::open_url(&local.dir)?;
    Ok(Some(Arc::new(LazyCache::new(folder, Arc::clone(order), options))))
}

fn fingerprint(corpus: &IndexedDataset, verify: bool) -> Result<Value> {
    let bin = match verify {
        true => Arc::clone(corpus.bin()),
        false => corpus.store().open(&corpus.prefix().with_suffix(".bin")?)?,
    };
    let mut buf = vec![0; FINGERPRINT_BYTES.min(bin.len_bytes()) as usize]; // fits: 1 MiB
    let mut crc = Crc64::new();
    for offset in [0, bin.len_bytes() - buf.len() as u64] {
        bin.read_many(&mut [RangeRead { offset, buf: &mut buf }])?;
        crc.update(&buf);
    }
    Ok(json!({
        "tokens": corpus.token_count(),
        "sequences": corpus.sequence_count(),
        "documents": corpus.document_count(),
        "ends_crc64": format!("{:016x}", crc.value()),
    }))
}
