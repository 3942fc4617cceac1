//! The tokenizer of a run, and the ids that its objective needs besides those of the text.

use std::collections::HashMap;
use std::sync::Arc;

use loader::batch::Vocabulary;
use preprocess::{Tokenizer, TokenizerSpec};
use recipe::Incompatible;
use recipe::config::{Config, Objective, SpecialConfig};

use crate::{Error, Result};

/// What names a rule among the files of a tokenizer.
const RULE: &str = "rule=";

/// Opens a tokenizer by its kind, alone or with its file behind a colon: `gpt2`,
/// `gpt2:vocab.json,merges.txt`, `hf:tokenizer.json`, `encdec:vocab.txt`; `null:30000` by its size.
/// `hf:FOLDER,rule=class` also names the rule of a folder.
///
/// # Errors
/// [`Error::Tokenizer`].
pub fn open_tokenizer(text: &str) -> Result<Arc<dyn Tokenizer>> {
    Ok(preprocess::open_tokenizer(&tokenizer_spec(text))?)
}

/// Parses a tokenizer's kind and files, as [`open_tokenizer`] takes them.
#[must_use]
pub fn tokenizer_spec(text: &str) -> TokenizerSpec {
    let (kind, files) = text.split_once(':').unwrap_or((text, ""));
    let files = files.split(',').filter(|file| !file.is_empty());
    let (rules, files): (Vec<_>, Vec<_>) = files.partition(|file| file.starts_with(RULE));
    let mut files = files.into_iter().map(str::to_owned);
    let (file, merge_file) = (files.next(), files.next());
    let rule = rules.last().and_then(|rule| rule.strip_prefix(RULE));
    // Each kind uses the field that applies to it.
    TokenizerSpec {
        kind: kind.to_owned(),
        vocab_size: file.as_ref().filter(|_| kind == "null").and_then(|size| size.parse().ok()),
        model: file.clone(),
        vocab_file: file,
        merge_file,
        tokenizer_rule: rule.map(str::to_owned),
        ..Default::default()
    }
}

/// A config with the ids of the special tokens that its objective needs: ids that the config does
/// not give are from its tokenizer, so that the run records them.
///
/// # Errors
/// [`Error::Tokenizer`]; [`Error::Mismatch`] with the keys of tokens that are not found.
pub fn with_special(mut config: Config) -> Result<Config> {
    // Running text needs at most an end-of-document token.
    if config.objective() != Objective::Lm {
        let tokenizer = open_tokenizer(&config.data.tokenizer)?;
        config.data.special = TokenSpellings::of(&*tokenizer).special(&config, &*tokenizer)?;
    }
    Ok(config)
}

/// How a tokenizer spells each of its ids.
#[derive(Debug)]
pub(super) struct TokenSpellings(Vec<String>);

impl TokenSpellings {
    pub(super) fn of(tokenizer: &dyn Tokenizer) -> Self {
        let mut bytes = Vec::new();
        let mut spell = |id: u32| {
            bytes.clear();
            // There may be gaps between ids.
            let exists = tokenizer.decode(&[id], &mut bytes).is_ok();
            if exists { String::from_utf8_lossy(&bytes).into_owned() } else { String::new() }
        };
        TokenSpellings((0..tokenizer.vocab_size()).map(&mut spell).collect())
    }

    /// Which of the ids continue a word.
    pub(super) fn vocabulary(&self) -> Vocabulary {
        Vocabulary::new(&self.0)
    }

    /// The special tokens that the config gives, and the others as far as the tokenizer has them.
    pub(super) fn special(
        &self,
        config: &Config,
        tokenizer: &dyn Tokenizer,
    ) -> Result<SpecialConfig> {
        let (given, vocab) = (&config.data.special, config.model.vocab);
        // If several ids have the same text, the first is used.
        let by_text = self.0.iter().enumerate().map(|(id, text)| (text.as_str(), id as u64));
        let ids: HashMap<&str, u64> = by_text.rev().collect();
        let known = |name: &str| ids.get(name).copied().filter(|id| *id < vocab);
        let find = |given: Option<u64>, names: &[&str]| {
            given.or_else(|| names.iter().find_map(|name| known(name)))
        };
        let pad = find(given.pad, &["[PAD]", "<pad>"]);
        let cls = find(given.cls, &["[CLS]", "<cls>"]);
        let bos = find(given.bos, &["[BOS]", "<bos>", "<s>"]);
        let sep = find(given.sep, &["[SEP]", "<sep>"]);
        let eos = find(given.eos, &["[EOS]", "<eos>", "</s>"]);
        let all = SpecialConfig {
            cls: cls.or(bos),
            sep: sep.or(eos),
            mask: find(given.mask, &["[MASK]", "<mask>"]),
            pad,
            // T5 starts with its padding token.
            bos: bos.or(cls).or(pad),
            eos: eos.or(sep),
            eod: given.eod.or(tokenizer.eod().map(u64::from).filter(|id| *id < vocab)),
            sentinels: given.sentinels.or_else(|| sentinels(known)),
        };
        let needed = match config.objective() {
            Objective::Lm => vec![],
            Objective::Mlm => {
                vec![("cls", all.cls), ("sep", all.sep), ("mask", all.mask)]
            }
            Objective::SpanCorruption => vec![("bos", all.bos), ("eos", all.eos)],
            Objective::Encdec => vec![("bos", all.bos), ("eod", all.eod), ("pad", all.pad)],
        };
        let mut missing: Vec<&str> =
            needed.iter().filter(|(_, id)| id.is_none()).map(|(key, _)| *key).collect();
        let hides_spans =
            matches!(config.objective(), Objective::SpanCorruption | Objective::Encdec);
        missing.extend((hides_spans && all.sentinels.is_none()).then_some("sentinels"));
        if missing.is_empty() {
            return Ok(all);
        }
        let name = &config.data.tokenizer;
        let detail = |key: &&str| {
            format!(
                "data.special.{key} is not set, and no token below model.vocab = {vocab} has one \
                 of its usual names"
            )
        };
        Err(Error::Mismatch(Incompatible {
            operation: format!("cannot find the special tokens of data.tokenizer '{name}'"),
            details: missing.iter().map(detail).collect(),
            hint: "set their ids, or set data.tokenizer to the one that made the corpus",
        }))
    }
}

/// The first and the last of a run of sentinels, in the order of their names: T5's descend.
fn sentinels(known: impl Fn(&str) -> Option<u64>) -> Option<[u64; 2]> {
    let run = |name: &dyn Fn(u64) -> String| {
        let first = known(&name(0))?;
        let mut last = first;
        for (nth, up) in (1..).zip(std::iter::repeat(known(&name(1))? > first)) {
            let next = if up { Some(first + nth) } else { first.checked_sub(nth) };
            match known(&name(nth)).filter(|id| Some(*id) == next) {
                Some(id) => last = id,
                None => break,
            }
        }
        Some([first, last])
    };
    run(&|nth| format!("<extra_id_{nth}>")).or_else(|| run(&|nth| format!("<s_{nth}>")))
}
