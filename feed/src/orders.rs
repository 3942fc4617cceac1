//! The order of the samples of a run, and the settings of their assemblers.

use std::cell::RefCell;
use std::sync::Arc;

use indexed::{
    BlendConfig, BlendIndex, BlendWeights, Dtype, GptIndex, GptIndexConfig, IndexedDataset,
    MaskedConfig, MaskedIndex, MaskedKind, Split, blend_sizes, normalize_weights,
};
use loader::batch::{
    BertAssemble, BertConfig, EncDecAssemble, EncDecConfig, EncDecPart, GptAssemble, GptConfig,
    MaskedPart, Masking, NO_LABEL, NgramLengths, T5Assemble, T5Config, pad_id,
};
use loader::{BlendOrder, EncDecOrder, GptOrder, MaskedOrder, SampleOrder};
use preprocess::Tokenizer;
use recipe::Incompatible;
use recipe::config::{Config, MaskLengths, Objective};
use recipe::text::thousands;
use serde_json::Value;
use storage::{Key, Storage};

use crate::special::TokenSpellings;
use crate::{AnyAssemble, Corpora, Error, Result, TRIPLE};

/// The settings of an assembler, and the properties of each corpus that it needs.
#[derive(Clone, Debug)]
pub(super) enum Assembly {
    Lm(GptConfig, Vec<Dtype>),
    Triple(EncDecConfig, Vec<EncDecPart>),
    Spans(T5Config, Vec<MaskedPart>),
    Masked(BertConfig, Vec<MaskedPart>),
}

impl Assembly {
    /// Without corpora. Only objective `"lm"` does not need a tokenizer.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the tokenizer lacks tokens that the objective needs.
    pub(super) fn new(config: &Config, tokenizer: Option<&dyn Tokenizer>) -> Result<Self> {
        // fits: the config refuses more than 2^20, and seeds above 32 bits.
        let (seq_len, seed) = (config.model.seq_len as usize, config.run.seed as u32);
        let decoder_len = config.model.dec_len.unwrap_or(0) as usize;
        let data = &config.data;
        let objective = config.objective();
        // fits: ids are below the vocabulary's size.
        let some = |id: Option<u64>| id.map(|id| id as i64);
        if objective == Objective::Lm {
            let eod = data.special.eod.or(tokenizer.and_then(Tokenizer::eod).map(u64::from));
            let config = GptConfig {
                eod: some(eod),
                eod_mask_loss: data.mask_eod_loss,
                reset_position_ids: data.reset_at_document,
                reset_attention_mask: data.reset_at_document,
                ..GptConfig::new(seq_len)
            };
            return Ok(Assembly::Lm(config, Vec::new()));
        }
        let tokenizer = tokenizer.expect("only lm is read without a tokenizer");
        let words = TokenSpellings::of(tokenizer);
        let special = words.special(config, tokenizer)?;
        // An id that the objective does not need may be absent.
        let id = |id: Option<u64>| some(id).unwrap_or(NO_LABEL);
        let sentinels = special.sentinel_ids().into_iter().map(|id| id as i64).collect();
        if objective == Objective::Encdec {
            let config = EncDecConfig {
                encoder_len: seq_len,
                decoder_len,
                vocab_size: tokenizer.vocab_size().into(),
                bos: id(special.bos),
                eod: id(special.eod),
                pad: id(special.pad),
                sentinels,
                reset_position_ids: data.reset_at_document,
                reset_attention_mask: data.reset_at_document,
            };
            return Ok(Assembly::Triple(config, Vec::new()));
        }
        let masking = Masking {
            probability: data.mask_prob,
            ngram_max: config.mask_ngram_max() as usize, // fits: at most 1024
            lengths: match config.mask_lengths() {
                MaskLengths::ShorterFirst => NgramLengths::ShorterFirst,
                MaskLengths::LongerFirst => NgramLengths::LongerFirst,
                MaskLengths::Geometric => NgramLengths::Geometric,
            },
            full_words: config.mask_full_words(),
            cls: id(special.cls),
            sep: id(special.sep),
            mask: id(special.mask),
            vocabulary: words.vocabulary(),
        };
        let pad = pad_id(some(special.pad), &[id(special.eos), id(special.eod)]);
        Ok(if objective == Objective::Mlm {
            check_random_tokens(config, tokenizer)?;
            let two_parts = config.sentence_order();
            Assembly::Masked(BertConfig { seq_len, pad, seed, two_parts, masking }, Vec::new())
        } else {
            let (bos, eos) = (id(special.bos), id(special.eos));
            let encoder_len = seq_len;
            let config =
                T5Config { encoder_len, decoder_len, pad, bos, eos, sentinels, seed, masking };
            Assembly::Spans(config, Vec::new())
        })
    }

    /// Adds the properties of the next corpus.
    pub(super) fn add_corpus(&mut self, part: CorpusAssembly) {
        match (self, part) {
            (Assembly::Lm(_, of), CorpusAssembly::Lm(dtype)) => of.push(dtype),
            (Assembly::Triple(_, of), CorpusAssembly::Triple(part)) => of.push(part),
            (Assembly::Spans(_, of) | Assembly::Masked(_, of), CorpusAssembly::Masked(part)) => {
                of.push(part);
            }
            _ => unreachable!("both are made from one config"),
        }
    }

    /// An assembler; each reader has its own.
    pub(super) fn assemble(&self) -> loader::Result<AnyAssemble> {
        Ok(match self.clone() {
            Assembly::Lm(config, of) => AnyAssemble::Lm(GptAssemble::new(config, of)?),
            Assembly::Triple(config, of) => AnyAssemble::Triple(EncDecAssemble::new(config, of)?),
            Assembly::Spans(config, of) => AnyAssemble::Spans(T5Assemble::new(config, of)?),
            Assembly::Masked(config, of) => AnyAssemble::Masked(BertAssemble::new(config, of)?),
        })
    }
}

/// `"mlm"` replaces some tokens by any id of the tokenizer.
fn check_random_tokens(config: &Config, tokenizer: &dyn Tokenizer) -> Result<()> {
    let (found, most) = (u64::from(tokenizer.vocab_size()), config.model.vocab);
    if found <= most {
        return Ok(());
    }
    Err(Error::Mismatch(Incompatible::new(
        format!("cannot use data.tokenizer '{}'", config.data.tokenizer),
        format!("expected at most model.vocab = {most} ids, found {found}"),
        "raise model.vocab; objective \"mlm\" replaces tokens by any id of the tokenizer",
    )))
}

/// The properties of one corpus that its batches need.
#[derive(Clone, Debug)]
pub(super) enum CorpusAssembly {
    Lm(Dtype),
    Triple(EncDecPart),
    Masked(MaskedPart),
}

/// A corpus in the order of its samples, its properties, and the description that names its cache.
type Ordered = (Arc<dyn SampleOrder>, CorpusAssembly, Value);

/// The inputs of sample orders.
pub(super) struct Orders<'a> {
    pub(super) corpora: &'a Corpora,
    pub(super) config: &'a Config,
    /// The identifiers of the tokenizer, which are part of the names of caches.
    pub(super) tokenizer: Value,
    /// The store of cached orders; without it they are built in memory.
    pub(super) cache: Option<&'a Arc<dyn Storage>>,
    /// Checks of every number of the cached orders, even if their seals match.
    pub(super) checks: RefCell<Vec<CacheCheck>>,
}

/// Checks one cached order.
pub(super) type CacheCheck = Box<dyn FnOnce() -> indexed::Result<()> + Send>;

impl Orders<'_> {
    /// The order of a split, and the properties of each corpus.
    pub(super) fn open(
        &self,
        which: Split,
        samples: Option<u64>,
    ) -> Result<(Arc<dyn SampleOrder>, Vec<CorpusAssembly>)> {
        let needed = samples.map(|samples| format!(", {} needed", thousands(samples as f64)));
        let needed = needed.unwrap_or_default();
        let log_count = |count: u64| {
            let count = thousands(count as f64);
            log::info!("sample index: {count} samples for {}{needed}", which.name());
        };
        let corpora = &self.config.data.train;
        let weights = corpora.iter().map(|corpus| corpus.weight).collect::<Vec<_>>();
        let weights = normalize_weights(&weights)?;
        let (sizes, size) = match (corpora.len(), samples) {
            (1, _) => (vec![samples], 0),
            (_, Some(samples)) => {
                let (sizes, size) = blend_sizes(&weights, samples);
                (sizes.into_iter().map(Some).collect(), size)
            }
            (found, None) => {
                return Err(Error::Mismatch(Incompatible::new(
                    "cannot blend corpora".to_owned(),
                    format!("expected a number of samples, found none for {found} corpora"),
                    "give the number of samples that the run consumes",
                )));
            }
        };
        let (mut orders, mut parts) = (Vec::new(), Vec::new());
        let (mut datasets, mut available) = (Vec::new(), Vec::new());
        for ((corpus, entry), size) in self.corpora.each().zip(corpora).zip(sizes) {
            let (order, part, description) = self.open_one(corpus, &entry.path, (which, size))?;
            available.push(order.sample_count());
            datasets.push(description);
            orders.push(order);
            parts.push(part);
        }
        if let [only] = &orders[..] {
            log_count(only.sample_count());
            return Ok((Arc::clone(only), parts));
        }
        let weights = BlendWeights::Weighted { weights, size };
        let blend = BlendConfig { datasets, which, weights, available };
        let blend = match self.cache {
            Some(cache) => {
                let index = BlendIndex::load_or_build(&blend, &**cache, &Key::root())?;
                let (blend, cache) = (blend.clone(), Arc::clone(cache));
                let check = move || BlendIndex::verify_cache(&blend, &*cache, &Key::root());
                self.check_later(move || check().map(|_| ()));
                index
            }
            None => BlendIndex::build_checked(&blend)?,
        };
        log_count(blend.sample_count());
        Ok((Arc::new(BlendOrder::new(orders, Arc::new(blend))), parts))
    }

    fn check_later(&self, check: impl FnOnce() -> indexed::Result<()> + Send + 'static) {
        self.checks.borrow_mut().push(Box::new(check));
    }

    /// The order of one corpus.
    fn open_one(
        &self,
        corpus: &[Arc<IndexedDataset>],
        path: &str,
        part: (Split, Option<u64>),
    ) -> Result<Ordered> {
        let (config, first) = (self.config, Arc::clone(&corpus[0]));
        let seq_len = config.model.seq_len;
        match config.objective() {
            Objective::Lm => {
                let (index, description) = self.gpt(&first, path.to_owned(), seq_len, part)?;
                let known = CorpusAssembly::Lm(first.dtype());
                let order = GptOrder::new(first, index, seq_len as usize)?; // fits: at most 2^20
                Ok((Arc::new(order), known, description))
            }
            Objective::Encdec => {
                // The extra token is part of the encoder's input.
                let path = format!("{path}{}", TRIPLE[0]);
                let (index, description) = self.gpt(&first, path, seq_len - 1, part)?;
                let triple = [0, 1, 2].map(|nth| Arc::clone(&corpus[nth]));
                let order = EncDecOrder::new(triple, index, seq_len as usize)?; // fits: as above
                let known = CorpusAssembly::Triple(order.part());
                Ok((Arc::new(order), known, description))
            }
            Objective::SpanCorruption => {
                let sequence_length_decoder = config.model.dec_len.unwrap_or(0);
                self.masked(first, path, part, MaskedKind::T5 { sequence_length_decoder })
            }
            Objective::Mlm => {
                let classification_head = config.sentence_order();
                self.masked(first, path, part, MaskedKind::Bert { classification_head })
            }
        }
    }

    fn gpt(
        &self,
        corpus: &Arc<IndexedDataset>,
        dataset_path: String,
        seq_len: u64,
        (which, samples): (Split, Option<u64>),
    ) -> Result<(Arc<GptIndex>, Value)> {
        let order = GptIndexConfig {
            dataset_path,
            split: Some(self.config.data.split.0.clone()),
            seq_len,
            seed: self.config.run.seed as u32, // fits: the config refuses a larger one
            num_samples: samples,
            add_extra_token: true,
            drop_last_partial_valid: true,
            tokenizer: self.tokenizer.clone(),
        };
        let index = match self.cache {
            Some(cache) => {
                let index = GptIndex::load_or_build(corpus, which, &order, &**cache, &Key::root())?;
                let of = (Arc::clone(corpus), order.clone(), Arc::clone(cache));
                self.check_later(move || {
                    let (corpus, order, cache) = of;
                    GptIndex::verify_cache(&corpus, which, &order, &*cache, &Key::root())
                        .map(|_| ())
                });
                index
            }
            None => GptIndex::build(corpus, which, &order)?,
        };
        Ok((Arc::new(index), order.description(which)?))
    }

    fn masked(
        &self,
        corpus: Arc<IndexedDataset>,
        path: &str,
        (which, samples): (Split, Option<u64>),
        kind: MaskedKind,
    ) -> Result<Ordered> {
        let config = self.config;
        let lengths = config.mask_lengths();
        let order = MaskedConfig {
            kind,
            dataset_path: path.to_owned(),
            split: Some(config.data.split.0.clone()),
            seq_len: config.model.seq_len,
            seed: config.run.seed as u32, // fits: the config refuses a larger one
            num_samples: samples,
            tokenizer: self.tokenizer.clone(),
            masking_probability: config.data.mask_prob,
            short_sequence_probability: config.data.short_seq_prob,
            masking_max_ngram: config.mask_ngram_max() as u32, // fits: at most 1024
            masking_do_full_word: config.mask_full_words(),
            masking_do_permutation: false,
            masking_use_longer_ngrams: lengths == MaskLengths::LongerFirst,
            masking_use_geometric_distribution: lengths == MaskLengths::Geometric,
        };
        let index = match self.cache {
            Some(cache) => {
                let index =
                    MaskedIndex::load_or_build(&corpus, which, &order, &**cache, &Key::root())?;
                let of = (Arc::clone(&corpus), order.clone(), Arc::clone(cache));
                self.check_later(move || {
                    let (corpus, order, cache) = of;
                    MaskedIndex::verify_cache(&corpus, which, &order, &*cache, &Key::root())
                        .map(|_| ())
                });
                index
            }
            None => MaskedIndex::build(&corpus, which, &order)?,
        };
        let order_of = MaskedOrder::new(corpus, Arc::new(index))?;
        let known = CorpusAssembly::Masked(order_of.part());
        Ok((Arc::new(order_of), known, order.description(which)?))
    }
}
