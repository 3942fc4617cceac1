//! Tokenizers from files of other libraries, compared with the output of those libraries.
use std::path::Path;

use crate::common::{Random, print_seed};
use preprocess::{HuggingFace, Tiktoken, Tokenizer, TokenizerSpec, open_tokenizer};
use serde_json::{Value, json};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/tokenizers");

/// The golden tokenizers and the engine that each must use. A build without the general engine
/// refuses those that need it.
const FAMILIES: [(&str, &str); 12] = [
    ("gpt2", "own"),
    ("roberta", "own"),
    ("llama3", "own"),
    ("qwen2", "own"),
    ("o200k", "own"),
    ("deepseek", "own"),
    ("llama2", "own"),
    ("mistral", "own"),
    ("gemma", "own"),
    ("metaspace", "own"),
    ("unigram", "own"),
    ("bert", "general"),
];

fn expected() -> Value {
    serde_json::from_slice(&std::fs::read(format!("{GOLDEN}/expected.json")).unwrap()).unwrap()
}

fn spec(kind: &str, model: &str) -> TokenizerSpec {
    TokenizerSpec { kind: kind.to_owned(), model: Some(model.to_owned()), ..Default::default() }
}

fn ids_of(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
        .collect()
}

/// Encodes every text with an encoder, which has a cache, and without one.
#[track_caller]
fn check(name: &str, tokenizer: &dyn Tokenizer, texts: &Value, expected: &Value) {
    let mut encoder = tokenizer.encoder();
    let (texts, expected) = (texts.as_array().unwrap(), expected.as_array().unwrap());
    assert_eq!(texts.len(), expected.len());
    for (text, expected) in texts.iter().zip(expected) {
        let (text, expected) = (text.as_str().unwrap(), ids_of(expected));
        let (mut ids, mut again) = (Vec::new(), Vec::new());
        encoder.encode(text, &mut ids);
        tokenizer.encode(text, &mut again);
        assert_eq!(ids, expected, "{name}, on {text:?}");
        assert_eq!(again, expected, "{name}, without a cache, on {text:?}");
    }
}

#[test]
fn every_family_gives_the_ids_of_its_library() {
    let expected = expected();
    for (name, engine) in FAMILIES {
        let mut spec = spec("hf", &format!("{GOLDEN}/{name}.json"));
        if engine == "general" && !cfg!(feature = "general") {
            let error = HuggingFace::open(&spec).unwrap_err().to_string();
            assert!(error.contains("hint: "), "{error}");
            continue;
        }
        let tokenizer = HuggingFace::open(&spec).unwrap();
        assert_eq!(tokenizer.engine(), engine, "{name}");
        let family = &expected[name];
        check(name, &tokenizer, &expected["texts"], &family["ids"]);
        spec.without_special_tokens = true;
        let plain = open_tokenizer(&spec).unwrap();
        check(name, &*plain, &expected["texts"], &family["plain"]);
        for (ids, text) in
            family["ids"].as_array().unwrap().iter().zip(family["decoded"].as_array().unwrap())
        {
            let mut decoded = Vec::new();
            tokenizer.decode(&ids_of(ids), &mut decoded).unwrap();
            let decoded = String::from_utf8_lossy(&decoded);
            assert_eq!(decoded, text.as_str().unwrap(), "{name}, decoding {ids}");
        }
        let size = tokenizer.vocab_size();
        let error = tokenizer.decode(&[size], &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains(&size.to_string()), "{error}");
    }
}

#[test]
fn tiktoken_in_both_forms() {
    let expected = expected();
    for name in ["cl100k", "o200k", "r50k", "v1", "v2"] {
        let megatron = name.starts_with('v');
        let file = if megatron { "tekken.json" } else { "small.tiktoken" };
        let mut spec = spec("TikTokenizer", &format!("{GOLDEN}/{file}"));
        spec.tiktoken_pattern = Some(name.to_owned());
        if megatron {
            let count = serde_json::from_slice::<Vec<Value>>(
                &std::fs::read(format!("{GOLDEN}/tekken.json")).unwrap(),
            );
            spec.tiktoken_num_special_tokens = Some(20);
            spec.vocab_size = Some(20 + count.unwrap().len() as u32);
        }
        let tokenizer = open_tokenizer(&spec).unwrap();
        check(name, &*tokenizer, &expected["texts"], &expected["tiktoken"][name]);
        let eod = if megatron { 2 } else { tokenizer.vocab_size() - 1 };
        assert_eq!(tokenizer.eod(), Some(eod), "{name}");
        let mut decoded = Vec::new();
        tokenizer.decode(&[eod], &mut decoded).unwrap();
        assert_eq!(decoded, if megatron { &b"</s>"[..] } else { b"<|endoftext|>" });
    }
}

/// The identifiers that Megatron core 0.16.1 records for the same tokenizers, with the keys in the
/// same order: the names of its cache files depend on them.
#[test]
fn identifiers_match_megatron() {
    let file = format!("{GOLDEN}/../identifiers/expected.json");
    let expected: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let check = |name: &str, spec: &TokenizerSpec| {
        let mut found = open_tokenizer(spec).unwrap().identifiers().to_string();
        for (given, theirs) in [(&spec.model, "<model>"), (&spec.vocab_file, "<vocab>")] {
            if let Some(given) = given {
                found = found.replace(given, theirs);
            }
        }
        assert_eq!(found, expected[name].to_string(), "{name}");
    };
    let of_kind = |kind: &str| TokenizerSpec { kind: kind.to_owned(), ..Default::default() };
    check("gpt2", &of_kind("GPT2BPETokenizer"));
    let special_tokens = vec!["<a>".to_owned(), "it's".to_owned()];
    check("gpt2_special", &TokenizerSpec { special_tokens, ..of_kind("GPT2BPETokenizer") });
    check("gpt2_slow", &TokenizerSpec { slow: true, ..of_kind("GPT2BPETokenizer") });
    check("null", &TokenizerSpec { vocab_size: Some(100), ..of_kind("NullTokenizer") });
    for (name, kind, file) in [
        ("bert_lower", "BertWordPieceLowerCase", "lower"),
        ("bert_case", "BertWordPieceCase", "kept"),
    ] {
        let vocab_file = Some(format!("{GOLDEN}/../wordpiece/{file}.txt"));
        check(name, &TokenizerSpec { vocab_file, ..of_kind(kind) });
    }
    let vocab_file = Some(format!("{GOLDEN}/../wordpiece/lower.txt"));
    let plain = of_kind("BertWordPieceLowerCase");
    let plain = TokenizerSpec { vocab_file, slow: true, without_special_tokens: true, ..plain };
    check("bert_plain", &plain);
    let model = format!("{GOLDEN}/../sentencepiece/bpe.model");
    check("sentencepiece", &spec("SentencePieceTokenizer", &model));
    check("gpt_sentencepiece", &spec("GPTSentencePieceTokenizer", &model));
    check("llama2", &spec("Llama2Tokenizer", &model));
    let mut of_tiktoken = spec("TikTokenizer", &format!("{GOLDEN}/tekken.json"));
    of_tiktoken.tiktoken_pattern = Some("v2".to_owned());
    of_tiktoken.vocab_size = Some(276);
    of_tiktoken.tiktoken_num_special_tokens = Some(20);
    check("tiktoken", &of_tiktoken);

    let model = format!("{GOLDEN}/llama2.json");
    let mut of_hf = spec("HuggingFaceTokenizer", &model);
    check("hf", &of_hf);
    check("hf_trusted", &TokenizerSpec { trust_remote_code: true, ..of_hf.clone() });
    of_hf.special_tokens = vec!["<a>".to_owned(), "it's".to_owned()];
    of_hf.without_special_tokens = true;
    check("hf_special", &of_hf);
    let tokenizer = open_tokenizer(&of_hf).unwrap();
    let size = HuggingFace::open(&spec("hf", &model)).unwrap().vocab_size();
    assert_eq!(tokenizer.vocab_size(), size + 2, "the new tokens have ids");
    let mut ids = Vec::new();
    tokenizer.encode("a<a>it's", &mut ids);
    assert_eq!(ids[ids.len() - 1], size + 1);
}

#[test]
fn the_eod_token_comes_from_the_option_then_the_tokenizer_then_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::copy(format!("{GOLDEN}/llama3.json"), path("tokenizer.json")).unwrap();
    let open = |eod: Option<&str>| {
        let mut spec = spec("hf", folder.path().to_str().unwrap());
        spec.eod_token = eod.map(str::to_owned);
        HuggingFace::open(&spec)
    };
    let eod = |tokenizer: HuggingFace| tokenizer.eod();
    assert_eq!(open(None).map(eod).unwrap(), Some(0), "by its usual name");
    std::fs::write(path("generation_config.json"), r#"{"eos_token_id": [2, 1]}"#).unwrap();
    assert_eq!(open(None).map(eod).unwrap(), Some(2), "from generation_config.json");
    let config = json!({"eos_token": {"content": "<s>", "lstrip": false}});
    std::fs::write(path("tokenizer_config.json"), config.to_string()).unwrap();
    assert_eq!(open(None).map(eod).unwrap(), Some(1), "from tokenizer_config.json");
    assert_eq!(open(Some("</s>")).map(eod).unwrap(), Some(2), "from the option");
    let error = open(Some("<none>")).unwrap_err().to_string();
    assert!(error.contains("eod-token") && error.contains("<none>"), "{error}");
    std::fs::write(path("tokenizer_config.json"), "{").unwrap();
    let error = open(None).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
    std::fs::remove_file(path("tokenizer.json")).unwrap();
    let error = open(None).unwrap_err().to_string();
    assert!(error.contains("hint: "), "{error}");
}

/// A different layout of the same vocabulary has the same fingerprint; a different behaviour does
/// not.
#[test]
fn fingerprints_depend_on_behaviour_only() {
    let folder = tempfile::tempdir().unwrap();
    let open = |value: &Value, without_special_tokens: bool| {
        let file = folder.path().join("tokenizer.json");
        std::fs::write(&file, serde_json::to_string_pretty(value).unwrap()).unwrap();
        let spec = spec("hf", file.to_str().unwrap());
        HuggingFace::open(&TokenizerSpec { without_special_tokens, ..spec }).unwrap().fingerprint()
    };
    let text = std::fs::read(format!("{GOLDEN}/llama3.json")).unwrap();
    let value: Value = serde_json::from_slice(&text).unwrap();
    let given = spec("hf", &format!("{GOLDEN}/llama3.json"));
    let first = HuggingFace::open(&given).unwrap().fingerprint();
    assert_eq!(open(&value, false), first);
    let mut lines = value.clone();
    for merge in lines["model"]["merges"].as_array_mut().unwrap() {
        *merge = format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()).into();
    }
    assert_eq!(open(&lines, false), first, "merges as lines are the same merges");
    let mut seen = vec![first];
    let mut differs = |fingerprint: String| {
        assert!(!seen.contains(&fingerprint));
        seen.push(fingerprint);
    };
    differs(open(&value, true));
    for (pointer, other) in [
        ("/model/ignore_merges", json!(false)),
        ("/normalizer", json!({"type": "NFC"})),
        ("/added_tokens/0/lstrip", json!(true)),
        ("/pre_tokenizer", json!({"type": "ByteLevel", "add_prefix_space": false})),
    ] {
        let mut changed = value.clone();
        *changed.pointer_mut(pointer).unwrap() = other;
        differs(open(&changed, false));
    }
}

#[track_caller]
fn refused(text: &str, words: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, text).unwrap();
    let message = HuggingFace::open(&spec("hf", file.to_str().unwrap())).unwrap_err().to_string();
    for word in words {
        assert!(message.contains(word), "without '{word}': {message}");
    }
}

#[test]
fn invalid_tokenizer_files_are_refused() {
    refused("", &["line 1"]);
    refused("{}", &["model"]);
    refused(r#"{"model": {"type": "BPE", "vocab": {}}}"#, &["no tokens"]);
    refused(r#"{"model": {"type": "BPE", "vocab": {"a": 4294967295}}}"#, &["2097150"]);
    refused(r#"{"model": {"type": "BPE", "vocab": {"a": -1}}}"#, &["-1"]);
    refused(
        r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a  a"]}}"#,
        &["two tokens"],
    );
    let special = r#"{"model": {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}}}"#;
    refused(special, &["found dropout 0.5"]);
    // Found by fuzzing: ids of the post-processor that are not in the vocabulary were written to
    // the output.
    let around = r#"{"model": {"type": "BPE", "vocab": {"a": 0}}, "post_processor":
        {"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 0]}}"#;
    refused(around, &["id 1 in the post-processor", "below 1"]);
    if !cfg!(feature = "general") {
        return;
    }
    refused(r#"{"model": {"type": "New", "vocab": {"a": 0}}}"#, &["unknown token"]);
    let merge = r#"{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}"#;
    refused(merge, &["the library"]);
    let model = r#"{"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}"#;
    refused(&format!(r#"{{"model": {model}}}"#), &["unknown token"]);
}

/// The library keeps added tokens in a hash map. If its normalizer makes two of them equal, which
/// one it finds in the same text differs from process to process.
#[test]
fn added_tokens_that_normalize_to_the_same_text_are_refused() {
    let text = std::fs::read(format!("{GOLDEN}/gpt2.json")).unwrap();
    let mut value: Value = serde_json::from_slice(&text).unwrap();
    let next = value["model"]["vocab"].as_object().unwrap().len() as u64;
    let token = |place: u64, content: &str| {
        json!({
            "id": next + place, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": true, "special": false,
        })
    };
    let first = value["added_tokens"].as_array().unwrap().clone();
    let mut with = |normalizer: Value, contents: [&str; 2]| {
        let mut tokens = first.clone();
        // Tokens that are in the vocabulary keep their ids.
        let fresh = first.iter().filter(|one| one["id"].as_u64() >= Some(next)).count() as u64;
        tokens.extend((fresh..).zip(contents).map(|(place, content)| token(place, content)));
        value["added_tokens"] = tokens.into();
        value["normalizer"] = normalizer;
        value.to_string()
    };
    let (composed, decomposed) = ("\u{e9}!", "e\u{301}!");
    let names = [composed, decomposed];
    refused(&with(json!({ "type": "NFC" }), names), &names);
    refused(&with(json!({ "type": "NFD" }), names), &names);
    if cfg!(feature = "general") {
        // With a normalizer that only the library has.
        let lower = json!({ "type": "Sequence", "normalizers": [
            { "type": "Strip", "strip_left": false, "strip_right": false }, { "type": "Lowercase" },
        ] });
        refused(&with(lower, ["<Name>", "<NAME>"]), &["<Name>", "<NAME>"]);
        let same_id = r#"{"model": {"type": "WordLevel", "unk_token": "a",
            "vocab": {"a": 0, "b": 1, "c": 1}}}"#;
        refused(same_id, &["'b' and 'c' with id 1"]);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, with(json!({ "type": "NFC" }), [composed, "e!"])).unwrap();
    HuggingFace::open(&spec("hf", file.to_str().unwrap())).unwrap();
}

#[test]
fn invalid_tiktoken_vocabularies_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vocab");
    let open = |text: &str, pattern: Option<&str>, vocab_size: Option<u32>| {
        std::fs::write(&file, text).unwrap();
        let mut spec = spec("tiktoken", file.to_str().unwrap());
        spec.tiktoken_pattern = pattern.map(str::to_owned);
        spec.vocab_size = vocab_size;
        Tiktoken::open(&spec).unwrap_err().to_string()
    };
    let good = std::fs::read_to_string(format!("{GOLDEN}/small.tiktoken")).unwrap();
    let list = std::fs::read_to_string(format!("{GOLDEN}/tekken.json")).unwrap();
    for (text, pattern, vocab_size, word) in [
        (good.as_str(), None, None, "tiktoken-pattern"),
        (&good, Some("x"), None, "tiktoken-pattern"),
        ("YQ== 0\n", Some("v1"), None, "0x00"),
        ("YQ==0\n", Some("v1"), None, "line 1"),
        ("YQ== 0\nYQ= 1\n", Some("v1"), None, "line 2"),
        ("YQ== 99999999\n", Some("v1"), None, "line 1"),
        (&format!("{good}YQ== 7000\n"), Some("v1"), None, "same bytes"),
        (&format!("{good}YWFhYWE= 7\n"), Some("v1"), None, "7"),
        (&list, None, None, "--vocab-size"),
        (&list, None, Some(900), "num-special-tokens"),
        (&list, None, Some(3_000_000), "vocab-size"),
        ("[1]", None, None, "token_bytes"),
        (r#"[{"rank": 0, "token_bytes": "AA==", "token_str": null, "x": 1}]"#, None, None, "x"),
        (
            r#"[{"rank": 1, "token_bytes": "AA==", "token_str": null}]"#,
            None,
            Some(1001),
            "rank order",
        ),
    ] {
        let message = open(text, pattern, vocab_size);
        assert!(message.contains(word), "without '{word}': {message}");
    }
}

/// The error for a file of another tokenizer names what the file is.
#[test]
fn a_file_of_another_tokenizer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let check = |kind: &str, file: &str, words: [&str; 2]| {
        let found = open_tokenizer(&spec(kind, file)).unwrap_err().to_string();
        for word in words {
            assert!(found.contains(word), "{kind} {file}: {found}");
        }
    };
    let published = folder.path().join("tekken.json");
    let vocab: Value =
        serde_json::from_slice(&std::fs::read(format!("{GOLDEN}/tekken.json")).unwrap()).unwrap();
    let object = json!({ "config": { "default_vocab_size": 900 }, "vocab": vocab });
    std::fs::write(&published, object.to_string()).unwrap();
    let published = published.to_str().unwrap();
    check("tiktoken", published, ["Mistral's published tekken.json", "\"vocab\""]);
    check("hf", published, ["Mistral's published tekken.json", "--tokenizer tiktoken"]);
    check("hf", &format!("{GOLDEN}/tekken.json"), ["Megatron's form", "--tokenizer tiktoken"]);
    check("tiktoken", &format!("{GOLDEN}/llama3.json"), ["tokenizer.json", "--tokenizer hf"]);
    check("sentencepiece", &format!("{GOLDEN}/llama3.json"), ["tokenizer.json", "--tokenizer hf"]);
    check("sentencepiece", &format!("{GOLDEN}/small.tiktoken"), ["a tiktoken vocabulary", "hint"]);
    check("hf", &format!("{GOLDEN}/small.tiktoken"), ["a tiktoken vocabulary", "hint"]);
    let model = format!("{GOLDEN}/../sentencepiece/word.model");
    check("hf", &model, ["a SentencePiece model", "--tokenizer sentencepiece"]);
    check("tiktoken", &model, ["a SentencePiece model", "--tokenizer sentencepiece"]);
    let ids = folder.path().join("vocab.json");
    std::fs::write(&ids, r#"{"a": 0, "b": 1}"#).unwrap();
    check("hf", ids.to_str().unwrap(), ["vocab.json", "--merge-file"]);
}

/// Valid files with random changes: each is refused or encodes, without a panic.
#[test]
fn randomly_changed_files_never_panic() {
    let mut random = Random::new(print_seed("changed_files", 0x5eed_0020));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    let texts = expected()["texts"].clone();
    let (mut opened, mut refused) = (0, 0);
    for (name, _) in FAMILIES.iter().filter(|(name, _)| *name != "bert") {
        let good = std::fs::read(format!("{GOLDEN}/{name}.json")).unwrap();
        for _ in 0..60 {
            let text = if random.below(3) == 0 {
                changed_bytes(&mut random, &good)
            } else {
                let mut value: Value = serde_json::from_slice(&good).unwrap();
                for _ in 0..=random.below(3) {
                    change(&mut random, &mut value);
                }
                serde_json::to_vec(&value).unwrap()
            };
            std::fs::write(&file, &text).unwrap();
            match HuggingFace::open(&spec("hf", file.to_str().unwrap())) {
                Err(_) => refused += 1,
                Ok(tokenizer) => {
                    opened += 1;
                    encode_and_decode(&tokenizer, &texts);
                }
            }
        }
    }
    // Fewer are accepted in a build without the general engine.
    assert!(opened > 50 && refused > 100, "{opened} opened, {refused} refused");
}

fn encode_and_decode(tokenizer: &HuggingFace, texts: &Value) {
    let mut encoder = tokenizer.encoder();
    for text in texts.as_array().unwrap() {
        let mut ids = Vec::new();
        encoder.encode(text.as_str().unwrap(), &mut ids);
        assert!(
            tokenizer.engine() == "general" || ids.iter().all(|&id| id < tokenizer.vocab_size())
        );
        let _ = tokenizer.decode(&ids, &mut Vec::new());
    }
    tokenizer.cut_after("Hello, world! And more.", 3);
}

fn changed_bytes(random: &mut Random, good: &[u8]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    match random.below(3) {
        0 => bytes.truncate(random.below(good.len() as u64) as usize),
        1 => {
            let at = random.below(good.len() as u64) as usize;
            bytes[at] = random.next() as u8;
        }
        _ => {
            let at = random.below(good.len() as u64) as usize;
            let end = (at + random.below(40) as usize).min(bytes.len());
            bytes.drain(at..end);
        }
    }
    bytes
}

/// Changes one value at a random place of the tree.
fn change(random: &mut Random, value: &mut Value) {
    let down = random.below(10) > 1;
    match value {
        Value::Object(map) if down && !map.is_empty() => {
            let at = random.below(map.len() as u64) as usize;
            let inner = map.values_mut().nth(at).unwrap();
            change(random, inner);
        }
        Value::Array(list) if down && !list.is_empty() => {
            let at = random.below(list.len() as u64) as usize;
            match random.below(8) {
                0 => drop(list.remove(at)),
                1 => list.push(list[at].clone()),
                2 => list.rotate_left(at),
                _ => change(random, &mut list[at]),
            }
        }
        Value::Bool(flag) => *flag = !*flag,
        Value::Number(number) if random.below(2) == 0 => {
            *value = json!(number.as_u64().unwrap_or(0).wrapping_add(random.below(3)));
        }
        Value::String(text) if random.below(2) == 0 => {
            let other = ["", " ", "▁", "é", "<0x41>", "\\p{L}+", "(", "Isolated", "NFC"];
            let &more = random.pick(&other);
            text.push_str(more);
        }
        other => {
            let values = [
                json!(null),
                json!(0),
                json!(-1),
                json!(1e9),
                json!(""),
                json!([]),
                json!({}),
                json!("a"),
            ];
            *other = random.pick(&values).clone();
        }
    }
}

#[test]
fn a_cut_text_has_the_same_ids() {
    let mut random = Random::new(print_seed("a_cut_text", 0x5eed_0021));
    let mut cuts = 0;
    for name in ["gpt2", "llama3", "qwen2", "deepseek", "gemma"] {
        assert!(Path::new(&format!("{GOLDEN}/{name}.json")).exists());
        let mut spec = spec("hf", &format!("{GOLDEN}/{name}.json"));
        spec.without_special_tokens = true;
        let tokenizer = HuggingFace::open(&spec).unwrap();
        for _ in 0..100 {
            let mut text = random.soup(200);
            text.push_str("<|endoftext|>, cafe\u{301} tool <s>.\n");
            text.push_str(&random.english(300));
            let at = random.below(text.len() as u64) as usize;
            let Some(cut) = tokenizer.cut_after(&text, at) else { continue };
            assert!(cut >= at, "{name}");
            cuts += 1;
            let (mut whole, mut parts) = (Vec::new(), Vec::new());
            tokenizer.encode(&text, &mut whole);
            tokenizer.encode(&text[..cut], &mut parts);
            tokenizer.encode(&text[cut..], &mut parts);
            assert_eq!(parts, whole, "{name}, cut at {cut}: {text:?}");
        }
    }
    assert!(cuts > 100, "{cuts} cuts");
}
