//! Files beside `tokenizer.json` in a folder of Hugging Face change ids. The expected ids are those
//! of `AutoTokenizer.from_pretrained(FOLDER)` of transformers 5.

use std::path::Path;

use preprocess::{HuggingFace, Tokenizer, TokenizerSpec};
use serde_json::{Map, Value, json};

use crate::common::byte_level::tokenizer_json;

fn open(folder: &Path, files: &[(&str, Value)], name: &str) -> Result<HuggingFace, String> {
    std::fs::write(folder.join("tokenizer.json"), tokenizer_json().to_string()).unwrap();
    for (name, value) in files {
        std::fs::write(folder.join(name), value.to_string()).unwrap();
    }
    let model = Some(folder.join(name).to_str().unwrap().to_owned());
    let spec = TokenizerSpec { kind: "hf".to_owned(), model, ..TokenizerSpec::default() };
    HuggingFace::open(&spec).map_err(|error| error.to_string())
}

#[track_caller]
fn check(files: &[(&str, Value)], text: &str, expected: &[u32], eod: u32) {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = open(folder.path(), files, "").unwrap();
    let mut ids = Vec::new();
    tokenizer.encode(text, &mut ids);
    assert_eq!((ids.as_slice(), tokenizer.eod()), (expected, Some(eod)), "{files:?}");
    let highest = expected.iter().copied().max().max(Some(256)).unwrap();
    assert!(tokenizer.vocab_size() > highest, "{files:?}");
}

fn token(content: &str, lstrip: bool) -> Value {
    json!({
        "content": content, "lstrip": lstrip, "normalized": false, "rstrip": false,
        "single_word": false, "special": true,
    })
}

const CONFIG: &str = "tokenizer_config.json";

#[test]
fn other_files_of_the_folder_add_tokens() {
    let end = || json!({ "eos_token": "<|endoftext|>" });
    let user = [97, 257, 98];
    check(&[], "a<u>b", &[97, 60, 117, 62, 98], 256);
    let decoder = json!({ "256": token("<|endoftext|>", false), "257": token("<u>", false) });
    let config = json!({ "eos_token": "<|endoftext|>", "added_tokens_decoder": decoder });
    check(&[(CONFIG, config.clone())], "a<u>b", &user, 256);
    let added = ("added_tokens.json", json!({ "<u>": 257 }));
    check(&[(CONFIG, end()), added.clone()], "a<u>b", &user, 256);
    check(std::slice::from_ref(&added), "a<u>b", &user, 256);
    let map = json!({ "additional_special_tokens": ["<u>"], "eos_token": "<|endoftext|>" });
    check(&[("special_tokens_map.json", map.clone())], "a<u>b", &user, 256);
    for key in ["additional_special_tokens", "extra_special_tokens"] {
        let config = json!({ "eos_token": "<|endoftext|>", key: [token("<u>", false)] });
        check(&[(CONFIG, config)], "a<u>b", &user, 256);
    }
    let of_model =
        [json!({ "image_token": "<u>" }), json!({ "extra_special_tokens": { "image": "<u>" } })];
    for config in of_model {
        check(&[(CONFIG, config)], "a<u>b", &user, 256);
    }
    // New ids follow the order of the ids in the file, not their values.
    check(&[("added_tokens.json", json!({ "<u>": 300, "<t>": 257 }))], "<u><t>", &[258, 257], 256);
    // The decoder is read instead of the map and the older file.
    let other = ("special_tokens_map.json", json!({ "additional_special_tokens": ["<v>"] }));
    check(&[(CONFIG, config.clone()), other], "<v>", &[60, 118, 62], 256);
    let other = ("added_tokens.json", json!({ "<v>": 257 }));
    check(&[(CONFIG, config), other], "<v>", &[60, 118, 62], 256);
}

/// A special token outside the vocabulary gets the next id. This holds for the end of a document,
/// too, which once was looked up by its usual name instead.
#[test]
fn special_tokens_outside_the_vocabulary_get_new_ids() {
    let config = json!({ "eos_token": "<end>", "pad_token": "<pad>", "bos_token": "a" });
    let ids = [257, 98, 258, 97];
    check(&[(CONFIG, config)], "<end>b<pad>a", &ids, 257);
    // The older file of special tokens is read last.
    let config = (CONFIG, json!({ "eos_token": "<a>" }));
    let map = ("special_tokens_map.json", json!({ "eos_token": "<b>" }));
    check(&[config, map], "<a><b>", &[60, 97, 62, 257], 257);
    let names = ["bos", "eos", "unk", "sep", "pad", "cls", "mask"];
    let config =
        names.iter().rev().map(|name| (format!("{name}_token"), format!("<{name}>").into()));
    let text: String = names.map(|name| format!("<{name}>")).concat();
    let config: Map<String, Value> = config.collect();
    check(&[(CONFIG, config.into())], &text, &[257, 258, 259, 260, 261, 262, 263], 258);
}

#[test]
fn flags_come_from_the_decoder() {
    let text = "a <|endoftext|> b";
    check(&[], text, &[97, 32, 256, 32, 98], 256);
    let decoder = json!({ "256": token("<|endoftext|>", true) });
    check(&[(CONFIG, json!({ "added_tokens_decoder": decoder }))], text, &[97, 256, 32, 98], 256);
}

#[test]
fn unsupported_settings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |config: Value, word: &str| {
        let found = open(folder.path(), &[(CONFIG, config)], "").unwrap_err();
        assert!(found.contains(CONFIG) && found.contains(word), "{found}");
    };
    refused(json!({ "split_special_tokens": true }), "split_special_tokens");
    let prefixed = json!({ "add_prefix_space": true, "tokenizer_class": "GPT2Tokenizer" });
    refused(prefixed, "add_prefix_space");
    refused(json!({ "added_tokens_decoder": { "x": {} } }), "added_tokens_decoder");
    refused(json!({ "additional_special_tokens": [5] }), "special token 5");
    let config = json!({ "split_special_tokens": false, "add_prefix_space": false });
    open(folder.path(), &[(CONFIG, config)], "").unwrap();
    let generic = json!({ "add_prefix_space": true, "tokenizer_class": "PreTrainedTokenizerFast" });
    open(folder.path(), &[(CONFIG, generic)], "").unwrap();
    // Given the path of a tokenizer.json, only the end of a document is read from other files.
    let config = json!({ "additional_special_tokens": ["<u>"], "split_special_tokens": true });
    let tokenizer = open(folder.path(), &[(CONFIG, config)], "tokenizer.json").unwrap();
    assert_eq!(tokenizer.vocab_size(), 257);
    let config = json!({ "eos_token": "<end>" });
    let found = open(folder.path(), &[(CONFIG, config)], "tokenizer.json").unwrap_err();
    assert!(found.contains("eos_token '<end>'"), "{found}");
}

/// A folder of BERT as published before `tokenizer.json`: special tokens are one id each and are
/// put around the text. Megatron core 0.16 does the same for its names of BERT's tokenizer.
#[test]
fn a_folder_with_berts_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let vocab = "[PAD] [UNK] [CLS] [SEP] [MASK] the quick brown fox un ##aff ##able [ ] mask , . ! \
                 \u{e9} e caf ##\u{e9} \u{4e2d} \u{56fd} HELLO Hello hello ##s <u>";
    std::fs::write(folder.path().join("vocab.txt"), vocab.replace(' ', "\n")).unwrap();
    let text = "Hello [MASK] unaffable caf\u{e9} \u{4e2d}\u{56fd} HELLO the<x>fox";
    let model = Some(folder.path().to_str().unwrap().to_owned());
    let spec = TokenizerSpec { kind: "hf".to_owned(), model, ..TokenizerSpec::default() };
    let lower = [2, 26, 4, 9, 10, 11, 1, 22, 23, 26, 5, 1, 1, 1, 8, 3];
    let kept = [2, 25, 4, 9, 10, 11, 20, 21, 22, 23, 24, 5, 1, 1, 1, 8, 3];
    let accents = [2, 26, 4, 9, 10, 11, 20, 21, 22, 23, 26, 5, 1, 1, 1, 8, 3];
    let joined = [2, 26, 4, 9, 10, 11, 1, 1, 26, 5, 29, 8, 3];
    for (config, expected) in [
        (json!({}), &lower[..]),
        (json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": true }), &lower),
        (json!({ "tokenizer_class": "BertTokenizer", "do_lower_case": false }), &kept),
        (json!({ "strip_accents": false }), &accents),
        (json!({ "tokenize_chinese_chars": false, "additional_special_tokens": ["<x>"] }), &joined),
    ] {
        std::fs::write(folder.path().join(CONFIG), config.to_string()).unwrap();
        let tokenizer = HuggingFace::open(&spec).unwrap();
        let mut ids = Vec::new();
        tokenizer.encode(text, &mut ids);
        assert_eq!((&ids[..], tokenizer.eod()), (expected, Some(3)), "{config}");
    }
    let refused = |word: &str| {
        let found = HuggingFace::open(&spec).unwrap_err().to_string();
        assert!(found.contains(word), "{found}");
    };
    std::fs::write(folder.path().join(CONFIG), r#"{"tokenizer_class": "LongformerTokenizer"}"#)
        .unwrap();
    refused("LongformerTokenizer");
    std::fs::remove_file(folder.path().join(CONFIG)).unwrap();
    std::fs::write(folder.path().join("vocab.txt"), "[PAD]\n[UNK]\n").unwrap();
    refused("no '[CLS]'");
}

/// Names on the hub that are no local folders.
#[test]
fn nothing_is_downloaded() {
    for (name, hint) in [
        ("gpt2-of-nobody", "hf download NAME"),
        ("nobody/gpt2", "hf download NAME"),
        ("/nonexistent/gpt2", "--tokenizer sentencepiece"),
    ] {
        let model = Some(name.to_owned());
        let spec = TokenizerSpec { kind: "hf".to_owned(), model, ..TokenizerSpec::default() };
        let found = preprocess::open_tokenizer(&spec).unwrap_err().to_string();
        assert!(found.contains(hint), "{found}");
    }
}
