//! The random number generators of Megatron's sample order: numpy's legacy `RandomState`, which is
//! frozen by numpy's compatibility policy, and the two Mersenne Twisters of the C++ standard.

use std::ops::ControlFlow;

use crate::block_prefetch::{BLOCK, generate_in_blocks};

/// The 32-bit Mersenne Twister, C++'s `std::mt19937`, seeded with one word.
#[derive(Clone, Debug)]
pub struct Mt19937 {
    state: [u32; 624],
    next: usize,
}

impl Mt19937 {
    /// Seeds the generator by Knuth's multiplier.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; 624];
        for i in 1..624 {
            let before = state[i - 1] ^ (state[i - 1] >> 30);
            state[i] = before.wrapping_mul(1_812_433_253).wrapping_add(i as u32); // fits: 624
        }
        Mt19937 { state, next: 624 }
    }

    /// The next word.
    #[inline]
    pub fn next_u32(&mut self) -> u32 {
        if self.next == 624 {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn refill(&mut self) {
        let twist = |upper: u32, lower: u32| {
            let word = (upper & 0x8000_0000) | (lower & 0x7fff_ffff);
            (word >> 1) ^ (0x9908_b0df * (lower & 1))
        };
        let state = &mut self.state;
        // In three parts, so that no index wraps around.
        for i in 0..227 {
            state[i] = state[i + 397] ^ twist(state[i], state[i + 1]);
        }
        for i in 227..623 {
            state[i] = state[i - 227] ^ twist(state[i], state[i + 1]);
        }
        state[623] = state[396] ^ twist(state[623], state[0]);
        self.next = 0;
    }
}

/// The 64-bit Mersenne Twister, C++'s `std::mt19937_64`, seeded with one word.
#[derive(Clone, Debug)]
pub struct Mt19937x64 {
    state: [u64; 312],
    next: usize,
}

impl Mt19937x64 {
    /// Seeds the generator.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut state = [seed; 312];
        for i in 1..312 {
            let before = state[i - 1] ^ (state[i - 1] >> 62);
            state[i] = before.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i as u64);
        }
        Mt19937x64 { state, next: 312 }
    }

    /// The next word.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        if self.next == 312 {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= (word >> 29) & 0x5555_5555_5555_5555;
        word ^= (word << 17) & 0x71d6_7fff_eda6_0000;
        word ^= (word << 37) & 0xfff7_eee0_0000_0000;
        word ^ (word >> 43)
    }

    fn refill(&mut self) {
        for i in 0..312 {
            let (upper, lower) = (self.state[i], self.state[(i + 1) % 312]);
            let word = (upper & 0xffff_ffff_8000_0000) | (lower & 0x7fff_ffff);
            let twisted = (word >> 1) ^ (0xb502_6f5a_a966_19e9 * (lower & 1));
            self.state[i] = self.state[(i + 156) % 312] ^ twisted;
        }
        self.next = 0;
    }

    /// Shuffles as Megatron's C++ does: with the remainder of each word, biased as it is.
    pub fn shuffle_by_remainder<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.next_u64() % (i as u64 + 1);
            items.swap(i, j as usize); // fits: at most i
        }
    }
}

/// `numpy.random.RandomState(seed)`.
#[derive(Clone, Debug)]
pub struct RandomState(Mt19937);

impl RandomState {
    /// Seeds the generator.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        RandomState(Mt19937::new(seed))
    }

    /// The next raw word.
    #[inline]
    pub fn next_u32(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// `shuffle(items)`: swaps each item, from the last, with one before it or itself.
    ///
    /// Indexes are drawn in advance: drawing has unpredictable branches and swapping has cache
    /// misses. In separate loops many misses are in flight at once.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        let mut upper = items.len().saturating_sub(1);
        while upper > u32::MAX as usize {
            let j = self.bounded(upper as u64);
            items.swap(upper, j as usize); // fits: at most upper
            upper -= 1;
        }
        let make = |block: usize, draws: &mut Vec<u32>| {
            let upper = upper - block * BLOCK;
            draws.resize(upper.min(BLOCK), 0);
            self.draw_below(upper as u32, draws); // fits: checked above
        };
        generate_in_blocks(upper.div_ceil(BLOCK), make, |block, draws| {
            let upper = upper - block * BLOCK;
            for (&j, item) in draws.iter().zip((1..=upper).rev()) {
                items.swap(item, j as usize);
            }
            ControlFlow::Continue(())
        });
    }

    /// Fills each item with a number in `0..=upper`, where `upper` decreases by one per item and is
    /// at least 1 at the last. A word above the bound is drawn again, without a branch: up to half
    /// of them are, and the branch is unpredictable.
    fn draw_below(&mut self, mut upper: u32, draws: &mut [u32]) {
        let mut filled = 0;
        while filled < draws.len() {
            let mask = mask_of(u64::from(upper)) as u32; // fits: as upper does
            // The mask holds until the bound is below half of it.
            let stop = draws.len().min(filled + (upper - mask / 2) as usize);
            while filled < stop {
                let word = self.0.next_u32() & mask;
                draws[filled] = word;
                let taken = u32::from(word <= upper);
                filled += taken as usize;
                upper -= taken;
            }
        }
    }

    /// A uniform number in `0..=max`. Draws nothing if `max` is 0.
    #[inline]
    pub fn bounded(&mut self, max: u64) -> u64 {
        if max == 0 {
            return 0;
        }
        let mask = mask_of(max);
        let narrow = max <= u64::from(u32::MAX);
        loop {
            let high = u64::from(self.0.next_u32());
            let word = if narrow { high } else { (high << 32) | u64::from(self.0.next_u32()) };
            if word & mask <= max {
                return word & mask;
            }
        }
    }

    /// `randint(low, high)`: an integer in `low..high`.
    ///
    /// # Panics
    /// If the range is empty.
    pub fn randint(&mut self, low: i64, high: i64) -> i64 {
        assert!(low < high, "randint of the empty range {low}..{high}");
        low.wrapping_add_unsigned(self.bounded(high.wrapping_sub(1).wrapping_sub(low) as u64))
    }

    /// `random_sample()`: a double in `0.0..1.0`, of 53 random bits.
    pub fn random_sample(&mut self) -> f64 {
        let (high, low) = (self.next_u32() >> 5, self.next_u32() >> 6);
        (f64::from(high) * 67_108_864.0 + f64::from(low)) / 9_007_199_254_740_992.0
    }

    /// `geometric(p)` for `p` below a third, where numpy inverts the distribution.
    ///
    /// # Panics
    /// If `p` is not in `0.0..1.0/3.0`, exclusive.
    pub fn geometric(&mut self, p: f64) -> u64 {
        assert!(p > 0.0 && p < 1.0 / 3.0, "geometric({p}): the inversion is for less than a third");
        ((-self.random_sample()).ln_1p() / (-p).ln_1p()).ceil() as u64
    }

    /// `choice(len(p), p=p)`: an index of `p`, by its probability.
    ///
    /// # Panics
    /// If `p` is empty.
    pub fn choice(&mut self, p: &[f64]) -> usize {
        assert!(!p.is_empty(), "choice of an empty list");
        let sums = p.iter().scan(0.0, |sum, p| {
            *sum += p;
            Some(*sum)
        });
        let sums: Vec<f64> = sums.collect();
        let u = self.random_sample();
        let last = sums.len() - 1;
        sums.iter().position(|sum| sum / sums[last] > u).unwrap_or(last)
    }
}

/// `numpy.sum` of doubles. Up to eight it adds from left to right; then in eight running sums; and
/// beyond 128 in halves.
#[must_use]
pub fn numpy_sum(items: &[f64]) -> f64 {
    if items.len() < 8 {
        return items.iter().fold(0.0, |sum, item| sum + item);
    }
    if items.len() > 128 {
        let half = items.len() / 2;
        let (low, high) = items.split_at(half - half % 8);
        return numpy_sum(low) + numpy_sum(high);
    }
    let (eights, tail) = items.as_chunks::<8>();
    let mut r = eights[0];
    for eight in &eights[1..] {
        r.iter_mut().zip(eight).for_each(|(sum, item)| *sum += item);
    }
    let sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
    tail.iter().fold(sum, |sum, item| sum + item)
}

/// The smallest `2^k - 1` that is not below `max`.
fn mask_of(max: u64) -> u64 {
    u64::MAX.checked_shr(max.leading_zeros()).unwrap_or(0)
}
