//! Finds where a normalised text may be cut before it is segmented: between two characters that
//! are adjacent in no piece.
//!
//! A piece that reached across such a place would hold both characters side by side. So no edge of
//! the unigram lattice crosses it, no merge of BPE ever does, and each side is cut into pieces as
//! if the other were not there. (The unigram sums do depend on the text before; `unigram` says how
//! they are kept.)

use super::super::EncodeError;

/// The pairs of characters that are adjacent in some piece.
#[derive(Debug)]
pub(crate) struct PieceBoundaries {
    ascii: [u128; 128],
    /// One bit for each hash of a pair with a character beyond ASCII. A pair of no piece that
    /// shares its bit with one of a piece is not cut, which changes no id.
    hashed: Vec<u64>,
    shift: u32,
}

/// With eight bits a pair, one pair of no piece in eight is not cut.
const BITS_PER_PAIR: usize = 8;

impl PieceBoundaries {
    /// From all pieces that a text is matched with.
    pub(crate) fn new<'a>(pieces: impl Iterator<Item = &'a str> + Clone) -> Self {
        let pair_count: usize = pieces.clone().map(|piece| piece.chars().count() - 1).sum();
        let bit_count = (pair_count * BITS_PER_PAIR).next_power_of_two().max(64);
        let mut joins = PieceBoundaries {
            ascii: [0; 128],
            hashed: vec![0; bit_count / 64],
            shift: u64::BITS - bit_count.trailing_zeros(),
        };
        for piece in pieces {
            let chars = piece.chars().zip(piece.chars().skip(1));
            for (left, right) in chars {
                let (left, right) = (u32::from(left), u32::from(right));
                if (left | right) < 0x80 {
                    joins.ascii[left as usize] |= 1 << right;
                } else {
                    let bit = hash(left, right, joins.shift);
                    joins.hashed[bit / 64] |= 1 << (bit % 64);
                }
            }
        }
        joins
    }

    /// Whether a piece may hold these two side by side.
    #[inline]
    pub(super) fn joined(&self, left: u32, right: u32) -> bool {
        if (left | right) < 0x80 {
            return self.ascii[left as usize] >> right & 1 == 1;
        }
        let bit = hash(left, right, self.shift);
        self.hashed[bit / 64] >> (bit % 64) & 1 == 1
    }

    /// The end of the part of a text that begins at `start`.
    #[inline]
    pub(crate) fn part_end(&self, text: &[u8], start: usize) -> usize {
        let (mut left, mut at) = char_at(text, start);
        while at < text.len() {
            let (right, end) = char_at(text, at);
            if !self.joined(left, right) {
                return at;
            }
            (left, at) = (right, end);
        }
        at
    }
}

/// The longest part that the unigram model is given: cutting it takes 3 to 16 bytes for each of its
/// bytes, so at most 1 GiB.
const UNIGRAM_PART_BYTES_MAX: usize = 64 << 20;

/// Refuses a text with a part that is too long for the unigram model. Parts of the normalized text
/// end, but for rare rules of normalizers, where those of the text do.
pub(crate) fn long_unigram_part(joins: &PieceBoundaries, text: &str) -> Option<EncodeError> {
    long_part(joins, text, UNIGRAM_PART_BYTES_MAX)
}

fn long_part(joins: &PieceBoundaries, text: &str, bytes_max: usize) -> Option<EncodeError> {
    let bytes = text.as_bytes();
    let mut start = 0;
    while bytes.len() - start > bytes_max {
        let end = joins.part_end(bytes, start);
        if end - start > bytes_max {
            return Some(EncodeError {
                found: format!("a word of {} bytes at byte {start} of the text", end - start),
                expected: format!("words of at most {bytes_max} bytes with a unigram model"),
                hint: Some("divide the text, or skip the line with --on-error skip"),
            });
        }
        start = end;
    }
    None
}

#[inline]
fn hash(left: u32, right: u32, shift: u32) -> usize {
    let pair = u64::from(left) << 32 | u64::from(right);
    let mixed = (pair ^ (pair >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> shift) as usize
}

/// The character at a position, as a unique number, and the position of the next one.
#[inline]
pub(super) fn char_at(text: &[u8], at: usize) -> (u32, usize) {
    let first = text[at];
    if first < 0x80 {
        return (u32::from(first), at + 1);
    }
    let rest = &text[at..];
    let part = |at: usize| u32::from(rest[at] & 0x3f);
    match rest.len() {
        3.. if first & 0xf0 == 0xe0 => {
            (u32::from(first & 0xf) << 12 | part(1) << 6 | part(2), at + 3)
        }
        2.. if first & 0xe0 == 0xc0 => (u32::from(first & 0x1f) << 6 | part(1), at + 2),
        4.. if first & 0xf8 == 0xf0 => {
            let top = u32::from(first & 7) << 18;
            (top | part(1) << 12 | part(2) << 6 | part(3), at + 4)
        }
        // Not in a text.
        _ => (u32::from(first), at + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_parts_are_refused() {
        let joins = PieceBoundaries::new(["ab", "ba", " a", "éa"].into_iter());
        let check = |text: &str| long_part(&joins, text, 8).map(|error| error.found);
        assert_eq!(check(&"ab".repeat(4)), None);
        let found = "a word of 9 bytes at byte 0 of the text";
        assert_eq!(check("ababababa").as_deref(), Some(found));
        let found = "a word of 10 bytes at byte 5 of the text";
        assert_eq!(check("cabab ababababa c").as_deref(), Some(found));
        // Characters that no piece joins end a part.
        assert_eq!(check(&"aabb".repeat(100)), None);
    }
}
