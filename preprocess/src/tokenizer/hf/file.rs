//! The contents of a `tokenizer.json`.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::super::added::AddedToken;

/// A `tokenizer.json`, apart from `truncation` and `padding`, which are of single calls.
#[derive(Debug, Deserialize)]
pub(super) struct TokenizerJson {
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pub(super) normalizer: Value,
    #[serde(default)]
    pub(super) pre_tokenizer: Value,
    #[serde(default)]
    pub(super) post_processor: Value,
    #[serde(default)]
    pub(super) decoder: Value,
    pub(super) model: ModelJson,
}

/// The model, of whatever type: fields that a type has not are absent.
#[derive(Debug, Deserialize)]
pub(super) struct ModelJson {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    #[serde(default)]
    pub(super) vocab: Vocab,
    #[serde(default)]
    pub(super) merges: Vec<MergePair>,
    pub(super) dropout: Option<f64>,
    pub(super) unk_token: Option<String>,
    pub(super) unk_id: Option<usize>,
    pub(super) continuing_subword_prefix: Option<String>,
    pub(super) end_of_word_suffix: Option<String>,
    #[serde(default)]
    pub(super) fuse_unk: Option<bool>,
    pub(super) byte_fallback: Option<bool>,
    pub(super) ignore_merges: Option<bool>,
    pub(super) max_input_chars_per_word: Option<usize>,
}

/// The tokens of a model.
#[derive(Debug)]
pub(super) enum Vocab {
    /// Of BPE, WordPiece and word tables.
    Ids(Vec<(String, u32)>),
    /// Of Unigram: a token's place is its id.
    Scores(Vec<(String, f64)>),
}

/// Two tokens that a merge joins.
#[derive(Debug)]
pub(super) struct MergePair(pub(super) String, pub(super) String);

impl Vocab {
    /// Tokens and their ids, which are below the limit that was checked.
    pub(super) fn tokens(&self) -> Box<dyn Iterator<Item = (&str, u32)> + '_> {
        match self {
            Vocab::Ids(ids) => Box::new(ids.iter().map(|(token, id)| (token.as_str(), *id))),
            Vocab::Scores(scores) => {
                Box::new(scores.iter().map(|(token, _)| token.as_str()).zip(0..))
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Vocab::Ids(ids) => ids.len(),
            Vocab::Scores(scores) => scores.len(),
        }
    }
}

impl Default for Vocab {
    fn default() -> Self {
        Vocab::Ids(Vec::new())
    }
}

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VocabVisitor)
    }
}

struct VocabVisitor;

impl<'de> Visitor<'de> for VocabVisitor {
    type Value = Vocab;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from token to id or a list of tokens and scores")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
        let mut ids = Vec::new();
        while let Some(entry) = map.next_entry()? {
            ids.push(entry);
        }
        Ok(Vocab::Ids(ids))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vocab, A::Error> {
        let mut scores = Vec::new();
        while let Some(entry) = seq.next_element()? {
            scores.push(entry);
        }
        Ok(Vocab::Scores(scores))
    }
}

impl<'de> Deserialize<'de> for MergePair {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = MergePair;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("two tokens, separated by a space or in a list")
    }

    fn visit_str<E: serde::de::Error>(self, line: &str) -> Result<MergePair, E> {
        let halves = line.split_once(' ').filter(|(_, right)| !right.contains(' '));
        let (left, right) = halves.ok_or_else(|| E::invalid_value(unexpected(line), &self))?;
        Ok(MergePair(left.to_owned(), right.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MergePair, A::Error> {
        let (Some(left), Some(right), None) =
            (seq.next_element()?, seq.next_element()?, seq.next_element::<Value>()?)
        else {
            return Err(A::Error::custom("expected two tokens in a merge"));
        };
        Ok(MergePair(left, right))
    }
}

fn unexpected(line: &str) -> serde::de::Unexpected<'_> {
    serde::de::Unexpected::Str(line)
}
