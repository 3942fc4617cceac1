//! GPT-2's pre-tokenizer: cutting a text into the pieces within which bytes are merged.
//!
//! By hand, and equal on every text to repeated matches of
//! `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`.
//! No two of its branches need backtracking: the first character of a piece, and after a space the
//! second, decide the branch.

use super::classes::{Class, Classes};

/// The pieces of a text, in order; together they are the text.
#[derive(Clone, Debug)]
pub struct Pieces<'a> {
    splitter: Splitter,
    text: &'a str,
    at: usize,
}

/// Cuts a text as GPT-2's pre-tokenizer does.
#[must_use]
pub fn pieces(text: &str) -> Pieces<'_> {
    Pieces { splitter: Splitter::new(), text, at: 0 }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.at == self.text.len() {
            return None;
        }
        let end = self.splitter.piece_end(self.text.as_bytes(), self.at);
        let piece = &self.text[self.at..end];
        self.at = end;
        Some(piece)
    }
}

/// Finds where pieces end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitter {
    classes: &'static Classes,
}

impl Splitter {
    pub(super) fn new() -> Self {
        Splitter { classes: Classes::get() }
    }

    /// Where the piece that starts at `start` ends. `bytes` are valid UTF-8, and `start` is a
    /// character of them.
    #[inline]
    pub(super) fn piece_end(self, bytes: &[u8], start: usize) -> usize {
        let first = bytes[start];
        if first == b'\''
            && let Some(len) = contraction_len(&bytes[start + 1..])
        {
            return start + 1 + len;
        }
        let (class, after) = self.class_at(bytes, start);
        if class != Class::Space {
            return self.run_end(bytes, after, class);
        }
        if first == b' ' && after < bytes.len() {
            let (next, after_next) = self.class_at(bytes, after);
            if next != Class::Space {
                return self.run_end(bytes, after_next, next);
            }
        }
        self.space_end(bytes, after)
    }

    /// The end of a run of white space of which the first character ends at `last`. The last
    /// character is left to the word after it, unless it is the only one, or there is no word.
    fn space_end(self, bytes: &[u8], mut last: usize) -> usize {
        let mut before_last = last;
        while last < bytes.len() {
            let (class, after) = self.class_at(bytes, last);
            if class != Class::Space {
                return before_last;
            }
            (before_last, last) = (last, after);
        }
        last
    }

    #[inline]
    fn run_end(self, bytes: &[u8], mut at: usize, class: Class) -> usize {
        while let Some(&byte) = bytes.get(at) {
            let of_byte = self.classes.of_byte(byte);
            if of_byte == class {
                at += 1;
                continue;
            }
            if of_byte != Class::Wide {
                break;
            }
            let (of_char, after) = self.class_of_wide(bytes, at);
            if of_char != class {
                break;
            }
            at = after;
        }
        at
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
        let low = |ahead: usize| u32::from(bytes[at + ahead] & 0x3f);
        let lead = u32::from(bytes[at]);
        let (code, len) = match lead {
            0xf0.. => (((lead & 0x07) << 18) | (low(1) << 12) | (low(2) << 6) | low(3), 4),
            0xe0.. => (((lead & 0x0f) << 12) | (low(1) << 6) | low(2), 3),
            _ => (((lead & 0x1f) << 6) | low(1), 2),
        };
        (self.classes.of_char(code), at + len)
    }
}

/// How many bytes after an apostrophe belong to an English contraction with it.
#[inline]
fn contraction_len(after: &[u8]) -> Option<usize> {
    match after {
        [b's' | b't' | b'm' | b'd', ..] => Some(1),
        [b'r', b'e', ..] | [b'v', b'e', ..] | [b'l', b'l', ..] => Some(2),
        _ => None,
    }
}
