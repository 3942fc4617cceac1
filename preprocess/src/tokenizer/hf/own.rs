//! The kinds of `tokenizer.json` that the native engines support.

use std::collections::HashMap;

use serde_json::Value;

use super::super::added::{Added, AddedToken, TextPart};
use super::super::bpe::{Bpe, BpeEncoder};
use super::super::merge::{Merge, RANK_LIMIT};
use super::super::split::Pattern;
use super::super::vocab::byte_chars;
use super::super::{EncodeError, Encoder};
use super::chars::{Chars, CharsEncoder, Space};
use super::file::{MergePair, ModelJson, TokenizerJson, Vocab};
use super::normalize::{NormalizeStep, Normalizer};
use super::patterns::{self, EnginePlan, Prefix};
use super::template::PostProcessor;
use super::tokens::{TokenDecoder, bytes_of_chars};
use super::unigram::{PiecesEncoder, UnigramEngine};
use crate::Result;

/// A tokenizer whose text is encoded by a native engine.
#[derive(Debug)]
pub(super) struct NativeTokenizer {
    around: PostProcessor,
    /// Searched in the original text.
    raw: Added,
    normalizer: Normalizer,
    /// Searched in the normalized rest.
    normalized: Added,
    core: Core,
    prefix: Prefix,
    tokens: TokenDecoder,
}

#[derive(Debug)]
enum Core {
    Bytes(Box<Bpe>),
    Chars(Box<Chars>),
    Unigram(Box<UnigramEngine>),
}

#[derive(Debug)]
enum CoreEncoder<'a> {
    Bytes(BpeEncoder<'a>),
    Chars(CharsEncoder<'a>),
    Unigram(PiecesEncoder<'a>),
}

/// Encodes one text after another.
#[derive(Debug)]
pub(super) struct OwnEncoder<'a> {
    own: &'a NativeTokenizer,
    core: CoreEncoder<'a>,
}

impl NativeTokenizer {
    /// # Errors
    /// Why it is none of these kinds.
    pub(super) fn new(file: &TokenizerJson, with_specials: bool) -> Supported<Self> {
        let around = PostProcessor::new(&file.post_processor)
            .ok_or_else(|| format!("post-processor {}", short(&file.post_processor)))?;
        let mut normalizer = Normalizer::new(&file.normalizer)
            .ok_or_else(|| format!("normalizer {}", short(&file.normalizer)))?;
        let tokens =
            TokenDecoder::new(file).ok_or_else(|| format!("decoder {}", short(&file.decoder)))?;
        let (raw, normalized) = added(file, &normalizer)?;
        let plan = patterns::plan(&file.pre_tokenizer, &normalizer)
            .ok_or_else(|| format!("pre-tokenizer {}", short(&file.pre_tokenizer)))?;
        if plan.prefix() == Prefix::MetaFirst && normalizer.may_drop_first() {
            return Err("a normalizer that may remove the prefix of the pre-tokenizer".to_owned());
        }
        let core = match file.model.kind.as_deref() {
            Some("Unigram") => Core::Unigram(Box::new(UnigramEngine::new(&file.model, &plan)?)),
            _ => bpe(file, &plan, &mut normalizer, normalized.is_empty())?,
        };
        let prefix = plan.prefix();
        let around = if with_specials { around } else { PostProcessor::default() };
        Ok(NativeTokenizer { around, raw, normalizer, normalized, core, prefix, tokens })
    }

    pub(super) fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        self.tokens.decode(ids, out)
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_by(text, ids, |text, ids| match &self.core {
            Core::Bytes(bpe) => bpe.encode(text, ids),
            Core::Chars(chars) => chars.encode(text, ids),
            Core::Unigram(pieces) => pieces.encode(text, ids),
        });
    }

    pub(super) fn encoder(&self) -> OwnEncoder<'_> {
        let core = match &self.core {
            Core::Bytes(bpe) => CoreEncoder::Bytes(bpe.encoder()),
            Core::Chars(chars) => CoreEncoder::Chars(chars.encoder()),
            Core::Unigram(pieces) => CoreEncoder::Unigram(pieces.encoder()),
        };
        OwnEncoder { own: self, core }
    }

    /// The part of a text that is too long for the model, if there is one.
    pub(super) fn refused(&self, text: &str) -> Option<EncodeError> {
        match &self.core {
            Core::Unigram(pieces) => pieces.refused(text),
            Core::Bytes(_) | Core::Chars(_) => None,
        }
    }

    /// A place to cut at, if one is found at the first few that the engine offers.
    pub(super) fn cut_after(&self, text: &str, mut at: usize) -> Option<usize> {
        const TRIES_MAX: usize = 64;
        let whole = self.around != PostProcessor::default()
            || self.prefix != Prefix::Never
            || !self.normalized.is_empty() && !self.normalizer.0.is_empty();
        if whole {
            return None;
        }
        for _ in 0..TRIES_MAX {
            at = match &self.core {
                Core::Bytes(bpe) => bpe.cut_after(text, at)?,
                Core::Chars(chars) => chars.cut_after(text, at)?,
                Core::Unigram(_) => return None,
            };
            if self.raw.may_cut(text, at)
                && self.normalized.may_cut(text, at)
                && self.normalizer.may_cut(text, at)
            {
                return Some(at);
            }
            at += 1;
        }
        None
    }

    #[inline]
    fn encode_by(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        mut encode: impl FnMut(&str, &mut Vec<u32>),
    ) {
        ids.extend_from_slice(&self.around.before);
        let mut first = true;
        self.raw.split(text, |part| {
            match part {
                TextPart::Token(id) => ids.push(id),
                TextPart::Text(text) => {
                    self.normalized.split(&self.normalizer.apply(text), |part| {
                        match part {
                            TextPart::Token(id) => ids.push(id),
                            TextPart::Text(text) if self.prefix.applies_to(text, first) => {
                                encode(&format!("{}{text}", self.prefix.text()), ids);
                            }
                            TextPart::Text(text) => encode(text, ids),
                        }
                        first = false;
                    });
                }
            }
            first = false;
        });
        ids.extend_from_slice(&self.around.after);
    }
}

impl Encoder for OwnEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let OwnEncoder { own, core } = self;
        match core {
            CoreEncoder::Bytes(bpe) => own.encode_by(text, ids, |text, ids| bpe.encode(text, ids)),
            CoreEncoder::Chars(chars) => {
                own.encode_by(text, ids, |text, ids| chars.encode(text, ids));
            }
            CoreEncoder::Unigram(pieces) => {
                own.encode_by(text, ids, |text, ids| pieces.encode(text, ids));
            }
        }
    }
}

/// A supported value, or why it is not supported.
pub(super) type Supported<T> = std::result::Result<T, String>;

/// Tokens by their spelling.
pub(super) type Ids<'a> = HashMap<&'a str, u32>;

/// Pairs of tokens, in rank order.
type Pairs<'a> = Vec<(&'a str, &'a str)>;

/// The engine for a model of plain BPE, which may take over the last step of the normalizer.
fn bpe(
    file: &TokenizerJson,
    plan: &EnginePlan,
    normalizer: &mut Normalizer,
    may_take: bool,
) -> Supported<Core> {
    let (ids, pairs) = bpe_of(&file.model)?;
    match *plan {
        EnginePlan::Bytes { pattern, .. } => bytes(file, &ids, &pairs, pattern),
        EnginePlan::Words => Err("a pre-tokenizer that removes white space".to_owned()),
        EnginePlan::Chars { mut space, words, .. } => {
            if file.model.byte_fallback != Some(true) || file.model.ignore_merges == Some(true) {
                return Err("a model without byte fallback".to_owned());
            }
            // Only if no added token is searched in the normalized text.
            if may_take && normalizer.0.last().is_some_and(NormalizeStep::is_meta) {
                normalizer.0.pop();
                space = Space::Meta;
            }
            Ok(Core::Chars(Box::new(Chars::new(&ids, &pairs, space, words)?)))
        }
    }
}

/// The vocabulary and merges of a model of plain BPE.
fn bpe_of(model: &ModelJson) -> Supported<(Ids<'_>, Pairs<'_>)> {
    let ModelJson { kind, vocab, merges, .. } = model;
    let (Some("BPE"), Vocab::Ids(vocab)) = (kind.as_deref(), vocab) else {
        return Err(format!("model type {}", kind.as_deref().unwrap_or("none")));
    };
    let affix = |affix: &Option<String>| affix.as_ref().is_some_and(|text| !text.is_empty());
    if affix(&model.continuing_subword_prefix) || affix(&model.end_of_word_suffix) {
        return Err("a model with word prefixes or suffixes".to_owned());
    }
    let ids: Ids<'_> = vocab.iter().map(|(token, id)| (token.as_str(), *id)).collect();
    let mut spelled = HashMap::with_capacity(ids.len());
    for (&token, &id) in &ids {
        if let Some(other) = spelled.insert(id, token) {
            return Err(format!("tokens '{other}' and '{token}' with id {id}"));
        }
    }
    let pairs = merges.iter().map(|MergePair(left, right)| (&**left, &**right)).collect();
    Ok((ids, pairs))
}

/// Merges in rank order. Of a pair that is there twice, the later one counts.
pub(super) fn merges(ids: &Ids<'_>, pairs: &[(&str, &str)]) -> Supported<Vec<Merge>> {
    let mut joined = String::new();
    let mut merges = Vec::with_capacity(pairs.len());
    let mut last = HashMap::with_capacity(pairs.len());
    for (rank, (left, right)) in pairs.iter().enumerate() {
        joined.clear();
        joined.extend([*left, *right]);
        let id = |token: &str| {
            let id = ids.get(token).copied();
            id.ok_or_else(|| format!("a merge with '{token}', which is not in the vocabulary"))
        };
        let merge = Merge { left: id(left)?, right: id(right)?, merged: id(&joined)? };
        last.insert((merge.left, merge.right), rank);
        merges.push(merge);
    }
    let mut rank = 0..;
    merges.retain(|merge| Some(last[&(merge.left, merge.right)]) == rank.next());
    if merges.len() > RANK_LIMIT {
        return Err(format!("more than {RANK_LIMIT} merges"));
    }
    Ok(merges)
}

/// The engine for vocabularies that are spelled with a character for each byte.
fn bytes(
    file: &TokenizerJson,
    ids: &Ids<'_>,
    pairs: &[(&str, &str)],
    pattern: Pattern,
) -> Supported<Core> {
    let mut byte_ids = [0; 256];
    for (byte_id, char) in byte_ids.iter_mut().zip(byte_chars()) {
        let id = ids.get(char.encode_utf8(&mut [0; 4]) as &str).copied();
        *byte_id = id.ok_or_else(|| format!("no token '{char}'"))?;
    }
    let bpe = Bpe::new(byte_ids, &merges(ids, pairs)?, pattern);
    if file.model.ignore_merges != Some(true) {
        return Ok(Core::Bytes(Box::new(bpe)));
    }
    let bytes_of = bytes_of_chars();
    let whole: Vec<_> =
        ids.iter().filter_map(|(token, &id)| Some((bytes_of(token)?, id))).collect();
    let whole = whole.iter().filter(|(token, _)| !token.is_empty());
    let with = bpe.with_whole_pieces(whole.map(|(token, id)| (token.as_slice(), *id)));
    let bpe = with.map_err(|unfit| format!("{} instead of {}", unfit.found, unfit.expected))?;
    Ok(Core::Bytes(Box::new(bpe)))
}

/// The added tokens: those searched in the original and those searched in the normalized text.
fn added(file: &TokenizerJson, normalizer: &Normalizer) -> Supported<(Added, Added)> {
    let mut ids: Ids<'_> = file.model.vocab.tokens().collect();
    let vocab_count = ids.len() as u32; // fits: below the limit that was checked
    if vocab_count as usize != file.model.vocab.len() {
        return Err("a repeated token in the vocabulary".to_owned());
    }
    let mut next = vocab_count;
    let (mut raw, mut normalized) = (Vec::new(), Vec::new());
    for token in &file.added_tokens {
        let AddedToken { id, content, .. } = token;
        let fresh = next;
        let expected = *ids.entry(content).or_insert(fresh);
        // Other ids are left to the library.
        if expected != *id {
            return Err(format!("added token '{content}' with id {id} instead of {expected}"));
        }
        next = next.max(id + 1);
        let spelled = if token.normalized { normalizer.apply(content) } else { content.into() };
        if spelled.is_empty() {
            return Err("an empty added token".to_owned());
        }
        let set = if token.normalized { &mut normalized } else { &mut raw };
        set.push((token, spelled.into_owned()));
    }
    for set in [&raw, &normalized] {
        let mut seen: HashMap<&str, &AddedToken> = HashMap::new();
        for (token, spelled) in set {
            if let Some(other) = seen.insert(spelled, token) {
                return Err(twins((&other.content, other.id), (&token.content, token.id)));
            }
        }
    }
    let build = |set| Added::new(set).map_err(|e| format!("unsupported added tokens: {e}"));
    Ok((build(raw)?, build(normalized)?))
}

/// Names two added tokens with the same text, for a message.
pub(super) fn twins((one, one_id): (&str, u32), (two, two_id): (&str, u32)) -> String {
    format!("added tokens '{one}' (id {one_id}) and '{two}' (id {two_id}) with the same text")
}

/// The beginning of a part of the file, for a message.
pub(super) fn short(given: &Value) -> String {
    let text = given.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
