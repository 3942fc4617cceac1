//! The patterns of cl100k's family: Llama 3's, Qwen's. They differ in a few rules.

use super::super::classes::{Class, Set};
use super::{Splitter, contraction_len};

const NUMBER: Set = Set::of(&[Class::Number]);
const NEWLINE: Set = Set::of(&[Class::Newline]);

/// What the patterns of the family differ in.
pub(super) trait Rules {
    /// What a word is made of.
    const WORD: Set = Set::LETTER;
    /// Digits in a piece at most.
    const NUMBERS_MAX: usize = 1;
    /// `\s++$` comes first: white space at the end of a text is one piece, newlines or not.
    const SPACE_AT_END_WHOLE: bool = false;
}

pub(super) enum Cl100k {}

impl Rules for Cl100k {
    const NUMBERS_MAX: usize = 3;
    const SPACE_AT_END_WHOLE: bool = true;
}

pub(super) enum Llama3 {}

impl Rules for Llama3 {
    const NUMBERS_MAX: usize = 3;
}

pub(super) enum Qwen2 {}

impl Rules for Qwen2 {}

pub(super) enum Qwen35 {}

impl Rules for Qwen35 {
    const WORD: Set = Set::LETTER.and(Set::of(&[Class::Mark]));
}

#[inline]
pub(super) fn piece_end<R: Rules>(splitter: Splitter, bytes: &[u8], start: usize) -> usize {
    let sign = const { R::WORD.and(NUMBER).and(Set::SPACE).not() };
    let first = bytes[start];
    if first == b'\''
        && let Some(len) = contraction_len(&bytes[start + 1..])
    {
        return start + 1 + len;
    }
    let (class, after) = splitter.class_at(bytes, start);
    if R::WORD.has(class) {
        return splitter.run_end(bytes, after, R::WORD);
    }
    if class == Class::Number {
        return splitter.run_end_max(bytes, after, NUMBER, R::NUMBERS_MAX - 1);
    }
    let next = splitter.next(bytes, after);
    // Any one character but a newline, a letter or a number goes with the word after it.
    if class != Class::Newline
        && let Some((next, after_next)) = next
        && R::WORD.has(next)
    {
        return splitter.run_end(bytes, after_next, R::WORD);
    }
    let signs = match next {
        Some((next, after_next)) if first == b' ' && sign.has(next) => Some(after_next),
        _ => sign.has(class).then_some(after),
    };
    if let Some(after) = signs {
        let end = splitter.run_end(bytes, after, sign);
        return splitter.run_end(bytes, end, NEWLINE);
    }
    if R::SPACE_AT_END_WHOLE {
        let (_, end) = splitter.space_run(bytes, start);
        if end == bytes.len() {
            return end;
        }
    }
    space_end(splitter, bytes, start)
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+` on white space at `start`: up to the last newline, if there is one.
pub(super) fn space_end(splitter: Splitter, bytes: &[u8], start: usize) -> usize {
    let (last, end) = splitter.space_run(bytes, start);
    match bytes[start..end].iter().rposition(|byte| matches!(byte, b'\r' | b'\n')) {
        Some(newline) => start + newline + 1,
        None if end == bytes.len() || last == start => end,
        None => last,
    }
}
