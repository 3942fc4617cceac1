//! A `.model` of SentencePiece.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::tokenize("sentencepiece", "x.model", data));
