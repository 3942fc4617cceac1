//! SplitMix64: enough randomness for fault injection, the same on every machine.

/// A generator with 64 bits of state (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// Seeded like the standard hash maps: for uses that need not be reproducible.
    #[cfg(feature = "s3")]
    pub(crate) fn from_entropy() -> Self {
        use std::hash::{BuildHasher as _, RandomState};
        Rng(RandomState::new().hash_one(std::process::id()))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, or 0 if there is none. The bias of the remainder is no concern here.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// True with a probability of `per_mille` in a thousand.
    #[cfg(any(feature = "server", feature = "sim", test))]
    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }

    #[cfg(any(feature = "sim", test))]
    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs for the seed 1234567, as the reference implementation in C returns them.
    #[test]
    fn equals_the_reference_implementation() {
        let mut rng = Rng::new(1_234_567);
        let found = [rng.next(), rng.next(), rng.next()];
        assert_eq!(
            found,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }
}
