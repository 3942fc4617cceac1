//! GPT-2's pattern. No two of its branches need backtracking: the first character of a piece, and
//! after a space the second, decide the branch.

use super::super::classes::{Class, Set};
use super::Splitter;
use super::block::{self, ByteBlock, below};

const NUMBER: Set = Set::of(&[Class::Number]);
const OTHER: Set = Set::LETTER.and(NUMBER).and(Set::SPACE).not();

#[inline]
pub(super) fn piece_end(splitter: Splitter, bytes: &[u8], start: usize) -> usize {
    let first = bytes[start];
    if first == b'\''
        && let Some(len) = contraction_len(&bytes[start + 1..])
    {
        return start + 1 + len;
    }
    let (mut class, mut after) = splitter.class_at(bytes, start);
    if first == b' '
        && let Some((next, after_next)) = splitter.next(bytes, after)
        && !Set::SPACE.has(next)
    {
        (class, after) = (next, after_next);
    }
    match class {
        Class::Upper | Class::Lower | Class::Caseless => {
            splitter.run_end(bytes, after, Set::LETTER)
        }
        Class::Number => splitter.run_end(bytes, after, NUMBER),
        Class::Space | Class::Newline => splitter.space_end(bytes, start),
        _ => splitter.run_end(bytes, after, OTHER),
    }
}

/// Where pieces start in a block that begins with a piece, and below which place that is certain.
#[inline(always)]
pub(super) fn starts(
    splitter: Splitter,
    block: &ByteBlock,
    bytes: &[u8; block::BYTES],
) -> (u64, u32) {
    let mut block = *block;
    let whole = if block.wide == 0 { u64::BITS } else { block.widen(splitter, bytes) };
    let ByteBlock { letter, number, space, blank, quote, .. } = block;
    let sign = block.sign();
    let same = (letter & (letter << 1)) | (number & (number << 1)) | (sign & (sign << 1));
    // A blank belongs to the text after it, so that a word's start is the blank before it; the last
    // of several characters of white space starts a piece in any case.
    let mut starts = !space & !same & !(blank << 1);
    starts |= (space & !(space << 1)) | block.first_of(space & !(space >> 1));
    // A contraction is at most three characters long, from its apostrophe. A white space character
    // is that long, too, and its first byte is determined by what follows its last.
    let certain = whole.saturating_sub(3);
    let mut quotes = quote & (starts | 1) & below(certain);
    while quotes != 0 {
        let at = quotes.trailing_zeros() as usize;
        if let Some(len) = contraction_len(&bytes[at + 1..]) {
            starts = starts & !(2 << at) | (2 << (at + len));
        }
        quotes &= quotes - 1;
    }
    (starts, certain)
}

/// As its namesake for all patterns, in lower case alone.
#[inline]
fn contraction_len(after: &[u8]) -> Option<usize> {
    match after {
        [b's' | b't' | b'm' | b'd', ..] => Some(1),
        [b'r', b'e', ..] | [b'v', b'e', ..] | [b'l', b'l', ..] => Some(2),
        _ => None,
    }
}
