//! Pre-tokenizers: cutting a text into the pieces within which bytes are merged.
//!
//! Each is written by hand and equal, on every text, to repeated matches of the regular expression
//! that its authors published; see [`Pattern`]. None needs backtracking beyond the run of
//! characters at its position.

mod block;
mod cut;
mod deepseek;
mod ends;
mod gpt2;
mod later;
mod o200k;

pub(super) use ends::Ends;

use super::classes::{Class, Classes, Set};

/// Which pre-tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pattern {
    /// The whole text is one piece.
    Whole,
    /// GPT-2's, of r50k and p50k too, and of Hugging Face's `ByteLevel` with `use_regex`:
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
    Gpt2,
    /// `'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|`
    /// `\s++$|\s*[\r\n]|\s+(?!\S)|\s`.
    Cl100k,
    /// `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+C?|`
    /// `[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*C?|`
    /// `\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`, where C is
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)`.
    O200k,
    /// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|`
    /// ` ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`: cl100k's as it first was, which
    /// differs in white space at the end of a text.
    Llama3,
    /// As [`Pattern::Llama3`], but `\p{N}`, one at a time. Of Qwen 1.5 to 3.
    Qwen2,
    /// Megatron's `v1`, of the Tekken kind: [`Pattern::Qwen2`] without contractions.
    TekkenV1,
    /// Megatron's `v2`: [`Pattern::O200k`] without contractions, and `\p{N}`, one at a time.
    TekkenV2,
    /// As [`Pattern::Qwen2`], but `[\p{L}\p{M}]+` and `[^\s\p{L}\p{M}\p{N}]+`.
    Qwen35,
    /// Three patterns, each on the parts, matched or not, of the one before: `\p{N}{1,3}`, then
    /// ``[一-龥\u3040-ゟ゠-ヿ]+``, then ``[!-/:-@\[-`{-~][A-Za-z]+|``
    /// `[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
    /// and unmatched text is a part too.
    DeepSeekV3,
}

impl Pattern {
    /// The pieces of a text, in order; together they are the text.
    #[must_use]
    pub fn pieces(self, text: &str) -> Pieces<'_> {
        Pieces { pattern: self, splitter: Splitter::new(), text, at: 0 }
    }

    /// Its part in the fingerprint of a tokenizer, which never changes.
    pub(super) fn identity(self) -> &'static str {
        match self {
            Pattern::Whole => "Whole",
            Pattern::Gpt2 => "Gpt2",
            Pattern::Cl100k => "Cl100k",
            Pattern::O200k => "O200k",
            Pattern::Llama3 => "Llama3",
            Pattern::Qwen2 => "Qwen2",
            Pattern::TekkenV1 => "TekkenV1",
            Pattern::TekkenV2 => "TekkenV2",
            Pattern::Qwen35 => "Qwen35",
            Pattern::DeepSeekV3 => "DeepSeekV3",
        }
    }
}

/// The pieces of a text, in order; together they are the text.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    pattern: Pattern,
    splitter: Splitter,
    text: &'a str,
    at: usize,
}

/// Cuts a text as GPT-2's pre-tokenizer does.
#[must_use]
pub fn pieces(text: &str) -> Pieces<'_> {
    Pattern::Gpt2.pieces(text)
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.at == self.text.len() {
            return None;
        }
        let end = self.splitter.piece_end(self.pattern, self.text.as_bytes(), self.at);
        let piece = &self.text[self.at..end];
        self.at = end;
        Some(piece)
    }
}

/// Finds where pieces end. In all its functions `bytes` are valid UTF-8, and positions are those of
/// characters, or the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitter {
    classes: &'static Classes,
}

impl Splitter {
    pub(super) fn new() -> Self {
        Splitter { classes: Classes::get() }
    }

    /// Where the piece that starts at `start`, which is not the end, ends.
    #[inline]
    pub(super) fn piece_end(self, pattern: Pattern, bytes: &[u8], start: usize) -> usize {
        match pattern {
            Pattern::Whole => bytes.len(),
            Pattern::Gpt2 => gpt2::piece_end(self, bytes, start),
            Pattern::Cl100k => later::piece_end::<later::Cl100k>(self, bytes, start),
            Pattern::Llama3 => later::piece_end::<later::Llama3>(self, bytes, start),
            Pattern::Qwen2 => later::piece_end::<later::Qwen2>(self, bytes, start),
            Pattern::Qwen35 => later::piece_end::<later::Qwen35>(self, bytes, start),
            Pattern::TekkenV1 => later::piece_end::<later::TekkenV1>(self, bytes, start),
            Pattern::O200k => o200k::piece_end::<false>(self, bytes, start),
            Pattern::TekkenV2 => o200k::piece_end::<true>(self, bytes, start),
            Pattern::DeepSeekV3 => deepseek::piece_end(self, bytes, start),
        }
    }

    /// A place at or after `at` where a piece ends, and would end too if the text did, so that both
    /// parts have the pieces of the whole. None: there is none nearby.
    pub(super) fn cut_after(self, pattern: Pattern, bytes: &[u8], at: usize) -> Option<usize> {
        if pattern == Pattern::Whole { None } else { cut::after(self, bytes, at) }
    }

    /// The end of a run of characters of a set that begins at `at`, which may be empty.
    #[inline]
    fn run_end(self, bytes: &[u8], mut at: usize, set: Set) -> usize {
        while let Some(&byte) = bytes.get(at) {
            let of_byte = self.classes.of_byte(byte);
            if set.has(of_byte) {
                at += 1;
                continue;
            }
            if of_byte != Class::Wide {
                break;
            }
            let (of_char, after) = self.class_of_wide(bytes, at);
            if !set.has(of_char) {
                break;
            }
            at = after;
        }
        at
    }

    /// The end of at most `max` characters of a set.
    #[inline]
    fn run_end_max(self, bytes: &[u8], mut at: usize, set: Set, max: usize) -> usize {
        for _ in 0..max {
            match self.next(bytes, at) {
                Some((class, after)) if set.has(class) => at = after,
                _ => break,
            }
        }
        at
    }

    /// Of a run of white space: the start of its last character, and its end. Not empty.
    #[inline]
    fn space_run(self, bytes: &[u8], start: usize) -> (usize, usize) {
        let (mut last, mut end) = (start, start);
        while let Some((class, after)) = self.next(bytes, end)
            && Set::SPACE.has(class)
        {
            (last, end) = (end, after);
        }
        (last, end)
    }

    /// `\s+(?!\S)|\s+` on white space at `start`. The last character is left to the word after it,
    /// unless it is the only one, or there is no word.
    fn space_end(self, bytes: &[u8], start: usize) -> usize {
        let (last, end) = self.space_run(bytes, start);
        if end == bytes.len() || last == start { end } else { last }
    }

    /// The class of the character at `at`, and where it ends; none at the end.
    #[inline]
    fn next(self, bytes: &[u8], at: usize) -> Option<(Class, usize)> {
        (at < bytes.len()).then(|| self.class_at(bytes, at))
    }

    /// The class of the character at `at`, and where it ends.
    #[inline]
    fn class_at(self, bytes: &[u8], at: usize) -> (Class, usize) {
        match self.classes.of_byte(bytes[at]) {
            Class::Wide => self.class_of_wide(bytes, at),
            class => (class, at + 1),
        }
    }

    #[inline]
    fn class_of_wide(self, bytes: &[u8], at: usize) -> (Class, usize) {
        let (code, after) = wide_char(bytes, at);
        (self.classes.of_char(code), after)
    }
}

/// The character of more than one byte at `at`, and where it ends.
#[inline]
fn wide_char(bytes: &[u8], at: usize) -> (u32, usize) {
    let low = |ahead: usize| u32::from(bytes[at + ahead] & 0x3f);
    let lead = u32::from(bytes[at]);
    match lead {
        0xf0.. => (((lead & 0x07) << 18) | (low(1) << 12) | (low(2) << 6) | low(3), at + 4),
        0xe0.. => (((lead & 0x0f) << 12) | (low(1) << 6) | low(2), at + 3),
        _ => (((lead & 0x1f) << 6) | low(1), at + 2),
    }
}

/// How many bytes after an apostrophe belong to an English contraction with it, in either case. The
/// long s, U+017F, is an s in another case.
#[inline]
fn contraction_len(after: &[u8]) -> Option<usize> {
    let [first, rest @ ..] = after else { return None };
    let second = rest.first().map(u8::to_ascii_lowercase);
    match (first.to_ascii_lowercase(), second) {
        (b's' | b't' | b'm' | b'd', _) => Some(1),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) | (0xc5, Some(0xbf)) => Some(2),
        _ => None,
    }
}
