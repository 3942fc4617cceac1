//! `tokenizer.json` of Hugging Face.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::tokenize("hf", "tokenizer.json", data));
