//! The shingles of a text: all runs of a fixed number of characters or words, each as a hash.

use crate::clean::ShingleUnit;
use crate::clean::dedup::hash::scatter;

/// Odd and without a pattern, so that every power of it moves all bits.
const BASE: u64 = 0xd6e8_feb8_6659_fd93;

/// More than is in use: the longest shingles in use are 13 words and 24 characters.
pub(in crate::clean) const SHINGLE_UNITS_MAX: usize = 64;

/// Makes shingles of a text.
#[derive(Clone, Copy, Debug)]
pub(in crate::clean) struct Shingler {
    unit: ShingleUnit,
    units: usize,
    /// [`BASE`] to the power of `units`.
    power: u64,
}

impl Shingler {
    /// `units` is at least 1 and at most [`SHINGLE_UNITS_MAX`].
    pub(in crate::clean) fn new(unit: ShingleUnit, units: usize) -> Self {
        assert!((1..=SHINGLE_UNITS_MAX).contains(&units), "checked with the options");
        let power = (0..units).fold(1_u64, |power, _| power.wrapping_mul(BASE));
        Shingler { unit, units, power }
    }

    /// Calls `each` with the hash of every shingle, in order and with repeats. A text that is
    /// shorter than a shingle is one, and an empty one has none.
    #[inline]
    pub(in crate::clean) fn for_each(&self, text: &str, each: impl FnMut(u64)) {
        match self.unit {
            ShingleUnit::Char => {
                self.hash_runs(text.chars().map(|char| scatter(u64::from(char))), each);
            }
            ShingleUnit::Word => self.hash_runs(words(text).map(of_word), each),
        }
    }

    /// A rolling hash: the hash of a run is a polynomial of its units' hashes, so that the next one
    /// takes two multiplications for every length.
    #[inline]
    fn hash_runs(&self, values: impl Iterator<Item = u64>, mut each: impl FnMut(u64)) {
        let mut last = [0_u64; SHINGLE_UNITS_MAX];
        let (mut hash, mut place, mut count) = (0_u64, 0, 0_usize);
        for value in values {
            let dropped = last[place].wrapping_mul(self.power);
            hash = hash.wrapping_mul(BASE).wrapping_add(value).wrapping_sub(dropped);
            last[place] = value;
            place = if place + 1 == self.units { 0 } else { place + 1 };
            count += 1;
            if count >= self.units {
                each(hash);
            }
        }
        if (1..self.units).contains(&count) {
            each(hash);
        }
    }
}

fn of_word(word: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(word.as_bytes())
}

/// Runs of letters and digits. Where a script writes no spaces, a character is a word.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start_matches(|char: char| !char.is_alphanumeric());
        let first = rest.chars().next()?;
        let end = if is_word(first) {
            first.len_utf8()
        } else {
            rest.find(|char: char| !char.is_alphanumeric() || is_word(char)).unwrap_or(rest.len())
        };
        let (word, after) = rest.split_at(end);
        rest = after;
        Some(word)
    })
}

/// Han and kana.
fn is_word(char: char) -> bool {
    matches!(
        u32::from(char),
        0x2e80..=0x2fdf | 0x3005..=0x3007 | 0x3040..=0x30ff | 0x3400..=0x4dbf | 0x4e00..=0x9fff
            | 0xf900..=0xfaff | 0x2_0000..=0x3_ffff
    )
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn shingles(unit: ShingleUnit, units: usize, text: &str) -> Vec<u64> {
        let mut all = Vec::new();
        Shingler::new(unit, units).for_each(text, |hash| all.push(hash));
        all
    }

    /// As many different hashes as there are different runs of five characters, found by cutting.
    #[test]
    fn hashes_are_those_of_the_runs() {
        let text = "春眠不覚暁 abracadabra abracadabra 處處聞啼鳥".repeat(3);
        let chars: Vec<char> = text.chars().collect();
        for units in [1, 2, 5, 64] {
            let runs: Vec<&[char]> = chars.windows(units).collect();
            let hashes = shingles(ShingleUnit::Char, units, &text);
            assert_eq!(hashes.len(), runs.len());
            for (hash, run) in hashes.iter().zip(&runs) {
                let alone = shingles(ShingleUnit::Char, units, &run.iter().collect::<String>());
                assert_eq!(alone, [*hash], "{run:?}");
            }
            let different = |count: usize, distinct: usize| assert_eq!(count, distinct);
            different(
                runs.iter().collect::<HashSet<_>>().len(),
                HashSet::<_>::from_iter(hashes).len(),
            );
        }
    }

    #[test]
    fn short_texts_are_one_shingle_and_empty_ones_none() {
        assert_eq!(shingles(ShingleUnit::Char, 5, "").len(), 0);
        assert_eq!(shingles(ShingleUnit::Char, 5, "abcd").len(), 1);
        assert_eq!(shingles(ShingleUnit::Char, 5, "abcde").len(), 1);
        assert_eq!(shingles(ShingleUnit::Char, 5, "abcdef").len(), 2);
        assert_ne!(shingles(ShingleUnit::Char, 5, "ab"), shingles(ShingleUnit::Char, 5, "ba"));
        assert_eq!(shingles(ShingleUnit::Word, 5, " ,.").len(), 0);
    }

    #[test]
    fn words_are_runs_of_letters_and_characters_of_han() {
        let found: Vec<&str> = words(" don't 3rd, 春眠abc覚!é").collect();
        assert_eq!(found, ["don", "t", "3rd", "春", "眠", "abc", "覚", "é"]);
        let once = shingles(ShingleUnit::Word, 2, "a b, a  b");
        assert_eq!((once.len(), once[0] == once[2], once[0] == once[1]), (3, true, false));
    }
}
