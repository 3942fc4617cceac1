//! A `.tiktoken` of OpenAI's kind.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::tokenize("tiktoken", "x.tiktoken", data));
