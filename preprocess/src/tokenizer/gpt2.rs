use serde_json::json;
use storage::Crc64;

use super::cache::{Cache, key_of};
use super::merge::{Merger, Scratch};
use super::split::Splitter;
use super::vocab::{self, Vocab};
use super::{Encode, Tokenizer};
use crate::{Error, Result};

/// GPT-2's byte-level BPE, with its own vocabulary or another of the same kind.
#[derive(Debug)]
pub struct Gpt2 {
    vocab: Vocab,
    merger: Merger,
    splitter: Splitter,
    /// `vocab.json` and `merges.txt`, if it was made from files.
    files: Option<(String, String)>,
}

/// Encodes one text after another; holds 2 MiB of words.
#[derive(Debug)]
struct Encoder<'a> {
    merger: &'a Merger,
    splitter: Splitter,
    cache: Cache,
    scratch: Scratch,
}

impl Gpt2 {
    /// GPT-2's own vocabulary: 50,257 ids.
    ///
    /// # Errors
    /// None today; it is fallible as its sister is.
    pub fn built_in() -> Result<Self> {
        Ok(Gpt2::new(vocab::built_in()?, None))
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
        let merger = Merger::new(vocab.byte_ids, &vocab.merges);
        Gpt2 { vocab, merger, splitter: Splitter::new(), files }
    }
}

impl Tokenizer for Gpt2 {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut scratch = Scratch::default();
        let bytes = text.as_bytes();
        let mut start = 0;
        while start < bytes.len() {
            let end = self.splitter.piece_end(bytes, start);
            self.merger.merge(&bytes[start..end], &mut scratch, ids);
            start = end;
        }
    }

    fn encoder(&self) -> Box<dyn Encode + '_> {
        Box::new(Encoder {
            merger: &self.merger,
            splitter: self.splitter,
            cache: Cache::new(),
            scratch: Scratch::default(),
        })
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size();
        for &id in ids {
            let token = self.vocab.token(id).ok_or(Error::UnknownToken { id, vocab_size })?;
            out.extend_from_slice(token);
        }
        Ok(())
    }

    fn vocab_size(&self) -> u32 {
        self.vocab.size()
    }

    fn eod(&self) -> Option<u32> {
        self.vocab.eod
    }

    fn name(&self) -> &str {
        "gpt2"
    }

    fn fingerprint(&self) -> String {
        let mut sum = Crc64::new();
        for id in 0..self.vocab_size() {
            let token = self.vocab.token(id).unwrap_or_default();
            sum.update(&(token.len() as u64).to_le_bytes());
            sum.update(token);
        }
        for merge in &self.vocab.merges {
            for id in [merge.left, merge.right, merge.merged] {
                sum.update(&id.to_le_bytes());
            }
        }
        format!("{:016x}", sum.value())
    }

    /// As Megatron core writes it for `--tokenizer-type GPT2BPETokenizer` and no other tokenizer
    /// flags. Its keys are the keywords that the tokenizer was built with, as text, and have
    /// changed between versions; these are of core 0.16.
    fn identifiers(&self) -> serde_json::Value {
        let (vocab, merges) = match &self.files {
            Some((vocab, merges)) => (vocab.as_str(), merges.as_str()),
            None => ("None", "None"),
        };
        json!({
            "class": "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText",
            "tokenizer_path": "GPT2BPETokenizer",
            "additional_special_tokens": "[]",
            "vocab_file": vocab,
            "merges_file": merges,
            "use_fast": "True",
            "trust_remote_code": "False",
            "include_special_tokens": "True",
        })
    }
}

impl Encode for Encoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        let bytes = text.as_bytes();
        let mut start = 0;
        while start < bytes.len() {
            let end = self.splitter.piece_end(bytes, start);
            self.encode_piece(bytes, start, end, ids);
            start = end;
        }
    }
}

impl Encoder<'_> {
    #[inline]
    fn encode_piece(&mut self, bytes: &[u8], start: usize, end: usize, ids: &mut Vec<u32>) {
        let Some(key) = key_of(bytes, start, end) else {
            return self.merger.merge(&bytes[start..end], &mut self.scratch, ids);
        };
        if !self.cache.get(key, ids) {
            let before = ids.len();
            self.merger.merge(&bytes[start..end], &mut self.scratch, ids);
            self.cache.put(key, &ids[before..]);
        }
    }
}
