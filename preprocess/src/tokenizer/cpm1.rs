//! The tokenizer of CPM-1: jieba's words, with a space between each two, through SentencePiece.

use std::sync::Arc;

use serde_json::json;
use storage::Crc64;

use super::jieba::{self, Jieba};
use super::spm::{self, SentencePiece};
use super::{EncodeError, Encoder, Tokenizer};
use crate::Result;

/// Represent a space and a line end in a text, because spaces separate words.
const SPACE: char = '\u{2582}';
const NEWLINE: char = '\u{2583}';

/// CPM-1's tokenizer.
#[derive(Debug)]
pub struct Cpm1 {
    jieba: Arc<Jieba>,
    pieces: SentencePiece,
    model_file: String,
}

#[derive(Debug)]
struct Cpm1Encoder<'a> {
    jieba: &'a Jieba,
    pieces: spm::SentencePieceEncoder<'a>,
    words: String,
    scratch: jieba::JiebaBuffers,
}

impl Cpm1 {
    /// From a `.model` of SentencePiece.
    ///
    /// # Errors
    /// [`crate::Error::BadVocab`] for a file that is no model, [`crate::Error::Storage`].
    pub fn open(model_file: &str, jieba: Arc<Jieba>) -> Result<Self> {
        let pieces = SentencePiece::open(model_file)?;
        Ok(Cpm1 { jieba, pieces, model_file: model_file.to_owned() })
    }
}

impl Tokenizer for Cpm1 {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let (mut words, mut scratch) = (String::new(), jieba::JiebaBuffers::default());
        join(&self.jieba, text, &mut words, &mut scratch);
        self.pieces.encode(&words, ids);
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        Box::new(Cpm1Encoder {
            jieba: &self.jieba,
            pieces: spm::SentencePieceEncoder::new(&self.pieces),
            words: String::new(),
            scratch: jieba::JiebaBuffers::default(),
        })
    }

    /// Words of jieba, which the model is given, are parts of those of the text.
    fn refused(&self, text: &str) -> Option<EncodeError> {
        self.pieces.refused(text)
    }

    /// Without the spaces that divide words, and with those of the text.
    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let mut words = Vec::new();
        self.pieces.decode(ids, &mut words)?;
        for char in String::from_utf8_lossy(&words).chars().filter(|&char| char != ' ') {
            let char = match char {
                SPACE => ' ',
                NEWLINE => '\n',
                other => other,
            };
            out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
        }
        Ok(())
    }

    fn vocab_size(&self) -> u32 {
        self.pieces.size()
    }

    fn eod(&self) -> Option<u32> {
        self.pieces.id_of("<eod>")
    }

    fn name(&self) -> &str {
        "cpm1"
    }

    fn fingerprint(&self) -> String {
        let mut sum = Crc64::new();
        sum.update(&self.jieba.checksum().to_le_bytes());
        sum.update(&self.pieces.checksum().to_le_bytes());
        format!("{:016x}", sum.value())
    }

    /// Megatron has no such tokenizer; the class is CPM-1's.
    fn identifiers(&self) -> serde_json::Value {
        json!({ "class": "GPT2Tokenizer", "variant": "cpm1", "model_file": self.model_file })
    }
}

impl Encoder for Cpm1Encoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        join(self.jieba, text, &mut self.words, &mut self.scratch);
        self.pieces.encode(&self.words, ids);
    }
}

/// Fills `words` with those of a text.
fn join(jieba: &Jieba, text: &str, words: &mut String, scratch: &mut jieba::JiebaBuffers) {
    words.clear();
    jieba.for_each_word(text, scratch, |word| {
        if !words.is_empty() {
            words.push(' ');
        }
        match word {
            " " => words.push(SPACE),
            "\n" => words.push(NEWLINE),
            "\r\n" => words.extend(['\r', NEWLINE]),
            word => words.push_str(word),
        }
    });
}
