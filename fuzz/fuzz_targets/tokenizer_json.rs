//! A `tokenizer.json`: if it is accepted, its ids are valid.

#![no_main]

use fuzz::{tokenize, tree};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

fuzz_target!(|file: &[u8]| tokenize("hf", "tokenizer.json", file));

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    tree::mutate(data, size, size_max, seed)
});
