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

/// Step 1 of a run with these keys of `[model]`, of the tensors that are wanted.
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
fn an_export_has_the_runs_own_configuration() {
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

#[test]
fn a_network_that_transformers_lacks_is_not_exported() {
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
fn half_a_model_is_not_imported() {
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
