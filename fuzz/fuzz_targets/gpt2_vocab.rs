//! `vocab.json` and `merges.txt`, one after the other with a zero byte between them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use preprocess::TokenizerSpec;

fuzz_target!(|data: &[u8]| {
    let middle = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    let (vocab, merges) = data.split_at(middle);
    let spec = TokenizerSpec {
        kind: "gpt2".to_owned(),
        vocab_file: Some(fuzz::file("vocab.json", vocab)),
        merge_file: Some(fuzz::file("merges.txt", merges.get(1..).unwrap_or(&[]))),
        ..TokenizerSpec::default()
    };
    fuzz::tokenize_spec(&spec, merges);
});
