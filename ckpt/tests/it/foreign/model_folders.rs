//! Which tensors of a model's files are imported: every byte of a safetensors file has one owner,
//! an index assigns tensors to files, and files of `torch.save` may have a part of a model, or
//! tensors of unsupported types.

use std::path::Path;

use ckpt::convert::{ConvertLimits, Family, Format, Import, NewRows, RenameRules, export};
use ckpt::{Checkpoint, Dtype, Group};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::torch_files::{Storage, TorchObject, dict, flagged, tensor, text, write_torch};
use crate::convert::{floats, gpt2, numbered, steps, write_hf};

type Tensors = Vec<(String, Vec<u64>, Vec<u8>)>;

fn open(path: &Path, format: Format) -> Result<Import, String> {
    Import::open(path.to_str().unwrap(), format).map_err(|error| error.to_string())
}

/// Saves an import as step 1 of a new folder.
fn saved(import: &Import) -> Result<(tempfile::TempDir, Checkpoint), String> {
    let folder = tempfile::tempdir().unwrap();
    let steps = steps(folder.path());
    let saved = steps.save_made(1, import, &[], json!({}), ConvertLimits::default(), &|_| ());
    saved.map_err(|error| error.to_string())?;
    let step = steps.open_step(1).unwrap();
    Ok((folder, step))
}

fn names(import: &Import) -> Vec<&str> {
    let mut names: Vec<&str> = import.made.iter().map(|made| made.name.as_str()).collect();
    names.sort_unstable();
    names
}

/// A file with this header and this many bytes after it.
fn safetensors_file(header: &Value, data_bytes: usize) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data_bytes).map(|at| at as u8));
    bytes
}

/// In the format, every byte after the header belongs to one tensor. Without the check, a range
/// that overlaps another was imported as that tensor's elements.
#[test]
fn safetensors_ranges_cover_file_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.safetensors");
    let f32s = |shape: &[u64], begin: u64, end: u64| {
        let data_offsets = [begin, end];
        json!({ "dtype": "F32", "shape": shape, "data_offsets": data_offsets })
    };
    let check = |header: Value, data_bytes: usize, refusal: Option<&str>| {
        let bytes = safetensors_file(&header, data_bytes);
        // The reference reader agrees on each.
        assert_eq!(SafeTensors::deserialize(&bytes).is_err(), refusal.is_some(), "{header}");
        std::fs::write(&path, bytes).unwrap();
        let found = open(&path, Format::HuggingFace).err();
        match (refusal, &found) {
            (None, None) => {}
            (Some(text), Some(found)) if found.contains(text) => {}
            _ => panic!("{header}: {found:?}"),
        }
    };
    let pair = |v: Value| json!({ "w": f32s(&[2, 3], 0, 24), "v": v });
    check(pair(f32s(&[1], 24, 28)), 28, None);
    check(json!({ "w": f32s(&[1], 4, 8), "v": f32s(&[1], 0, 4) }), 8, None);
    check(
        json!({ "none": f32s(&[0], 0, 0), "w": f32s(&[1], 0, 4), "end": f32s(&[0], 4, 4) }),
        4,
        None,
    );
    check(json!({}), 0, None);
    check(pair(f32s(&[1], 20, 24)), 24, Some("data_offsets [20, 24] of 'v'"));
    check(pair(f32s(&[2, 3], 0, 24)), 24, Some("data_offsets [0, 24]"));
    check(pair(f32s(&[1], 32, 36)), 36, Some("data_offsets [32, 36] of 'v'"));
    check(json!({ "w": f32s(&[1], 4, 8) }), 8, Some("data_offsets [4, 8] of 'w'"));
    check(json!({ "w": f32s(&[2, 3], 0, 24) }), 32, Some("tensors of 24 bytes"));
    check(json!({ "w": f32s(&[2, 3], 0, 24) }), 20, Some("tensors of 24 bytes"));
    check(json!({}), 1, Some("tensors of 0 bytes"));
}

/// Two files have the same tensor, as after a repair by another file: the index decides.
#[test]
fn index_assigns_tensors_to_files() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let f32s = |values: &[f32]| values.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>();
    let write = |file: &str, tensors: &[(&str, f32)]| {
        let tensors: Tensors =
            tensors.iter().map(|(name, it)| ((*name).to_owned(), vec![1], f32s(&[*it]))).collect();
        write_hf(root, &tensors, &json!({}));
        std::fs::rename(root.join("model.safetensors"), root.join(file)).unwrap();
    };
    write("old.safetensors", &[("a", 1.0), ("b", 2.0), ("c", 3.0)]);
    write("new.safetensors", &[("b", 20.0)]);
    let index = |map: Value| {
        let index = json!({ "weight_map": map }).to_string();
        std::fs::write(root.join("model.safetensors.index.json"), index).unwrap();
        open(root, Format::HuggingFace)
    };
    let import = index(json!({ "a": "old.safetensors", "b": "new.safetensors" })).unwrap();
    assert_eq!(names(&import), ["a", "b"]);
    let left_out = import.dropped.join("; ");
    assert!(left_out.contains("b (old.safetensors"), "{left_out}");
    assert!(left_out.contains("c (old.safetensors"), "{left_out}");
    let (_folder, step) = saved(&import).unwrap();
    assert_eq!((floats(&step, "a"), floats(&step, "b")), (vec![1.0], vec![20.0]));

    // The other file has it, but the index does not assign it there.
    let found = index(json!({ "a": "new.safetensors", "b": "old.safetensors" })).unwrap_err();
    assert!(found.contains("a in new.safetensors"), "{found}");
    // Both a single file and an index: ambiguous.
    write("model.safetensors", &[("a", 1.0)]);
    let found = index(json!({ "a": "old.safetensors", "b": "new.safetensors" })).unwrap_err();
    assert!(found.contains("model.safetensors and model.safetensors.index.json"), "{found}");
}

/// A GPT-2 in `pytorch_model-*.bin`, or in one such file, equals that of `model.safetensors`.
#[test]
fn pytorch_model_folders_are_imported() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let config = json!({ "model_type": "gpt2", "n_head": 2, "n_layer": 1 });
    write_hf(&path("safetensors"), &gpt2(), &config);
    let expected = open(&path("safetensors"), Format::HuggingFace).unwrap();
    let (_expected_folder, expected_step) = saved(&expected).unwrap();

    let write = |file: &str, tensors: &[(String, Vec<u64>, Vec<u8>)]| {
        std::fs::create_dir_all(path(file).parent().unwrap()).unwrap();
        write_torch(&path(file), &state_dict(tensors), &storages(tensors));
    };
    let [one, two] = [1, 2].map(|number| format!("pytorch_model-0000{number}-of-00002.bin"));
    let all = gpt2();
    let (first, second) = all.split_at(7);
    write(&format!("shards/{one}"), first);
    write(&format!("shards/{two}"), second);
    let of = |tensors: &[(String, Vec<u64>, Vec<u8>)], file: &str| {
        tensors.iter().map(|(name, ..)| (name.clone(), json!(file))).collect::<Vec<_>>()
    };
    let map: serde_json::Map<_, _> = of(first, &one).into_iter().chain(of(second, &two)).collect();
    let index = json!({ "weight_map": map }).to_string();
    std::fs::write(path("shards/pytorch_model.bin.index.json"), index).unwrap();
    write("one/pytorch_model.bin", &all);
    for name in ["shards", "one"] {
        std::fs::write(path(name).join("config.json"), config.to_string()).unwrap();
    }
    let sources = [
        ("shards", Format::HuggingFace),
        ("shards", Format::Torch),
        ("one", Format::HuggingFace),
        ("one", Format::Torch),
        ("one/pytorch_model.bin", Format::Torch),
    ];
    for (name, format) in sources {
        let mut import = open(&path(name), format).unwrap();
        assert_eq!((import.heads, names(&import)), (Some(2), names(&expected)), "{name}");
        let (_folder, step) = saved(&import).unwrap();
        for tensor in expected_step.tensors() {
            assert_eq!(floats(&step, &tensor.name), floats(&expected_step, &tensor.name));
        }
        let family = import.normalize().unwrap();
        assert_eq!(family, Some(Family::Gpt2), "{name} {format:?}");
        import.check_complete(Family::Gpt2).unwrap();
    }
    // A part of a model, by its name or by the index in its folder.
    let found = open(&path(&format!("shards/{one}")), Format::Torch).unwrap_err();
    assert!(found.contains("file 1 of 2 of a model"), "{found}");
    std::fs::rename(path("shards").join(&one), path("shards/a.bin")).unwrap();
    let index = json!({ "weight_map": { "a": "a.bin", "b": two } }).to_string();
    std::fs::write(path("shards/pytorch_model.bin.index.json"), index).unwrap();
    let found = open(&path("shards/a.bin"), Format::Torch).unwrap_err();
    assert!(found.contains("one of the 2 files"), "{found}");
    assert!(open(&path("safetensors"), Format::Torch).unwrap_err().contains("pytorch_model.bin"));
}

fn state_dict(tensors: &[(String, Vec<u64>, Vec<u8>)]) -> TorchObject {
    let pairs = tensors.iter().enumerate();
    dict(pairs.map(|(at, (name, shape, _))| {
        (name.as_str(), tensor("FloatStorage", &at.to_string(), shape))
    }))
}

fn storages(tensors: &[(String, Vec<u64>, Vec<u8>)]) -> Vec<Storage> {
    let storage = |(at, (_, _, bytes)): (usize, &(String, Vec<u64>, Vec<u8>))| Storage {
        key: at.to_string(),
        elements: bytes.len() as u64 / 4,
        bytes: bytes.clone(),
    };
    tensors.iter().enumerate().map(storage).collect()
}

/// A model without a layer, a part of one, or a parameter outside the layers has the names of a
/// GPT-2, and was imported as one before the check.
#[test]
fn incomplete_models_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let check = |config: Value, is_there: &dyn Fn(&str) -> bool, missing: Option<&str>| {
        let mut tensors = gpt2();
        let second: Tensors = tensors
            .iter()
            .filter(|(name, ..)| name.starts_with("h.0."))
            .map(|(name, shape, bytes)| {
                (name.replace("h.0.", "h.1."), shape.clone(), bytes.clone())
            })
            .collect();
        tensors.extend(second);
        tensors.retain(|(name, ..)| is_there(name));
        write_hf(root, &tensors, &config);
        let mut import = open(root, Format::HuggingFace).unwrap();
        let family = import.normalize().unwrap().unwrap();
        let found = import.check_complete(family).map_err(|error| error.to_string());
        match (missing, &found) {
            (None, Ok(())) => {}
            (Some(name), Err(found)) if found.contains(name) => {}
            _ => panic!("{config} {missing:?}: {found:?}"),
        }
    };
    let gpt2 = || json!({ "model_type": "gpt2", "n_layer": 2 });
    check(gpt2(), &|_| true, None);
    check(json!({}), &|name| name != "wpe.weight", None);
    check(gpt2(), &|name| name != "wpe.weight", Some("'transformer.wpe.weight'"));
    check(gpt2(), &|name| name != "wte.weight", Some("'transformer.wte.weight'"));
    check(gpt2(), &|name| name != "ln_f.bias", Some("'transformer.ln_f.bias'"));
    check(json!({}), &|name| name != "ln_f.weight", Some("'transformer.ln_f.weight'"));
    check(json!({}), &|name| !name.starts_with("h.0."), Some("'transformer.h.0.attn"));
    check(json!({}), &|name| name != "h.1.mlp.c_fc.bias", Some("'transformer.h.1.mlp.c_fc.bias'"));
    check(json!({}), &|name| !name.ends_with("mlp.c_fc.weight"), Some("h.0.mlp.c_fc.weight'"));
    check(json!({ "n_layer": 3 }), &|_| true, Some("'transformer.h.2."));
    let untied = json!({ "model_type": "gpt2", "tie_word_embeddings": false });
    check(untied, &|_| true, Some("'lm_head.weight'"));

    // Tensors that a rule drops are not reported as missing.
    write_hf(root, &self::gpt2(), &json!({ "model_type": "gpt2" }));
    let mut import = open(root, Format::HuggingFace).unwrap();
    import.apply(&RenameRules::parse("rules", "drop ln_f.*").unwrap()).unwrap();
    import.normalize().unwrap();
    import.check_complete(Family::Gpt2).unwrap();

    // Other architectures.
    let t5 = numbered(&[("encoder.block.0.layer.0.SelfAttention.q.weight", &[2, 2])]);
    let bert = numbered(&[("bert.encoder.layer.0.attention.self.query.weight", &[2, 2])]);
    for (tensors, family, missing) in
        [(t5, Family::T5, "'shared.weight'"), (bert, Family::Bert, "word_embeddings.weight'")]
    {
        write_hf(root, &tensors, &json!({}));
        let mut import = open(root, Format::HuggingFace).unwrap();
        assert_eq!(import.normalize().unwrap(), Some(family));
        let found = import.check_complete(family).unwrap_err().to_string();
        assert!(found.contains(missing), "{found}");
    }
}

/// `model` may be the name of an architecture, or a dict of settings: weights are in the first dict
/// that has tensors.
#[test]
fn weights_are_in_first_dict_with_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ckpt.pt");
    let weights = || dict([("w", tensor("FloatStorage", "0", &[2]))]);
    let objects = [
        dict([("model", text("small-v2")), ("state_dict", weights()), ("epoch", text("3"))]),
        dict([("model", dict([("layers", text("2"))])), ("model_state_dict", weights())]),
        dict([("state_dict", weights()), ("model", text("small"))]),
        dict([("model", weights()), ("state_dict", text("absent"))]),
        weights(),
    ];
    for object in objects {
        let storage = Storage { key: "0".to_owned(), elements: 2, bytes: vec![0; 8] };
        write_torch(&path, &object, &[storage]);
        assert_eq!(names(&open(&path, Format::Torch).unwrap()), ["w"]);
    }
}

/// A complex tensor among others: it can be dropped, and is rejected by its name otherwise. In old
/// files, the storages after it are found.
#[test]
fn unsupported_tensor_can_be_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("complex.pt");
    let floats_of = |key: &str, value: f32| Storage {
        key: key.to_owned(),
        elements: 2,
        bytes: [value, value].iter().flat_map(|it| it.to_le_bytes()).collect(),
    };
    let write = |object: TorchObject, class_bytes: usize| {
        let complex = Storage { key: "1".to_owned(), elements: 3, bytes: vec![9; 3 * class_bytes] };
        write_torch(&path, &object, &[floats_of("0", 1.0), complex, floats_of("2", 2.0)]);
    };
    let all = |class: &str| {
        dict([
            ("w", tensor("FloatStorage", "0", &[2])),
            ("freqs_cis", tensor(class, "1", &[3])),
            ("e", tensor("FloatStorage", "2", &[2])),
        ])
    };
    let check_kept = |import: &Import| {
        assert_eq!(names(import), ["e", "w"]);
        let (_folder, step) = saved(import).unwrap();
        assert_eq!((floats(&step, "w"), floats(&step, "e")), (vec![1.0; 2], vec![2.0; 2]));
    };
    for (class, bytes) in [("ComplexHalfStorage", 4), ("ComplexDoubleStorage", 16)] {
        write(all(class), bytes);
        let mut import = open(&path, Format::Torch).unwrap();
        let found = saved(&import).unwrap_err();
        assert!(found.contains("'freqs_cis'") && found.contains(class), "{found}");
        import.apply(&RenameRules::parse("rules", "drop freqs_cis").unwrap()).unwrap();
        check_kept(&import);
    }
    for (class, flag) in [("ComplexFloatStorage", "conj"), ("FloatStorage", "neg")] {
        let object = dict([
            ("w", tensor("FloatStorage", "0", &[2])),
            ("x", flagged(tensor(class, "1", &[3]), flag)),
            ("e", tensor("FloatStorage", "2", &[2])),
        ]);
        write(object, if flag == "conj" { 8 } else { 4 });
        let found = saved(&open(&path, Format::Torch).unwrap()).unwrap_err();
        assert!(found.contains("'x'") && found.contains("lazily"), "{found}");
    }
    write(all("ComplexFloatStorage"), 8);
    let (_folder, step) = saved(&open(&path, Format::Torch).unwrap()).unwrap();
    assert_eq!(step.tensor("freqs_cis", Group::Model).unwrap().dtype, Dtype::C64);
    // Outside the weights.
    let model =
        dict([("w", tensor("FloatStorage", "0", &[2])), ("e", tensor("FloatStorage", "2", &[2]))]);
    let freqs = tensor("ComplexFloatStorage", "1", &[3]);
    write(dict([("model", model), ("freqs_cis", freqs)]), 8);
    check_kept(&open(&path, Format::Torch).unwrap());
    // The size of its elements is not known.
    write(all("OtherStorage"), 8);
    assert!(open(&path, Format::Torch).unwrap_err().contains("OtherStorage"));

    let header = json!({
        "e": { "dtype": "F32", "shape": [2], "data_offsets": [0, 8] },
        "scale": { "dtype": "F6_E2M3", "shape": [4], "data_offsets": [8, 11] },
        "w": { "dtype": "F32", "shape": [1], "data_offsets": [11, 15] },
    });
    let path = folder.path().join("f.safetensors");
    std::fs::write(&path, safetensors_file(&header, 15)).unwrap();
    let mut import = open(&path, Format::HuggingFace).unwrap();
    let found = saved(&import).unwrap_err();
    assert!(found.contains("'scale'") && found.contains("F6_E2M3"), "{found}");
    import.apply(&RenameRules::parse("rules", "drop scale").unwrap()).unwrap();
    let (_folder, step) = saved(&import).unwrap();
    assert_eq!(floats(&step, "w")[0].to_le_bytes(), [11, 12, 13, 14]);
}

/// A folder with one tensor of each type that version 0.8 of safetensors added, and its step.
fn newer_types(folder: &Path) -> Import {
    let header = json!({
        "block": { "dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8] },
        "scale": { "dtype": "F8_E8M0", "shape": [2, 1], "data_offsets": [8, 10] },
        "rope": { "dtype": "C64", "shape": [2], "data_offsets": [10, 26] },
        "a": { "dtype": "F8_E4M3FNUZ", "shape": [1], "data_offsets": [26, 27] },
        "b": { "dtype": "F8_E5M2FNUZ", "shape": [1], "data_offsets": [27, 28] },
    });
    let path = folder.join("f.safetensors");
    std::fs::write(&path, safetensors_file(&header, 28)).unwrap();
    open(&path, Format::HuggingFace).unwrap()
}

fn rules(text: &str) -> RenameRules {
    RenameRules::parse("rules", text).unwrap()
}

/// Types of few bits and complex numbers keep type, shape and bytes on the way into a step and out.
#[test]
fn newer_types_are_carried() {
    let folder = tempfile::tempdir().unwrap();
    let import = newer_types(folder.path());
    let bytes = std::fs::read(folder.path().join("f.safetensors")).unwrap();
    let (_out, step) = saved(&import).unwrap();
    step.verify().unwrap();
    let block = step.tensor("block", Group::Model).unwrap();
    assert_eq!((block.dtype, &block.shape[..]), (Dtype::F4X2, &[2, 4][..]));
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let key = storage::Key::new("hf").unwrap();
    let import = Import::of_step(step).unwrap();
    export(&import, &[], &store, &key, ConvertLimits::default(), &|_| ()).unwrap();
    let found = std::fs::read(folder.path().join("hf/model.safetensors")).unwrap();
    let (found, expected) =
        (SafeTensors::deserialize(&found).unwrap(), SafeTensors::deserialize(&bytes).unwrap());
    assert_eq!(found.len(), 5);
    for (name, view) in expected.tensors() {
        let other = found.tensor(&name).unwrap();
        assert_eq!(other.dtype(), view.dtype(), "{name}");
        assert_eq!((other.shape(), other.data()), (view.shape(), view.data()), "{name}");
    }
}

/// No rule moves half a byte.
#[test]
fn packed_types_are_cut_at_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let open = || newer_types(folder.path());
    let mut import = open();
    import.apply(&rules("split block axis 1 -> l, r\nsplit l axis 0 -> t, u\n")).unwrap();
    let (_out, step) = saved(&import).unwrap();
    let read = |name: &str| {
        let entry = step.tensor(name, Group::Model).unwrap();
        let mut bytes = vec![0; entry.bytes() as usize];
        step.read_tensor(name, Group::Model, &mut bytes).unwrap();
        (entry.shape.clone(), bytes)
    };
    assert_eq!(read("r"), (vec![2, 2], vec![2, 3, 6, 7]));
    assert_eq!(read("u"), (vec![1, 2], vec![4, 5]));
    for (rule, text) in
        [("transpose block", "F4_X2"), ("split block axis 1 -> a, b, c, d, e, f, g, h", "'block'")]
    {
        let found = open().apply(&rules(rule)).unwrap_err().to_string();
        assert!(found.contains("'block'") && found.contains(text), "{found}");
    }
}

/// A message has a tensor's name as a rule takes it: complete, and as the source has it.
#[test]
fn names_in_messages_are_those_of_rules() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.safetensors");
    let long = format!("h.0.attn.c_attn.weight.{}", "x".repeat(200));
    let header = json!({
        "h.0.attn.c_attn.weight": { "dtype": "F4", "shape": [2, 1], "data_offsets": [0, 1] },
        "wte.weight": { "dtype": "F32", "shape": [1], "data_offsets": [1, 5] },
        (long): { "dtype": "F6_E3M2", "shape": [4], "data_offsets": [5, 8] },
    });
    std::fs::write(&path, safetensors_file(&header, 8)).unwrap();
    let mut dropped = String::new();
    for hint in ["even length", "F6_E3M2"] {
        let mut import = open(&path, Format::HuggingFace).unwrap();
        import.apply(&rules(&dropped)).unwrap();
        import.normalize().unwrap();
        let found = saved(&import).unwrap_err();
        assert!(found.contains(hint), "{found}");
        let rule = found.split('`').nth(1).unwrap();
        assert!(rule.starts_with("drop "), "{found}");
        dropped += &format!("{rule}\n");
    }
    let mut import = open(&path, Format::HuggingFace).unwrap();
    import.apply(&rules(&dropped)).unwrap();
    let (_out, step) = saved(&import).unwrap();
    assert_eq!(floats(&step, "wte.weight").len(), 1);
}

/// New rows have values, which quantized types cannot be given. Their rows can be removed.
#[test]
fn quantized_vocabulary_is_not_extended() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.safetensors");
    for dtype in ["F8_E4M3", "F8_E8M0", "F4", "C64"] {
        let (columns, bytes) = match dtype {
            "F4" => (4, 8),
            "C64" => (2, 64),
            _ => (2, 8),
        };
        let header = json!({
            "h.0.attn.c_attn.weight": { "dtype": "F32", "shape": [0], "data_offsets": [0, 0] },
            "wte.weight": { "dtype": dtype, "shape": [4, columns], "data_offsets": [0, bytes] },
        });
        std::fs::write(&path, safetensors_file(&header, bytes)).unwrap();
        for new in [NewRows::Zeros, NewRows::Mean] {
            let mut import = open(&path, Format::HuggingFace).unwrap();
            import.normalize().unwrap();
            let found = import.set_vocab(5, &new).unwrap_err().to_string();
            assert!(found.contains("'transformer.wte.weight'"), "{found}");
            import.set_vocab(3, &new).unwrap();
            let (_out, step) = saved(&import).unwrap();
            let entry = step.tensor("transformer.wte.weight", Group::Model).unwrap();
            assert_eq!(entry.bytes(), bytes as u64 / 4 * 3, "{dtype}");
        }
    }
}
