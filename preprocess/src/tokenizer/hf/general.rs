//! Every other `tokenizer.json`, by Hugging Face's own library: exact, but slower.

use std::collections::HashMap;
use std::fmt;
use std::panic::catch_unwind;

use tokenizers::{NormalizedString, Normalizer as _, Tokenizer as Library};

use super::super::Encoder;
use super::super::added::AddedToken;
use super::super::read::{bad, parse_error};
use super::file::{TokenizerJson, Vocab};
use super::own::twins;
use crate::{Error, Result};

/// A tokenizer of the library.
pub(super) struct LibraryTokenizer {
    library: Library,
    with_specials: bool,
}

impl LibraryTokenizer {
    /// `text` is a `tokenizer.json` that was parsed to `parsed`; `more` are tokens to add.
    pub(super) fn new(
        file: &str,
        text: &str,
        parsed: &TokenizerJson,
        more: &[AddedToken],
        with_specials: bool,
    ) -> Result<Self> {
        check(parsed).map_err(|(found, expected)| bad(file, found, expected))?;
        check_ids_differ(parsed)
            .map_err(|found| bad(file, found, "a different id for each token"))?;
        // The library trusts its input and may panic on what no trainer writes.
        let made = catch_unwind(|| Library::from_bytes(text.as_bytes()));
        let expected = "a tokenizer that the library `tokenizers` can load";
        let mut library = match made {
            Ok(made) => made.map_err(|e| bad(file, parse_error(e), expected))?,
            Err(_) => return Err(bad(file, "a panic of the library", expected)),
        };
        // Truncation and padding are for single calls, not for a corpus.
        library.with_padding(None);
        library.with_truncation(None).map_err(|e| bad(file, format!("an error: {e}"), expected))?;
        let more = more.iter().map(|token| {
            tokenizers::AddedToken::from(&*token.content, true)
                .single_word(token.single_word)
                .lstrip(token.lstrip)
                .rstrip(token.rstrip)
                .normalized(token.normalized)
        });
        library
            .add_special_tokens(more.collect::<Vec<_>>())
            .map_err(|e| bad(file, format!("an error: {e}"), expected))?;
        check_distinct(&library).map_err(|found| {
            bad(file, found, "added tokens that differ after normalization")
                .with_hint("remove one of the two from the file")
        })?;
        Ok(LibraryTokenizer { library, with_specials })
    }

    /// The id that the library assigns to a token, even if the file has another.
    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }

    pub(super) fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let encoding = self.library.encode_fast(text, self.with_specials);
        ids.extend_from_slice(encoding.expect("its unknown token was looked for").get_ids());
    }

    pub(super) fn decode(&self, ids: &[u32], vocab_size: u32, out: &mut Vec<u8>) -> Result<()> {
        if let Some(&id) = ids.iter().find(|&&id| self.library.id_to_token(id).is_none()) {
            return Err(Error::UnknownToken { id, vocab_size });
        }
        let text = self.library.decode(ids, false);
        out.extend_from_slice(text.expect("none of its decoders fails").as_bytes());
        Ok(())
    }
}

/// Checks that no two tokens of the vocabulary share an id: which of them it decodes to would
/// depend on a hash map, and differ between processes.
fn check_ids_differ(file: &TokenizerJson) -> std::result::Result<(), String> {
    let mut seen: HashMap<u32, &str> = HashMap::new();
    for (token, id) in file.model.vocab.tokens() {
        if let Some(other) = seen.insert(id, token).filter(|other| *other != token) {
            return Err(format!("tokens '{other}' and '{token}' with id {id}"));
        }
    }
    Ok(())
}

/// Checks that no two added tokens match the same text. The library keeps added tokens in a hash
/// map, so which of the two is found would differ between processes.
fn check_distinct(library: &Library) -> std::result::Result<(), String> {
    let tokens = library.get_added_tokens_decoder();
    let mut tokens: Vec<_> = tokens.iter().filter(|(_, token)| token.normalized).collect();
    tokens.sort_unstable_by_key(|(id, _)| **id);
    let mut seen: HashMap<String, (&str, u32)> = HashMap::new();
    for (&id, token) in tokens {
        let mut text = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = library.get_normalizer() {
            normalizer.normalize(&mut text).map_err(|error| format!("an error: {error}"))?;
        }
        if let Some((other, other_id)) = seen.insert(text.get().to_owned(), (&token.content, id)) {
            return Err(twins((other, other_id), (&token.content, id)));
        }
    }
    Ok(())
}

/// Checks that encoding cannot fail, as it does for unknown words without an unknown token.
fn check(file: &TokenizerJson) -> std::result::Result<(), (String, &'static str)> {
    let model = &file.model;
    let unknown = model.unk_token.as_deref();
    let there = match &model.vocab {
        Vocab::Ids(ids) => match (model.kind.as_deref(), unknown) {
            (Some("BPE") | None, None) => true,
            (kind, unknown) => {
                let unknown = unknown.or(match kind {
                    Some("WordPiece") => Some("[UNK]"),
                    Some("WordLevel") => Some("<unk>"),
                    _ => None,
                });
                unknown.is_some_and(|unknown| ids.iter().any(|(token, _)| token == unknown))
            }
        },
        Vocab::Scores(scores) => model.unk_id.is_some_and(|id| id < scores.len()),
    };
    if there { Ok(()) } else { Err(("none".to_owned(), "an unknown token in the vocabulary")) }
}

impl fmt::Debug for LibraryTokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LibraryTokenizer")
            .field("with_specials", &self.with_specials)
            .finish_non_exhaustive()
    }
}

impl Encoder for &LibraryTokenizer {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        LibraryTokenizer::encode(self, text, ids);
    }
}
