//! The pattern of o200k, which distinguishes the cases of letters.

use super::super::classes::{Class, Set};
use super::block::{self, ByteBlock, below};
use super::{Splitter, contraction_len, later};

const NUMBER: Set = Set::of(&[Class::Number]);
const HEAD: Set = Set::of(&[Class::Upper, Class::Caseless, Class::Mark]);
const TAIL: Set = Set::of(&[Class::Lower, Class::Caseless, Class::Mark]);
const SIGN: Set = Set::LETTER.and(NUMBER).and(Set::SPACE).not();

/// `TEKKEN`: without contractions, and numbers one digit at a time.
#[inline]
pub(super) fn piece_end<const TEKKEN: bool>(
    splitter: Splitter,
    bytes: &[u8],
    start: usize,
) -> usize {
    let (class, after) = splitter.class_at(bytes, start);
    if class == Class::Number {
        return splitter.run_end_max(bytes, after, NUMBER, if TEKKEN { 0 } else { 2 });
    }
    if class != Class::Newline
        && let Some(end) = word_end(splitter, bytes, start, class, after)
    {
        return match &bytes[end..] {
            [b'\'', rest @ ..] if !TEKKEN => end + contraction_len(rest).map_or(0, |len| len + 1),
            _ => end,
        };
    }
    let signs = match splitter.next(bytes, after) {
        Some((next, after_next)) if bytes[start] == b' ' && SIGN.has(next) => Some(after_next),
        _ => SIGN.has(class).then_some(after),
    };
    match signs {
        Some(after) => {
            let end = splitter.run_end(bytes, after, SIGN);
            let tail = |byte: &&u8| matches!(byte, b'\r' | b'\n' | b'/');
            end + bytes[end..].iter().take_while(tail).count()
        }
        None => later::space_end(splitter, bytes, start),
    }
}

/// Where pieces start in a block that begins with a piece, and below which place that is certain.
#[inline(always)]
pub(super) fn starts(block: &ByteBlock, bytes: &[u8; block::BYTES]) -> (u64, u32) {
    let ByteBlock { letter, upper, quote, slash, .. } = *block;
    let (mut starts, certain) = later::common_starts(block, 3);
    // A slash after newlines that belong to signs belongs to them as well, and so may others.
    let slashes = slash & (later::sign_tails(block) << 1);
    let certain = certain.min(slashes.trailing_zeros());
    starts |= upper & ((letter & !upper) << 1);
    let mut quotes = quote & (letter << 1) & below(certain);
    let mut contraction_end = 0;
    while quotes != 0 {
        let at = quotes.trailing_zeros() as usize;
        quotes &= quotes - 1;
        // An apostrophe after a contraction begins a word.
        if at == contraction_end {
            continue;
        }
        if let Some(len) = contraction_len(&bytes[at + 1..]) {
            contraction_end = at + 1 + len;
            starts = starts & !(below(1 + len as u32) << at) | (1 << contraction_end);
        }
    }
    (starts, certain)
}

/// A word, with one character of another kind before it or without. That character may be a mark,
/// which may also be the first of the word; the pattern tries the former first.
#[inline]
fn word_end(
    splitter: Splitter,
    bytes: &[u8],
    start: usize,
    class: Class,
    after: usize,
) -> Option<usize> {
    if Set::LETTER.has(class) {
        return tail_last(splitter, bytes, start).or_else(|| head_first(splitter, bytes, start));
    }
    let as_first = |branch: fn(Splitter, &[u8], usize) -> Option<usize>| {
        if class == Class::Mark { branch(splitter, bytes, start) } else { None }
    };
    tail_last(splitter, bytes, after)
        .or_else(|| as_first(tail_last))
        .or_else(|| head_first(splitter, bytes, after))
        .or_else(|| as_first(head_first))
}

/// `HEAD*TAIL+`. If no tail follows the run of heads, the last of them that is a tail too is it.
#[inline]
fn tail_last(splitter: Splitter, bytes: &[u8], start: usize) -> Option<usize> {
    let mut last_tail = None;
    let mut at = start;
    while let Some((class, after)) = splitter.next(bytes, at) {
        if !HEAD.has(class) {
            if class == Class::Lower {
                return Some(splitter.run_end(bytes, after, TAIL));
            }
            break;
        }
        if TAIL.has(class) {
            last_tail = Some(after);
        }
        at = after;
    }
    last_tail
}

/// `HEAD+TAIL*`, where the branch before this found no tail.
#[inline]
fn head_first(splitter: Splitter, bytes: &[u8], start: usize) -> Option<usize> {
    let end = splitter.run_end(bytes, start, HEAD);
    (end > start).then_some(end)
}
