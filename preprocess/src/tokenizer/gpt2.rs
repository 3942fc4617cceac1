use serde_json::json;

use super::added::{Added, AddedToken};
use super::bpe::{Bpe, BpeEncoder};
use super::keywords::Keywords;
use super::python::repr_list;
use super::split::Pattern;
use super::vocab::{self, Vocab};
use super::{Encoder, Tokenizer};
use crate::{Error, Result};

/// GPT-2's byte-level BPE, with its own vocabulary or another of the same kind.
#[derive(Debug)]
pub struct Gpt2 {
    vocab: Vocab,
    bpe: Bpe,
    /// `vocab.json` and `merges.txt`, if it was made from files.
    files: Option<(String, String)>,
    /// As they were given.
    special_tokens: Vec<String>,
    /// Those of them with ids after the vocabulary.
    more: Vec<String>,
    specials: Added,
    keywords: Keywords,
}

#[derive(Debug)]
struct Gpt2Encoder<'a> {
    of: &'a Gpt2,
    bpe: BpeEncoder<'a>,
}

impl Gpt2 {
    /// GPT-2's own vocabulary: 50,257 ids.
    ///
    /// # Errors
    /// None today; fallible like [`Gpt2::from_files`].
    pub fn built_in() -> Result<Self> {
        Ok(Gpt2::new(vocab::built_in(), None))
    }

    /// The vocabulary in a `vocab.json` and a `merges.txt`, as Hugging Face and Megatron have them.
    ///
    /// # Errors
    /// [`Error::BadVocab`] for files that are no vocabulary, [`Error::Storage`].
    pub fn from_files(vocab_file: &str, merge_file: &str) -> Result<Self> {
        let files = Some((vocab_file.to_owned(), merge_file.to_owned()));
        Ok(Gpt2::new(vocab::from_files(vocab_file, merge_file)?, files))
    }

    /// The text of `vocab.json`: one JSON object from token to id, in the order of the ids.
    #[must_use]
    pub fn vocab_json(&self) -> String {
        self.vocab.to_json()
    }

    /// The text of `merges.txt`: a version line, then one merge a line, in rank order.
    #[must_use]
    pub fn merges_txt(&self) -> String {
        self.vocab.to_merges_txt()
    }

    fn new(vocab: Vocab, files: Option<(String, String)>) -> Self {
        let bpe = Bpe::new(vocab.byte_ids, &vocab.merges, Pattern::Gpt2);
        let (special_tokens, more) = (Vec::new(), Vec::new());
        let (specials, keywords) = (Added::default(), Keywords::default());
        Gpt2 { vocab, bpe, files, special_tokens, more, specials, keywords }
    }

    pub(super) fn with_keywords(self, keywords: Keywords) -> Self {
        Gpt2 { keywords, ..self }
    }

    /// Recognizes these where a text spells them, as Megatron's `--tokenizer-special-tokens` has
    /// it: those that are in the vocabulary by their ids, the others by the next ones.
    ///
    /// # Errors
    /// [`Error::BadOption`] for one that is empty, or more than can be looked for.
    pub fn with_special_tokens(mut self, special_tokens: &[String]) -> Result<Self> {
        if special_tokens.is_empty() {
            return Ok(self);
        }
        let bad = |found: String, expected: &str| Error::BadOption {
            name: "tokenizer-special-tokens",
            found,
            expected: expected.to_owned(),
            hint: None,
        };
        let known = self.vocab.ids();
        let mut added: Vec<AddedToken> = Vec::new();
        for token in special_tokens {
            if token.is_empty() {
                return Err(bad("''".to_owned(), "non-empty tokens"));
            }
            if added.iter().any(|one| one.content == *token) {
                continue;
            }
            let id = known.get(token).copied().unwrap_or_else(|| {
                self.more.push(token.clone());
                self.vocab.size() + self.more.len() as u32 - 1 // fits: as many as arguments
            });
            added.push(AddedToken::special(id, token));
        }
        let spelled = added.iter().map(|one| (one, one.content.clone()));
        self.specials = Added::new(spelled)
            .map_err(|e| bad(format!("an error: {e}"), "fewer special tokens"))?;
        self.special_tokens = special_tokens.to_vec();
        Ok(self)
    }

    fn token(&self, id: u32) -> Option<&[u8]> {
        let more = || id.checked_sub(self.vocab.size()).and_then(|at| self.more.get(at as usize));
        self.vocab.token(id).or_else(|| more().map(String::as_bytes))
    }
}

impl Tokenizer for Gpt2 {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.specials.encode(text, ids, |text, ids| self.bpe.encode(text, ids));
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        let bpe = self.bpe.encoder();
        if self.specials.is_empty() {
            Box::new(bpe)
        } else {
            Box::new(Gpt2Encoder { of: self, bpe })
        }
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let at = self.bpe.cut_after(text, at)?;
        self.specials.may_cut(text, at).then_some(at)
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size();
        for &id in ids {
            let token = self.token(id).ok_or(Error::UnknownToken { id, vocab_size })?;
            out.extend_from_slice(token);
        }
        Ok(())
    }

    fn vocab_size(&self) -> u32 {
        self.vocab.size() + self.more.len() as u32 // fits: as many as arguments
    }

    fn eod(&self) -> Option<u32> {
        self.vocab.eod
    }

    fn name(&self) -> &str {
        "gpt2"
    }

    fn fingerprint(&self) -> String {
        // All in one buffer first: many small checksum updates cost more than the bytes.
        let mut all = Vec::with_capacity(20 * self.vocab_size() as usize);
        for id in 0..self.vocab.size() {
            let token = self.vocab.token(id).unwrap_or_default();
            all.extend((token.len() as u64).to_le_bytes());
            all.extend_from_slice(token);
        }
        for merge in &self.vocab.merges {
            for id in [merge.left, merge.right, merge.merged] {
                all.extend(id.to_le_bytes());
            }
        }
        for token in &self.special_tokens {
            all.extend((token.len() as u64).to_le_bytes());
            all.extend_from_slice(token.as_bytes());
        }
        format!("{:016x}", storage::crc64(&all))
    }

    /// As Megatron core writes it for `--tokenizer-type GPT2BPETokenizer`. Its keys are the
    /// keywords that the tokenizer was built with, as text, and have changed between versions;
    /// these are of core 0.16.
    fn identifiers(&self) -> serde_json::Value {
        let (vocab, merges) = match &self.files {
            Some((vocab, merges)) => (vocab.as_str(), merges.as_str()),
            None => ("None", "None"),
        };
        let mut identifiers = json!({
            "class": "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText",
            "tokenizer_path": "GPT2BPETokenizer",
            "additional_special_tokens": repr_list(&self.special_tokens),
            "vocab_file": vocab,
            "merges_file": merges,
        });
        self.keywords.add_to(&mut identifiers);
        identifiers
    }
}

impl Encoder for Gpt2Encoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let Gpt2Encoder { of, bpe } = self;
        of.specials.encode(text, ids, |text, ids| bpe.encode(text, ids));
    }
}
