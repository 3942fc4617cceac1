use serde_json::json;

use super::bpe::Bpe;
use super::split::Pattern;
use super::vocab::{self, Vocab};
use super::{Encode, Tokenizer};
use crate::{Error, Result};

/// GPT-2's byte-level BPE, with its own vocabulary or another of the same kind.
#[derive(Debug)]
pub struct Gpt2 {
    vocab: Vocab,
    bpe: Bpe,
    /// `vocab.json` and `merges.txt`, if it was made from files.
    files: Option<(String, String)>,
}

impl Gpt2 {
    /// GPT-2's own vocabulary: 50,257 ids.
    ///
    /// # Errors
    /// None today; it is fallible as its sister is.
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
        Gpt2 { vocab, bpe, files }
    }
}

impl Tokenizer for Gpt2 {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.bpe.encode(text, ids);
    }

    fn encoder(&self) -> Box<dyn Encode + '_> {
        Box::new(self.bpe.encoder())
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        self.bpe.cut_after(text, at)
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
        // All in one row first: a checksum of pieces costs more for each than for its bytes.
        let mut all = Vec::with_capacity(20 * self.vocab_size() as usize);
        for id in 0..self.vocab_size() {
            let token = self.vocab.token(id).unwrap_or_default();
            all.extend((token.len() as u64).to_le_bytes());
            all.extend_from_slice(token);
        }
        for merge in &self.vocab.merges {
            for id in [merge.left, merge.right, merge.merged] {
                all.extend(id.to_le_bytes());
            }
        }
        format!("{:016x}", storage::crc64(&all))
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
