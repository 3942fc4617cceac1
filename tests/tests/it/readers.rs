//! Output of this project, read by other programs: Megatron's reader, numpy, safetensors and
//! tokenizers.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use indexed::IndexedDataset;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use storage::Key;

/// The Python with the packages of the readers; without it the tests are skipped.
fn python(test: &str) -> Option<PathBuf> {
    let named = std::env::var_os("FEEDLINE_PYTHON").map(PathBuf::from);
    let python = named.unwrap_or_else(|| tests::root().join(".venv/bin/python"));
    if python.exists() {
        return Some(python);
    }
    tests::skip(test, "no Python with the readers' packages; `scripts/setup.sh --tests` makes one");
    None
}

fn tokenize(folder: &Path) -> String {
    let corpus = tests::root().join("demo/data/corpus.jsonl.zst");
    let prefix = folder.join("corpus").to_str().unwrap().to_owned();
    let mut options =
        preprocess::PreprocessOptions::new(vec![corpus.to_str().unwrap().to_owned()], &prefix);
    options.append_eod = true;
    preprocess::run(&options, &mut |_| {}).unwrap();
    format!("{prefix}_text_document")
}

/// The result of the reader of this project, in the form of the scripts.
fn read_here(prefix: &str) -> Value {
    let (store, key) = storage::locate(prefix).unwrap();
    let dataset = IndexedDataset::open(&store, &key).unwrap();
    let mut sum = Sha256::new();
    for sequence in 0..dataset.sequence_count() {
        for token in dataset.read_sequence(sequence).unwrap() {
            sum.update(token.to_le_bytes());
        }
    }
    let mut first = dataset.read_sequence(0).unwrap();
    first.truncate(16);
    let sha256: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "sequences": dataset.sequence_count(),
        "documents": dataset.document_count(),
        "tokens": dataset.token_count(),
        "sha256": sha256,
        "first_tokens": first,
    })
}

fn read_with(python: &Path, script: &str, prefix: &str) -> Value {
    let script = tests::root().join("tests/readers").join(script);
    let output = Command::new(python).arg(&script).arg(prefix).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", script.display());
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn megatron_and_numpy_read_the_demo_corpus() {
    let Some(python) = python("megatron_and_numpy_read_the_demo_corpus") else { return };
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokenize(folder.path());
    let expected = read_here(&prefix);
    assert_eq!(expected["tokens"], 884_768, "{expected}");
    for script in ["megatron_read.py", "numpy_read.py"] {
        assert_eq!(read_with(&python, script, &prefix), expected, "{script}");
    }
}

/// Each reader must detect a changed token.
#[test]
fn the_readers_detect_a_changed_token() {
    let Some(python) = python("the_readers_detect_a_changed_token") else { return };
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokenize(folder.path());
    let expected = read_here(&prefix);
    let bin = format!("{prefix}.bin");
    let mut bytes = std::fs::read(&bin).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&bin, bytes).unwrap();
    for script in ["megatron_read.py", "numpy_read.py"] {
        assert_ne!(read_with(&python, script, &prefix)["sha256"], expected["sha256"], "{script}");
    }
}

/// The manifest matches the files and verifies them; it detects a changed byte.
#[test]
fn the_manifest_matches_and_verifies() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokenize(folder.path());
    let (store, key) = storage::locate(&prefix).unwrap();
    let manifest = key.with_suffix(".manifest.json").unwrap();
    let manifest = storage::Manifest::read(&*store, &manifest).unwrap();
    let expected = read_here(&prefix);
    for name in ["sequences", "documents", "tokens"] {
        assert_eq!(manifest.meta[name], expected[name], "{name}");
    }
    assert_eq!(manifest.verify(&*store, &Key::root()).unwrap().files, 3);
    let bin = format!("{prefix}.bin");
    let mut bytes = std::fs::read(&bin).unwrap();
    bytes[12_345] ^= 64;
    std::fs::write(&bin, bytes).unwrap();
    let error = manifest.verify(&*store, &Key::root()).unwrap_err().to_string();
    assert!(error.contains("corpus_text_document.bin"), "{error}");
}

/// Both files of a trained tokenizer, in the packages for their formats: the same ids, and a round
/// trip of the text.
#[test]
fn trained_tokenizers_load_in_both_packages() {
    use preprocess::train::{ModelType, TrainOptions, train};
    let Some(python) = python("trained_tokenizers_load_in_both_packages") else { return };
    let folder = tempfile::tempdir().unwrap();
    let corpus = std::fs::read(tests::root().join("demo/data/corpus.jsonl.zst")).unwrap();
    let jsonl = folder.path().join("corpus.jsonl").to_str().unwrap().to_owned();
    std::fs::write(&jsonl, zstd::decode_all(&corpus[..]).unwrap()).unwrap();
    for model_type in [ModelType::Bpe, ModelType::Unigram] {
        let options = TrainOptions::new(vec![jsonl.clone()], model_type, 6000);
        let trained = train(&options, &std::sync::atomic::AtomicBool::new(false), &mut |_| {});
        for (name, bytes) in trained.unwrap().files {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        let script = tests::root().join("tests/readers/trained_tokenizer.py");
        let output =
            Command::new(&python).arg(script).arg(&jsonl).arg(folder.path()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{model_type:?}: {stderr}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&found["documents"], &found["differ"]), (&json!(1535), &json!(0)), "{found}");
    }
}

/// A state with weights of several types, and moments with gaps between them.
fn save_step(folder: &Path) -> ckpt::Checkpoint {
    use ckpt::{Checkpoints, Dtype, Group, TensorData};
    let bytes: Vec<u8> = (0..(3_u32 << 20) + 24).map(|place| (place % 251) as u8).collect();
    let shapes: [(&str, Group, Dtype, &[u64]); 5] = [
        ("embed.weight", Group::Model, Dtype::BF16, &[300, 70]),
        ("head.weight", Group::Model, Dtype::F16, &[70, 300]),
        ("norm.weight", Group::Model, Dtype::F32, &[]),
        ("embed.weight", Group::ExpAvg, Dtype::F32, &[(1 << 18) + 1, 3]),
        ("head.weight", Group::ExpAvg, Dtype::F32, &[(1 << 18) + 1]),
    ];
    let data = |(name, group, dtype, shape): (_, _, Dtype, &'static [u64])| {
        let len = (shape.iter().product::<u64>() * dtype.item_bytes()) as usize;
        TensorData { name, group, dtype, shape, bytes: &bytes[..len] }
    };
    let tensors = shapes.map(data);
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let steps = Checkpoints::open(store, Key::root());
    steps.save(7, &tensors, &[], json!({})).unwrap();
    steps.open_step(7).unwrap()
}

/// The reference reader of safetensors finds every tensor of a step, with its bytes.
#[test]
fn safetensors_reads_a_step() {
    let Some(python) = python("safetensors_reads_a_step") else { return };
    let folder = tempfile::tempdir().unwrap();
    let step = save_step(folder.path());
    let files = folder.path().join("step-000000000007");
    let read = || read_with(&python, "safetensors_read.py", files.to_str().unwrap());
    let found = read();
    for tensor in step.tensors() {
        let mut bytes = vec![0; tensor.bytes() as usize];
        step.read_tensor(&tensor.name, tensor.group, &mut bytes).unwrap();
        let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        let prefix = match tensor.group {
            ckpt::Group::Model => String::new(),
            group => format!("{group}/"),
        };
        let expected = json!([tensor.dtype.name(), tensor.shape, sum]);
        assert_eq!(found[format!("{prefix}{}", tensor.name)], expected, "{tensor:?}");
    }
    assert_eq!(found.as_object().unwrap().len(), step.tensors().len());

    let path = files.join(&step.tensors()[0].chunks[0].file);
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(read(), found, "a changed byte is seen");
}

/// A GPT-2 of two layers, in the layout of the hub, each tensor with different values.
fn save_gpt2(folder: &Path) -> ckpt::Checkpoint {
    use ckpt::{Checkpoints, Dtype, Group, TensorData};
    let mut shapes: Vec<(String, Vec<u64>)> = vec![
        ("transformer.wte.weight".to_owned(), vec![60, 8]),
        ("transformer.wpe.weight".to_owned(), vec![16, 8]),
        ("transformer.ln_f.weight".to_owned(), vec![8]),
        ("transformer.ln_f.bias".to_owned(), vec![8]),
    ];
    for layer in 0..2 {
        for (name, shape) in [
            ("ln_1.weight", vec![8]),
            ("ln_1.bias", vec![8]),
            ("attn.c_attn.weight", vec![8, 24]),
            ("attn.c_attn.bias", vec![24]),
            ("attn.c_proj.weight", vec![8, 8]),
            ("attn.c_proj.bias", vec![8]),
            ("ln_2.weight", vec![8]),
            ("ln_2.bias", vec![8]),
            ("mlp.c_fc.weight", vec![8, 32]),
            ("mlp.c_fc.bias", vec![32]),
            ("mlp.c_proj.weight", vec![32, 8]),
            ("mlp.c_proj.bias", vec![8]),
        ] {
            shapes.push((format!("transformer.h.{layer}.{name}"), shape));
        }
    }
    let values = (0..5000_u16).flat_map(|place| f32::from(place).to_le_bytes());
    let values: Vec<u8> = values.collect();
    let mut begin = 0;
    let tensor = |(name, shape): &'_ (String, Vec<u64>)| {
        let bytes = shape.iter().product::<u64>() as usize * 4;
        begin += 4;
        (name.clone(), shape.clone(), values[begin..begin + bytes].to_vec())
    };
    let tensors: Vec<(String, Vec<u64>, Vec<u8>)> = shapes.iter().map(tensor).collect();
    let (group, dtype) = (Group::Model, Dtype::F32);
    let data = tensors.iter();
    let data = data.map(|(name, shape, bytes)| TensorData { name, group, dtype, shape, bytes });
    let tensors: Vec<TensorData<'_>> = data.collect();
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let steps = Checkpoints::open(store, Key::root());
    steps.save(7, &tensors, &[], json!({})).unwrap();
    steps.open_step(7).unwrap()
}

/// `transformers` loads an exported model, from one file and from several: no weight is missing,
/// and each has the original bytes.
#[test]
fn transformers_loads_an_export() {
    use ckpt::convert::{ConvertLimits, Family, Import, export};
    let test = "transformers_loads_an_export";
    let Some(python) = python(test) else { return };
    let folder = tempfile::tempdir().unwrap();
    let step = save_gpt2(folder.path());
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let script = tests::root().join("tests/readers/transformers_read.py");
    for (name, shard_bytes_max) in [("one", 1 << 30), ("several", 1000)] {
        let steps = ckpt::Checkpoints::open(Arc::clone(&store), Key::root());
        let import = Import::of_step(steps.open_step(7).unwrap()).unwrap();
        let config = import.config_json(Family::Gpt2, Some(2)).unwrap();
        let companions = [("config.json".to_owned(), config.to_string().into_bytes())];
        let bounds = ConvertLimits { shard_bytes_max, ..ConvertLimits::default() };
        export(&import, &companions, &store, &Key::new(name).unwrap(), bounds, &|_| ()).unwrap();
        let output = Command::new(&python).arg(&script).arg(folder.path().join(name)).output();
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(77) {
            return tests::skip(test, &format!("no transformers in {}", python.display()));
        }
        assert!(output.status.success(), "{said}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        for tensor in step.tensors() {
            let mut bytes = vec![0; tensor.bytes() as usize];
            step.read_tensor(&tensor.name, tensor.group, &mut bytes).unwrap();
            let digest = Sha256::digest(&bytes);
            let sum: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found[&tensor.name], json!([tensor.shape, sum]), "{}", tensor.name);
        }
    }
}
