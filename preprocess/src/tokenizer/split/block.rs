//! The classes of 64 bytes at once, a bit a byte: where pieces start is then a formula of
//! whole words, without a branch for every character.

use wide::u8x16;

use super::super::classes::{Class, Set};
use super::Splitter;

/// How many bytes a block has.
pub(super) const BYTES: usize = 64;

/// Which bytes of a block are of a kind; bit i is of byte i.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteBlock {
    pub(super) letter: u64,
    pub(super) upper: u64,
    pub(super) number: u64,
    /// All white space.
    pub(super) space: u64,
    pub(super) newline: u64,
    /// ' ' alone.
    pub(super) blank: u64,
    pub(super) quote: u64,
    pub(super) slash: u64,
    /// Not ASCII.
    pub(super) wide: u64,
    /// Of a character's bytes all but the first.
    pub(super) inside: u64,
}

impl ByteBlock {
    #[inline(always)]
    pub(super) fn of(bytes: &[u8; BYTES]) -> Self {
        let quarters = bytes.as_chunks::<16>().0;
        let bits = |is: &dyn Fn(u8x16) -> u8x16| {
            let quarter = |i: usize| u64::from(is(u8x16::new(quarters[i])).to_bitmask());
            quarter(0) | (quarter(1) << 16) | (quarter(2) << 32) | (quarter(3) << 48)
        };
        let is = |byte: u8| bits(&|bytes| bytes.simd_eq(u8x16::splat(byte)));
        // From `first`, `count` of them: the difference, without sign, is below the count.
        let among = |bytes: u8x16, first: u8, count: u8| {
            let from_first = bytes - u8x16::splat(first);
            from_first.min(u8x16::splat(count - 1)).simd_eq(from_first)
        };
        let blank = is(b' ');
        ByteBlock {
            letter: bits(&|bytes| among(bytes | u8x16::splat(0x20), b'a', 26)),
            upper: bits(&|bytes| among(bytes, b'A', 26)),
            number: bits(&|bytes| among(bytes, b'0', 10)),
            space: blank | bits(&|bytes| among(bytes, b'\t', 5)),
            newline: is(b'\r') | is(b'\n'),
            blank,
            quote: is(b'\''),
            slash: is(b'/'),
            wide: bits(&|bytes| bytes),
            inside: bits(&|bytes| among(bytes, 0x80, 64)),
        }
    }

    /// Sets the classes of GPT-2's pattern for the bytes of characters beyond ASCII, the same for
    /// all bytes of a character. Returns the position of the first incomplete character, or 64. The
    /// block begins with a character.
    #[inline]
    pub(super) fn widen(&mut self, splitter: Splitter, bytes: &[u8; BYTES]) -> u32 {
        let mut leads = self.wide & !self.inside;
        while leads != 0 {
            let at = leads.trailing_zeros();
            let len = bytes[at as usize].leading_ones();
            if at + len > BYTES as u32 {
                return at;
            }
            let (class, _) = splitter.class_of_wide(bytes, at as usize);
            let run = ((1 << len) - 1) << at;
            let if_of = |set: Set| if set.has(class) { run } else { 0 };
            self.letter |= if_of(Set::LETTER);
            self.number |= if_of(Set::of(&[Class::Number]));
            self.space |= if_of(Set::SPACE);
            leads &= leads - 1;
        }
        BYTES as u32
    }

    /// The first byte of each character whose last is given; one of white space has three at most.
    #[inline]
    pub(super) fn first_of(&self, mut last: u64) -> u64 {
        for _ in 0..2 {
            let inside = last & self.inside;
            last = (last ^ inside) | (inside >> 1);
        }
        last
    }

    /// Neither letter nor number nor white space.
    #[inline]
    pub(super) fn sign(&self) -> u64 {
        !(self.letter | self.number | self.space)
    }
}

/// The bits below a place, which may be 64 or more.
#[inline]
pub(super) fn below(place: u32) -> u64 {
    if place >= u64::BITS { u64::MAX } else { (1 << place) - 1 }
}

/// The bits of a set that are reached from bits of it in `from` by going up without leaving it.
#[inline]
pub(super) fn up(from: u64, mut set: u64) -> u64 {
    let mut reached = from & set;
    for shift in [1, 2, 4, 8, 16, 32] {
        reached |= set & (reached << shift);
        set &= set << shift;
    }
    reached
}

/// As [`up`], going down.
#[inline]
pub(super) fn down(from: u64, mut set: u64) -> u64 {
    let mut reached = from & set;
    for shift in [1, 2, 4, 8, 16, 32] {
        reached |= set & (reached >> shift);
        set &= set >> shift;
    }
    reached
}
