//! Ids of the published CPM tokenizers, whose vocabularies are not in this repository.

use preprocess::{TokenizerSpec, open_tokenizer};
use serde_json::Value;

/// Checks the cases of a golden file with the vocabulary in an environment variable.
fn check(test: &str, variable: &str, kind: &str, golden: &str) {
    let Ok(file) = std::env::var(variable) else {
        return tests::skip(test, &format!("{variable} does not name the vocabulary"));
    };
    let spec =
        TokenizerSpec { kind: kind.to_owned(), vocab_file: Some(file), ..TokenizerSpec::default() };
    let tokenizer = open_tokenizer(&spec).unwrap();
    assert_eq!(tokenizer.eod(), Some(7));
    let cases = std::fs::read(tests::root().join("tests/golden/cpm2").join(golden)).unwrap();
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        let mut ids = Vec::new();
        tokenizer.encoder().encode(case["text"].as_str().unwrap(), &mut ids);
        assert_eq!(serde_json::json!(ids), case["ids"], "{}", case["text"]);
    }
}

/// `bpe_cn/vocab.txt` of CPM-2.
#[test]
fn cpm2_as_published() {
    check("cpm2_as_published", "FEEDLINE_CPM_VOCAB", "cpm2", "tokenizer_bpe_cn.json");
}

/// `chinese_vocab.model` of CPM-1.
#[test]
fn cpm1_as_published() {
    let golden = "tokenizer_cpm1_sentencepiece.json";
    check("cpm1_as_published", "FEEDLINE_CPM_MODEL", "cpm1", golden);
}
