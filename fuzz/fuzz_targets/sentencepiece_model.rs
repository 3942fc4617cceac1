//! A `.model` of SentencePiece: if it is accepted, its ids are valid.

#![no_main]

use fuzz::tokenize;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|file: &[u8]| tokenize("sentencepiece", "x.model", file));
