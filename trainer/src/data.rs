//! The corpus of a run: its token files, the order of their samples, and batches.

use std::sync::Arc;

use indexed::{GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::{Batch, GptBatches, Options};
use preprocess::{Tokenizer, TokenizerSpec};
use serde_json::{Value, json};
use storage::{Crc64, Key, Read};

use crate::config::Config;
use crate::log::thousands;
use crate::{Error, Result};

/// How much of each end of the `.bin` tells one corpus from another.
const FINGERPRINT_BYTES: u64 = 1 << 20;

/// Opens the token files of a run.
///
/// # Errors
/// [`Error::Indexed`].
pub fn open_corpus(config: &Config) -> Result<IndexedDataset> {
    let (store, prefix) = storage::locate(config.corpus())?;
    let corpus = IndexedDataset::open(&store, &prefix)?;
    log::info!(
        "data: {} has {} tokens in {} documents",
        corpus.display(),
        thousands(corpus.token_count() as f64),
        thousands(corpus.document_count() as f64)
    );
    Ok(corpus)
}

/// A corpus and the order in which a run reads it.
#[derive(Debug)]
pub struct Data {
    corpus: Arc<IndexedDataset>,
    train: Arc<GptIndex>,
    /// `None` if the run never evaluates.
    valid: Option<Arc<GptIndex>>,
    vocab: u64,
    window_batches: usize,
}

impl Data {
    /// Maps or builds the sample orders that a run of this length needs.
    ///
    /// # Errors
    /// [`Error::Indexed`], or [`Error::Tokenizer`] for a tokenizer that is not known.
    pub fn new(corpus: IndexedDataset, config: &Config) -> Result<Self> {
        let tokenizer = tokenizer_of(config)?;
        let cache = storage::open_url(&config.cache_dir())?;
        let order = |which: Split, samples: u64| -> Result<Arc<GptIndex>> {
            let order = GptIndexConfig {
                dataset_path: config.corpus().to_owned(),
                split: Some(config.data.split.0.clone()),
                seq_len: config.model.seq_len,
                seed: config.run.seed as u32, // fits: the config refuses a larger one
                num_samples: Some(samples),
                add_extra_token: true,
                drop_last_partial_valid: true,
                tokenizer: tokenizer.identifiers(),
            };
            let index =
                GptIndex::load_or_build(&corpus, which, &order, cache.as_ref(), &Key::root())?;
            let count = thousands(index.sample_count() as f64);
            let needed = thousands(samples as f64);
            log::info!("index: {count} samples for {}, {needed} needed", which.name());
            Ok(Arc::new(index))
        };
        let train = order(Split::Train, config.samples_total())?;
        let evaluates = config.eval.every > 0;
        let valid = evaluates.then(|| order(Split::Valid, config.eval_samples())).transpose()?;
        Ok(Data {
            corpus: Arc::new(corpus),
            train,
            valid,
            vocab: config.model.vocab,
            window_batches: config.data.prefetch_batches as usize, // fits: at most 1024
        })
    }

    /// What tells this corpus from another, wherever it lies: its counts, and a checksum of its
    /// first and last MiB.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn fingerprint(&self) -> Result<Value> {
        let bin = self.corpus.bin();
        let mut buf = vec![0; FINGERPRINT_BYTES.min(bin.len_bytes()) as usize]; // fits: 1 MiB
        let mut crc = Crc64::new();
        for offset in [0, bin.len_bytes() - buf.len() as u64] {
            bin.read_many(&mut [Read { offset, buf: &mut buf }])?;
            crc.update(&buf);
        }
        Ok(json!({
            "tokens": self.corpus.token_count(),
            "sequences": self.corpus.sequence_count(),
            "documents": self.corpus.document_count(),
            "ends_crc64": format!("{:016x}", crc.value()),
        }))
    }

    /// The training batches after `samples_consumed` samples, to the end of the run.
    ///
    /// # Errors
    /// [`Error::Loader`] if the order has too few samples.
    pub fn train_batches(&self, config: &Config, samples_consumed: u64) -> Result<Batches> {
        self.batches(&self.train, config, samples_consumed..config.samples_total())
    }

    /// The validation batches: the same ones at every call. None if the run never evaluates.
    ///
    /// # Errors
    /// As [`Data::train_batches`].
    pub fn valid_batches(&self, config: &Config) -> Result<Option<Batches>> {
        let batches = |index| self.batches(index, config, 0..config.eval_samples());
        self.valid.as_ref().map(batches).transpose()
    }

    fn batches(
        &self,
        index: &Arc<GptIndex>,
        config: &Config,
        samples: std::ops::Range<u64>,
    ) -> Result<Batches> {
        let options = Options {
            seq_len: config.model.seq_len as usize, // fits: the config refuses more than 2^20
            micro_batch: config.batch.micro as usize, // fits: nor more than 2^16
            samples_consumed: samples.start,
            samples_end: samples.end,
            window_batches: self.window_batches,
        };
        let batches = GptBatches::start(Arc::clone(&self.corpus), Arc::clone(index), options)?;
        Ok(Batches { batches, vocab: self.vocab })
    }
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

/// Micro-batches in their order, with every token checked against the vocabulary.
#[derive(Debug)]
pub struct Batches {
    batches: GptBatches,
    vocab: u64,
}

impl Batches {
    /// Fills `into` with the next `count` batches, or fewer at the end. What it held is recycled.
    ///
    /// # Errors
    /// [`Error::Loader`]; [`Error::Mismatch`] for a token that the model does not have.
    pub fn fill(&mut self, count: u64, into: &mut Vec<Batch>) -> Result<()> {
        for spent in into.drain(..) {
            self.batches.recycle(spent);
        }
        while (into.len() as u64) < count {
            let Some(batch) = self.batches.next_batch()? else { break };
            self.check(&batch)?;
            into.push(batch);
        }
        Ok(())
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let fits = |token: &i64| u64::try_from(*token).is_ok_and(|token| token < self.vocab);
        let ids = || batch.tokens.iter().chain(&batch.labels);
        if ids().all(fits) {
            return Ok(());
        }
        let worst = ids().find(|token| !fits(token)).expect("one was found above");
        let last = batch.first_sample + batch.rows as u64 - 1;
        Err(Error::Mismatch {
            doing: format!("read samples {} to {last} of the order", batch.first_sample),
            details: vec![format!("got token {worst}, due ids below model.vocab = {}", self.vocab)],
            hint: "the corpus was made with another tokenizer, or model.vocab is too small",
        })
    }
}
