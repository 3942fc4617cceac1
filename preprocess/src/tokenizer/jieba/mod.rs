//! Chinese words, as Python's jieba 0.42.1 cuts them with `cut(text)`.
//!
//! A text is blocks of Han, Latin and a few signs ([`alphabet`]), and the text between, which is
//! cut into characters. A block is cut so that the product of its words' shares in the
//! [`dictionary`] is greatest; a run of single characters in that cut goes to [`hmm`], as far as
//! it is Han. [`user`] is a user's own words.
//!
//! Models were trained on its cuts, so ties and roundings are the original's: sums of doubles are
//! made in its order, and of two equal sums the longer word wins.

mod alphabet;
mod dictionary;
mod hmm;
mod user;

use std::sync::{Arc, OnceLock};

use crate::Result;
use alphabet::{HAN, code_at, code_of, is_ascii_of_block, len_bytes};
use dictionary::Dictionary;
use hmm::{Hmm, Rows};

/// Cuts Chinese text into words.
#[derive(Debug)]
pub struct Jieba {
    dictionary: Dictionary,
    hmm: Hmm,
}

/// Buffers for cutting, reused from text to text.
#[derive(Debug, Default)]
pub(super) struct JiebaBuffers {
    /// Of the block.
    codes: Vec<u16>,
    /// The logarithm of the best cut from each character to the end of the block.
    best: Vec<f64>,
    /// How many characters the first word of that cut has.
    lens: Vec<u32>,
    rows: Rows,
}

impl Jieba {
    /// With jieba's own dictionary. It is made once.
    #[must_use]
    pub fn built_in() -> Arc<Self> {
        static BUILT_IN: OnceLock<Arc<Jieba>> = OnceLock::new();
        let made = || Jieba::open(None, None).expect("the built-in files are valid");
        Arc::clone(BUILT_IN.get_or_init(|| Arc::new(made())))
    }

    /// With the words of a file in the place of jieba's own, as after `jieba.set_dictionary`, or
    /// with a user's words beside them, as after `jieba.load_userdict`, or both.
    ///
    /// # Errors
    /// [`crate::Error::BadVocab`] for files that are no dictionaries, [`crate::Error::Storage`].
    pub fn open(dict: Option<&str>, user: Option<&str>) -> Result<Self> {
        Ok(Jieba { dictionary: Dictionary::open(dict, user)?, hmm: Hmm::built_in() })
    }

    /// The words of a text; together they are the text.
    #[must_use]
    pub fn cut<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut words = Vec::new();
        self.for_each_word(text, &mut JiebaBuffers::default(), |word| words.push(word));
        words
    }

    /// A checksum of the dictionary.
    pub(super) fn checksum(&self) -> u64 {
        self.dictionary.checksum
    }

    /// The first position at or after `at` that is between two words in any context.
    pub(super) fn cut_after(text: &str, at: usize) -> Option<usize> {
        let start = (at..text.len()).find(|&place| text.is_char_boundary(place))?;
        let between = |&(_, char): &(usize, char)| char != '\r' && code_of(char).is_none();
        let (place, char) = text[start..].char_indices().find(between)?;
        Some(start + place + char.len_utf8())
    }

    /// As [`Jieba::cut`], one word after the other.
    pub(super) fn for_each_word<'t>(
        &self,
        text: &'t str,
        scratch: &mut JiebaBuffers,
        mut word: impl FnMut(&'t str),
    ) {
        let bytes = text.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            at = match code_at(bytes, at) {
                Some(_) => self.block(text, at, scratch, &mut word),
                None => {
                    let len = match bytes[at] {
                        b'\r' if bytes.get(at + 1) == Some(&b'\n') => 2,
                        0..=0x7f => 1,
                        0x80..=0xdf => 2,
                        0xe0..=0xef => 3,
                        0xf0.. => 4,
                    };
                    word(&text[at..at + len]);
                    at + len
                }
            };
        }
    }

    /// Cuts the block that begins at `start`, and returns its end.
    fn block<'t>(
        &self,
        text: &'t str,
        start: usize,
        scratch: &mut JiebaBuffers,
        word: &mut impl FnMut(&'t str),
    ) -> usize {
        let bytes = text.as_bytes();
        let mut end = start;
        let mut pairs = false;
        let mut before = 0;
        while end < bytes.len() && is_ascii_of_block(bytes[end]) {
            pairs |= self.dictionary.ascii_pairs[before] >> bytes[end] & 1 == 1;
            before = usize::from(bytes[end]);
            end += 1;
        }
        if !pairs && code_at(bytes, end).is_none() {
            // No word of two characters can be in it, so all are single.
            let mut at = start;
            while at < end {
                let len = latin_len(&bytes[at..end]);
                word(&text[at..at + len]);
                at += len;
            }
            return end;
        }
        scratch.codes.clear();
        let mut end = start;
        while let Some(code) = code_at(bytes, end) {
            scratch.codes.push(code);
            end += len_bytes(code);
        }
        self.best_cut(scratch);
        self.words_of(&text[start..end], scratch, word);
        end
    }

    /// The cut of the block with the greatest product of shares, from the end to the beginning.
    fn best_cut(&self, scratch: &mut JiebaBuffers) {
        let JiebaBuffers { codes, best, lens, .. } = scratch;
        let Dictionary { trie, logs, .. } = &self.dictionary;
        best.clear();
        best.resize(codes.len() + 1, 0.0);
        lens.clear();
        lens.resize(codes.len(), 0);
        for start in (0..codes.len()).rev() {
            let (mut most, mut word_end) = (f64::NEG_INFINITY, start + 1);
            let mut children = trie.root();
            for (end, &code) in (start + 1..).zip(&codes[start..]) {
                let Some(unit) = trie.child(children, code) else { break };
                if let Some(place) = unit.value() {
                    let sum = logs[place as usize] + best[end];
                    if sum >= most {
                        (most, word_end) = (sum, end);
                    }
                }
                children = unit.children();
            }
            if most == f64::NEG_INFINITY {
                most = logs[0] + best[start + 1];
            }
            best[start] = most;
            lens[start] = (word_end - start) as u32; // fits: a way down the trie
        }
    }

    fn words_of<'t>(
        &self,
        block: &'t str,
        scratch: &mut JiebaBuffers,
        word: &mut impl FnMut(&'t str),
    ) {
        let JiebaBuffers { codes, lens, rows, .. } = scratch;
        let mut at = 0;
        // Where the run of single characters before `at` begins, and its byte.
        let (mut run, mut byte) = (0, 0);
        while at < codes.len() {
            let end = at + lens[at] as usize;
            if end - at > 1 {
                let len = self.singles(&block[byte..], &codes[run..at], rows, word);
                byte += len;
                let len: usize = codes[at..end].iter().copied().map(len_bytes).sum();
                word(&block[byte..byte + len]);
                byte += len;
                run = end;
            }
            at = end;
        }
        self.singles(&block[byte..], &codes[run..], rows, word);
    }

    /// Cuts a run of characters that the dictionary has no words for, and returns its bytes.
    fn singles<'t>(
        &self,
        text: &'t str,
        run: &[u16],
        rows: &mut Rows,
        word: &mut impl FnMut(&'t str),
    ) -> usize {
        let mut byte = 0;
        let mut emit = |codes: &[u16]| {
            let len: usize = codes.iter().copied().map(len_bytes).sum();
            word(&text[byte..byte + len]);
            byte += len;
        };
        // A word whose characters are likelier apart stays apart.
        if run.len() < 2 || self.dictionary.trie.get(run.iter().copied()).is_some() {
            run.iter().for_each(|code| emit(std::slice::from_ref(code)));
            return byte;
        }
        for part in run.chunk_by(|&a, &b| (a < HAN) == (b < HAN)) {
            let mut rest = part;
            if part[0] < HAN {
                while !rest.is_empty() {
                    let (codes, after) = rest.split_at(latin_len(rest));
                    emit(codes);
                    rest = after;
                }
                continue;
            }
            self.hmm.cut(part, rows, |len| {
                let (codes, after) = rest.split_at(len);
                rest = after;
                if self.dictionary.never.contains(codes) {
                    codes.iter().for_each(|code| emit(std::slice::from_ref(code)));
                } else {
                    emit(codes);
                }
            });
        }
        byte
    }
}

/// The length of the first part of ASCII without words: `[a-zA-Z0-9]+(?:\.\d+)?%?`, or the text
/// before the next such part.
#[inline]
fn latin_len<T: Copy + Into<u16>>(run: &[T]) -> usize {
    let is = |at: usize, of: fn(&u8) -> bool| {
        run.get(at).is_some_and(|&code| of(&(code.into() as u8))) // fits: ASCII
    };
    let after = |at: usize, of| (at..).find(|&at| !is(at, of)).unwrap_or(at);
    let letters = after(0, u8::is_ascii_alphanumeric);
    if letters == 0 {
        let part = |&code: &T| (code.into() as u8).is_ascii_alphanumeric(); // fits: ASCII
        return run.iter().position(part).unwrap_or(run.len());
    }
    let digits = after(letters + 1, u8::is_ascii_digit);
    let fraction = is(letters, |&byte| byte == b'.') && digits > letters + 1;
    let end = if fraction { digits } else { letters };
    end + usize::from(is(end, |&byte| byte == b'%'))
}
