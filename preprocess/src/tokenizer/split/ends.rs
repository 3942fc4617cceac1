//! The ends of many pieces at once, which is faster than one by one: finding the ends and looking
//! up the pieces are two loops, neither of which waits for the other.

use super::block::{self, ByteBlock, below};
use super::{Pattern, Splitter, gpt2, later, o200k};

/// Pieces requested at once. Their ends are 4 KiB.
pub(crate) const PIECES: usize = 512;

/// Where pieces end, in order.
#[derive(Debug)]
pub(crate) struct Ends {
    /// A block may return more than were requested.
    places: Box<[usize; PIECES + block::BYTES]>,
    count: usize,
}

impl Ends {
    pub(crate) fn new() -> Self {
        Ends { places: Box::new([0; PIECES + block::BYTES]), count: 0 }
    }

    #[inline]
    pub(crate) fn as_slice(&self) -> &[usize] {
        &self.places[..self.count]
    }

    #[inline]
    fn push(&mut self, end: usize) {
        self.places[self.count] = end;
        self.count += 1;
    }

    /// Appends `at` plus the place of every bit.
    #[inline]
    fn push_bits(&mut self, at: usize, mut bits: u64) {
        let count = bits.count_ones() as usize;
        let places = &mut self.places[self.count..];
        // A fixed eight, needed or not, are faster than a variable number.
        for eight in places.as_chunks_mut::<8>().0 {
            for place in eight {
                *place = at + bits.trailing_zeros() as usize;
                bits &= bits.wrapping_sub(1);
            }
            if bits == 0 {
                break;
            }
        }
        self.count += count;
    }
}

impl Splitter {
    /// Finds where the next pieces end, some [`PIECES`] of them, from one that starts at `at`.
    pub(crate) fn ends(self, pattern: Pattern, bytes: &[u8], at: usize, ends: &mut Ends) {
        match pattern {
            Pattern::Gpt2 => {
                let starts = |block: &ByteBlock, bytes: &_| gpt2::starts(self, block, bytes);
                self.ends_by_block(Pattern::Gpt2, starts, bytes, at, ends);
            }
            Pattern::Cl100k => {
                self.ends_by_block(pattern, later::starts::<later::Cl100k>, bytes, at, ends);
            }
            Pattern::Llama3 => {
                self.ends_by_block(pattern, later::starts::<later::Llama3>, bytes, at, ends);
            }
            // The two differ in marks, none of which is ASCII.
            Pattern::Qwen2 | Pattern::Qwen35 => {
                self.ends_by_block(pattern, later::starts::<later::Qwen2>, bytes, at, ends);
            }
            Pattern::O200k => self.ends_by_block(pattern, o200k::starts, bytes, at, ends),
            Pattern::Whole | Pattern::DeepSeekV3 | Pattern::TekkenV1 | Pattern::TekkenV2 => {
                self.ends_one_by_one(pattern, bytes, at, ends);
            }
        }
    }

    fn ends_one_by_one(self, pattern: Pattern, bytes: &[u8], mut at: usize, ends: &mut Ends) {
        ends.count = 0;
        while at < bytes.len() && ends.count < PIECES {
            at = self.piece_end(pattern, bytes, at);
            ends.push(at);
        }
    }

    /// By the block where possible, for most patterns where text is ASCII; other pieces one by one.
    #[inline(always)]
    fn ends_by_block(
        self,
        pattern: Pattern,
        starts: impl Fn(&ByteBlock, &[u8; block::BYTES]) -> (u64, u32),
        bytes: &[u8],
        mut at: usize,
        ends: &mut Ends,
    ) {
        ends.count = 0;
        while at < bytes.len() && ends.count < PIECES {
            let rest = &bytes[at..];
            let mut padded = [b' '; block::BYTES];
            let block = rest.first_chunk().unwrap_or_else(|| {
                padded[..rest.len()].copy_from_slice(rest);
                &padded
            });
            if block[0] < 0x80 || pattern == Pattern::Gpt2 {
                let (bits, certain) = starts(&ByteBlock::of(block), block);
                // The text's end is a piece's, if all before it is certain.
                let end = if (rest.len() as u64) < u64::from(certain.min(64)) {
                    1 << rest.len()
                } else {
                    0
                };
                let bits = (bits & below(certain) & below(rest.len().min(64) as u32) & !1) | end;
                if bits != 0 {
                    ends.push_bits(at, bits);
                    at += 63 - bits.leading_zeros() as usize;
                    continue;
                }
            }
            at = self.piece_end(pattern, bytes, at);
            ends.push(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many pieces at once are those that are found one by one.
    #[test]
    fn blocks_agree_with_pieces() {
        let few: Vec<char> =
            "aab BCsStTlLeErRdD''''  \n\n\r\t1234.,/!-\u{b}\u{1}".chars().collect();
        let rare: Vec<char> = "é中，\u{3000}\u{301}ʰſ".chars().collect();
        let mut state = 0x5eed_000a_u64;
        let mut next = |limit: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % limit
        };
        let splitter = Splitter::new();
        let mut ends = Ends::new();
        for round in 0..6000 {
            // Of few characters, so that runs of a kind are long; some without any that is wide.
            let kinds: Vec<char> = (0..1 + next(8)).map(|_| few[next(few.len())]).collect();
            let text: String = (0..next(300))
                .map(|_| match next(40) {
                    0 if round % 3 == 0 => rare[next(rare.len())],
                    1..5 => few[next(few.len())],
                    _ => kinds[next(kinds.len())],
                })
                .collect();
            for pattern in [
                Pattern::Gpt2,
                Pattern::Cl100k,
                Pattern::Llama3,
                Pattern::Qwen2,
                Pattern::Qwen35,
                Pattern::O200k,
            ] {
                let bytes = text.as_bytes();
                let mut at = 0;
                while at < bytes.len() {
                    splitter.ends(pattern, bytes, at, &mut ends);
                    for &end in ends.as_slice() {
                        let expected = splitter.piece_end(pattern, bytes, at);
                        assert_eq!(
                            end, expected,
                            "{pattern:?} from {at} in round {round} of {text:?}"
                        );
                        at = end;
                    }
                }
                assert_eq!(at, bytes.len());
            }
        }
    }
}
