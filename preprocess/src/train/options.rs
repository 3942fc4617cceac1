//! Options of a training run.

use std::str::FromStr;

use crate::input::InputOptions;
use crate::{Error, Result};

/// Tokens of the largest vocabulary.
const VOCAB_SIZE_MAX: u64 = 1 << 20;

/// Bytes of the largest sample: the trainers count pairs in 32 bits.
const SAMPLE_BYTES_MAX: u64 = 1 << 30;

/// The algorithm of a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    /// Byte-pair encoding of characters, with a byte for a character that has no token, as
    /// SentencePiece and Llama 2 have it.
    Bpe,
    /// Byte-pair encoding of bytes, after GPT-2's pre-tokenizer.
    ByteBpe,
    /// A unigram language model, as SentencePiece and T5 have it, with bytes as in `Bpe`.
    Unigram,
    /// WordPiece with BERT's normalizer and pre-tokenizer.
    WordPiece,
}

impl FromStr for ModelType {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        Ok(match text {
            "bpe" => ModelType::Bpe,
            "byte-bpe" => ModelType::ByteBpe,
            "unigram" => ModelType::Unigram,
            "wordpiece" => ModelType::WordPiece,
            _ => return Err("expected bpe, byte-bpe, unigram or wordpiece".to_owned()),
        })
    }
}

impl ModelType {
    /// The special tokens that every tokenizer of the type has; the first ids are theirs.
    pub(super) fn special_tokens(self) -> &'static [&'static str] {
        match self {
            ModelType::Bpe | ModelType::Unigram => &["<unk>", "<s>", "</s>"],
            ModelType::ByteBpe => &["<|endoftext|>"],
            ModelType::WordPiece => &["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        }
    }

    /// Whether tokens of single bytes encode characters without a token.
    pub(super) fn has_byte_tokens(self) -> bool {
        matches!(self, ModelType::Bpe | ModelType::Unigram)
    }
}

/// Options of a training run. Start from [`TrainOptions::new`].
#[derive(Clone, Debug)]
pub struct TrainOptions {
    /// Files, folders and patterns, as in [`crate::PreprocessOptions::inputs`].
    pub inputs: Vec<String>,
    /// How inputs are read.
    pub input: InputOptions,
    /// Key of the text, or the text column of Parquet. Default: `text`.
    pub key: String,
    /// The algorithm.
    pub model_type: ModelType,
    /// Tokens, special ones and bytes included. Maximum: 1,048,576.
    pub vocab_size: u64,
    /// Bytes of text that are held in memory and trained on. Default: 256 MiB. Maximum: 1 GiB.
    pub sample_bytes: u64,
    /// Seed of the sample.
    pub seed: u64,
    /// Fraction of the characters of the sample that have a token of their own; the rarest have
    /// none. Without effect on `ByteBpe`. Default: 0.9995, as in SentencePiece.
    pub character_coverage: f64,
    /// Each digit is a token. Without effect on `WordPiece`. Default: no.
    pub split_digits: bool,
    /// Texts are in lower case and without accents. Only with `WordPiece`. Default: no.
    pub lowercase: bool,
    /// More special tokens, after those of the model type.
    pub special_tokens: Vec<String>,
    /// Threads that read and count, at most 1024. Default: one for every core.
    pub workers: usize,
    /// A longer line is rejected. Default and maximum: 1 GiB.
    pub line_bytes_max: u64,
}

impl TrainOptions {
    /// The defaults.
    #[must_use]
    pub fn new(inputs: Vec<String>, model_type: ModelType, vocab_size: u64) -> Self {
        TrainOptions {
            inputs,
            input: InputOptions::default(),
            key: "text".to_owned(),
            model_type,
            vocab_size,
            sample_bytes: 256 << 20,
            seed: 1234,
            character_coverage: 0.9995,
            split_digits: false,
            lowercase: false,
            special_tokens: Vec::new(),
            workers: std::thread::available_parallelism().map_or(1, usize::from),
            line_bytes_max: 1 << 30,
        }
    }

    /// All special tokens, in the order of their ids.
    pub(super) fn special_tokens(&self) -> Vec<String> {
        let own = self.model_type.special_tokens().iter().map(|token| (*token).to_owned());
        own.chain(self.special_tokens.iter().cloned()).collect()
    }

    pub(super) fn check(&self) -> Result<()> {
        let bytes = if self.model_type.has_byte_tokens() { 256 } else { 0 };
        let fixed = self.special_tokens().len() as u64 + bytes;
        within("vocab-size", self.vocab_size, fixed + 1, VOCAB_SIZE_MAX)?;
        within("sample", self.sample_bytes, 1, SAMPLE_BYTES_MAX)?;
        within("workers", self.workers as u64, 1, 1024)?;
        within("line-max", self.line_bytes_max, 1, 1 << 30)?;
        if !(self.character_coverage > 0.0 && self.character_coverage <= 1.0) {
            let found = self.character_coverage.to_string();
            return bad("character-coverage", found, "a fraction above 0 and at most 1");
        }
        if self.lowercase && self.model_type != ModelType::WordPiece {
            return bad("lowercase", "another type".to_owned(), "--type wordpiece");
        }
        let mut seen = Vec::new();
        for token in self.special_tokens() {
            // Characters and bytes have tokens of their own.
            let is_byte = token.len() == 6 && token.starts_with("<0x") && token.ends_with('>');
            if token.chars().nth(1).is_none() || is_byte || seen.contains(&token) {
                let expected = "tokens of several characters, no names of bytes, each once";
                return bad("special-tokens", format!("'{token}'"), expected);
            }
            seen.push(token);
        }
        Ok(())
    }
}

fn within(name: &'static str, found: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    bad(name, found.to_string(), &format!("at least {least} and at most {most}"))
}

pub(super) fn bad<T>(name: &'static str, found: String, expected: &str) -> Result<T> {
    Err(Error::BadOption { name, found, expected: expected.to_owned(), hint: None })
}
