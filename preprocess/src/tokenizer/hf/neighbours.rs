//! Tokens that the neighbours of a `tokenizer.json` add, as `AutoTokenizer.from_pretrained` reads a
//! folder: `added_tokens_decoder` and the special tokens of `tokenizer_config.json`, and, where it
//! has no such decoder, `special_tokens_map.json` and `added_tokens.json`.
//!
//! Other keys that would change ids are refused by name.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::added::AddedToken;
use super::super::read::bad;
use super::folder::Folder;
use crate::Result;

pub(super) const CONFIG: &str = "tokenizer_config.json";
pub(super) const SPECIALS: &str = "special_tokens_map.json";
pub(super) const ADDED: &str = "added_tokens.json";

/// Keys of special tokens, in the order in which missing ones get their ids.
const NAMED: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Keys of lists of further special tokens, of earlier and of current versions.
const LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The files beside a `tokenizer.json`; null where there is none.
#[derive(Debug, Default)]
pub(super) struct Neighbours {
    pub(super) config: Value,
    pub(super) specials: Value,
    pub(super) added: Value,
}

/// A token to be added, or whose flags are to be set. Flags are named as in the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NeighbourToken {
    pub(super) content: String,
    pub(super) single_word: bool,
    pub(super) lstrip: bool,
    pub(super) rstrip: bool,
    pub(super) normalized: bool,
    /// Whether flags of a token that the tokenizer has are replaced.
    pub(super) replaces: bool,
}

/// The tokens of a class, besides those that the files beside the tokenizer name.
#[derive(Debug, Default)]
pub(super) struct ClassTokens<'a> {
    /// Special tokens by their keys, where the files have no such key.
    pub(super) named: &'a [(&'a str, &'a str)],
    /// Whether the mask takes the space before it.
    pub(super) mask_strips: bool,
    /// Whether special tokens lose their flags.
    pub(super) resets_flags: bool,
    /// Further special tokens, where the files have no list of them.
    pub(super) extra: &'a [String],
    /// The added tokens of `tokenizer.json`, taken where no file beside it has a decoder of them.
    pub(super) of_file: &'a [AddedToken],
}

#[derive(Deserialize)]
struct TokenFields {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl Neighbours {
    /// Tokens to add, in the order in which they get ids. Errors name the files of `folder`.
    ///
    /// # Errors
    /// [`crate::Error::BadVocab`] for a file or a key that cannot be followed.
    pub(super) fn tokens(
        &self,
        folder: &Folder,
        class: &ClassTokens<'_>,
    ) -> Result<Vec<NeighbourToken>> {
        let file = folder.file(CONFIG);
        if self.config["split_special_tokens"] == true {
            let expected = "split_special_tokens = false, because a special token is one id";
            return Err(bad(&file, "true", expected));
        }
        let mut tokens = match &self.config["added_tokens_decoder"] {
            Value::Object(decoder) => decoder_tokens(&file, decoder)?,
            _ => self.legacy_tokens(&folder.file(ADDED), class.of_file)?,
        };
        let special = self.special_tokens(&file, class)?;
        if class.resets_flags {
            let is_special = |token: &NeighbourToken| {
                special.iter().any(|special| special.content == token.content)
            };
            for token in tokens.iter_mut().filter(|token| is_special(token)) {
                *token = NeighbourToken::special(&token.content);
            }
        }
        for token in special {
            if !tokens.iter().any(|known| known.content == token.content) {
                tokens.push(token);
            }
        }
        tokens.retain(|token| !token.content.is_empty());
        Ok(tokens)
    }

    /// Those with a key in the order of the keys, then those of lists.
    fn special_tokens(&self, file: &str, class: &ClassTokens<'_>) -> Result<Vec<NeighbourToken>> {
        let token_of = |value: &Value| {
            special_token(value).ok_or_else(|| {
                bad(file, format!("special token {value}"), "a string, or an object with one")
            })
        };
        let mut tokens = Vec::new();
        for key in NAMED {
            let value = self.special(key);
            let default = class.named.iter().find(|(name, _)| *name == key && !self.has(key));
            let token = match (value.is_null(), default) {
                (false, _) => token_of(value)?,
                (true, Some((_, default))) => NeighbourToken::special(default),
                (true, None) => continue,
            };
            let strips = class.mask_strips && key == "mask_token" && !value.is_object();
            tokens.push(NeighbourToken { lstrip: token.lstrip || strips, ..token });
        }
        // Tokens of one model, such as `image_token`.
        let keys = self.config.as_object().into_iter().flatten();
        let of_model = keys.filter(|(key, value)| {
            key.ends_with("_token") && value.is_string() && !NAMED.contains(&key.as_str())
        });
        let listed = LISTS.iter().flat_map(|key| match self.special(key) {
            Value::Array(tokens) => tokens.iter().collect(),
            Value::Object(tokens) => tokens.values().collect(),
            _ => Vec::new(),
        });
        for value in of_model.map(|(_, value)| value).chain(listed) {
            tokens.push(token_of(value)?);
        }
        if !LISTS.iter().any(|key| self.has(key)) {
            tokens.extend(class.extra.iter().map(|token| NeighbourToken::special(token)));
        }
        Ok(tokens)
    }

    /// Whether a key of special tokens is there, be it null.
    pub(super) fn has(&self, key: &str) -> bool {
        let is_legacy = self.config["added_tokens_decoder"].is_null();
        self.config.get(key).is_some() || is_legacy && self.specials.get(key).is_some()
    }

    /// A special token, or a list of such, by its key.
    pub(super) fn special(&self, key: &str) -> &Value {
        // Without a decoder of added tokens the map is read last.
        let is_legacy = self.config["added_tokens_decoder"].is_null();
        let mapped = &self.specials[key];
        if is_legacy && !mapped.is_null() { mapped } else { &self.config[key] }
    }

    /// The tokens of `added_tokens.json`, and those of `tokenizer.json` that a class takes.
    fn legacy_tokens(&self, file: &str, of_file: &[AddedToken]) -> Result<Vec<NeighbourToken>> {
        let added = self.added.as_object().into_iter().flatten();
        let mut tokens = Vec::new();
        for (content, id) in added {
            let id = id.as_u64().ok_or_else(|| {
                bad(file, format!("id {id} for '{content}'"), "an object from token to id")
            })?;
            let is_special = self.is_special(content);
            let token = NeighbourToken {
                normalized: !is_special,
                replaces: false,
                ..NeighbourToken::special(content)
            };
            tokens.push((id, token));
        }
        tokens.retain(|(id, _)| !of_file.iter().any(|token| u64::from(token.id) == *id));
        tokens.extend(of_file.iter().map(|token| (token.id.into(), token.into())));
        tokens.sort_by_key(|(id, _)| *id);
        Ok(tokens.into_iter().map(|(_, token)| token).collect())
    }

    fn is_special(&self, content: &str) -> bool {
        let is_it = |value: &Value| special_token(value).is_some_and(|it| it.content == content);
        NAMED.iter().any(|key| is_it(self.special(key)))
            || LISTS.iter().any(|key| match self.special(key) {
                Value::Array(tokens) => tokens.iter().any(is_it),
                _ => false,
            })
    }
}

impl NeighbourToken {
    fn special(content: &str) -> Self {
        NeighbourToken {
            content: content.to_owned(),
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            replaces: false,
        }
    }
}

impl From<&AddedToken> for NeighbourToken {
    fn from(token: &AddedToken) -> Self {
        NeighbourToken {
            content: token.content.clone(),
            single_word: token.single_word,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
            normalized: token.normalized,
            replaces: false,
        }
    }
}

/// The tokens of `added_tokens_decoder`, by their ids.
fn decoder_tokens(file: &str, decoder: &Map<String, Value>) -> Result<Vec<NeighbourToken>> {
    let mut tokens = Vec::with_capacity(decoder.len());
    for (id, value) in decoder {
        let parsed = id.parse::<u64>().ok().zip(token_of(value));
        let (id, token) = parsed.ok_or_else(|| {
            let found = format!("added_tokens_decoder[\"{id}\"] = {value}");
            bad(file, found, "an id and an object with the content of the token")
        })?;
        tokens.push((id, NeighbourToken { replaces: true, ..token }));
    }
    tokens.sort_by_key(|(id, _)| *id);
    Ok(tokens.into_iter().map(|(_, token)| token).collect())
}

fn token_of(value: &Value) -> Option<NeighbourToken> {
    let fields = TokenFields::deserialize(value).ok()?;
    Some(NeighbourToken {
        content: fields.content,
        single_word: fields.single_word,
        lstrip: fields.lstrip,
        rstrip: fields.rstrip,
        normalized: fields.normalized.unwrap_or(!fields.special),
        replaces: false,
    })
}

/// A special token by itself, or with its flags.
fn special_token(value: &Value) -> Option<NeighbourToken> {
    match value {
        Value::String(content) => Some(NeighbourToken::special(content)),
        _ => token_of(value),
    }
}

/// A token by itself, or with its flags.
pub(super) fn token_in(given: &Value) -> Option<&str> {
    given.as_str().or_else(|| given["content"].as_str())
}
