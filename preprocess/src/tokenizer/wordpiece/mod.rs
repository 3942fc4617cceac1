//! BERT's tokenizer: words and signs, each cut into the longest tokens of a vocabulary, of which
//! those inside a word begin with `##`.
//!
//! Ids are those of Hugging Face's `tokenizers` with the normalizer, pre-tokenizer and model of
//! BERT, or those of the program that it is a port of ([`WordPieceRules`]). A text is cut, before
//! anything is changed in it, at spaces, ASCII signs and Han, which no token crosses; only parts
//! with other characters above ASCII take the slow path through [`characters`].

mod characters;

use std::borrow::Cow;

use serde_json::json;
use storage::Crc64;

use super::cache::{KEY_BYTES_MAX, Key, PieceCache};
use super::keywords::Keywords;
use super::lexicon::{INNER, Lexicon};
use super::python::repr_list;
use super::{Encoder, Tokenizer};
use crate::{Error, Result};
use characters::{Characters, Traits};

/// Whether case and accents of letters are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordPieceCase {
    /// All are lower-cased, and lose their accents.
    Lower,
    /// All stay as they are.
    Kept,
}

/// Which program's rules are followed. They differ in words of more than 100 characters, the
/// capital sigma, characters of private use, and those newer than Unicode 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordPieceRules {
    /// Of Hugging Face's `tokenizers`.
    HuggingFace,
    /// `FullTokenizer` of BERT's authors, which is Megatron's `--legacy-tokenizer`, under Python
    /// 3.11.
    FullTokenizer,
}

impl WordPieceRules {
    /// Characters of a word, at most: a longer one is one unknown token.
    pub(super) fn word_chars_max(self) -> usize {
        match self {
            WordPieceRules::HuggingFace => 100,
            WordPieceRules::FullTokenizer => 200,
        }
    }
}

/// BERT's tokenizer.
#[derive(Debug)]
pub struct WordPiece {
    lexicon: Lexicon,
    vocab_file: String,
    case: WordPieceCase,
    rules: WordPieceRules,
    word_chars_max: usize,
    unknown: u32,
    characters: &'static Characters,
    /// By ASCII character: the id of a sign.
    signs: [u32; 128],
    keywords: Keywords,
}

/// Encodes one text after another; holds 4 MiB of words.
#[derive(Debug)]
struct WordPieceEncoder<'a> {
    of: &'a WordPiece,
    cache: Option<PieceCache>,
    scratch: WordPieceBuffers,
}

#[derive(Debug, Default)]
struct WordPieceBuffers {
    clean: String,
    lower: String,
}

impl WordPiece {
    /// From a `vocab.txt` of one token a line, or a `.json` from token to id.
    ///
    /// # Errors
    /// [`Error::BadVocab`] for a file that is no vocabulary or has no `[UNK]`, [`Error::Storage`].
    pub fn open(vocab_file: &str, case: WordPieceCase, rules: WordPieceRules) -> Result<Self> {
        let lexicon = Lexicon::read(vocab_file)?;
        let unknown = lexicon.id("[UNK]").ok_or_else(|| Error::BadVocab {
            file: vocab_file.to_owned(),
            line: None,
            found: "none".to_owned(),
            expected: "the unknown token '[UNK]'".to_owned(),
            hint: None,
        })?;
        let sign = |byte: usize| {
            let sign = char::from(byte as u8); // fits: below 128
            lexicon.id(sign.encode_utf8(&mut [0; 4])).unwrap_or(unknown)
        };
        let signs = std::array::from_fn(sign);
        Ok(WordPiece {
            lexicon,
            vocab_file: vocab_file.to_owned(),
            case,
            rules,
            word_chars_max: rules.word_chars_max(),
            unknown,
            characters: Characters::get(rules),
            signs,
            keywords: Keywords::default(),
        })
    }

    pub(super) fn with_keywords(self, keywords: Keywords) -> Self {
        WordPiece { keywords, ..self }
    }

    fn encode_with(
        &self,
        text: &str,
        ids: &mut Vec<u32>,
        cache: &mut Option<PieceCache>,
        scratch: &mut WordPieceBuffers,
    ) {
        let text = match (self.rules, self.case) {
            (WordPieceRules::FullTokenizer, WordPieceCase::Lower) => {
                self.characters.with_small_sigmas(text)
            }
            _ => Cow::Borrowed(text),
        };
        let (text, bytes) = (&*text, text.as_bytes());
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            let (len, traits) = match byte {
                0..0x80 => (1, self.characters.of(char::from(byte))),
                _ => {
                    let char = text[at..].chars().next().unwrap_or_default();
                    (char.len_utf8(), self.characters.of(char))
                }
            };
            if traits.has(Traits::SPACE) {
                at += len;
            } else if byte < 0x80 && traits.has(Traits::SIGN) {
                ids.push(self.signs[usize::from(byte)]);
                at += 1;
            } else if traits.has(Traits::ALONE.or(Traits::HAN)) {
                self.cut_word(&text[at..at + len], traits, ids, scratch);
                at += len;
            } else {
                let end = at + self.run_len(&text[at..]);
                self.cached_run(text, at, end, ids, cache, scratch);
                at = end;
            }
        }
    }

    /// The length of the text up to the next space, ASCII sign or Han.
    #[inline]
    fn run_len(&self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let ascii = bytes.iter().position(|byte| !byte.is_ascii_alphanumeric());
        let ascii = ascii.unwrap_or(bytes.len());
        let ends = Traits::SPACE.or(Traits::ALONE).or(Traits::HAN);
        let end = text[ascii..].find(|char| self.characters.of(char).has(ends));
        end.map_or(text.len(), |end| ascii + end)
    }

    #[inline]
    fn cached_run(
        &self,
        text: &str,
        start: usize,
        end: usize,
        ids: &mut Vec<u32>,
        cache: &mut Option<PieceCache>,
        scratch: &mut WordPieceBuffers,
    ) {
        let Some(cache) = cache.as_mut().filter(|_| end - start <= KEY_BYTES_MAX) else {
            return self.cut_run(&text[start..end], ids, scratch);
        };
        let place = cache.sets().find(Key::at(text.as_bytes(), start, end));
        if let Some((found, count)) = cache.sets().get(place) {
            return ids.extend_from_slice(&found[..count]);
        }
        let before = ids.len();
        self.cut_run(&text[start..end], ids, scratch);
        cache.sets().put(place, &ids[before..]);
    }

    /// Cuts a run without spaces and Han, but maybe with signs above ASCII.
    fn cut_run(&self, run: &str, ids: &mut Vec<u32>, scratch: &mut WordPieceBuffers) {
        self.normalize(run, scratch);
        let normal = &scratch.lower;
        let sign = |char| self.characters.of(char).has(Traits::SIGN);
        for part in normal.split_inclusive(sign) {
            let last = part.char_indices().next_back().filter(|&(_, char)| sign(char));
            let (word, sign) = part.split_at(last.map_or(part.len(), |(at, _)| at));
            self.pieces(word, ids);
            self.pieces(sign, ids);
        }
    }

    /// A word of one character.
    #[inline]
    fn cut_word(
        &self,
        word: &str,
        traits: Traits,
        ids: &mut Vec<u32>,
        scratch: &mut WordPieceBuffers,
    ) {
        if traits.has(Traits::ALONE) {
            self.pieces(word, ids);
        } else {
            self.cut_run(word, ids, scratch);
        }
    }

    /// Fills `lower` with the normalized words of a run.
    fn normalize(&self, run: &str, scratch: &mut WordPieceBuffers) {
        let WordPieceBuffers { clean, lower } = scratch;
        lower.clear();
        let kept = |char: &char| !self.characters.of(*char).has(Traits::REMOVED);
        match self.case {
            WordPieceCase::Kept => lower.extend(run.chars().filter(kept)),
            WordPieceCase::Lower if run.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
                lower.push_str(run);
                lower.make_ascii_lowercase();
            }
            WordPieceCase::Lower => {
                clean.clear();
                clean.extend(run.chars().filter(kept));
                self.characters.lower(clean, lower);
            }
        }
    }

    /// Appends the longest token first, then the longest inner ones; one unknown token if a part is
    /// unknown.
    fn pieces(&self, word: &str, ids: &mut Vec<u32>) {
        if word.len() > self.word_chars_max && word.chars().nth(self.word_chars_max).is_some() {
            return ids.push(self.unknown);
        }
        let before = ids.len();
        let mut rest = word;
        while !rest.is_empty() {
            let longest = match rest.len() == word.len() {
                true => self.lexicon.longest(rest, |_| true),
                false => self.lexicon.longest_inner(rest, |_| true),
            };
            let Some((len, id)) = longest else {
                ids.truncate(before);
                return ids.push(self.unknown);
            };
            ids.push(id);
            rest = &rest[len..];
        }
    }
}

impl Tokenizer for WordPiece {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_with(text, ids, &mut None, &mut WordPieceBuffers::default());
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        let (cache, scratch) = (Some(PieceCache::new()), WordPieceBuffers::default());
        Box::new(WordPieceEncoder { of: self, cache, scratch })
    }

    /// Words with a space between, because the original spaces are not known.
    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size();
        for (number, &id) in ids.iter().enumerate() {
            let token = self.lexicon.token(id).ok_or(Error::UnknownToken { id, vocab_size })?;
            match token.strip_prefix(INNER) {
                Some(inner) if number > 0 => out.extend_from_slice(inner.as_bytes()),
                _ => {
                    out.extend_from_slice(if number > 0 { b" " } else { b"" });
                    out.extend_from_slice(token.as_bytes());
                }
            }
        }
        Ok(())
    }

    /// After a space or a line's end.
    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let rest = text.as_bytes().get(at..)?;
        memchr::memchr3(b' ', b'\n', b'\t', rest).map(|space| at + space + 1)
    }

    fn vocab_size(&self) -> u32 {
        self.lexicon.size()
    }

    fn eod(&self) -> Option<u32> {
        ["[EOD]", "<eod>", "[EOS]"].iter().find_map(|token| self.lexicon.id(token))
    }

    fn name(&self) -> &str {
        match (self.rules, self.case) {
            (WordPieceRules::HuggingFace, WordPieceCase::Lower) => "bert-uncased",
            (WordPieceRules::HuggingFace, WordPieceCase::Kept) => "bert-cased",
            (WordPieceRules::FullTokenizer, WordPieceCase::Lower) => "BertWordPieceLowerCase",
            (WordPieceRules::FullTokenizer, WordPieceCase::Kept) => "BertWordPieceCase",
        }
    }

    fn fingerprint(&self) -> String {
        let mut sum = Crc64::new();
        let rules = u8::from(self.rules == WordPieceRules::FullTokenizer) << 1;
        sum.update(&[u8::from(self.case == WordPieceCase::Lower) | rules]);
        self.lexicon.add_to_checksum(&mut sum);
        format!("{:016x}", sum.value())
    }

    /// As Megatron core 0.16 writes it for its two names of BERT's tokenizer; to the one that keeps
    /// capitals it adds a hundred tokens.
    fn identifiers(&self) -> serde_json::Value {
        let (kind, added) = match self.case {
            WordPieceCase::Lower => ("BertWordPieceLowerCase", 0),
            WordPieceCase::Kept => ("BertWordPieceCase", 100),
        };
        let added: Vec<String> = (0..added).map(|id| format!("<extra_id_{id}>")).collect();
        let mut identifiers = json!({
            "class": "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText",
            "tokenizer_path": kind,
            "additional_special_tokens": repr_list(&added),
            "vocab_file": self.vocab_file,
            "merges_file": "None",
        });
        self.keywords.add_to(&mut identifiers);
        identifiers
    }
}

impl Encoder for WordPieceEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        self.of.encode_with(text, ids, &mut self.cache, &mut self.scratch);
    }
}
