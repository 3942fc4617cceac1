//! `feedline ckpt export` and `import` of a GPT-2: what `config.json` has, and what is refused.

use std::path::Path;
use std::process::{Command, Output};

use ckpt::{Blob, Checkpoints, Dtype, Group, TensorData};
use serde_json::{Value, json};
use storage::Key;

const SHAPES: [(&str, &[u64]); 16] = [
    ("wte.weight", &[10, 4]),
    ("wpe.weight", &[3, 4]),
    ("h.0.ln_1.weight", &[4]),
    ("h.0.ln_1.bias", &[4]),
    ("h.0.attn.c_attn.weight", &[4, 12]),
    ("h.0.attn.c_attn.bias", &[12]),
    ("h.0.attn.c_proj.weight", &[4, 4]),
    ("h.0.attn.c_proj.bias", &[4]),
    ("h.0.ln_2.weight", &[4]),
    ("h.0.ln_2.bias", &[4]),
    ("h.0.mlp.c_fc.weight", &[4, 16]),
    ("h.0.mlp.c_fc.bias", &[16]),
    ("h.0.mlp.c_proj.weight", &[16, 4]),
    ("h.0.mlp.c_proj.bias", &[4]),
    ("ln_f.weight", &[4]),
    ("ln_f.bias", &[4]),
];

fn feedline(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.arg("ckpt").args(args).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Saves step 1 of a run with these keys of `[model]`, and the tensors whose name `is_wanted`.
fn save(folder: &Path, model: &str, is_wanted: impl Fn(&str) -> bool) -> String {
    let root = folder.to_str().unwrap().to_owned();
    let config = format!(
        "[run]\ndir = 'r'\nbudget = {{ steps = 1 }}\n[model]\nlayers = 1\nhidden = 4\nheads = 2\n\
         vocab = 10\nseq_len = 3\n{model}\n[data]\ntrain = 'c'\ntokenizer = 'null:10'\n\
         special = {{ eod = 0 }}\n[batch]\nglobal = 1\nmicro = 1\n[optim.lr]\npeak = 1e-3\n"
    );
    let zeros = vec![0; 4 * 64];
    let names: Vec<String> = SHAPES.iter().map(|(name, _)| format!("transformer.{name}")).collect();
    let tensors: Vec<TensorData<'_>> = SHAPES
        .iter()
        .zip(&names)
        .filter(|((name, _), _)| is_wanted(name))
        .map(|((_, shape), name)| TensorData {
            name,
            group: Group::Model,
            dtype: Dtype::F32,
            shape,
            bytes: &zeros[..4 * shape.iter().product::<u64>() as usize],
        })
        .collect();
    let blobs = [Blob { name: "config.toml", bytes: config.as_bytes() }];
    let steps = Checkpoints::open(storage::open_url(&root).unwrap(), Key::root());
    steps.save(1, &tensors, &blobs, json!({})).unwrap();
    root
}

/// `config.json` was that of the published GPT-2 but for its sizes, whatever the run had.
#[test]
fn export_has_the_configuration_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("hf");
    let model = "activation = 'relu'\nnorm_eps = 1e-2\ndropout = 0.0\nattention_dropout = 0.25";
    let steps = save(&folder.path().join("steps"), model, |_| true);
    let output = feedline(&["export", &steps, out.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let config: Value =
        serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    let expected = json!({
        "activation_function": "relu", "layer_norm_epsilon": 1e-2, "embd_pdrop": 0.0,
        "resid_pdrop": 0.0, "attn_pdrop": 0.25, "eos_token_id": 0, "bos_token_id": 0,
        "model_type": "gpt2", "n_head": 2, "vocab_size": 10,
    });
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(config[key], *value, "{key}");
    }
}

/// A `tokenizer.json` with one special token.
fn write_tokenizer(folder: &Path) -> String {
    std::fs::create_dir_all(folder).unwrap();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [{
            "id": 0, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": true,
        },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true },
        "model": { "type": "BPE", "vocab": { "<end>": 0, "a": 1, "b": 2, "ab": 3 },
                   "merges": ["a b"] },
    });
    let file = folder.join("tokenizer.json");
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    file.to_str().unwrap().to_owned()
}

fn json_of(file: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// The folder had no tokenizer, and GPT-2's classes would have cut texts in their own way.
#[test]
fn tokenizer_is_exported() {
    let folder = tempfile::tempdir().unwrap();
    let steps = save(&folder.path().join("steps"), "", |_| true);
    let file = write_tokenizer(&folder.path().join("tokenizer"));
    let export = |name: &str, tokenizer: &str| {
        let out = folder.path().join(name);
        let output = feedline(&["export", &steps, out.to_str().unwrap(), "--tokenizer", tokenizer]);
        (out, output)
    };
    let (out, output) = export("file", &format!("hf:{file}"));
    assert!(output.status.success(), "{}", stderr(&output));
    let written = json_of(&out.join("tokenizer_config.json"));
    assert_eq!(written["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(written["model_input_names"], json!(["input_ids", "attention_mask"]));
    assert_eq!((&written["eos_token"], &written["model_max_length"]), (&json!("<end>"), &json!(3)));
    let bytes = |file: &Path| std::fs::read(file).unwrap();
    assert_eq!(bytes(&out.join("tokenizer.json")), bytes(Path::new(&file)));

    // The config of a folder is kept, except for the class, and for code that would make other ids.
    let beside = Path::new(&file).with_file_name("tokenizer_config.json");
    let given = json!({ "tokenizer_class": "GPT2Tokenizer", "model_max_length": 7,
                        "auto_map": { "AutoTokenizer": ["x.py", null] }, "eos_token": "<end>" });
    std::fs::write(&beside, given.to_string()).unwrap();
    let of_folder = format!("hf:{}", beside.parent().unwrap().display());
    // GPT-2's class has a token that this file lacks.
    let (_, output) = export("class", &of_folder);
    assert!(!output.status.success() && stderr(&output).contains("GPT2Tokenizer"));
    let (_, output) = export("class", &format!("{of_folder},rule=class"));
    assert!(!output.status.success() && stderr(&output).contains("tokenizer-rule"));
    let (out, output) = export("folder", &format!("{of_folder},rule=file"));
    assert!(output.status.success(), "{}", stderr(&output));
    let written = json_of(&out.join("tokenizer_config.json"));
    assert_eq!(written["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!((&written["model_max_length"], &written["auto_map"]), (&json!(7), &Value::Null));

    let (out, output) = export("gpt2", "gpt2");
    let found = stderr(&output);
    assert!(output.status.success() && found.contains("has 50257 tokens"), "{found}");
    for name in ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"] {
        assert!(out.join(name).exists(), "{name}");
    }
    check_ids("gpt2", &out);
    let (out, output) = export("none", "null:10");
    let found = stderr(&output);
    assert!(output.status.code() == Some(2) && found.contains("found 'null'"), "{found}");
    assert!(!out.exists());
}

/// Checks that the exported folder gives the ids of the original tokenizer.
fn check_ids(name: &str, folder: &Path) {
    let exported = preprocess::TokenizerSpec {
        kind: "hf".to_owned(),
        model: Some(folder.to_str().unwrap().to_owned()),
        without_special_tokens: true,
        ..preprocess::TokenizerSpec::default()
    };
    let exported = preprocess::open_tokenizer(&exported).unwrap();
    let original = feed::open_tokenizer(name).unwrap();
    for text in ["a b ab ABBA", "The cat's 12  dogs\n\n\tÉa 日本", "", " ", "a\u{301}b\u{a0}b"] {
        let [mut ids, mut expected] = [Vec::new(), Vec::new()];
        exported.encode(text, &mut ids);
        original.encode(text, &mut expected);
        assert_eq!(ids, expected, "{name}: {text:?}");
    }
}

/// A WordPiece vocabulary of BERT: its pairs, and the five special tokens.
#[test]
fn wordpiece_vocabulary_is_exported_for_bert() {
    let folder = tempfile::tempdir().unwrap();
    let steps = save(&folder.path().join("steps"), "", |_| true);
    let vocab = folder.path().join("vocab.txt");
    let words = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##b\n";
    std::fs::write(&vocab, words).unwrap();
    for (kind, is_lower, chars_max, is_exact) in
        [("wordpiece", true, 100, true), ("BertWordPieceCase", false, 200, false)]
    {
        let out = folder.path().join(kind);
        let tokenizer = format!("{kind}:{}", vocab.display());
        let output =
            feedline(&["export", &steps, out.to_str().unwrap(), "--tokenizer", &tokenizer]);
        let found = stderr(&output);
        assert!(output.status.success(), "{found}");
        assert_eq!(found.contains("may differ"), !is_exact, "{found}");
        assert_eq!(std::fs::read_to_string(out.join("vocab.txt")).unwrap(), words);
        let written = json_of(&out.join("tokenizer.json"));
        assert_eq!(written["normalizer"]["lowercase"], is_lower);
        assert_eq!(written["model"]["max_input_chars_per_word"], chars_max);
        assert_eq!(written["post_processor"]["pair"].as_array().unwrap().len(), 5);
        assert_eq!(written["added_tokens"].as_array().unwrap().len(), 5);
        check_ids(&tokenizer, &out);
    }
}

/// The run's tokenizer has no form in `transformers`, or cannot be opened: the weights are
/// exported anyway.
#[test]
fn export_without_a_tokenizer_warns() {
    let folder = tempfile::tempdir().unwrap();
    let steps = save(&folder.path().join("steps"), "", |_| true);
    let out = folder.path().join("hf");
    let output = feedline(&["export", &steps, out.to_str().unwrap()]);
    let found = stderr(&output);
    assert!(output.status.success(), "{found}");
    assert!(found.contains("warning: no tokenizer files are written"), "{found}");
    assert!(!out.join("tokenizer_config.json").exists());
}

/// Shapes do not show what a step without a config was trained with.
#[test]
fn assumptions_without_a_config_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let steps = save(&folder.path().join("steps"), "", |_| true);
    let file = format!("{steps}/step-000000000001/model-00001-of-00001.safetensors");
    assert!(feedline(&["import", &file, &path("bare"), "--from", "hf"]).status.success());
    let output = feedline(&["export", &path("bare"), &path("hf"), "--heads", "2"]);
    let found = stderr(&output);
    assert!(output.status.success(), "{found}");
    for text in ["activation_function \"gelu_new\"", "attn_pdrop 0.1", "eos_token_id null"] {
        assert!(found.contains(text), "{text}: {found}");
    }
    let config = json_of(&folder.path().join("hf/config.json"));
    assert_eq!((&config["eos_token_id"], &config["resid_pdrop"]), (&Value::Null, &json!(0.1)));
}

#[test]
fn options_that_contradict_the_run_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let steps = save(&folder.path().join("steps"), "", |_| true);
    let out = folder.path().join("hf").to_str().unwrap().to_owned();
    for (flag, value, text) in [
        ("--heads", "4", "expected model.heads = 2, found 4"),
        ("--vocab-size", "9", "expected at least model.vocab = 10, found 9"),
        ("--dropout", "0.1", "expected a T5"),
        ("--tokenizer", "hf:/nonexistent", "cannot use --tokenizer"),
    ] {
        let output = feedline(&["export", &steps, &out, flag, value]);
        let found = stderr(&output);
        assert!(output.status.code() == Some(2) && found.contains(text), "{flag}: {found}");
        assert!(!Path::new(&out).exists(), "{flag}");
    }
    let output = feedline(&["export", &steps, &out, "--vocab-size", "12"]);
    let found = stderr(&output);
    assert!(output.status.success() && found.contains("from 10 on"), "{found}");
}

#[test]
fn inexpressible_networks_are_not_exported() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (model, key)) in [
        ("norm = 'rmsnorm'\nactivation = 'relu'", "model.norm"),
        ("positions = 'rope'", "model.positions"),
        ("head_dim = 4", "model.head_dim"),
    ]
    .into_iter()
    .enumerate()
    {
        let steps = save(&folder.path().join(number.to_string()), model, |_| true);
        let out = folder.path().join("hf");
        let output = feedline(&["export", &steps, out.to_str().unwrap()]);
        let found = stderr(&output);
        assert!(output.status.code() == Some(2) && found.contains(key), "{model}: {found}");
        assert!(!out.exists(), "{model}");
    }
}

/// A file of a model that has several, and a model without its last layer.
#[test]
fn incomplete_models_are_not_imported() {
    let folder = tempfile::tempdir().unwrap();
    let steps = save(&folder.path().join("steps"), "", |name| !name.starts_with("ln_f."));
    let file = |name: &str| format!("{steps}/step-000000000001/{name}");
    let out = folder.path().join("out");
    let import = |name: &str, flags: &[&str]| {
        let source = file(name);
        let args = ["import", &source, out.to_str().unwrap(), "--from", "hf"];
        feedline(&[&args, flags].concat())
    };
    let whole = "model-00001-of-00001.safetensors";
    let output = import(whole, &[]);
    let found = stderr(&output);
    assert!(output.status.code() == Some(2) && found.contains("ln_f.weight"), "{found}");
    std::fs::rename(file(whole), file("model-00001-of-00002.safetensors")).unwrap();
    for flags in [&[][..], &["--keep-names"]] {
        let output = import("model-00001-of-00002.safetensors", flags);
        let found = stderr(&output);
        assert!(output.status.code() == Some(2) && found.contains("file 1 of 2"), "{found}");
    }
    assert!(!out.exists(), "nothing was written");
}
