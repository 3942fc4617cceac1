//! The random numbers of numpy and of the C++ standard library.

use crate::common::{manifest, numbers};
use indexed::rng::{Mt19937, Mt19937x64, RandomState, numpy_sum};
use md5::{Digest as _, Md5};
use serde_json::Value;

fn vectors() -> Value {
    manifest("rng", "numpy_randomstate_and_cpp_mt.json")
}

/// Runs `check` for every seed of the vectors, with a fresh generator.
fn for_each_seed(check: impl Fn(RandomState, &Value)) {
    for (seed, expected) in vectors().as_object().unwrap() {
        if let Ok(seed) = seed.parse() {
            check(RandomState::new(seed), expected);
        }
    }
}

#[test]
fn raw_words() {
    for_each_seed(|mut rng, expected| {
        let words: Vec<u32> = (0..8).map(|_| rng.next_u32()).collect();
        assert_eq!(words, numbers::<u32>(&expected["raw_u32_first8"]));
    });
}

#[test]
fn shuffles() {
    for_each_seed(|rng, expected| {
        let mut items: Vec<u32> = (0..20).collect();
        rng.clone().shuffle(&mut items);
        assert_eq!(items, numbers::<u32>(&expected["shuffle_arange20"]));

        let mut many: Vec<u32> = (0..100_000).collect();
        rng.clone().shuffle(&mut many);
        let bytes: Vec<u8> = many.iter().flat_map(|item| item.to_le_bytes()).collect();
        let hash: String = Md5::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, expected["shuffle_arange100000_u32_le_md5"].as_str().unwrap());

        // The second continues exactly where the first stopped.
        let mut rng = rng;
        for (start, len, place) in [(0, 7, 0), (1000, 13, 1)] {
            let mut items: Vec<u64> = (start..start + len).collect();
            rng.shuffle(&mut items);
            assert_eq!(items, numbers::<u64>(&expected["two_shuffles_in_a_row"][place]));
        }
    });
}

/// Drawing in advance must not change the draws. The definition is one swap at a time.
#[test]
fn a_shuffle_is_one_bounded_draw_per_swap() {
    for len in (0..70).chain([1023, 1024, 1025, 1026, 2048, 2049, 4097, 100_000]) {
        let (mut rng, mut plain) = (RandomState::new(len as u32), RandomState::new(len as u32));
        let (mut items, mut expected): (Vec<usize>, Vec<usize>) =
            ((0..len).collect(), (0..len).collect());
        rng.shuffle(&mut items);
        for i in (1..len).rev() {
            expected.swap(i, plain.bounded(i as u64) as usize);
        }
        assert!(items == expected, "{len} items");
        assert_eq!(rng.next_u32(), plain.next_u32(), "the word after a shuffle of {len}");
    }
}

#[test]
fn distributions() {
    for_each_seed(|rng, expected| {
        let mut draw = rng.clone();
        let doubles: Vec<f64> = (0..5).map(|_| draw.random_sample()).collect();
        let expected_doubles = expected["random_sample_first5"].as_array().unwrap().iter();
        assert!(expected_doubles.map(|value| value.as_f64().unwrap()).eq(doubles));

        let mut draw = rng.clone();
        let integers: Vec<i64> = (0..10).map(|_| draw.randint(1, 10)).collect();
        assert_eq!(integers, numbers::<i64>(&expected["randint_1_10_x10"]));

        let mut draw = rng.clone();
        let counts: Vec<u64> = (0..12).map(|_| draw.geometric(0.2)).collect();
        assert_eq!(counts, numbers::<u64>(&expected["geometric_0.2_x12"]));

        let mut draw = rng;
        let p = [6.0 / 11.0, 3.0 / 11.0, 2.0 / 11.0];
        let choices: Vec<i64> = (0..12).map(|_| [1, 2, 3][draw.choice(&p)]).collect();
        assert_eq!(choices, numbers::<i64>(&expected["choice_123_p_6_3_2_over_11_x12"]));
    });
}

#[test]
fn a_single_choice_draws_nothing_and_a_wide_one_two_words() {
    let mut rng = RandomState::new(1);
    assert_eq!(rng.bounded(0), 0);
    let mut raw = Mt19937::new(1);
    let (high, low) = (raw.next_u32(), raw.next_u32());
    assert_eq!(rng.bounded(u64::MAX), u64::from(high) << 32 | u64::from(low));
    assert_eq!(rng.next_u32(), raw.next_u32());
}

#[test]
fn check_values_of_the_cpp_standard() {
    let cpp = &vectors()["cpp"];
    let mut narrow = Mt19937::new(5489);
    let word = (0..10_000).map(|_| narrow.next_u32()).last().unwrap();
    assert_eq!(u64::from(word), cpp["mt19937_seed5489_10000th"].as_u64().unwrap());
    let mut wide = Mt19937x64::new(5489);
    let word = (0..10_000).map(|_| wide.next_u64()).last().unwrap();
    assert_eq!(word, cpp["mt19937_64_seed5489_10000th"].as_u64().unwrap());
    let mut narrow = Mt19937::new(1234);
    let words: Vec<u32> = (0..6).map(|_| narrow.next_u32()).collect();
    assert_eq!(words, numbers::<u32>(&cpp["mt19937_seed1234_first6"]));
    let mut wide = Mt19937x64::new(1235);
    for expected in cpp["mt19937_64_seed1235_first6"].as_array().unwrap() {
        assert_eq!(wide.next_u64(), expected.as_u64().unwrap());
    }
}

/// From numpy 2.4.6: `numpy.sum([0.1 * k for k in range(n)]).hex()`, for lengths at which addition
/// from left to right differs.
#[test]
fn sums_are_pairwise() {
    for (n, expected) in NUMPY_SUMS {
        let items: Vec<f64> = (0..n).map(|k| 0.1 * f64::from(k)).collect();
        assert_eq!(numpy_sum(&items).to_bits(), expected, "{n} items");
    }
}

const NUMPY_SUMS: [(u32, u64); 17] = [
    (0, 0x0000_0000_0000_0000),
    (1, 0x0000_0000_0000_0000),
    (7, 0x4000_cccc_cccc_cccd),
    (8, 0x4006_6666_6666_6667),
    (9, 0x400c_cccc_cccc_ccce),
    (15, 0x4025_0000_0000_0001),
    (16, 0x4028_0000_0000_0000),
    (17, 0x402b_3333_3333_3333),
    (127, 0x4089_00cc_cccc_cccd),
    (128, 0x4089_6666_6666_6667),
    (129, 0x4089_cccc_cccc_cccd),
    (200, 0x409f_1800_0000_0000),
    (256, 0x40a9_8000_0000_0001),
    (257, 0x40a9_b333_3333_3334),
    (1000, 0x40e8_63c0_0000_0000),
    (4099, 0x4129_a19a_3333_3334),
    (32767, 0x4189_9900_00cc_cccd),
];
