//! `[data]`: what a run reads, and what it makes of it.

use serde::{Deserialize, Serialize};

use super::check::{not_empty, refused, within};
use super::node::KeyError;
use super::values;
use super::{Config, Corpus, Family, MaskLengths, Objective, Size, SplitText};

/// Corpora of one blend: Megatron's index of a blend has a byte for each.
const CORPORA_MAX: usize = 255;
/// Megatron's seeds of sentences are 32 bits with a sign, and one is added to them.
const SENTENCES_SEED_MAX: u64 = i32::MAX as u64 - 1;

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// The corpora: the prefix of a `.bin/.idx` pair, alone (`"data/wiki_text_document"`), or
    /// `[{ path = "...", weight = 1.0 }]` with as many as there are. With `"encdec"` a prefix is
    /// that of three pairs, which end in `_context`, `_target` and `_target_offset`. Required.
    /// Minimum: 1. Maximum: 255, which Megatron's blends can count.
    #[serde(deserialize_with = "values::corpora")]
    pub train: Vec<Corpus>,
    /// Shares of the documents for training, validation and test, as Megatron writes them:
    /// `"949,50,1"` or `[949, 50, 1]`. Default: `"949,50,1"`. Minimum: 1 share that is not 0.
    #[serde(default)]
    pub split: SplitText,
    /// The tokenizer that made the corpus; generation needs it, special tokens and the pieces of
    /// words are known by it, and the name of the index cache depends on it. A kind, or a kind and
    /// its file: `"hf:tokenizer.json"`, `"encdec:vocab.txt"`, `"gpt2:vocab.json,merges.txt"`;
    /// `"null:30000"` is none, of so many ids. Default: `"gpt2"`.
    #[serde(default = "default_tokenizer")]
    pub tokenizer: String,
    /// What is learned from it: `"lm"`; `"span-corruption"`, of spans that are hidden as they are
    /// read, or `"encdec"`, of those that CPM-2's three files have hidden; `"mlm"`. Default: what
    /// the family learns, `"lm"` with `"gpt"`, `"span-corruption"` with `"t5"`, `"mlm"` with
    /// `"bert"`.
    #[serde(default)]
    pub objective: Option<Objective>,
    /// Part of the tokens that `"span-corruption"` and `"mlm"` hide. Default: 0.15. Minimum: 0,
    /// with these more. Below 1.
    #[serde(default = "default_mask_prob")]
    pub mask_prob: f64,
    /// The longest run of words that `"span-corruption"` and `"mlm"` hide at once. Default: 10 and
    /// 3, as Megatron. Minimum: 1. Maximum: 1024.
    #[serde(default)]
    pub mask_ngram_max: Option<u64>,
    /// How long such runs are: `"shorter-first"`, `"longer-first"`, or `"geometric"`. Default:
    /// `"geometric"` with `"span-corruption"`, `"shorter-first"` with `"mlm"`, as Megatron.
    #[serde(default)]
    pub mask_lengths: Option<MaskLengths>,
    /// Whether a word is hidden with all of its pieces. Default: true, with these two.
    #[serde(default)]
    pub mask_full_words: Option<bool>,
    /// Part of the samples of `"span-corruption"` and `"mlm"` that are made shorter. Default: 0.1.
    /// Minimum: 0. Maximum: 1.
    #[serde(default = "default_short_seq_prob")]
    pub short_seq_prob: f64,
    /// Whether samples of `"mlm"` have two parts, of which the model also learns to say whether
    /// they have changed places. Default: true, with this one.
    #[serde(default)]
    pub sentence_order: Option<bool>,
    /// Ids of special tokens.
    #[serde(default)]
    pub special: SpecialConfig,
    /// Whether a token sees its own document alone, and positions begin anew with it. Default:
    /// false. Of `"lm"` and `"encdec"`: samples of the others are of one document.
    #[serde(default)]
    pub reset_at_document: bool,
    /// Whether the token after the end of a document counts in the loss no more. Default: false,
    /// but `"encdec"` never counts it. Of these two objectives.
    #[serde(default)]
    pub mask_eod_loss: bool,
    /// Micro-batches read ahead of the one in use. Fewer stall on a slow store, more cost
    /// `micro x seq_len` tokens each. Default: 8. Minimum: 1. Maximum: 1024.
    #[serde(default = "default_prefetch_batches")]
    pub prefetch_batches: u64,
    /// Folder of the sample-index cache. Default: `cache/GPTDataset_indices` in a folder named as
    /// the corpus, where Megatron has it; its name for the samples of `"span-corruption"` and
    /// `"mlm"` with these.
    #[serde(default)]
    pub cache_dir: Option<String>,
    /// Whether tokens are compared with the checksums of their blocks as they are read, where the
    /// corpus has a `.crc`. Default: true.
    #[serde(default = "default_verify")]
    pub verify: bool,
    /// Samples on a disk of the node, for corpora that are far away. Default: none.
    #[serde(default)]
    pub local_cache: Option<LocalCacheConfig>,
}

/// `[data.local_cache]`: all of the corpora if they fit, else the samples since the last
/// checkpoint, so that a run that was killed reads again what it had read from near by. It may be
/// deleted at any time, and shared by runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalCacheConfig {
    /// Its folder, on a disk of the node's own. Required.
    pub dir: String,
    /// The most that it may take, as `"200GiB"`. A twentieth of what is free stays free in any
    /// case. Default: no such limit. Minimum: `"1MiB"`.
    #[serde(default)]
    pub limit: Option<Size>,
}

/// `[data.special]`: ids that objectives need besides those of the text. Each is below
/// `model.vocab`. Default: the tokenizer's, by their usual names; what a run found is recorded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SpecialConfig {
    /// Opens a sample of `"mlm"`; never hidden. Default: `[CLS]`, `<cls>`, or `bos`.
    pub cls: Option<u64>,
    /// Ends a part of a sample of `"mlm"`; never hidden. Default: `[SEP]`, `<sep>`, or `eos`.
    pub sep: Option<u64>,
    /// Stands for what `"mlm"` hides. Default: `[MASK]` or `<mask>`.
    pub mask: Option<u64>,
    /// Fills rows up. Default: `[PAD]` or `<pad>`; none is needed but for `"encdec"`.
    pub pad: Option<u64>,
    /// Begins what a decoder writes. Default: `[BOS]`, `<bos>`, `<s>`, or `cls`, or as T5 `pad`.
    pub bos: Option<u64>,
    /// Ends what a decoder writes of `"span-corruption"`. Default: `[EOS]`, `<eos>`, `</s>`, or
    /// `sep`.
    pub eos: Option<u64>,
    /// Ends a document. Default: the tokenizer's.
    pub eod: Option<u64>,
    /// Stand for spans, the first and the last of a run of ids that may ascend or descend. Default:
    /// `<extra_id_0>` or `<s_0>` and those that follow.
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
    /// Every id that is given, by its key.
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
    /// What is learned from the corpus.
    #[must_use]
    pub fn objective(&self) -> Objective {
        self.data.objective.unwrap_or(match self.model.family {
            Family::Gpt => Objective::Lm,
            Family::T5 => Objective::SpanCorruption,
            Family::Bert => Objective::Mlm,
        })
    }

    /// The longest run of words that is hidden at once.
    #[must_use]
    pub fn mask_ngram_max(&self) -> u64 {
        let default = if self.objective() == Objective::Mlm { 3 } else { 10 };
        self.data.mask_ngram_max.unwrap_or(default)
    }

    /// How long such runs are.
    #[must_use]
    pub fn mask_lengths(&self) -> MaskLengths {
        let is_mlm = self.objective() == Objective::Mlm;
        let default = if is_mlm { MaskLengths::ShorterFirst } else { MaskLengths::Geometric };
        self.data.mask_lengths.unwrap_or(default)
    }

    /// Whether a word is hidden with all of its pieces.
    #[must_use]
    pub fn mask_full_words(&self) -> bool {
        self.data.mask_full_words.unwrap_or(true)
    }

    /// Whether samples have two parts, whose order is learned.
    #[must_use]
    pub fn sentence_order(&self) -> bool {
        self.data.sentence_order.unwrap_or(self.objective() == Objective::Mlm)
    }

    /// Writes the defaults of the objective down.
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

    pub(super) fn check_data(&self) -> Result<(), KeyError> {
        let data = &self.data;
        if data.train.is_empty() || data.train.len() > CORPORA_MAX {
            let problem = format!("got {} corpora, due 1 to {CORPORA_MAX}", data.train.len());
            return Err(refused("data.train", problem));
        }
        for (at, corpus) in data.train.iter().enumerate() {
            not_empty(&format!("data.train.{at}.path"), &corpus.path)?;
            if !(corpus.weight > 0.0 && corpus.weight.is_finite()) {
                let problem = format!("got {}, due more than 0", corpus.weight);
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
                let problem = format!("got {limit}, due 1MiB or more");
                return Err(refused("data.local_cache.limit", problem));
            }
        }
        if !(0.0..1.0).contains(&data.mask_prob) {
            let problem = format!("got {}, due 0 or more, and less than 1", data.mask_prob);
            return Err(refused("data.mask_prob", problem));
        }
        within("data.short_seq_prob", data.short_seq_prob, 0.0..=1.0)?;
        for (key, id) in data.special.given() {
            within(&format!("data.special.{key}"), id, 0..=self.model.vocab - 1)?;
        }
        self.check_objective()
    }

    /// What the objective, its keys and the shape of the model must say together.
    fn check_objective(&self) -> Result<(), KeyError> {
        let (data, model, objective) = (&self.data, &self.model, self.objective());
        let fits = match model.family {
            Family::Gpt => objective == Objective::Lm,
            Family::T5 => matches!(objective, Objective::SpanCorruption | Objective::Encdec),
            Family::Bert => objective == Objective::Mlm,
        };
        if !fits {
            let hint = "gpt learns lm, t5 span-corruption or encdec, bert mlm";
            return Err(refused("data.objective", "is not of this family").hint(hint));
        }
        let hides = objective.hides();
        let only = |is_given: bool, key: &str, of: &str| match is_given {
            true => Err(refused(&format!("data.{key}"), format!("is of objective {of} alone"))),
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
            return Err(refused("data.mask_prob", "is 0: nothing is hidden to be learned"));
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
        // A full sample hides so many tokens in so many spans at least; BOS is before them.
        let hidden = (((model.seq_len - 2) as f64 * data.mask_prob) as u64).max(1);
        let due = 1 + hidden + hidden.div_ceil(self.mask_ngram_max());
        match model.dec_len {
            Some(got) if got < due => {
                let problem = format!(
                    "got {got}, due {due} or more: of {} tokens {hidden} are hidden, in runs of \
                     {} at most",
                    model.seq_len,
                    self.mask_ngram_max()
                );
                Err(refused("model.dec_len", problem))
            }
            _ => Ok(()),
        }
    }
}
