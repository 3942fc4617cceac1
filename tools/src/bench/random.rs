//! Seeded random numbers: data, offsets and orders are the same in every run.

/// SplitMix64, as Steele, Lea and Flood describe it.
#[derive(Clone, Debug)]
pub struct Random(u64);

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// Starts the sequence of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        mixed(self.0)
    }

    /// A number below `end`, which is not 0. Some are more likely by `end` of 2^64.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64 // fits: below `end`
    }

    /// Shuffles `items`.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for nth in (1..items.len()).rev() {
            items.swap(nth, self.below(nth as u64 + 1) as usize); // fits: at most `nth`
        }
    }
}

/// The `nth` number of the sequence of a seed, without computing those before it.
#[must_use]
pub fn word(seed: u64, nth: u64) -> u64 {
    mixed(seed.wrapping_add(nth.wrapping_add(1).wrapping_mul(STEP)))
}

fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_matches_published_values() {
        let mut random = Random::new(1_234_567);
        let expected = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973];
        assert_eq!([random.bits(), random.bits()], expected);
        assert_eq!([word(1_234_567, 0), word(1_234_567, 1)], expected);
    }
}
