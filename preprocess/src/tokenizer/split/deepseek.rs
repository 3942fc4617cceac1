//! The patterns of DeepSeek V3. Numbers, and runs of Chinese and Japanese, are cut out first; the
//! third pattern then cuts each run, and each part between, as if it were a text of its own.

use super::super::classes::{Class, Set};
use super::{Splitter, wide_char};

const NUMBER: Set = Set::of(&[Class::Number]);
const NEWLINE: Set = Set::of(&[Class::Newline]);
const SIGN: Set = Set::of(&[Class::Sign]);
const WORD: Set = Set::LETTER.and(Set::of(&[Class::Mark]));

#[inline]
pub(super) fn piece_end(splitter: Splitter, bytes: &[u8], start: usize) -> usize {
    let (class, after) = splitter.class_at(bytes, start);
    if class == Class::Number {
        return splitter.run_end_max(bytes, after, NUMBER, 2);
    }
    let part = ScriptRun { splitter, bytes, is_cjk: is_cjk_at(bytes, start) };
    let next = part.next(after);
    if bytes[start].is_ascii_punctuation() && bytes.get(after).is_some_and(u8::is_ascii_alphabetic)
    {
        let letters = bytes[after..].iter().take_while(|byte| byte.is_ascii_alphabetic());
        return after + letters.count();
    }
    if WORD.has(class) {
        return part.run_end(after, WORD);
    }
    match (class, next) {
        (Class::Space | Class::Other, Some((next, after_next))) if WORD.has(next) => {
            part.run_end(after_next, WORD)
        }
        (Class::Space, Some((Class::Sign, after_next))) if bytes[start] == b' ' => {
            part.signs_end(after_next)
        }
        (Class::Sign, _) => part.signs_end(after),
        (Class::Space | Class::Newline, _) => part.space_end(start),
        _ => part.gap_end(start),
    }
}

/// `[一-龥\u3040-ゟ゠-ヿ]`, all of three bytes.
#[inline]
fn is_cjk_at(bytes: &[u8], at: usize) -> bool {
    bytes[at] >= 0xe3 && matches!(wide_char(bytes, at).0, 0x4e00..=0x9fa5 | 0x3040..=0x30ff)
}

/// A run of Chinese or Japanese, or the text between two of them, without numbers.
#[derive(Clone, Copy)]
struct ScriptRun<'a> {
    splitter: Splitter,
    bytes: &'a [u8],
    is_cjk: bool,
}

impl ScriptRun<'_> {
    #[inline]
    fn next(self, at: usize) -> Option<(Class, usize)> {
        let next = self.splitter.next(self.bytes, at)?;
        (next.0 != Class::Number && is_cjk_at(self.bytes, at) == self.is_cjk).then_some(next)
    }

    #[inline]
    fn run_end(self, mut at: usize, set: Set) -> usize {
        while let Some((class, after)) = self.next(at)
            && set.has(class)
        {
            at = after;
        }
        at
    }

    fn signs_end(self, at: usize) -> usize {
        let end = self.run_end(at, SIGN);
        self.run_end(end, NEWLINE)
    }

    /// `\s*[\r\n]+|\s+(?!\S)|\s+`.
    fn space_end(self, start: usize) -> usize {
        let (mut last, mut end, mut newline) = (start, start, None);
        let word_follows = loop {
            match self.next(end) {
                Some((class, after)) if Set::SPACE.has(class) => {
                    (last, end) = (end, after);
                    if class == Class::Newline {
                        newline = Some(after);
                    }
                }
                other => break other.is_some(),
            }
        };
        newline.unwrap_or(if word_follows && last > start { last } else { end })
    }

    /// Text that no branch matches, from a character that is in none: up to the next that belongs
    /// to a word after it, or is of another kind.
    fn gap_end(self, start: usize) -> usize {
        let (mut last, mut end) = (start, start);
        loop {
            match self.next(end) {
                Some((Class::Other, after)) => (last, end) = (end, after),
                Some((class, _)) if WORD.has(class) && last > start => return last,
                _ => return end,
            }
        }
    }
}
