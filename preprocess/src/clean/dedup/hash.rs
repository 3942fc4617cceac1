//! Hashes that are the same on every machine and in every version: the outputs depend on them.

use std::hash::{BuildHasherDefault, Hash, Hasher};

/// The fractional part of the golden ratio, as in SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea, Flood 2014): a permutation of the numbers that looks random.
#[inline]
pub(in crate::clean) fn scatter(number: u64) -> u64 {
    let mixed = number.wrapping_add(GOLDEN);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Both halves of a product of 128 bits, folded: as good as [`scatter`] on numbers that look random
/// already, at half its cost.
#[inline]
pub(in crate::clean) fn fold(number: u64, seed: u64) -> u64 {
    let product = u128::from(number ^ seed) * u128::from(GOLDEN);
    product as u64 ^ (product >> 64) as u64 // fits: both halves are wanted
}

/// The 128-bit hash of a text (XXH3, whose values are stable). Any two of n different texts share a
/// value with probability n^2 / 2^129: at 10^9 documents 1.5e-21.
pub(in crate::clean) fn of_text(text: &str) -> u128 {
    xxhash_rust::xxh3::xxh3_128(text.as_bytes())
}

/// A hash as the key of a table, which need not hash it again. In halves of 32 bits, so that a
/// number of 32 bits beside it costs no padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::clean) struct HashKey<const WORDS: usize>([u32; WORDS]);

impl HashKey<2> {
    pub(in crate::clean) fn of_64(hash: u64) -> Self {
        HashKey([hash as u32, (hash >> 32) as u32]) // fits: both halves are kept
    }
}

impl HashKey<4> {
    pub(in crate::clean) fn of_128(hash: u128) -> Self {
        // fits: all four parts are kept
        HashKey([0, 32, 64, 96].map(|shift| (hash >> shift) as u32))
    }
}

impl<const WORDS: usize> Hash for HashKey<WORDS> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from(self.0[0]) | u64::from(self.0[1]) << 32);
    }
}

/// A table whose keys are hashes.
pub(in crate::clean) type HashTable<const WORDS: usize, V> =
    std::collections::HashMap<HashKey<WORDS>, V, BuildHasherDefault<IdentityHasher>>;

/// Bytes that such a table takes: an entry and a byte of control, at most 7 of 8 places used.
pub(in crate::clean) fn table_bytes<const WORDS: usize, V>(table: &HashTable<WORDS, V>) -> u64 {
    let places = (table.capacity() as u64 * 8).div_ceil(7);
    places * (size_of::<(HashKey<WORDS>, V)>() as u64 + 1)
}

/// Uses the number itself as its hash.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::clean) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("only keys that are one number are hashed");
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first values of the generator from seed 1234567, as published by its authors.
    #[test]
    fn scatter_is_split_mix() {
        let expected = [6457827717110365317, 3203168211198807973, 9817491932198370423_u64];
        let found = [0, 1, 2].map(|nth: u64| scatter(1_234_567 + GOLDEN.wrapping_mul(nth)));
        assert_eq!(found, expected);
    }

    /// From the reference implementation, `xxhsum -H2`.
    #[test]
    fn texts_have_the_hash_of_the_reference() {
        assert_eq!(of_text(""), 0x99aa_06d3_0147_98d8_6001_c324_468d_497f);
    }

    #[test]
    fn a_table_entry_has_no_padding() {
        assert_eq!(size_of::<(HashKey<2>, u32)>(), 12);
        assert_eq!(size_of::<(HashKey<4>, u32)>(), 20);
    }
}
