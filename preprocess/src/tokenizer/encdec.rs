//! The tokenizer of CPM-2 and those made after it: jieba's words, each cut into the longest tokens
//! of a vocabulary of Chinese words.
//!
//! Its mistakes are reproduced, because models were trained with them: see [`EncDecRules`].

use std::borrow::Cow;
use std::sync::Arc;

use memchr::memchr2_iter;
use serde_json::json;
use storage::Crc64;

use super::jieba::{self, Jieba};
use super::lexicon::{INNER, Lexicon};
use super::{Encoder, Tokenizer};
use crate::{Error, Result};

/// Represent a space and a line end in the vocabulary.
const SPACE: char = '\u{2582}';
const NEWLINE: char = '\u{2583}';

/// A longer word is one unknown token.
const WORD_CHARS_MAX: usize = 200;

/// The id that the original takes for the space in every vocabulary.
const PUBLISHED_SPACE_ID: u32 = 10;

/// Which tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncDecKind {
    /// CPM-2's, with `bpe_cn` or `bpe_cn_en`.
    Cpm2,
    /// Yuan 1.0's: as CPM-2's, but full-width characters stay as they are.
    Yuan,
    /// That of CPM-Pretrain's T5 and GPT: moreover no `##`, and spaces are kept.
    CpmT5,
}

/// How the published tokenizer treats spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EncDecSpaces {
    /// As published. Id 10 is dropped between two tokens without Han; it is the space of `bpe_cn`,
    /// but the comma of `bpe_cn_en`. The token of a text of one token is repeated.
    Published,
    /// As intended: the space of the vocabulary, whatever its id, and a single token once.
    Meant,
}

/// CPM-2's tokenizer, and related ones.
#[derive(Debug)]
pub struct EncDec {
    jieba: Arc<Jieba>,
    lexicon: Lexicon,
    vocab_file: String,
    kind: EncDecKind,
    rules: EncDecRules,
    unknown: u32,
    eod: Option<u32>,
    /// By id: the token has no Han. The original calls these English, and signs are among them.
    latin: Vec<bool>,
}

/// The differences between the kinds.
#[derive(Clone, Copy, Debug)]
struct EncDecRules {
    /// Full-width characters are read as ASCII.
    half_width: bool,
    /// Inside a word, tokens without Han begin with `##`.
    inner: bool,
    /// This id is dropped between two tokens without Han.
    dropped: Option<u32>,
    /// The token of a text of one token is repeated.
    twice: bool,
}

#[derive(Debug)]
struct EncDecEncoder<'a> {
    of: &'a EncDec,
    scratch: jieba::JiebaBuffers,
}

impl EncDec {
    /// From a `vocab.txt` of one token a line, or a `.json` from token to id.
    ///
    /// # Errors
    /// [`Error::BadVocab`] for a file that is no vocabulary or has no `<unk>`, [`Error::Storage`].
    pub fn open(
        kind: EncDecKind,
        vocab_file: &str,
        spaces: EncDecSpaces,
        jieba: Arc<Jieba>,
    ) -> Result<Self> {
        let mut lexicon = Lexicon::read(vocab_file)?;
        let unknown = lexicon.id("<unk>").ok_or_else(|| Error::BadVocab {
            file: vocab_file.to_owned(),
            line: None,
            found: "none".to_owned(),
            expected: "the unknown token '<unk>'".to_owned(),
            hint: None,
        })?;
        let latin = lexicon.tokens().iter().map(|token| !token.contains(is_han)).collect();
        let space = lexicon.id(SPACE.encode_utf8(&mut [0; 4]));
        lexicon.treat_as(' ', SPACE);
        lexicon.treat_as('\n', NEWLINE);
        let filtered = kind != EncDecKind::CpmT5;
        let published = spaces == EncDecSpaces::Published;
        let rules = EncDecRules {
            half_width: kind == EncDecKind::Cpm2,
            inner: filtered,
            dropped: if published { Some(PUBLISHED_SPACE_ID) } else { space }.filter(|_| filtered),
            twice: published && filtered,
        };
        let eod = lexicon.id("<eod>");
        let vocab_file = vocab_file.to_owned();
        Ok(EncDec { jieba, lexicon, vocab_file, kind, rules, unknown, eod, latin })
    }

    fn encode_with(&self, text: &str, ids: &mut Vec<u32>, scratch: &mut jieba::JiebaBuffers) {
        let text = if self.rules.half_width { half_width(text) } else { Cow::Borrowed(text) };
        let mut filter = Filter::new(self, ids);
        self.jieba.for_each_word(&text, scratch, |word| self.cut(word, &mut filter));
        filter.finish();
    }

    /// Cuts a word into tokens, the longest first.
    #[inline]
    fn cut(&self, word: &str, filter: &mut Filter<'_>) {
        if word.len() > WORD_CHARS_MAX && word.chars().nth(WORD_CHARS_MAX).is_some() {
            return filter.push(self.unknown);
        }
        let mut rest = word;
        let mut next = self.lexicon.longest(rest, |_| true);
        while let Some(first) = rest.chars().next() {
            let (len, id) = next.unwrap_or((first.len_utf8(), self.unknown));
            filter.push(id);
            rest = &rest[len..];
            next = if rest.is_empty() { None } else { self.longest_inner(rest) };
        }
    }

    /// The longest token at the beginning of the rest of a word.
    fn longest_inner(&self, rest: &str) -> Option<(usize, u32)> {
        if !self.rules.inner {
            return self.lexicon.longest(rest, |_| true);
        }
        let mut han = false;
        let plain = self.lexicon.longest(rest, |char| {
            han |= is_han(char);
            han
        });
        let marked = || {
            let mut han = false;
            self.lexicon.longest_inner(rest, |char| {
                han |= is_han(char);
                !han
            })
        };
        // A token with Han is longer than one that ends before it.
        plain.or_else(marked)
    }
}

impl Tokenizer for EncDec {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        self.encode_with(text, ids, &mut jieba::JiebaBuffers::default());
    }

    fn encoder(&self) -> Box<dyn Encoder + '_> {
        Box::new(EncDecEncoder { of: self, scratch: jieba::JiebaBuffers::default() })
    }

    /// As the original: a space between two tokens without Han, because the encoder dropped one
    /// there, or there was none. The text is not always the one that was encoded.
    fn decode(&self, ids: &[u32], out: &mut Vec<u8>) -> Result<()> {
        let vocab_size = self.vocab_size();
        let mut latin_before = false;
        for &id in ids {
            let token = self.lexicon.token(id).ok_or(Error::UnknownToken { id, vocab_size })?;
            let latin = self.latin[id as usize];
            let inner =
                token.strip_prefix(INNER).filter(|rest| self.rules.inner && !rest.is_empty());
            if latin && latin_before && inner.is_none() && self.rules.dropped.is_some() {
                out.push(b' ');
            }
            for char in inner.unwrap_or(token).chars() {
                let char = match char {
                    SPACE => ' ',
                    NEWLINE => '\n',
                    other => other,
                };
                out.extend_from_slice(char.encode_utf8(&mut [0; 4]).as_bytes());
            }
            latin_before = latin;
        }
        Ok(())
    }

    /// After a line's end before a Han character, if there is more than one token on both sides:
    /// the first and the last of a text are not dropped, and a single one may be doubled.
    fn cut_after(&self, text: &str, at: usize) -> Option<usize> {
        let dropped = self.rules.dropped.and_then(|id| self.lexicon.token(id)).unwrap_or_default();
        if dropped == "<unk>" || dropped.contains(|char| is_han(char) || char == NEWLINE) {
            return None;
        }
        let bytes = text.as_bytes();
        let last = memchr::memrchr(b'\n', bytes)?;
        memchr::memchr_iter(b'\n', bytes.get(at..last)?).map(|place| at + place).find_map(|place| {
            let before = *bytes.get(place.checked_sub(1)?)?;
            let han = text[place + 1..].starts_with(is_han);
            (before != b'\r' && han).then_some(place + 1)
        })
    }

    fn vocab_size(&self) -> u32 {
        self.lexicon.size()
    }

    fn eod(&self) -> Option<u32> {
        self.eod
    }

    fn name(&self) -> &str {
        match self.kind {
            EncDecKind::Cpm2 => "encdec",
            EncDecKind::Yuan => "yuan",
            EncDecKind::CpmT5 => "cpm-t5",
        }
    }

    fn fingerprint(&self) -> String {
        let mut sum = Crc64::new();
        let EncDecRules { half_width, inner, dropped, twice } = self.rules;
        sum.update(&[u8::from(half_width), u8::from(inner), u8::from(twice)]);
        sum.update(&dropped.unwrap_or(u32::MAX).to_le_bytes());
        sum.update(&self.jieba.checksum().to_le_bytes());
        self.lexicon.add_to_checksum(&mut sum);
        format!("{:016x}", sum.value())
    }

    /// Megatron has no such tokenizer; the class is CPM-2's.
    fn identifiers(&self) -> serde_json::Value {
        json!({ "class": "EncDecTokenizer", "variant": self.name(), "vocab_file": self.vocab_file })
    }
}

impl Encoder for EncDecEncoder<'_> {
    fn encode(&mut self, text: &str, ids: &mut Vec<u32>) {
        self.of.encode_with(text, ids, &mut self.scratch);
    }
}

/// Appends ids, without the spaces between two tokens that have no Han.
struct Filter<'a> {
    latin: &'a [bool],
    rules: EncDecRules,
    ids: &'a mut Vec<u32>,
    /// The number of ids before the first.
    start: usize,
    latin_before: bool,
    /// An id to be dropped, if the next token has no Han either.
    held: Option<u32>,
}

impl<'a> Filter<'a> {
    fn new(of: &'a EncDec, ids: &'a mut Vec<u32>) -> Self {
        let start = ids.len();
        Filter { latin: &of.latin, rules: of.rules, ids, start, latin_before: false, held: None }
    }

    #[inline]
    fn push(&mut self, id: u32) {
        let latin = self.latin[id as usize];
        if let Some(held) = self.held.take()
            && !latin
        {
            self.ids.push(held);
        }
        if self.rules.dropped == Some(id) && self.latin_before {
            self.held = Some(id);
        } else {
            self.ids.push(id);
        }
        self.latin_before = latin;
    }

    fn finish(self) {
        let Filter { rules, ids, start, held, .. } = self;
        ids.extend(held);
        if rules.twice && ids.len() == start + 1 {
            ids.extend_from_within(start..);
        }
    }
}

/// Whether the original considers a character Chinese.
#[inline]
fn is_han(char: char) -> bool {
    matches!(char, '\u{4e00}'..='\u{9fff}')
}

/// The text with full-width characters as ASCII, but for Chinese punctuation.
fn half_width(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let mut narrow = String::new();
    let mut done = 0;
    // U+3000 and U+FF00 to U+FFEF begin with these, and within a character they do not occur.
    for at in memchr2_iter(0xe3, 0xef, bytes) {
        let Some(ascii) = ascii_of(bytes[at], bytes[at + 1], bytes[at + 2]) else { continue };
        narrow.push_str(&text[done..at]);
        narrow.push(ascii);
        done = at + 3;
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    narrow.push_str(&text[done..]);
    Cow::Owned(narrow)
}

/// The ASCII character for a full-width character of these bytes.
#[inline]
fn ascii_of(first: u8, second: u8, third: u8) -> Option<char> {
    match (first, second) {
        (0xe3, 0x80) if third == 0x80 => Some(' '),
        (0xef, 0xbc | 0xbd) => {
            let ascii = u32::from(second - 0xbc) * 64 + u32::from(third & 0x3f) + 0x20;
            let ascii = char::from_u32(ascii).filter(|char| matches!(char, ' '..='~'))?;
            (!matches!(ascii, ',' | '!' | '(' | ')' | '?' | ';' | ':')).then_some(ascii)
        }
        _ => None,
    }
}
