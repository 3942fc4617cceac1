//! What a class makes of its settings: the parts of a `tokenizer.json`.

use serde_json::{Value, json};

use super::super::file::Vocab;
use super::super::neighbours::{Neighbours, token_in};

/// What the rule of a class depends on.
#[derive(Debug)]
pub(super) struct Given<'a> {
    /// `tokenizer_config.json`.
    pub(super) config: &'a Value,
    pub(super) neighbours: &'a Neighbours,
    /// Special tokens without a setting.
    pub(super) tokens: &'static [(&'static str, &'static str)],
    pub(super) vocab: &'a Vocab,
    /// The normalizer of the file.
    pub(super) normalizer: &'a Value,
}

impl Given<'_> {
    pub(super) fn flag(&self, key: &str, default: bool) -> bool {
        self.config[key].as_bool().unwrap_or(default)
    }

    /// A special token by its key.
    pub(super) fn token(&self, key: &str) -> Option<String> {
        if self.neighbours.has(key) {
            return token_in(self.neighbours.special(key)).map(str::to_owned);
        }
        let default = self.tokens.iter().find(|(name, _)| *name == key);
        default.map(|(_, token)| (*token).to_owned())
    }

    /// Where a token is in a vocabulary with scores.
    pub(super) fn place_of(&self, token: &str) -> Option<usize> {
        self.scores().iter().position(|(one, _)| one == token)
    }

    /// The same, if its score is 0.
    pub(super) fn unscored_place_of(&self, token: &str) -> Option<usize> {
        self.scores().iter().position(|(one, score)| one == token && *score == 0.0)
    }

    fn scores(&self) -> &[(String, f64)] {
        match self.vocab {
            Vocab::Scores(scores) => scores,
            Vocab::Ids(_) => &[],
        }
    }
}

/// The rule of a class. Null for a part that it has not.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub(super) normalizer: Value,
    pub(super) pre_tokenizer: Value,
    pub(super) decoder: Value,
    pub(super) model: ModelRule,
    pub(super) around: AroundText,
    /// Special tokens besides those with a key, where no setting lists others.
    pub(super) extra: Vec<String>,
}

/// The tokens around every text.
#[derive(Clone, Copy, Debug)]
pub(super) enum AroundText {
    /// Those of the file.
    OfFile,
    /// Special tokens by their keys, before and after.
    Keys(&'static [&'static str], &'static [&'static str]),
    Ids(&'static [u32], &'static [u32]),
}

/// How a model treats its vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelRule {
    pub(super) kind: &'static str,
    pub(super) unk_token: Option<String>,
    pub(super) unk_id: Option<usize>,
    pub(super) continuing_subword_prefix: Option<&'static str>,
    pub(super) end_of_word_suffix: Option<&'static str>,
    pub(super) fuse_unk: bool,
    pub(super) byte_fallback: bool,
    pub(super) word_chars_max: Option<usize>,
}

impl ModelRule {
    pub(super) fn bpe() -> Self {
        ModelRule {
            kind: "BPE",
            unk_token: None,
            unk_id: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            word_chars_max: None,
        }
    }

    pub(super) fn wordpiece(unk_token: Option<String>) -> Self {
        ModelRule {
            kind: "WordPiece",
            unk_token,
            continuing_subword_prefix: Some("##"),
            word_chars_max: Some(100),
            ..ModelRule::bpe()
        }
    }

    pub(super) fn unigram(unk_id: usize) -> Self {
        ModelRule { kind: "Unigram", unk_id: Some(unk_id), ..ModelRule::bpe() }
    }
}

impl Parts {
    pub(super) fn of(model: ModelRule) -> Self {
        Parts {
            normalizer: Value::Null,
            pre_tokenizer: Value::Null,
            decoder: Value::Null,
            model,
            around: AroundText::OfFile,
            extra: Vec::new(),
        }
    }
}

/// A sequence of normalizers or pre-tokenizers, by the key of its steps.
pub(super) fn sequence_of(key: &str, steps: Vec<Value>) -> Value {
    json!({ "type": "Sequence", key: Value::Array(steps) })
}

pub(super) fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true,
        "use_regex": use_regex,
    })
}

pub(super) fn byte_level_decoder() -> Value {
    byte_level(true, true)
}

pub(super) fn split(regex: &str) -> Value {
    json!({
        "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false,
    })
}

pub(super) fn replace(pattern: &str, content: &str) -> Value {
    json!({ "type": "Replace", "pattern": { "String": pattern }, "content": content })
}

pub(super) fn replace_regex(pattern: &str, content: &str) -> Value {
    json!({ "type": "Replace", "pattern": { "Regex": pattern }, "content": content })
}

pub(super) fn meta(scheme: &str, split: bool) -> Value {
    json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split })
}

/// Words between white space, with the sign for a space before each or before none.
pub(super) fn meta_words(scheme: &str) -> Value {
    sequence_of("pretokenizers", vec![json!({ "type": "WhitespaceSplit" }), meta(scheme, true)])
}

pub(super) fn meta_decoder(scheme: &str) -> Value {
    meta(scheme, true)
}

/// The decoder of vocabularies with a sign for a space and tokens for bytes.
pub(super) fn spelled_decoder(prefixed: bool) -> Value {
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let mut steps =
        vec![replace("▁", " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    steps.extend(Some(strip).filter(|_| prefixed));
    sequence_of("decoders", steps)
}

pub(super) fn bert(clean: bool, chinese: bool, accents: &Value, lowercase: bool) -> Value {
    json!({
        "type": "BertNormalizer", "clean_text": clean, "handle_chinese_chars": chinese,
        "strip_accents": accents, "lowercase": lowercase,
    })
}

/// The map of characters of the file's normalizer; null if it has none.
pub(super) fn charsmap_only(given: &Given<'_>) -> Value {
    let steps = given.normalizer["normalizers"].as_array();
    let steps = steps.map_or(std::slice::from_ref(given.normalizer), Vec::as_slice);
    let charsmap = steps.iter().find(|step| step["type"] == "Precompiled");
    charsmap.cloned().unwrap_or(Value::Null)
}
