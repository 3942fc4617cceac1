//! jieba's words as tokens.

use std::sync::Arc;

use serde_json::json;
use storage::Crc64;

use super::jieba::{self, Jieba};
use super::lexicon::Lexicon;
use super::{Encoder, Tokenizer};
use crate::{Error, Result};

/// Every word that jieba cuts is a token, or unknown.
#[derive(Debug)]
pub struct JiebaWords {
    jieba: Arc<Jieba>,
    lexicon: Lexicon,
    vocab_file: String,
    unknown: u32,
}

#[derive(Debug)]
struct JiebaWordsEncoder<'a> {
    of: &'a JiebaWords,
    scratch: jieba::JiebaBuffers,
}

impl JiebaWords {
    /// From a file of one word a line, or a `.json` from word to id.
    ///
    /// # Errors
    /// [`Error::BadVocab`] for a file that is no vocabulary, or has neither `<unk>` nor `[UNK]`;
    /// [`Error::Storage`].
    pub fn open(vocab_file: &str, jieba: Arc<Jieba>) -> Result<Self> {
        let lexicon = Lexicon::read(vocab_file)?;
        let unknown = lexicon.id("<unk>").or_else(|| lexicon.id("[UNK]"));
        let unknown = unknown.ok_or_else(|| Error::BadVocab {
            file: vocab_file.to_owned(),
            line: None,
            found: "neither".to_owned(),
            expected: "the unknown token '<unk>' or '[UNK]'".to_owned(),
            hint: None,
        })?;
        Ok(JiebaWords { jieba, lexicon, vocab_file: vocab_file.to_owned(), unknown })
    }

    fn encode_with(&self, text: &str, ids: &mut Vec<u32>, scratch: &mut jieba::JiebaBuffers) {
        self.jieba.for_each_word(text, scratch, |word| {
            ids.push(self.lexicon.id(word).unwrap_or(self.unknown));
        });
    }
}

impl Tokenizer for JiebaWords {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_with(text, ids, &mut jieba::JiebaBuffers::default());
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        Box::new(JiebaWordsEncoder { of: self, scratch: jieba::JiebaBuffers::default() })
    }

    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size();
        for &id in ids {
            let word = self.lexicon.token(id).ok_or(Error::UnknownToken { id, vocab_size })?;
            out.extend_from_slice(word.as_bytes());
        }
        Ok(())
    }

    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        Jieba::cut_after(text, at)
    }

    fn vocab_size(&self) -> u32 {
        self.lexicon.size()
    }

    fn eod(&self) -> Option<u32> {
        ["<eod>", "[EOS]", "</s>"].iter().find_map(|token| self.lexicon.id(token))
    }

    fn name(&self) -> &str {
        "jieba"
    }

    fn fingerprint(&self) -> String {
        let mut sum = Crc64::new();
        sum.update(&self.jieba.checksum().to_le_bytes());
        sum.update(&self.unknown.to_le_bytes());
        self.lexicon.add_to_checksum(&mut sum);
        format!("{:016x}", sum.value())
    }

    fn identifiers(&self) -> serde_json::Value {
        json!({ "class": "JiebaTokenizer", "vocab_file": self.vocab_file })
    }
}

impl Encoder for JiebaWordsEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        self.of.encode_with(text, ids, &mut self.scratch);
    }
}
