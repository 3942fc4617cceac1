//! GPT-2 vocabularies from files: valid ones, and every error.
mod train;

use preprocess::{Gpt2, Tokenizer as _};
use serde_json::{Map, Value};

/// The 256 bytes in GPT-2's order, as `vocab.json` spells them.
fn byte_tokens() -> Vec<String> {
    let gpt2: Value = serde_json::from_str(&Gpt2::built_in().unwrap().vocab_json()).unwrap();
    gpt2.as_object().unwrap().keys().take(256).cloned().collect()
}

/// The bytes, then these tokens.
fn vocab(more: &[&str]) -> String {
    let tokens = byte_tokens().into_iter().chain(more.iter().map(|token| (*token).to_owned()));
    let ids: Map<_, _> = tokens.zip((0..).map(|id: u32| id.into())).collect();
    Value::Object(ids).to_string()
}

fn open(vocab: &str, merges: &str) -> preprocess::Result<Gpt2> {
    let folder = tempfile::tempdir().unwrap();
    let [vocab_file, merge_file] = [("v.json", vocab), ("m.txt", merges)].map(|(name, text)| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    });
    Gpt2::from_files(&vocab_file, &merge_file)
}

#[track_caller]
fn refused(vocab: &str, merges: &str, words: &[&str]) {
    let message = open(vocab, merges).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "without '{word}': {message}");
    }
}

#[test]
fn a_small_vocabulary() {
    let vocab = vocab(&["ab", "abc", "<|pad|> 中"]);
    for merges in ["#version: 0.2\na b\nab c\n", "a b\r\nab c\r\n", "a b\n\nab c"] {
        let tokenizer = open(&vocab, merges).unwrap();
        assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (259, None));
        let mut ids = Vec::new();
        tokenizer.encode("abc ab", &mut ids);
        // A space is spelled as the 33rd of the bytes that are not spelled as themselves.
        assert_eq!(ids, [257, 220, 256]);
        let mut bytes = Vec::new();
        tokenizer.decode(&[258, 257], &mut bytes).unwrap();
        assert_eq!(bytes, "<|pad|> 中abc".as_bytes());
    }
}

/// A vocabulary without `<|endoftext|>` has no end token to append.
#[test]
fn append_eod_needs_an_end_token() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("v.json"), vocab(&[])).unwrap();
    std::fs::write(at("m.txt"), "").unwrap();
    std::fs::write(at("in.jsonl"), "bad").unwrap();
    let mut options = preprocess::PreprocessOptions::new(vec![at("in.jsonl")], at("out"));
    options.tokenizer.vocab_file = Some(at("v.json"));
    options.tokenizer.merge_file = Some(at("m.txt"));
    options.append_eod = true;
    let message = preprocess::run(&options, &mut |_| {}).unwrap_err().to_string();
    assert!(message.contains("--append-eod") && message.contains("<|endoftext|>"), "{message}");
}

#[test]
fn invalid_vocabularies_are_refused() {
    let good = vocab(&["ab", "abc", "bc"]);
    refused("", "", &["v.json", "expected a JSON object from token to id"]);
    refused("[1]", "", &["v.json"]);
    refused("{\"a\":-1}", "", &["v.json"]);
    refused("{\"a\":0}", "", &["v.json", "for byte 0x00, found none"]);
    refused(&good.replace(":258", ":259"), "", &["id 259", "each id from 0 to 258 once"]);
    refused(&good.replace(":258", ":257"), "", &["id 257", "each id from 0 to 258 once"]);
    refused(&good, "a b\nab\n", &["m.txt, line 2", "'ab'", "two tokens separated by a space"]);
    refused(&good, "a b c\n", &["m.txt, line 1", "two tokens"]);
    refused(&good, "a b\na  c\n", &["m.txt, line 2", "two tokens"]);
    refused(&good, "#version: 0.2\na z\n", &["m.txt, line 2", "'az'", "a token of the vocabulary"]);
    refused(&good, "ab c\na b\n", &["m.txt, line 1", "'ab'", "the token of an earlier merge"]);
    refused(&good, "a b\na b\n", &["m.txt, line 2", "'a b' again"]);
    let message = Gpt2::from_files("/nowhere/v.json", "/nowhere/m.txt").unwrap_err().to_string();
    assert!(message.contains("/nowhere/v.json"), "{message}");
}
