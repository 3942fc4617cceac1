use serde_json::json;

use super::{EncodeError, Encoder, Tokenizer, TokenizerSpec};
use crate::{Error, Result};

/// Its names on the command line and in Megatron.
pub(super) const KINDS: [&str; 2] = ["null", "NullTokenizer"];

/// Ids are counted in an i32 when they are written.
const VOCAB_SIZE_MAX: u32 = i32::MAX as u32;

/// Texts that are ids already: numbers with white space between them. It reads all that Megatron's
/// `NullTokenizer` reads, which fails at two adjacent spaces.
#[derive(Debug)]
pub struct Null {
    vocab_size: u32,
    eod: u32,
    /// As it was given.
    eod_id: Option<u32>,
}

impl Null {
    /// As many ids as a spec says, the end included: Megatron core 0.16 and older add one more for
    /// the end.
    ///
    /// # Errors
    /// [`Error::BadOption`] for a spec that does not say how many, or with an end that is none of
    /// them.
    pub fn open(spec: &TokenizerSpec) -> Result<Self> {
        let bad = |name, found: String, expected: String| {
            Err(Error::BadOption { name, found, expected, hint: None })
        };
        let expected = || format!("the number of ids, at least 1 and at most {VOCAB_SIZE_MAX}");
        let vocab_size = match spec.vocab_size {
            Some(count @ 1..=VOCAB_SIZE_MAX) => count,
            Some(count) => return bad("vocab-size", count.to_string(), expected()),
            None => return bad("vocab-size", "none".to_owned(), expected()),
        };
        let eod = spec.null_eod_id.unwrap_or(vocab_size - 1);
        if eod >= vocab_size {
            let expected = format!("an id below --vocab-size {vocab_size}");
            return bad("null-tokenizer-eod-id", eod.to_string(), expected);
        }
        Ok(Null { vocab_size, eod, eod_id: spec.null_eod_id })
    }

    fn id(&self, word: &str) -> Option<u32> {
        word.parse().ok().filter(|&id| id < self.vocab_size)
    }
}

impl Tokenizer for Null {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        ids.extend(text.split_ascii_whitespace().map_while(|word| self.id(word)));
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        Box::new(self)
    }

    fn refused(&self, text: &str) -> Option<EncodeError> {
        let word = text.split_ascii_whitespace().find(|word| self.id(word).is_none())?;
        let shown: String = word.chars().take(40).collect();
        let expected = format!("ids below {}, separated by spaces", self.vocab_size);
        Some(EncodeError { found: format!("'{shown}'"), expected, hint: None })
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size;
        for &id in ids {
            if id >= vocab_size {
                return Err(Error::UnknownToken { id, vocab_size });
            }
            if !out.is_empty() {
                out.push(b' ');
            }
            out.extend_from_slice(id.to_string().as_bytes());
        }
        Ok(())
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let rest = text.as_bytes().get(at..)?;
        rest.iter().position(u8::is_ascii_whitespace).map(|space| at + space)
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn eod(&self) -> Option<u32> {
        Some(self.eod)
    }

    fn name(&self) -> &str {
        "null"
    }

    fn fingerprint(&self) -> String {
        format!("{:016x}", storage::crc64(format!("null {}", self.vocab_size).as_bytes()))
    }

    /// As Megatron core 0.16 writes it, with the end where it was given, as later ones do.
    fn identifiers(&self) -> serde_json::Value {
        let mut identifiers = json!({
            "class": "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText",
            "tokenizer_path": null,
            "vocab_size": self.vocab_size.to_string(),
        });
        if let Some(eod_id) = self.eod_id {
            identifiers["eod_id"] = eod_id.to_string().into();
        }
        identifiers
    }
}

impl Encoder for &Null {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        Tokenizer::encode(*self, text, ids);
    }
}
