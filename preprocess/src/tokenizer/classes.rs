//! The classes of characters that pre-tokenizers distinguish, as a table of all of Unicode.

use std::collections::HashMap;
use std::sync::OnceLock;

use regex_syntax::hir::{Class as HirClass, HirKind};

/// The class of a character in the patterns. Each has one class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(super) enum Class {
    /// None of the others: controls, formats, private and unassigned characters.
    #[default]
    Other,
    /// `\p{Lu}` and `\p{Lt}`.
    Upper,
    /// `\p{Ll}`.
    Lower,
    /// `\p{Lm}` and `\p{Lo}`: letters without case.
    Caseless,
    /// `\p{M}`.
    Mark,
    /// `\p{N}`.
    Number,
    /// `\p{P}` and `\p{S}`.
    Sign,
    /// `\s`, but for the next.
    Space,
    /// `\r` and `\n`.
    Newline,
    /// No class: a byte above 0x7f, whose character must be decoded first.
    Wide,
}

/// Some of the classes, a bit each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Set(u16);

impl Set {
    /// `\p{L}`.
    pub(super) const LETTER: Set = Set::of(&[Class::Upper, Class::Lower, Class::Caseless]);
    /// `\s`.
    pub(super) const SPACE: Set = Set::of(&[Class::Space, Class::Newline]);

    pub(super) const fn of(classes: &[Class]) -> Set {
        let mut bits = 0;
        let mut i = 0;
        while i < classes.len() {
            bits |= 1 << classes[i] as u16;
            i += 1;
        }
        Set(bits)
    }

    pub(super) const fn and(self, other: Set) -> Set {
        Set(self.0 | other.0)
    }

    /// Every class that is not in it; [`Class::Wide`] is in none.
    pub(super) const fn not(self) -> Set {
        Set(!self.0 & ((1 << Class::Wide as u16) - 1))
    }

    #[inline]
    pub(super) const fn has(self, class: Class) -> bool {
        (self.0 >> class as u16) & 1 != 0
    }
}

const BLOCK_CHARS: usize = 128;
const BLOCK_COUNT: usize = 0x11_0000 / BLOCK_CHARS;
const _: () = assert!(0x11_0000 % BLOCK_CHARS == 0);

/// The class of every character. A character's block is looked up first, then its class in it; most
/// of the 8,704 blocks are all of one class, so that some 300 distinct ones (38 KB) are stored, and
/// a text in one script stays within a few cache lines.
#[derive(Debug)]
pub(super) struct Classes {
    block_of: Vec<u16>,
    blocks: Vec<[Class; BLOCK_CHARS]>,
    bytes: [Class; 256],
}

impl Classes {
    /// The one table of this process, built on first use, in about a millisecond.
    pub(super) fn get() -> &'static Classes {
        static CLASSES: OnceLock<Classes> = OnceLock::new();
        CLASSES.get_or_init(Classes::build)
    }

    /// The class of a byte that is a character of its own, or [`Class::Wide`].
    #[inline]
    pub(super) fn of_byte(&self, byte: u8) -> Class {
        self.bytes[usize::from(byte)]
    }

    /// The class of a character.
    #[inline]
    pub(super) fn of_char(&self, code: u32) -> Class {
        let code = code as usize; // fits: a character has 21 bits
        let block = usize::from(self.block_of[code / BLOCK_CHARS]);
        self.blocks[block][code % BLOCK_CHARS]
    }

    fn build() -> Classes {
        let mut all = vec![Class::Other; BLOCK_CHARS * BLOCK_COUNT];
        for (pattern, class) in [
            (r"[\p{Lu}\p{Lt}]", Class::Upper),
            (r"\p{Ll}", Class::Lower),
            (r"[\p{Lm}\p{Lo}]", Class::Caseless),
            (r"\p{M}", Class::Mark),
            (r"\p{N}", Class::Number),
            (r"[\p{P}\p{S}]", Class::Sign),
            (r"\s", Class::Space),
            (r"[\r\n]", Class::Newline),
        ] {
            for (first, last) in ranges(pattern) {
                all[first as usize..=last as usize].fill(class);
            }
        }
        let mut index_of = HashMap::new();
        let mut blocks = Vec::new();
        let block_of = all.as_chunks().0.iter().map(|block| {
            *index_of.entry(block).or_insert_with(|| {
                blocks.push(*block);
                (blocks.len() - 1) as u16 // fits: there are 8,704 blocks at most
            })
        });
        let block_of = block_of.collect();
        let mut bytes = [Class::Wide; 256];
        bytes[..128].copy_from_slice(&all[..128]);
        Classes { block_of, blocks, bytes }
    }
}

/// First and last code of each range of a pattern that is one class.
pub(super) fn ranges(pattern: &str) -> Vec<(u32, u32)> {
    let hir = regex_syntax::parse(pattern).expect("the built-in pattern is valid");
    let HirKind::Class(HirClass::Unicode(class)) = hir.kind() else {
        unreachable!("a class of Unicode characters");
    };
    class.iter().map(|range| (u32::from(range.start()), u32::from(range.end()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rust's own tables are another reading of the same standard, or of its next version, so that
    /// a letter or number here is one there, and white space, to which nothing is added, is the
    /// same.
    #[test]
    fn agrees_with_std() {
        let classes = Classes::get();
        for code in (0..0x11_0000).filter_map(char::from_u32) {
            let class = classes.of_char(u32::from(code));
            assert_eq!(Set::SPACE.has(class), code.is_whitespace(), "{code:?}");
            assert!(!Set::LETTER.has(class) || code.is_alphabetic(), "{code:?}");
            assert!(class != Class::Number || code.is_numeric(), "{code:?}");
        }
        for byte in 0..128_u8 {
            let class = classes.of_byte(byte);
            assert_eq!(class, classes.of_char(u32::from(byte)));
            assert_eq!(Set::LETTER.has(class), byte.is_ascii_alphabetic());
            assert_eq!(class == Class::Upper, byte.is_ascii_uppercase());
            assert_eq!(class == Class::Lower, byte.is_ascii_lowercase());
            assert_eq!(class == Class::Number, byte.is_ascii_digit());
            assert_eq!(class == Class::Sign, byte.is_ascii_punctuation());
            assert_eq!(class == Class::Newline, matches!(byte, b'\r' | b'\n'));
        }
        assert!(classes.blocks.len() < 500, "{} blocks are not compact", classes.blocks.len());
    }
}
