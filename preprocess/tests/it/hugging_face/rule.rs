//! A class that a folder of Hugging Face names may have another rule than its `tokenizer.json`. The
//! expected ids are those of `AutoTokenizer.from_pretrained(FOLDER)` of transformers 5 for `class`,
//! and of `Tokenizer.from_file` of tokenizers for `file`.

use std::path::Path;
use std::process::Command;

use preprocess::{HuggingFace, Tokenizer, TokenizerSpec, open_tokenizer};
use serde_json::{Value, json};

use crate::common::byte_level::tokenizer_json;

const CONFIG: &str = "tokenizer_config.json";

/// Writes a folder and opens it.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new(tokenizer: &Value, files: &[(&str, Value)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        for (name, value) in files {
            std::fs::write(folder.path().join(name), value.to_string()).unwrap();
        }
        Case { folder }
    }

    fn of_class(class: &str, tokenizer: &Value) -> Self {
        Case::new(tokenizer, &[(CONFIG, json!({ "tokenizer_class": class }))])
    }

    fn open(&self, rule: Option<&str>) -> Result<HuggingFace, String> {
        HuggingFace::open(&spec(self.folder.path(), rule)).map_err(|error| error.to_string())
    }

    fn ids(&self, rule: Option<&str>, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        self.open(rule).unwrap().encode(text, &mut ids);
        ids
    }

    /// The folder is refused where no rule is chosen, and both rules have their ids.
    #[track_caller]
    fn check(&self, class: &str, word: &str, text: &str, [file, of_class]: [&[u32]; 2]) {
        let found = self.open(None).unwrap_err();
        for part in [class, word, "--tokenizer-rule file", "--tokenizer-rule class"] {
            assert!(found.contains(part), "{part} in {found}");
        }
        assert_eq!(self.ids(Some("file"), text), file, "file of {class}");
        assert_eq!(self.ids(Some("class"), text), of_class, "class {class}");
        let open = |rule| self.open(Some(rule)).unwrap();
        assert_ne!(open("file").fingerprint(), open("class").fingerprint(), "{class}");
        assert!(open("class").rule().unwrap().starts_with("class "), "{class}");
        assert!(open("file").rule().unwrap().starts_with("tokenizer.json"), "{class}");
    }
}

fn spec(model: &Path, rule: Option<&str>) -> TokenizerSpec {
    TokenizerSpec {
        kind: "hf".to_owned(),
        model: Some(model.to_str().unwrap().to_owned()),
        tokenizer_rule: rule.map(str::to_owned),
        ..TokenizerSpec::default()
    }
}

fn with(key: &str, value: Value) -> Value {
    let mut json = tokenizer_json();
    json[key] = value;
    json
}

/// Taken silently, each folder once had the ids of its file.
#[test]
fn a_class_with_another_rule_is_refused_until_one_is_chosen() {
    let accent = "e\u{301}";
    let (composed, apart): (&[u32], &[u32]) = (&[0xc3, 0xa9], &[0x65, 0xcc, 0x81]);
    let nfc = with("normalizer", json!({ "type": "NFC" }));
    let case = Case::of_class("GPT2TokenizerFast", &nfc);
    case.check("GPT2Tokenizer", "normalizer", accent, [composed, apart]);
    let case = Case::of_class("Qwen2Tokenizer", &tokenizer_json());
    case.check("Qwen2Tokenizer", "normalizer", accent, [apart, composed]);
    let case = Case::of_class("GPTNeoXTokenizer", &tokenizer_json());
    case.check("GPTNeoXTokenizer", "<|padding|>", accent, [apart, composed]);
    let padding = "<|padding|>";
    let bytes: Vec<u32> = padding.bytes().map(u32::from).collect();
    case.check("GPTNeoXTokenizer", "normalizer", padding, [&bytes, &[257]]);
    assert_eq!(case.open(Some("class")).unwrap().vocab_size(), 258);
    assert_eq!(case.open(Some("file")).unwrap().vocab_size(), 257);
    // A setting of the class.
    let config = json!({ "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": true });
    let case = Case::new(&tokenizer_json(), &[(CONFIG, config)]);
    case.check("GPT2Tokenizer", "add_prefix_space", "a", [&[97], &[32, 97]]);
    // RoBERTa's class puts tokens around a text that the file has not; `</s>` gets the next id.
    let case = Case::of_class("RobertaTokenizer", &tokenizer_json());
    case.check("RobertaTokenizer", "post-processor", "a", [&[97], &[257, 97, 258]]);
}

/// A class of WordPiece, which lower-cases unless its config says otherwise.
#[test]
fn the_general_engine_follows_a_class() {
    let vocab = json!({
        "[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "hello": 5, "Hello": 6,
    });
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    };
    let names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];
    let tokenizer = json!({
        "added_tokens": (0..5).map(|id| special(id, names[id as usize])).collect::<Value>(),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": false,
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": null,
        "decoder": null,
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab,
        },
    });
    let case = Case::of_class("BertTokenizerFast", &tokenizer);
    let ids: [&[u32]; 2] = [&[6, 4], &[2, 5, 4, 3]];
    case.check("BertTokenizer", "lowercase", "Hello [MASK]", ids);
    let config = json!({ "tokenizer_class": "ElectraTokenizer", "do_lower_case": false });
    let mut spec = spec(Path::new(""), None);
    let case = Case::new(&tokenizer, &[(CONFIG, config)]);
    spec.model = case.folder.path().to_str().map(str::to_owned);
    // Without tokens around a text the two are the same.
    assert!(HuggingFace::open(&spec).is_err());
    spec.without_special_tokens = true;
    let same = HuggingFace::open(&spec).unwrap();
    assert!(same.rule().unwrap().contains("the same"), "{:?}", same.rule());
}

#[test]
fn a_class_with_the_rule_of_the_file_passes() {
    let gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    let split = json!({
        "type": "Sequence",
        "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": gpt2 }, "behavior": "Isolated",
              "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
              "use_regex": false },
        ],
    });
    for tokenizer in [tokenizer_json(), with("pre_tokenizer", split)] {
        for class in ["GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer"] {
            let case = Case::of_class(class, &tokenizer);
            let fingerprints = [None, Some("file"), Some("class")]
                .map(|rule| case.open(rule).unwrap().fingerprint());
            assert!(fingerprints.iter().all(|one| *one == fingerprints[0]), "{class}");
        }
    }
    // Classes that read the file, and a name that is no class of transformers.
    for class in ["PreTrainedTokenizerFast", "TokenizersBackend", "BloomTokenizer", "OwnTokenizer"]
    {
        let case = Case::of_class(class, &with("normalizer", json!({ "type": "NFC" })));
        for rule in [None, Some("file"), Some("class")] {
            assert_eq!(case.ids(rule, "e\u{301}"), [0xc3, 0xa9], "{class}");
        }
    }
}

#[test]
fn an_unsupported_class_is_refused_by_name() {
    for class in ["NllbTokenizerFast", "CTRLTokenizer", "CodeLlamaTokenizer", "XGLMTokenizer"] {
        let case = Case::of_class(class, &tokenizer_json());
        for rule in [None, Some("class")] {
            let found = case.open(rule).unwrap_err();
            let name = class.trim_end_matches("Fast");
            assert!(found.contains(name) && found.contains("--tokenizer-rule file"), "{found}");
        }
        assert_eq!(case.ids(Some("file"), "a"), [97]);
    }
    // A class of another type of model.
    let case = Case::of_class("T5Tokenizer", &tokenizer_json());
    let found = case.open(Some("class")).unwrap_err();
    assert!(found.contains("T5Tokenizer") && found.contains("BPE"), "{found}");
    assert_eq!(case.ids(Some("file"), "a"), [97]);
}

/// The type of the model may decide for another class than the one that is named.
#[test]
fn the_type_of_the_model_decides_too() {
    let nfc = with("normalizer", json!({ "type": "NFC" }));
    let case =
        |model: Value, config: Value| Case::new(&nfc, &[("config.json", model), (CONFIG, config)]);
    let gpt2 = json!({ "tokenizer_class": "GPT2Tokenizer" });
    let fast = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
    let of = |name: &str| json!({ "model_type": name });
    let code = json!({ "tokenizer_class": "GPT2Tokenizer",
                       "auto_map": { "AutoTokenizer": ["a.B", null] } });
    for (model, config, class) in [
        // No class of its own is registered for the type.
        (of("llama"), gpt2.clone(), Some("GPT2Tokenizer")),
        (json!({}), gpt2.clone(), Some("GPT2Tokenizer")),
        (of("mistral"), gpt2.clone(), None),
        (of("mistral"), code, Some("GPT2Tokenizer")),
        (of("qwen2"), fast.clone(), Some("Qwen2Tokenizer")),
        (of("qwen3"), fast, None),
        (of("gptj"), json!({}), Some("GPT2Tokenizer")),
        (of("llama"), json!({}), None),
        (json!({ "tokenizer_class": "GPT2Tokenizer" }), json!({}), Some("GPT2Tokenizer")),
        (of("code_llama"), json!({}), None),
        (of("llama"), json!({ "tokenizer_class": "LlamaTokenizerFast" }), None),
    ] {
        let found = case(model.clone(), config.clone()).open(None);
        match class {
            Some(class) => {
                let found = found.unwrap_err();
                assert!(found.contains(class), "{class} for {model} and {config}: {found}");
            }
            None => assert!(found.is_ok(), "{model} {config}: {}", found.unwrap_err()),
        }
    }
}

#[test]
fn a_rule_that_cannot_be_followed_is_refused() {
    let case = Case::of_class("GPT2Tokenizer", &tokenizer_json());
    let refused = |spec: &TokenizerSpec, word: &str| {
        let found = open_tokenizer(spec).unwrap_err().to_string();
        assert!(found.contains("tokenizer-rule") && found.contains(word), "{found}");
    };
    refused(&spec(case.folder.path(), Some("own")), "file or class");
    let file = case.folder.path().join("tokenizer.json");
    refused(&spec(&file, Some("class")), "folder");
    open_tokenizer(&spec(&file, Some("file"))).unwrap();
    let kind = "gpt2".to_owned();
    refused(&TokenizerSpec { kind, model: None, ..spec(&file, Some("file")) }, "gpt2");
}

/// The rule is in the manifest, and a run with one rule is not resumed with the other.
#[test]
fn a_run_keeps_its_rule() {
    let case = Case::of_class("GPTNeoXTokenizer", &tokenizer_json());
    let folder = case.folder.path();
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let lines = folder.join("lines.jsonl");
    let good = "{\"text\": \"e\u{301}\"}\n".repeat(2000);
    std::fs::write(&lines, format!("{good}{{\"text\": 1}}\n")).unwrap();
    let run = |more: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_preprocess"))
            .args(["--json-in", &text(&lines), "--out", &text(&folder.join("out"))])
            .args(["--tokenizer", "hf", "--tokenizer-model", &text(folder)])
            .args(["--commit-interval", "1ms", "--block-bytes", "20000"])
            .args(more)
            .output()
            .unwrap()
    };
    let refused = |more: &[&str], word: &str| {
        let output = run(more);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && message.contains(word), "{word}: {message}");
    };
    refused(&[], "--tokenizer-rule class");
    // The last line is bad, so that the run is interrupted.
    refused(&["--tokenizer-rule", "class"], "line 2001");
    refused(&["--tokenizer-rule", "file", "--resume"], "expected tokenizer = ");
    std::fs::write(&lines, format!("{good}{{\"text\": \"a\"}}\n")).unwrap();
    let output = run(&["--tokenizer-rule", "class", "--resume"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let manifest = folder.join("out_text_document.manifest.json");
    let manifest = std::fs::read_to_string(manifest).unwrap();
    assert!(manifest.contains("class GPTNeoXTokenizer"), "{manifest}");
    let bytes = std::fs::read(folder.join("out_text_document.bin")).unwrap();
    assert_eq!(bytes, [[0xc3, 0, 0xa9, 0].repeat(2000), vec![97, 0]].concat());
}
