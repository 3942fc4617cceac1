//! Text to token ids and back.

mod added;
mod base64;
mod bpe;
mod by_char;
mod cache;

mod classes;
mod cpm1;
mod double_array;
mod encdec;
mod gpt2;
mod hf;
mod jieba;
mod keywords;
mod lexicon;
mod long_cache;
mod merge;
mod null;
mod python;
mod ranks;
mod read;
mod split;
mod spm;
mod tiktoken;
mod vocab;
mod worded;
mod wordpiece;
mod words;

use std::fmt;
use std::sync::Arc;

pub use cpm1::Cpm1;
pub use encdec::{EncDec, EncDecKind, EncDecSpaces};
pub use gpt2::Gpt2;
pub use hf::{ExportedTokenizer, HuggingFace, ModelTokens};
pub use jieba::Jieba;
pub use null::Null;
pub use split::{Pattern, Pieces, pieces};
#[cfg(feature = "general")]
pub(crate) use spm::Trie;
pub use tiktoken::Tiktoken;
pub use wordpiece::{WordPiece, WordPieceCase, WordPieceRules};
pub use words::JiebaWords;

use crate::{Error, Result};
use keywords::Keywords;

/// Converts text to ids of one vocabulary and back. The same text always gives the same ids.
pub trait Tokenizer: fmt::Debug + Send + Sync {
    /// Appends the ids of a text. Special tokens spelled in the text are ordinary text, except to
    /// [`HuggingFace`] and to Megatron's files of [`Tiktoken`]'s kind, which recognize them. For
    /// many texts use a [`Tokenizer::encoder`], which caches words.
    fn encode(&self, text: &str, ids: &mut Vec<u32>);

    /// An encoder for many texts, one for each thread.
    fn encoder(&self) -> Box<dyn Encoder + '_>;

    /// The part of a text that [`Tokenizer::encode`] cannot encode: with [`Null`] anything but ids,
    /// with unigram models a word of more than 64 MiB. `None`: there is none.
    fn refused(&self, text: &str) -> Option<EncodeError> {
        let _ = text;
        None
    }

    /// Appends the bytes of the ids. Those of a whole text are UTF-8; a part of them may begin or
    /// end within a character.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] for an id at or above [`Tokenizer::vocab_size`].
    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()>;

    /// A place at or after `at` where a long text may be cut: the ids of both parts, concatenated,
    /// are those of the whole. `None`: there is none nearby, or this tokenizer finds none.
    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let _ = (text, at);
        None
    }

    /// How many ids there are; all are below.
    fn vocab_size(&self) -> u32;

    /// The id that ends a document, if the vocabulary has one.
    fn eod(&self) -> Option<u32>;

    /// Its name on the command line.
    fn name(&self) -> &str;

    /// A checksum of the whole vocabulary, in 16 hexadecimal digits. It differs between tokenizers
    /// that may encode a text as different ids.
    fn fingerprint(&self) -> String;

    /// Where a folder has a `tokenizer.json` and a class with a rule of its own: the name of the
    /// rule that encodes.
    fn rule(&self) -> Option<&str> {
        None
    }

    /// The entries of this tokenizer in Megatron's description of a cached sample order, which is
    /// hashed to name the cache.
    fn identifiers(&self) -> serde_json::Value;
}

/// Why a text cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodeError {
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
    /// A command or a setting that may help.
    pub hint: Option<&'static str>,
}

/// Encodes one text after another. Its caches change its speed, never its ids.
pub trait Encoder: fmt::Debug {
    /// Appends the ids of a text.
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>);
}

/// Which tokenizer, and the files it is made from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerSpec {
    /// `gpt2`, or Megatron's name for it, `GPT2BPETokenizer`; `encdec`, `yuan`, `cpm-t5`, `jieba`.
    /// `hf` or `HuggingFaceTokenizer`; `tiktoken` or `TikTokenizer`.
    /// `sentencepiece`, or Megatron's names for it, `SentencePieceTokenizer`,
    /// `GPTSentencePieceTokenizer` and `Llama2Tokenizer`. `null` or `NullTokenizer`.
    pub kind: String,
    /// `vocab.json`. None: GPT-2's own vocabulary, which is built in.
    pub vocab_file: Option<String>,
    /// `merges.txt`. None: GPT-2's own.
    pub merge_file: Option<String>,
    /// The one file, or its folder, of kinds that have one: `tokenizer.json`, SentencePiece's
    /// `.model`, OpenAI's `.tiktoken`.
    pub model: Option<String>,
    /// Words with frequencies in the place of jieba's own dictionary.
    pub jieba_dict: Option<String>,
    /// A user's words for jieba: word, frequency and tag, of which the last two may be missing.
    pub user_dict: Option<String>,
    /// CPM-2's handling of spaces as it was meant, not as it was published.
    pub cpm_spaces_meant: bool,
    /// Of a folder with a `tokenizer.json`: `file` for the rule of that file, `class` for the rule
    /// of the class that the folder names, as `AutoTokenizer` of transformers 5 takes it. None: the
    /// folder is refused where the two differ.
    pub tokenizer_rule: Option<String>,
    /// Of the kinds that read a `tokenizer.json`: put nothing around a text, as Megatron's
    /// `--tokenizer-hf-no-include-special-tokens`.
    pub without_special_tokens: bool,
    /// Hugging Face's slow tokenizer, as Megatron's `--tokenizer-hf-no-use-fast`: recorded in the
    /// identifiers, without effect on ids.
    pub slow: bool,
    /// As Megatron's `--trust-remote-code`: recorded in the identifiers; no code is ever run.
    pub trust_remote_code: bool,
    /// More special tokens, as Megatron's `--tokenizer-special-tokens`.
    pub special_tokens: Vec<String>,
    /// The token that ends a document. None: the one that the files name.
    pub eod_token: Option<String>,
    /// The pre-tokenizer of a vocabulary of tiktoken's kind: Megatron's `v1` or `v2`, or the name
    /// of a published vocabulary. None: detected by the vocabulary, or `v2` for Megatron's files.
    pub tiktoken_pattern: Option<String>,
    /// How many special tokens Megatron puts before such a vocabulary. None: 1000.
    pub tiktoken_num_special_tokens: Option<u32>,
    /// How many ids there are, where a file holds more than are used, or there is none. None:
    /// Megatron's 131072.
    pub vocab_size: Option<u32>,
    /// The id that ends a document of ids. None: the last one.
    pub null_eod_id: Option<u32>,
    /// Megatron's tokenizers before core 0.15, as its `--legacy-tokenizer`: SentencePiece's had
    /// tokens of their own, and Llama 2's put a beginning before every text.
    pub legacy: bool,
    /// How many `<extra_id_0>`, `<extra_id_1>` ... an older SentencePiece tokenizer has.
    pub vocab_extra_ids: u32,
}

/// Makes a tokenizer.
///
/// # Errors
/// [`Error::BadOption`] for a kind that is not known or one file without the other,
/// [`Error::BadVocab`] for files that are no vocabulary, [`Error::Storage`].
pub fn open_tokenizer(spec: &TokenizerSpec) -> Result<Arc<dyn Tokenizer>> {
    open_kind(spec).map_err(|error| read::sniff::explained(spec, error))
}

fn open_kind(spec: &TokenizerSpec) -> Result<Arc<dyn Tokenizer>> {
    if let Some(rule) = spec.tokenizer_rule.as_ref().filter(|_| !hf::KINDS.contains(&&*spec.kind)) {
        return Err(Error::BadOption {
            name: "tokenizer-rule",
            found: format!("'{rule}'"),
            expected: format!("none for the tokenizer '{}'", spec.kind),
            hint: Some("hf reads folders whose class may have a rule of its own".to_owned()),
        });
    }
    if let Some(worded) = worded::open(spec)? {
        refuse_special_tokens(spec)?;
        return Ok(worded);
    }
    match spec.kind.as_str() {
        kind if null::KINDS.contains(&kind) => Ok(Arc::new(Null::open(spec)?)),
        kind if hf::KINDS.contains(&kind) => Ok(Arc::new(HuggingFace::open(spec)?)),
        kind if tiktoken::KINDS.contains(&kind) => Ok(Arc::new(Tiktoken::open(spec)?)),
        kind if spm::KINDS.contains(&kind) => {
            refuse_special_tokens(spec)?;
            Ok(Arc::new(spm::open(spec)?))
        }
        _ => Ok(Arc::new(open_gpt2(spec)?)),
    }
}

/// As [`open_tokenizer`], for methods that only byte-level BPE has.
///
/// # Errors
/// As [`open_tokenizer`].
pub fn open_gpt2(spec: &TokenizerSpec) -> Result<Gpt2> {
    if !["gpt2", "GPT2BPETokenizer"].contains(&spec.kind.as_str()) {
        let found = format!("'{}'", spec.kind);
        let expected = "gpt2, hf, tiktoken, sentencepiece, encdec, cpm-t5, yuan, cpm1, jieba, \
                   wordpiece, bert-cased or null";
        return Err(Error::BadOption {
            name: "tokenizer",
            found,
            expected: expected.to_owned(),
            hint: None,
        });
    }
    let tokenizer = match (&spec.vocab_file, &spec.merge_file) {
        (None, None) => Gpt2::built_in()?,
        (Some(vocab), Some(merges)) => Gpt2::from_files(vocab, merges)?,
        (vocab, _) => {
            let (name, other) = match vocab {
                Some(_) => ("vocab-file", "merge-file"),
                None => ("merge-file", "vocab-file"),
            };
            let (found, expected) =
                (format!("no --{other}"), "both --vocab-file and --merge-file".to_owned());
            return Err(Error::BadOption { name, found, expected, hint: None });
        }
    };
    Ok(tokenizer.with_special_tokens(&spec.special_tokens)?.with_keywords(Keywords::of(spec)))
}

/// Refuses special tokens that would be ignored silently.
fn refuse_special_tokens(spec: &TokenizerSpec) -> Result<()> {
    if spec.special_tokens.is_empty() {
        return Ok(());
    }
    let found = spec.special_tokens.join(" ");
    let expected = format!("none for the tokenizer '{}'", spec.kind);
    Err(Error::BadOption {
        name: "tokenizer-special-tokens",
        found,
        expected,
        hint: Some("gpt2, hf and Megatron's files for tiktoken support special tokens".to_owned()),
    })
}
