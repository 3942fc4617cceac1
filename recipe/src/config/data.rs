//! `[data]`: the corpora, the objective and the special tokens.

use serde::{Deserialize, Serialize};

use super::check::{not_empty, refused, within};
use super::node::KeyError;
use super::values;
use super::{Config, Corpus, Family, MaskLengths, Objective, Size, SplitText};

/// Corpora of one blend: the index of a blend of Megatron stores a corpus in one byte.
const CORPORA_MAX: usize = 255;
/// The sentence mapping of Megatron takes a signed 32-bit seed and adds 1 to it.
const SENTENCES_SEED_MAX: u64 = i32::MAX as u64 - 1;

/// `[data]`: the corpora, the objective and the special tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The corpora. Either the prefix of one `.bin/.idx` pair (`"data/wiki_text_document"`), or a
    /// list `[{ path = "...", weight = 1.0 }]`. A prefix may be a name of `[corpora]`. With
    /// `"encdec"` a prefix names three pairs, which end in `_context`, `_target` and
    /// `_target_offset`. Required. Minimum: 1. Maximum: 255, the limit of a blend of Megatron.
    #[serde(deserialize_with = "values::corpora")]
    pub train: Vec<Corpus>,
    /// Shares of the documents for training, validation and test, in Megatron's syntax:
    /// `"949,50,1"` or `[949, 50, 1]`. Default: `"949,50,1"`. Minimum: one share above 0.
    #[serde(default)]
    pub split: SplitText,
    /// Tokenizer of the corpus: a kind, or a kind and its file. Examples: `"hf:tokenizer.json"`,
    /// `"hf:FOLDER,rule=class"`, `"encdec:vocab.txt"`, `"gpt2:vocab.json,merges.txt"`.
    /// `"null:30000"` means no tokenizer and 30000 ids. Generation, special tokens and whole-word
    /// masking use it, and it is part of the name of the index cache. Default: `"gpt2"`.
    #[serde(default = "default_tokenizer")]
    pub tokenizer: String,
    /// Training objective. `"lm"` predicts the next token. `"span-corruption"` predicts spans that
    /// are masked at run time. `"encdec"` predicts the spans in the three token files of CPM-2.
    /// `"mlm"` predicts masked tokens. Default: `"lm"` with family `"gpt"`, `"span-corruption"`
    /// with `"t5"`, `"mlm"` with `"bert"`.
    #[serde(default)]
    pub objective: Option<Objective>,
    /// Fraction of the tokens that are masked. Only with `"span-corruption"` and `"mlm"`. Default:
    /// 0.15. Minimum: above 0. Maximum: below 1.
    #[serde(default = "default_mask_prob")]
    pub mask_prob: f64,
    /// Largest number of words that are masked as one span. Only with `"span-corruption"` and
    /// `"mlm"`. Default: 10 with `"span-corruption"`, 3 with `"mlm"`, as in Megatron. Minimum: 1.
    /// Maximum: 1024.
    #[serde(default)]
    pub mask_ngram_max: Option<u64>,
    /// Distribution of the lengths of masked spans: `"shorter-first"`, `"longer-first"` or
    /// `"geometric"`. Only with `"span-corruption"` and `"mlm"`. Default: `"geometric"` with
    /// `"span-corruption"`, `"shorter-first"` with `"mlm"`, as in Megatron.
    #[serde(default)]
    pub mask_lengths: Option<MaskLengths>,
    /// Whether all tokens of a word are masked together. Only with `"span-corruption"` and `"mlm"`.
    /// Default: true.
    #[serde(default)]
    pub mask_full_words: Option<bool>,
    /// Fraction of the samples with a shorter target length. Only with `"span-corruption"` and
    /// `"mlm"`. Default: 0.1. Minimum: 0. Maximum: 1.
    #[serde(default = "default_short_seq_prob")]
    pub short_seq_prob: f64,
    /// Whether samples have two segments and the model also predicts whether they are swapped. Only
    /// with `"mlm"`. Default: true.
    #[serde(default)]
    pub sentence_order: Option<bool>,
    /// Ids of special tokens.
    #[serde(default)]
    pub special: SpecialConfig,
    /// Whether attention and positions restart at each document in a sample. Only with `"lm"` and
    /// `"encdec"`; samples of other objectives hold one document. Default: false.
    #[serde(default)]
    pub reset_at_document: bool,
    /// Whether the loss excludes the token after the end of a document. Only with `"lm"` and
    /// `"encdec"`; `"encdec"` always excludes it. Default: false.
    #[serde(default)]
    pub mask_eod_loss: bool,
    /// Micro-batches that are read ahead of the current one. With fewer, a slow store may stall the
    /// run; each takes memory for `micro x seq_len` tokens. Default: 8. Minimum: 1. Maximum: 1024.
    #[serde(default = "default_prefetch_batches")]
    pub prefetch_batches: u64,
    /// Folder of the sample-index cache. Default: below the first corpus as in Megatron,
    /// `PREFIX/cache/GPTDataset_indices`; `T5MaskedWordPieceDataset_indices` with
    /// `"span-corruption"`, `BERTMaskedWordPieceDataset_indices` with `"mlm"`.
    #[serde(default)]
    pub cache_dir: Option<String>,
    /// Whether tokens are checked against block checksums as they are read, if the corpus has a
    /// `.crc` file. Default: true.
    #[serde(default = "default_verify")]
    pub verify: bool,
    /// Cache on a local disk, for corpora on a remote store. Default: none.
    #[serde(default)]
    pub local_cache: Option<LocalCacheConfig>,
}

/// `[data.local_cache]`: a cache of the corpora on a local disk of each node. It holds the complete
/// corpora if they fit. Otherwise it holds the samples since the last checkpoint, so that a
/// restarted run reads them from the local disk. Several runs may share it, and it may be deleted
/// at any time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalCacheConfig {
    /// Folder of the cache, on a local disk of the node. Required.
    pub dir: String,
    /// Largest size of the cache, such as `"200GiB"`. One twentieth of the free space always stays
    /// free. Default: no other limit. Minimum: `"1MiB"`.
    #[serde(default)]
    pub limit: Option<Size>,
}

/// `[data.special]`: ids of special tokens that objectives need. Each is below `model.vocab`.
/// Default: those of the tokenizer, found by their usual names; the ids in use are recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpecialConfig {
    /// Starts a sample of `"mlm"`; never masked. Default: `[CLS]`, `<cls>`, or `bos`.
    pub cls: Option<u64>,
    /// Ends a segment of a sample of `"mlm"`; never masked. Default: `[SEP]`, `<sep>`, or `eos`.
    pub sep: Option<u64>,
    /// Replaces the masked tokens of `"mlm"`. Default: `[MASK]` or `<mask>`.
    pub mask: Option<u64>,
    /// Fills a row to its full length. Only `"encdec"` requires it. Default: `[PAD]` or `<pad>`.
    pub pad: Option<u64>,
    /// First input token of a decoder. Default: `[BOS]`, `<bos>`, `<s>`, or `cls`; `pad` if there
    /// is none, as in T5.
    pub bos: Option<u64>,
    /// Last output token of a decoder with `"span-corruption"`. Default: `[EOS]`, `<eos>`, `</s>`,
    /// or `sep`.
    pub eos: Option<u64>,
    /// Ends a document. Default: that of the tokenizer.
    pub eod: Option<u64>,
    /// First and last id of the sentinel tokens, which replace masked spans. The ids may ascend or
    /// descend. Default: `<extra_id_0>` or `<s_0>` and those that follow.
    pub sentinels: Option<[u64; 2]>,
}

fn default_tokenizer() -> String {
    "gpt2".to_owned()
}

fn default_verify() -> bool {
    true
}

fn default_prefetch_batches() -> u64 {
    8
}

pub(super) fn default_mask_prob() -> f64 {
    0.15
}

pub(super) fn default_short_seq_prob() -> f64 {
    0.1
}

impl SpecialConfig {
    /// Every id that is set, with its key.
    pub fn given(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let SpecialConfig { cls, sep, mask, pad, bos, eos, eod, sentinels } = *self;
        let ones = [
            ("cls", cls),
            ("sep", sep),
            ("mask", mask),
            ("pad", pad),
            ("bos", bos),
            ("eos", eos),
            ("eod", eod),
            ("sentinels.0", sentinels.map(|ends| ends[0])),
            ("sentinels.1", sentinels.map(|ends| ends[1])),
        ];
        ones.into_iter().filter_map(|(key, id)| Some((key, id?)))
    }

    /// The sentinels, in the order of their use.
    #[must_use]
    pub fn sentinel_ids(&self) -> Vec<u64> {
        match self.sentinels {
            Some([first, last]) if first <= last => (first..=last).collect(),
            Some([first, last]) => (last..=first).rev().collect(),
            None => Vec::new(),
        }
    }
}

impl Config {
    /// The training objective.
    #[must_use]
    pub fn objective(&self) -> Objective {
        self.data.objective.unwrap_or(match self.model.family {
            Family::Gpt => Objective::Lm,
            Family::T5 => Objective::SpanCorruption,
            Family::Bert => Objective::Mlm,
        })
    }

    /// Largest number of words that are masked as one span.
    #[must_use]
    pub fn mask_ngram_max(&self) -> u64 {
        let default = if self.objective() == Objective::Mlm { 3 } else { 10 };
        self.data.mask_ngram_max.unwrap_or(default)
    }

    /// The distribution of the lengths of masked spans.
    #[must_use]
    pub fn mask_lengths(&self) -> MaskLengths {
        let is_mlm = self.objective() == Objective::Mlm;
        let default = if is_mlm { MaskLengths::ShorterFirst } else { MaskLengths::Geometric };
        self.data.mask_lengths.unwrap_or(default)
    }

    /// Whether all tokens of a word are masked together.
    #[must_use]
    pub fn mask_full_words(&self) -> bool {
        self.data.mask_full_words.unwrap_or(true)
    }

    /// Whether samples have two segments that may be swapped.
    #[must_use]
    pub fn sentence_order(&self) -> bool {
        self.data.sentence_order.unwrap_or(self.objective() == Objective::Mlm)
    }

    /// Fills in the defaults of the objective.
    pub(super) fn resolve_objective(&mut self) {
        self.data.objective = Some(self.objective());
        if self.objective().hides() {
            self.data.mask_ngram_max = Some(self.mask_ngram_max());
            self.data.mask_lengths = Some(self.mask_lengths());
            self.data.mask_full_words = Some(self.mask_full_words());
        }
        if self.objective() == Objective::Mlm {
            self.data.sentence_order = Some(self.sentence_order());
        }
    }

    /// Replaces each name of a corpus by its prefix. The names are dropped: a run by name and a run
    /// by prefix then have the same config.
    pub(super) fn resolve_corpora(&mut self) -> Result<(), KeyError> {
        let names = std::mem::take(&mut self.corpora);
        for (name, prefix) in &names {
            let key = format!("corpora.{name}");
            if name.is_empty() || name.contains('/') {
                let problem = format!("expected a name without '/', found '{name}'");
                return Err(refused(&key, problem).hint("write a prefix in data.train itself"));
            }
            not_empty(&key, prefix)?;
        }
        for corpus in &mut self.data.train {
            if let Some(prefix) = names.get(&corpus.path) {
                corpus.path.clone_from(prefix);
            }
        }
        Ok(())
    }

    pub(super) fn check_data(&self) -> Result<(), KeyError> {
        let data = &self.data;
        if data.train.is_empty() || data.train.len() > CORPORA_MAX {
            let problem =
                format!("expected 1 to {CORPORA_MAX} corpora, found {}", data.train.len());
            return Err(refused("data.train", problem));
        }
        for (at, corpus) in data.train.iter().enumerate() {
            not_empty(&format!("data.train.{at}.path"), &corpus.path)?;
            if !(corpus.weight > 0.0 && corpus.weight.is_finite()) {
                let problem = format!("expected more than 0, found {}", corpus.weight);
                return Err(refused(&format!("data.train.{at}.weight"), problem));
            }
        }
        data.split.shares().map_err(|problem| refused("data.split", problem))?;
        not_empty("data.tokenizer", &data.tokenizer)?;
        within("data.prefetch_batches", data.prefetch_batches, 1..=1024)?;
        data.cache_dir.as_ref().map_or(Ok(()), |folder| not_empty("data.cache_dir", folder))?;
        if let Some(LocalCacheConfig { dir, limit }) = &data.local_cache {
            not_empty("data.local_cache.dir", dir)?;
            if let Some(limit) = limit.filter(|limit| limit.0 < 1 << 20) {
                let problem = format!("expected at least 1MiB, found {limit}");
                return Err(refused("data.local_cache.limit", problem));
            }
        }
        if !(0.0..1.0).contains(&data.mask_prob) {
            let problem = format!("expected at least 0 and below 1, found {}", data.mask_prob);
            return Err(refused("data.mask_prob", problem));
        }
        within("data.short_seq_prob", data.short_seq_prob, 0.0..=1.0)?;
        for (key, id) in data.special.given() {
            within(&format!("data.special.{key}"), id, 0..=self.model.vocab - 1)?;
        }
        self.check_objective()
    }

    /// Checks that the objective, its keys and the shape of the model agree.
    fn check_objective(&self) -> Result<(), KeyError> {
        let (data, model, objective) = (&self.data, &self.model, self.objective());
        let fits = match model.family {
            Family::Gpt => objective == Objective::Lm,
            Family::T5 => matches!(objective, Objective::SpanCorruption | Objective::Encdec),
            Family::Bert => objective == Objective::Mlm,
        };
        if !fits {
            let hint = "gpt takes lm, t5 takes span-corruption or encdec, bert takes mlm";
            return Err(refused("data.objective", "not supported by model.family").hint(hint));
        }
        let hides = objective.hides();
        let only = |is_given: bool, key: &str, of: &str| match is_given {
            true => Err(refused(&format!("data.{key}"), format!("only valid with objective {of}"))),
            false => Ok(()),
        };
        let (hiding, whole) = ("\"span-corruption\" or \"mlm\"", "\"lm\" or \"encdec\"");
        only(data.mask_ngram_max.is_some() && !hides, "mask_ngram_max", hiding)?;
        only(data.mask_lengths.is_some() && !hides, "mask_lengths", hiding)?;
        only(data.mask_full_words.is_some() && !hides, "mask_full_words", hiding)?;
        let is_mlm = objective == Objective::Mlm;
        only(data.sentence_order.is_some() && !is_mlm, "sentence_order", "\"mlm\"")?;
        only(data.reset_at_document && hides, "reset_at_document", whole)?;
        only(data.mask_eod_loss && hides, "mask_eod_loss", whole)?;
        match objective {
            Objective::Lm => Ok(()),
            Objective::Encdec => {
                within("model.seq_len", model.seq_len, 2..=1 << 20)?;
                within("model.dec_len", model.dec_len.unwrap_or(0), 2..=1 << 20)
            }
            Objective::SpanCorruption | Objective::Mlm => self.check_hiding(),
        }
    }

    fn check_hiding(&self) -> Result<(), KeyError> {
        let (data, model) = (&self.data, &self.model);
        if data.mask_prob == 0.0 {
            return Err(refused(
                "data.mask_prob",
                "expected more than 0 with this objective, found 0",
            ));
        }
        within("data.mask_ngram_max", self.mask_ngram_max(), 1..=1024)?;
        within("run.seed", self.run.seed, 0..=SENTENCES_SEED_MAX)?;
        if self.objective() == Objective::Mlm {
            // CLS and two SEP, and two tokens between them.
            within("model.seq_len", model.seq_len, 5..=1 << 20)?;
            let types = if self.sentence_order() { 2 } else { 1 };
            return within("model.token_types", model.token_types, types..=1024);
        }
        within("model.seq_len", model.seq_len, 4..=1 << 20)?;
        // A full sample masks at least so many tokens, in at least so many spans; BOS comes first.
        let hidden = (((model.seq_len - 2) as f64 * data.mask_prob) as u64).max(1);
        let least = 1 + hidden + hidden.div_ceil(self.mask_ngram_max());
        match model.dec_len {
            Some(found) if found < least => {
                let problem = format!(
                    "expected at least {least}, found {found}: of {} tokens {hidden} are masked, \
                     in spans of at most {} words",
                    model.seq_len,
                    self.mask_ngram_max()
                );
                Err(refused("model.dec_len", problem))
            }
            _ => Ok(()),
        }
    }
}
