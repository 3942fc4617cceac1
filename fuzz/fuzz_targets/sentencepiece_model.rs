//! A `.model` of SentencePiece: what is accepted encodes soundly.

#![no_main]

use fuzz::tokenize;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| tokenize("sentencepiece", "x.model", file));
