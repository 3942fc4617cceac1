//! GPT-2's pattern. No two of its branches need backtracking: the first character of a piece, and
//! after a space the second, decide the branch.

use super::super::classes::{Class, Set};
use super::Splitter;

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

/// As its namesake for all patterns, in lower case alone.
#[inline]
fn contraction_len(after: &[u8]) -> Option<usize> {
    match after {
        [b's' | b't' | b'm' | b'd', ..] => Some(1),
        [b'r', b'e', ..] | [b'v', b'e', ..] | [b'l', b'l', ..] => Some(2),
        _ => None,
    }
}
