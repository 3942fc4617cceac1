//! Random numbers as a function of a key and a position, without state.
//!
//! Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns a
//! 64-bit key and a 128-bit counter into four random words. The key of a stream is derived from the
//! seed of the run and the name of the stream; the counter is a position in it. So element
//! 1,000,000 of a weight does not depend on the rank that draws it or on earlier draws: a resumed
//! run has no generator to restore, and any part of a tensor can be drawn alone.

use std::f64::consts::TAU;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;
/// Blocks that [`Stream::fill_dropped`] draws together: the lanes of a SIMD register.
const LANES: usize = 16;
/// Elements of this many blocks, at 16 bits each.
const GROUP: usize = 8 * LANES;

/// Four random words for a counter and a key.
#[must_use]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [high(b) ^ counter[1] ^ key[0], low(b), high(a) ^ counter[3] ^ key[1], low(a)];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// One named stream of a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
}

impl Stream {
    /// The stream of this name. Streams of different names are independent.
    #[must_use]
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a over the name, then the finalizer of SplitMix64 over both: every bit of either
        // reaches every bit of the key.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in name.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        let mut z = hash ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        Stream { key: [low(z), high(z)] }
    }

    /// Four words of the stream: those at `4 x block` to `4 x block + 3`.
    #[must_use]
    pub fn block(self, block: u64) -> [u32; 4] {
        philox4x32([low(block), high(block), 0, 0], self.key)
    }

    /// A number in [0, 1) with 53 random bits, from the first two words of a block.
    #[must_use]
    pub fn uniform(self, block: u64) -> f64 {
        let [a, b, ..] = self.block(block);
        let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
        bits as f64 / (1_u64 << 53) as f64 // exact: both are below 2^53 or a power of two
    }

    /// Four numbers of the standard normal distribution, by Box and Muller from one block.
    #[must_use]
    pub fn normals(self, block: u64) -> [f64; 4] {
        let [a, b, c, d] = self.block(block);
        let [x, y] = box_muller(a, b);
        let [z, w] = box_muller(c, d);
        [x, y, z, w]
    }

    /// Fills `out` with the elements `first..first + out.len()` of the endless tensor of normal
    /// numbers with this standard deviation.
    pub fn fill_normal(self, first: u64, std: f64, out: &mut [f32]) {
        let mut place = first;
        let mut rest = out;
        while !rest.is_empty() {
            let lane = (place % 4) as usize; // fits: below 4
            let normals = self.normals(place / 4);
            let count = (4 - lane).min(rest.len());
            let (now, later) = rest.split_at_mut(count);
            for (out, normal) in now.iter_mut().zip(&normals[lane..]) {
                *out = (normal * std) as f32;
            }
            place += count as u64;
            rest = later;
        }
    }

    /// Fills `out` with the dropout mask of the elements `first..first + out.len()` of the endless
    /// tensor with this number: 1 for dropped elements, which are `rate` of 65,536, and 0 for the
    /// others.
    pub fn fill_dropped(self, tensor: u64, first: u64, rate: u16, out: &mut [u8]) {
        let mut place = first;
        let mut rest = out;
        while !rest.is_empty() {
            let group = dropped(self.key, tensor, place / GROUP as u64, rate);
            let at = (place % GROUP as u64) as usize; // fits: below 128
            let (now, later) = rest.split_at_mut((GROUP - at).min(rest.len()));
            now.copy_from_slice(&group[at..at + now.len()]);
            place += now.len() as u64;
            rest = later;
        }
    }
}

/// A group of elements of a tensor. Element `16 h + lane` has the `h`th 16 bits of block `lane`: so
/// every statement applies to all lanes, and compilers vectorize it.
#[expect(clippy::needless_range_loop, reason = "lanes are what is walked, in several words")]
fn dropped(mut key: [u32; 2], tensor: u64, group: u64, rate: u16) -> [u8; GROUP] {
    let mut words = [[0; LANES], [0; LANES], [low(tensor); LANES], [high(tensor); LANES]];
    for lane in 0..LANES {
        let block = group * LANES as u64 + lane as u64;
        (words[0][lane], words[1][lane]) = (low(block), high(block));
    }
    for _ in 0..ROUNDS {
        for lane in 0..LANES {
            let a = u64::from(MULTIPLIERS[0]) * u64::from(words[0][lane]);
            let b = u64::from(MULTIPLIERS[1]) * u64::from(words[2][lane]);
            words[0][lane] = high(b) ^ words[1][lane] ^ key[0];
            words[2][lane] = high(a) ^ words[3][lane] ^ key[1];
            (words[1][lane], words[3][lane]) = (low(b), low(a));
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    let mut out = [0; GROUP];
    for (half, out) in out.chunks_exact_mut(LANES).enumerate() {
        for (out, word) in out.iter_mut().zip(&words[half / 2]) {
            let bits = (word >> (16 * (half % 2))) as u16; // the lower half is intended
            *out = u8::from(bits < rate);
        }
    }
    out
}

fn box_muller(a: u32, b: u32) -> [f64; 2] {
    let unit = 1.0 / 4_294_967_296.0;
    // Shifted by half a unit, so that the logarithm is never of 0.
    let radius = (-2.0 * ((f64::from(a) + 0.5) * unit).ln()).sqrt();
    let (sin, cos) = (f64::from(b) * unit * TAU).sin_cos();
    [radius * cos, radius * sin]
}

fn low(word: u64) -> u32 {
    word as u32 // the low half is intended
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32 // fits: 32 bits remain
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors that Random123 ships for philox4x32-10.
    #[test]
    fn known_answers() {
        let ones = u32::MAX;
        for (counter, key, expected) in [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 4], [ones; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32(counter, key), expected, "counter {counter:x?}, key {key:x?}");
        }
    }

    /// Groups are the blocks of Philox; their counters include the number of the tensor.
    #[test]
    fn dropout_masks_are_the_bits_of_their_blocks() {
        let stream = Stream::new(7, "dropout.3.mlp");
        let (tensor, first, rate) = (5 + (9 << 32), (1 << 36) - 300, 20_000);
        let mut out = vec![9; 1000];
        stream.fill_dropped(tensor, first, rate, &mut out);
        for (place, dropped) in (first..).zip(&out) {
            let (group, at) = (place / 128, place % 128);
            let block = group * 16 + at % 16;
            let words = philox4x32([low(block), high(block), 5, 9], stream.key);
            let bits = words[(at / 32) as usize] >> (16 * (at / 16 % 2)) & 0xffff;
            assert_eq!(*dropped == 1, bits < u32::from(rate), "element {place}");
        }
        let mut part = vec![9; 333];
        stream.fill_dropped(tensor, first + 77, rate, &mut part);
        assert_eq!(part, out[77..410]);
    }

    #[test]
    fn the_dropout_rate_is_as_requested() {
        let stream = Stream::new(1, "a");
        let count = |tensor, rate| {
            let mut out = vec![9; 1 << 20];
            stream.fill_dropped(tensor, 0, rate, &mut out);
            assert!(out.iter().all(|dropped| *dropped <= 1));
            (out.iter().filter(|dropped| **dropped == 1).count(), out)
        };
        assert_eq!((count(0, 0).0, count(0, u16::MAX).0 >> 19), (0, 1));
        for rate in [655_u16, 6554, 32_768, 60_000] {
            let p = f64::from(rate) / 65_536.0;
            let (one, one_all) = count(1, rate);
            let (other, other_all) = count(2, rate);
            // Five standard deviations.
            let near = |found: usize, p: f64| {
                let n = (1 << 20) as f64;
                assert!((found as f64 - n * p).abs() < 5.0 * (n * p * (1.0 - p)).sqrt(), "{rate}");
            };
            near(one, p);
            near(other, p);
            // Tensors are independent of one another, and so are elements at this distance.
            let both = one_all.iter().zip(&other_all).filter(|(a, b)| **a + **b == 2).count();
            near(both, p * p);
            for apart in [1, 16, 32, 128, 2048] {
                let pairs = one_all.iter().zip(&one_all[apart..]);
                near(pairs.filter(|(a, b)| **a + **b == 2).count(), p * p);
            }
        }
    }

    #[test]
    fn a_part_equals_the_same_part_of_the_whole() {
        let stream = Stream::new(7, "transformer.wte.weight");
        let mut whole = vec![0.0; 1000];
        stream.fill_normal(0, 0.02, &mut whole);
        for (first, len) in [(0, 1), (1, 2), (3, 5), (4, 4), (997, 3), (17, 0), (250, 700)] {
            let mut part = vec![0.0; len];
            stream.fill_normal(first as u64, 0.02, &mut part);
            assert_eq!(part, whole[first..first + len], "{len} from {first}");
        }
    }

    #[test]
    fn normals_are_normal_and_streams_differ() {
        let mut x = vec![0.0; 100_000];
        Stream::new(1, "a").fill_normal(0, 2.0, &mut x);
        let mean = x.iter().map(|v| f64::from(*v)).sum::<f64>() / x.len() as f64;
        let square = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / x.len() as f64;
        let inside = x.iter().filter(|v| v.abs() < 2.0).count() as f64 / x.len() as f64;
        assert!(mean.abs() < 0.03, "mean {mean}");
        assert!((square - 4.0).abs() < 0.06, "mean square {square}");
        assert!((inside - 0.6827).abs() < 0.006, "within one deviation {inside}");
        let first = |seed, name| Stream::new(seed, name).block(0);
        let all = [first(1, "a"), first(2, "a"), first(1, "b"), first(0, ""), first(1, "ab")];
        for (i, one) in all.iter().enumerate() {
            assert!(!all[i + 1..].contains(one), "two streams begin alike");
        }
        assert!((0..1000).map(|i| Stream::new(3, "u").uniform(i)).all(|u| (0.0..1.0).contains(&u)));
    }
}
