//! BERT's `vocab.txt`, for texts in lower case and as they are.

#![no_main]

use libfuzzer_sys::fuzz_target;
use preprocess::TokenizerSpec;

fuzz_target!(|file: &[u8]| {
    let vocab_file = Some(fuzz::file("vocab.txt", file));
    let spec = TokenizerSpec { vocab_file, ..TokenizerSpec::default() };
    for kind in ["wordpiece", "bert-cased"] {
        fuzz::tokenize_spec(&TokenizerSpec { kind: kind.to_owned(), ..spec.clone() }, file);
    }
});
