//! Positions where every pattern ends a piece, whatever is before and after.

use super::super::classes::{Class, Set};
use super::Splitter;

/// Prose has such a position in every word or line; a text without one for this long is not cut.
const SEARCH_BYTES_MAX: usize = 1 << 20;

/// The first position at or after `at` between a letter and white space, or a letter and
/// punctuation that is no apostrophe. No branch of any pattern that has a letter continues with
/// either, and none looks back; the letter is not white space, so that it does not matter whether
/// the text ends after it.
pub(super) fn after(splitter: Splitter, bytes: &[u8], at: usize) -> Option<usize> {
    let is_inside = |byte: &u8| (0x80..0xc0).contains(byte);
    let mut at = at;
    while bytes.get(at).is_some_and(is_inside) {
        at += 1;
    }
    let end = bytes.len().min(at.saturating_add(SEARCH_BYTES_MAX));
    let mut after_letter = at > 0 && at < end && {
        let len = bytes[..at].iter().rev().take_while(|byte| is_inside(byte)).count();
        Set::LETTER.has(splitter.class_at(bytes, at - 1 - len).0)
    };
    while at < end {
        let (class, after) = splitter.class_at(bytes, at);
        let ends = Set::SPACE.has(class) || (class == Class::Sign && bytes[at] != b'\'');
        if after_letter && ends {
            return Some(at);
        }
        after_letter = Set::LETTER.has(class);
        at = after;
    }
    None
}
