//! The patterns of cl100k's family: Llama 3's, Qwen's. They differ in a few rules.

use super::super::classes::{Class, Set};
use super::block::{self, ByteBlock, below, down, up};
use super::{Splitter, contraction_len};

const NUMBER: Set = Set::of(&[Class::Number]);
const NEWLINE: Set = Set::of(&[Class::Newline]);

/// The differences between the patterns of the family.
pub(super) trait PatternRules {
    /// The characters of a word.
    const WORD: Set = Set::LETTER;
    /// Digits in a piece at most.
    const NUMBERS_MAX: usize = 1;
    /// `'s` and the like are pieces.
    const CONTRACTIONS: bool = true;
    /// `\s++$` comes first: white space at the end of a text is one piece, newlines or not.
    const SPACE_AT_END_WHOLE: bool = false;
}

pub(super) enum Cl100k {}

impl PatternRules for Cl100k {
    const NUMBERS_MAX: usize = 3;
    const SPACE_AT_END_WHOLE: bool = true;
}

pub(super) enum Llama3 {}

impl PatternRules for Llama3 {
    const NUMBERS_MAX: usize = 3;
}

pub(super) enum Qwen2 {}

impl PatternRules for Qwen2 {}

pub(super) enum TekkenV1 {}

impl PatternRules for TekkenV1 {
    const CONTRACTIONS: bool = false;
}

pub(super) enum Qwen35 {}

impl PatternRules for Qwen35 {
    const WORD: Set = Set::LETTER.and(Set::of(&[Class::Mark]));
}

#[inline]
pub(super) fn piece_end<R: PatternRules>(splitter: Splitter, bytes: &[u8], start: usize) -> usize {
    let sign = const { R::WORD.and(NUMBER).and(Set::SPACE).not() };
    let first = bytes[start];
    if R::CONTRACTIONS
        && first == b'\''
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
    // Any one character but a newline, a letter or a number belongs to the word after it.
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

/// Where pieces start in a block that begins with a piece, and below which place that is certain.
#[inline(always)]
pub(super) fn starts<R: PatternRules>(block: &ByteBlock, bytes: &[u8; block::BYTES]) -> (u64, u32) {
    let (mut starts, certain) = common_starts(block, R::NUMBERS_MAX);
    let mut quotes = block.quote & lone_signs(block) & below(certain);
    while quotes != 0 {
        let at = quotes.trailing_zeros() as usize;
        if let Some(len) = contraction_len(&bytes[at + 1..]) {
            starts |= 2 << (at + len);
        }
        quotes &= quotes - 1;
    }
    (starts, certain)
}

/// Signs that start a piece alone, so that a word after them belongs to it.
#[inline]
fn lone_signs(block: &ByteBlock) -> u64 {
    let sign = block.sign();
    sign & !(sign << 1) & !(block.blank << 1)
}

/// Newlines that go with the signs before them.
#[inline]
pub(super) fn sign_tails(block: &ByteBlock) -> u64 {
    up(block.newline & (block.sign() << 1), block.newline)
}

/// The starts that cl100k's family and o200k have in common: all but for contractions and cases.
#[inline]
pub(super) fn common_starts(block: &ByteBlock, numbers_max: usize) -> (u64, u32) {
    let ByteBlock { letter, number, space, newline, blank, wide, .. } = *block;
    let sign = block.sign();
    let in_line = space & !newline;
    let mut starts = letter & !(letter << 1) & !(in_line << 1) & !(lone_signs(block) << 1);
    starts |= sign & !(sign << 1) & !(blank << 1);
    if numbers_max == 1 {
        starts |= number;
    } else {
        let mut thirds = number & !(number << 1);
        while thirds != 0 {
            starts |= thirds;
            thirds = (thirds << 3) & number & (number << 1) & (number << 2);
        }
    }
    // White space: up to the last newline of a run is one piece, the last character is one for
    // itself or for the word after it, and the text between them is one.
    let free = space & !sign_tails(block);
    starts |= free & !(free << 1);
    starts |= in_line & (newline << 1) & !down(newline, space);
    starts |= in_line & !(space >> 1);
    // How a run continues that reaches the end of the known part is not known.
    let known = wide.trailing_zeros();
    let run = u64::BITS - (!space & below(known)).leading_zeros();
    (starts, known.saturating_sub(3).min(run + 1))
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
