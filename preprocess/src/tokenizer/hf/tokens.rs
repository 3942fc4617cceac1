//! Decodes ids to the bytes of their tokens.

use serde::Deserialize;
use serde_json::Value;

use super::super::added::AddedToken;
use super::super::vocab::byte_chars;
use super::file::TokenizerJson;
use crate::{Error, Result};

/// The bytes of every token, and how those of a text are made from them.
#[derive(Debug)]
pub(super) struct TokenDecoder {
    bytes: Vec<u8>,
    /// Where each token ends; an id without a token has no bytes.
    ends: Vec<usize>,
    known: Vec<bool>,
    first: First,
}

/// How leading spaces of a text are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Kept,
    /// The first character is dropped if it is a space.
    OneDropped,
    /// All spaces of the first token are dropped.
    MetaDropped,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum DecoderJson {
    ByteLevel {},
    Sequence { decoders: Vec<DecoderJson> },
    Replace { pattern: Literal, content: String },
    ByteFallback {},
    Fuse {},
    Strip { content: char, start: usize, stop: usize },
    Metaspace { replacement: char, prepend_scheme: Option<String>, add_prefix_space: Option<bool> },
}

#[derive(Deserialize, PartialEq, Eq)]
struct Literal {
    #[serde(rename = "String")]
    literal: String,
}

/// How the text of a token is turned into bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// A character for each byte.
    ByteChars,
    /// `▁` for a space, `<0x0A>` for a byte.
    Words(First),
    /// `▁` for a space.
    Meta(First),
}

impl TokenDecoder {
    /// None for a decoder that is not supported here. All ids are below the limit that was checked.
    pub(super) fn new(file: &TokenizerJson) -> Option<Self> {
        let spelling = spelling(&file.decoder)?;
        let of_vocab = file.model.vocab.tokens();
        let of_added =
            file.added_tokens.iter().map(|AddedToken { content, id, .. }| (&**content, *id));
        let mut by_id: Vec<Option<&str>> = Vec::new();
        for (token, id) in of_vocab.chain(of_added) {
            let id = id as usize;
            by_id.resize(by_id.len().max(id + 1), None);
            by_id[id] = Some(token);
        }
        let bytes_of = bytes_of_chars();
        let mut tokens = TokenDecoder {
            bytes: Vec::new(),
            ends: Vec::with_capacity(by_id.len()),
            known: by_id.iter().map(Option::is_some).collect(),
            first: match spelling {
                Spelling::ByteChars => First::Kept,
                Spelling::Words(first) | Spelling::Meta(first) => first,
            },
        };
        for token in by_id {
            let token = token.unwrap_or_default();
            match spelling {
                Spelling::ByteChars => match bytes_of(token) {
                    Some(mut bytes) => tokens.bytes.append(&mut bytes),
                    None => tokens.bytes.extend_from_slice(token.as_bytes()),
                },
                Spelling::Meta(_) => {
                    tokens.bytes.extend_from_slice(token.replace('▁', " ").as_bytes());
                }
                Spelling::Words(_) => match byte_token(token) {
                    Some(byte) => tokens.bytes.push(byte),
                    None => tokens.bytes.extend_from_slice(token.replace('▁', " ").as_bytes()),
                },
            }
            tokens.ends.push(tokens.bytes.len());
        }
        Some(tokens)
    }

    /// One more than the highest id.
    pub(super) fn size(&self) -> u32 {
        self.ends.len() as u32 // fits: ids are below the limit that was checked
    }

    pub(super) fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let from = out.len();
        for &id in ids {
            let place = id as usize;
            if !self.known.get(place).is_some_and(|&known| known) {
                return Err(Error::UnknownToken { id, vocab_size: self.size() });
            }
            out.extend_from_slice(self.bytes_of(id));
        }
        match (self.first, ids.first()) {
            (First::OneDropped, _) if out.get(from) == Some(&b' ') => {
                out.remove(from);
            }
            (First::MetaDropped, Some(&id)) => {
                let len = self.bytes_of(id).len();
                let kept = self.bytes_of(id).iter().copied().filter(|&byte| byte != b' ');
                out.splice(from..from + len, kept);
            }
            _ => {}
        }
        Ok(())
    }

    /// The bytes of a known id.
    fn bytes_of(&self, id: u32) -> &[u8] {
        let place = id as usize;
        let start = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..self.ends[place]]
    }
}

/// From a token that is spelled with a character for each byte to those bytes.
pub(super) fn bytes_of_chars() -> impl Fn(&str) -> Option<Vec<u8>> {
    let byte_of: std::collections::HashMap<char, u8> =
        byte_chars().into_iter().zip(0..=255).collect();
    move |token: &str| token.chars().map(|char| byte_of.get(&char).copied()).collect()
}

/// The byte of a token such as `<0x0A>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let valid = hex.len() == 2 && hex.bytes().all(|digit| digit.is_ascii_hexdigit());
    if valid { u8::from_str_radix(hex, 16).ok() } else { None }
}

fn spelling(decoder: &Value) -> Option<Spelling> {
    let given = DecoderJson::deserialize(decoder).ok()?;
    let steps = match given {
        DecoderJson::ByteLevel {} => return Some(Spelling::ByteChars),
        DecoderJson::Metaspace {
            replacement: '▁',
            prepend_scheme,
            add_prefix_space: None | Some(true),
        } => {
            let kept = prepend_scheme.as_deref() == Some("never");
            return Some(Spelling::Meta(if kept { First::Kept } else { First::MetaDropped }));
        }
        DecoderJson::Sequence { decoders } => decoders,
        _ => return None,
    };
    let (replace, rest) = steps.split_first()?;
    let spaces = matches!(replace,
        DecoderJson::Replace { pattern, content } if pattern.literal == "▁" && content == " ");
    match rest {
        _ if !spaces => None,
        [DecoderJson::ByteFallback {}, DecoderJson::Fuse {}] => Some(Spelling::Words(First::Kept)),
        [
            DecoderJson::ByteFallback {},
            DecoderJson::Fuse {},
            DecoderJson::Strip { content: ' ', start: 1, stop: 0 },
        ] => Some(Spelling::Words(First::OneDropped)),
        _ => None,
    }
}
