//! Conversions, rules and foreign files, through the public API.

use std::path::Path;

use ckpt::convert::{ConvertLimits, Family, Format, Import, NewRows, RenameRules, export};
use ckpt::{Checkpoints, Dtype, Error, Group, TensorData, bands};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use storage::Key;

/// A GPT-2 of one layer, of width 4 with 2 heads, 6 tokens and 3 positions. The value of each
/// element is its index, so that every move is detected.
pub fn gpt2() -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let shapes: [(&str, &[u64]); 16] = [
        ("wte.weight", &[6, 4]),
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
    numbered(&shapes)
}

/// Tensors of these shapes; the value of each element is its index.
pub fn numbered(shapes: &[(&str, &[u64])]) -> Vec<(String, Vec<u64>, Vec<u8>)> {
    let mut next = 0.0_f32;
    let mut tensor = |(name, shape): &(&str, &[u64])| {
        let count = shape.iter().product::<u64>();
        let values = (0..count).flat_map(|_| {
            next += 1.0;
            next.to_le_bytes()
        });
        ((*name).to_owned(), shape.to_vec(), values.collect())
    };
    shapes.iter().map(&mut tensor).collect()
}

/// Writes a Hugging Face folder with the reference writer.
pub fn write_hf(folder: &Path, tensors: &[(String, Vec<u64>, Vec<u8>)], config: &Value) {
    std::fs::create_dir_all(folder).unwrap();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        let shape = shape.iter().map(|&len| len as usize).collect();
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes);
        (name.clone(), view.unwrap())
    });
    let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

pub fn steps(folder: &Path) -> Checkpoints {
    Checkpoints::open(storage::open_url(folder.to_str().unwrap()).unwrap(), Key::root())
}

pub fn floats(step: &ckpt::Checkpoint, name: &str) -> Vec<f32> {
    let entry = step.tensor(name, Group::Model).unwrap();
    let mut bytes = vec![0; entry.bytes() as usize];
    step.read_tensor(name, Group::Model, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|item| f32::from_le_bytes(item.try_into().unwrap())).collect()
}

fn import(folder: &Path, edit: impl FnOnce(&mut Import)) -> (Checkpoints, Import) {
    let out = folder.join("steps");
    let mut import =
        Import::open(folder.join("hf").to_str().unwrap(), Format::HuggingFace).unwrap();
    edit(&mut import);
    let steps = steps(&out);
    let bounds = ConvertLimits { memory_bytes: 1 << 20, ..ConvertLimits::default() };
    steps.save_made(3, &import, &[], json!({}), bounds, &|_| ()).unwrap();
    steps.open_step(3).unwrap().verify().unwrap();
    (steps, import)
}

/// The GPT-2 of the hub has names without a prefix, masks and a second embedding; a step has each
/// parameter once, and the export equals the import.
#[test]
fn gpt2_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let mut tensors = gpt2();
    let expected = tensors.clone();
    tensors.push(("h.0.attn.bias".to_owned(), vec![1, 1, 2, 2], vec![0; 16]));
    tensors.push(("lm_head.weight".to_owned(), vec![6, 4], tensors[0].2.clone()));
    write_hf(&folder.path().join("hf"), &tensors, &json!({ "model_type": "gpt2", "n_head": 2 }));
    let (steps, imported) = import(folder.path(), |import| {
        assert_eq!(import.normalize().unwrap(), Some(Family::Gpt2));
    });
    assert_eq!(imported.heads, Some(2));
    let mut left_out = imported.dropped.clone();
    left_out.sort();
    assert_eq!(left_out, ["lm_head.weight", "transformer.h.0.attn.bias"]);

    let mut back = Import::of_step(steps.open_step(3).unwrap()).unwrap();
    let config = imported.config_json(Family::Gpt2, None).unwrap();
    assert_eq!((&config["vocab_size"], &config["n_head"]), (&json!(6), &json!(2)));
    let back_config = back.config_json(Family::Gpt2, Some(2)).unwrap();
    assert_eq!((&back_config["n_layer"], &back_config["n_inner"]), (&json!(1), &json!(16)));
    assert!(back.config_json(Family::Gpt2, None).is_err(), "shapes do not determine the heads");
    back.set_vocab(5, &NewRows::Zeros).unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let bounds = ConvertLimits { shard_bytes_max: 300, ..ConvertLimits::default() };
    let companions = [("config.json".to_owned(), back_config.to_string().into_bytes())];
    let key = Key::new("out").unwrap();
    export(&back, &companions, &store, &key, bounds, &|_| ()).unwrap();
    let again = export(&back, &companions, &store, &key, bounds, &|_| ());
    assert!(matches!(again, Err(Error::Storage(storage::Error::Exists { .. }))), "{again:?}");

    let out = folder.path().join("out");
    let index = std::fs::read(out.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    for (name, shape, bytes) in expected {
        let name = format!("transformer.{name}");
        let file = index["weight_map"][&name].as_str().unwrap();
        let file = std::fs::read(out.join(file)).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let view = tensors.tensor(&name).unwrap();
        if name.ends_with("wte.weight") {
            assert_eq!((view.shape(), view.data()), (&[5, 4][..], &bytes[..80]));
        } else {
            let found: Vec<u64> = view.shape().iter().map(|&len| len as u64).collect();
            assert_eq!((found, view.data()), (shape, &bytes[..]), "{name}");
        }
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().count() == 3, "no staging folder remains");
}

#[test]
fn vocabulary_is_extended() {
    let folder = tempfile::tempdir().unwrap();
    write_hf(&folder.path().join("hf"), &gpt2(), &json!({}));
    let (steps, _) = import(folder.path(), |import| {
        import.normalize().unwrap();
        import.set_vocab(8, &NewRows::Mean).unwrap();
    });
    let rows = floats(&steps.open_step(3).unwrap(), "transformer.wte.weight");
    // 1, 5, .. 21 in the first column.
    assert_eq!(rows[20..28], [21.0, 22.0, 23.0, 24.0, 11.0, 12.0, 13.0, 14.0]);
    assert_eq!(rows[28..], [11.0, 12.0, 13.0, 14.0]);

    let normal = |seed| {
        let folder = tempfile::tempdir().unwrap();
        write_hf(&folder.path().join("hf"), &gpt2(), &json!({}));
        let (steps, _) = import(folder.path(), |import| {
            import.normalize().unwrap();
            import.set_vocab(7, &NewRows::Normal { std: 0.5, seed }).unwrap();
        });
        floats(&steps.open_step(3).unwrap(), "transformer.wte.weight")[24..].to_vec()
    };
    assert_eq!(normal(1), normal(1));
    assert_ne!(normal(1), normal(2));
    assert!(normal(1).iter().all(|value| *value != 0.0 && value.abs() < 3.0));
}

#[test]
fn rules_move_boxes() {
    let folder = tempfile::tempdir().unwrap();
    write_hf(&folder.path().join("hf"), &gpt2(), &json!({}));
    let text = "drop ln_f.*\n\
                split h.*.attn.c_attn.weight axis 1 -> layer.{1}.q, layer.{1}.k, layer.{1}.v\n\
                transpose layer.*.k\n\
                split layer.*.k axis 0 -> k.{1}.0, k.{1}.1\n\
                rename wte.* -> words.{1}\n";
    let (steps, _) = import(folder.path(), |import| {
        import.apply(&RenameRules::parse("text", text).unwrap()).unwrap();
        let unused = RenameRules::parse("text", "drop nothing.*").unwrap();
        assert!(matches!(import.apply(&unused), Err(Error::Unfit { .. })));
    });
    let step = steps.open_step(3).unwrap();
    assert!(step.tensor("ln_f.weight", Group::Model).is_err());
    let words = floats(&step, "words.weight");
    assert_eq!(words[..3], [1.0, 2.0, 3.0]);
    // c_attn.weight begins with 45 and has rows of 12; k is its columns 4 to 8.
    assert_eq!(floats(&step, "layer.0.v")[..5], [53.0, 54.0, 55.0, 56.0, 65.0]);
    assert_eq!(floats(&step, "k.0.0"), [49.0, 61.0, 73.0, 85.0, 50.0, 62.0, 74.0, 86.0]);
    assert_eq!(floats(&step, "k.0.1")[4..], [52.0, 64.0, 76.0, 88.0]);
}

/// A transposed matrix that is far larger than the buffers is correct.
#[test]
fn transpose_uses_bounded_buffers() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, columns) = (700_u64, 501_u64);
    let bytes: Vec<u8> = (0..rows * columns).flat_map(|at| (at as u32).to_le_bytes()).collect();
    let source = steps(&folder.path().join("a"));
    let tensor = TensorData {
        name: "w",
        group: Group::Model,
        dtype: Dtype::F32,
        shape: &[rows, columns],
        bytes: &bytes,
    };
    source.save(1, &[tensor], &[], json!({})).unwrap();
    let mut import = Import::of_step(source.open_step(1).unwrap()).unwrap();
    import.apply(&RenameRules::parse("text", "transpose w").unwrap()).unwrap();
    let out = steps(&folder.path().join("b"));
    let bounds = ConvertLimits { memory_bytes: 1 << 20, ..ConvertLimits::default() };
    out.save_made(1, &import, &[], json!({}), bounds, &|_| ()).unwrap();
    let step = out.open_step(1).unwrap();
    let mut found = vec![0; bytes.len()];
    step.read_tensor("w", Group::Model, &mut found).unwrap();
    for (place, item) in found.chunks_exact(4).enumerate() {
        let (column, row) = (place as u64 / rows, place as u64 % rows);
        let found = u64::from(u32::from_le_bytes(item.try_into().unwrap()));
        assert_eq!(found, row * columns + column);
    }
    let longest = bands(&[columns, rows], 4, 1 << 17).map(|band| band[0].len).max();
    assert!(longest < Some(columns), "it took several bands");
}

#[test]
fn invalid_foreign_files_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let check = |bytes: &[u8], format| {
        let file = folder.path().join("f.safetensors");
        std::fs::write(&file, bytes).unwrap();
        let opened = Import::open(file.to_str().unwrap(), format);
        assert!(matches!(opened, Err(Error::Corrupt { .. } | Error::Storage(_))), "{opened:?}");
    };
    let header = |json: &str| {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.extend([0; 16]);
        bytes
    };
    let entry = |shape: &str, offsets: &str| {
        header(&format!(
            "{{\"w\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":{offsets}}}}}"
        ))
    };
    check(&entry("[5]", "[0,20]"), Format::HuggingFace);
    check(&entry("[4]", "[16,0]"), Format::HuggingFace);
    check(&entry("[4]", "[0,12]"), Format::HuggingFace);
    check(&entry("[4611686018427387904,4]", "[0,0]"), Format::HuggingFace);
    check(&entry("[4]", "[18446744073709551615,15]"), Format::HuggingFace);
    check(&u64::MAX.to_le_bytes(), Format::HuggingFace);
    check(b"", Format::HuggingFace);
    for bytes in [&b""[..], b"PK\x03\x04", b"\x80\x02.", b"PK\x05\x06"] {
        check(bytes, Format::Torch);
    }
    assert!(Import::open("/nonexistent", Format::Megatron).is_err());
    assert!(Import::open("/nonexistent", Format::DeepSpeed).is_err());
}

/// An index of two files, one of which lacks its tensor.
#[test]
fn index_with_missing_tensors_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let hf = folder.path().join("hf");
    write_hf(&hf, &gpt2(), &json!({}));
    let index = json!({ "weight_map": {
        "wte.weight": "model.safetensors", "absent.weight": "model.safetensors"
    } });
    std::fs::write(hf.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let opened = Import::open(hf.to_str().unwrap(), Format::HuggingFace);
    let text = opened.unwrap_err().to_string();
    assert!(text.contains("absent.weight"), "{text}");
    let index = json!({ "weight_map": { "wte.weight": "../model.safetensors" } });
    std::fs::write(hf.join("model.safetensors.index.json"), index.to_string()).unwrap();
    assert!(Import::open(hf.to_str().unwrap(), Format::HuggingFace).is_err());
}

/// Moments of a MiB begin at pages, also in imported steps, and the padding has entries.
#[test]
fn large_moments_are_page_aligned() {
    let folder = tempfile::tempdir().unwrap();
    let steps = steps(folder.path());
    let bytes = vec![7; (1 << 20) + 4];
    let shape = [bytes.len() as u64 / 4];
    let data =
        |name, group| TensorData { name, group, dtype: Dtype::F32, shape: &shape, bytes: &bytes };
    let names = ["a", "b", "c"];
    let tensors: Vec<_> = [Group::Model, Group::ExpAvg]
        .into_iter()
        .flat_map(|group| names.map(|name| data(name, group)))
        .collect();
    steps.save(1, &tensors, &[], json!(null)).unwrap();
    let import = Import::of_step(steps.open_step(1).unwrap()).unwrap();
    steps.save_made(2, &import, &[], json!(null), ConvertLimits::default(), &|_| ()).unwrap();
    let again = steps.open_step(2).unwrap();
    again.verify().unwrap();
    for tensor in again.tensors() {
        let is_paged = tensor.chunks[0].offset.is_multiple_of(4096);
        assert_eq!(is_paged, tensor.group == Group::ExpAvg || tensor.name == "a", "{tensor:?}");
    }
    let file = |step| format!("step-{step:012}/optim-00001-of-00001.safetensors");
    let [a, b] = [1, 2].map(|step| std::fs::read(folder.path().join(file(step))).unwrap());
    assert!(a == b, "both writers make the same file");
}

/// An untied head is kept, with its weights and its optimizer state.
#[test]
fn untied_head_keeps_its_moments() {
    let folder = tempfile::tempdir().unwrap();
    let steps = steps(folder.path());
    for (step, is_tied) in [(1, true), (2, false)] {
        let mut owned = Vec::new();
        for group in [Group::Model, Group::ExpAvg] {
            for (name, shape, bytes) in gpt2() {
                owned.push((format!("transformer.{name}"), group, shape, bytes));
            }
            let (_, shape, mut bytes) = gpt2().swap_remove(0);
            if !is_tied && group == Group::Model {
                bytes[0] ^= 1;
            }
            owned.push(("lm_head.weight".to_owned(), group, shape, bytes));
        }
        let tensors: Vec<_> = owned
            .iter()
            .map(|(name, group, shape, bytes)| TensorData {
                name,
                group: *group,
                dtype: Dtype::F32,
                shape,
                bytes,
            })
            .collect();
        steps.save(step, &tensors, &[], json!(null)).unwrap();
        let mut import = Import::of_step(steps.open_step(step).unwrap()).unwrap();
        assert_eq!(import.normalize().unwrap(), Some(Family::Gpt2));
        let heads: Vec<_> =
            import.made.iter().filter(|made| made.name == "lm_head.weight").collect();
        assert_eq!(heads.len(), if is_tied { 0 } else { 2 }, "{heads:?}");
    }
}

/// `tie_word_embeddings` of BERT follows from its tensors.
#[test]
fn untied_bert_decoder_is_in_config() {
    let mut tensors = numbered(&[
        ("bert.embeddings.word_embeddings.weight", &[6, 4]),
        ("bert.embeddings.position_embeddings.weight", &[3, 4]),
        ("bert.embeddings.token_type_embeddings.weight", &[2, 4]),
        ("bert.encoder.layer.0.attention.self.query.weight", &[4, 4]),
        ("bert.encoder.layer.0.intermediate.dense.weight", &[8, 4]),
        ("cls.predictions.bias", &[6]),
        ("cls.predictions.decoder.weight", &[6, 4]),
    ]);
    for is_tied in [false, true] {
        if is_tied {
            tensors[6].2 = tensors[0].2.clone();
        }
        let folder = tempfile::tempdir().unwrap();
        write_hf(folder.path(), &tensors, &json!({}));
        let mut import =
            Import::open(folder.path().to_str().unwrap(), Format::HuggingFace).unwrap();
        assert_eq!(import.normalize().unwrap(), Some(Family::Bert));
        let config = import.config_json(Family::Bert, Some(2)).unwrap();
        assert_eq!(config["tie_word_embeddings"], is_tied);
        assert_eq!(import.made.len(), if is_tied { 6 } else { 7 });
    }
}

/// For names that two architectures share, the configuration decides.
#[test]
fn other_architecture_with_gpt2_names_is_unchanged() {
    for (config, expected) in [
        (json!({ "model_type": "gpt_bigcode" }), None),
        (json!({ "model_type": "gpt2" }), Some(Family::Gpt2)),
        (json!({}), Some(Family::Gpt2)),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write_hf(folder.path(), &gpt2(), &config);
        let mut import =
            Import::open(folder.path().to_str().unwrap(), Format::HuggingFace).unwrap();
        assert_eq!(import.normalize().unwrap(), expected, "{config}");
        assert_eq!(import.set_vocab(8, &NewRows::Zeros).is_ok(), expected.is_some(), "{config}");
        let is_renamed = import.made.iter().any(|made| made.name == "transformer.wte.weight");
        assert_eq!(is_renamed, expected.is_some(), "{config}");
    }
}

/// The optimizer file of a step is not a model of Hugging Face: its padding is not a tensor.
#[test]
fn optimizer_file_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let steps = steps(folder.path());
    let bytes = vec![1; (1 << 20) + 4];
    let shape = [bytes.len() as u64];
    let data = |name| TensorData {
        name,
        group: Group::ExpAvg,
        dtype: Dtype::U8,
        shape: &shape,
        bytes: &bytes,
    };
    steps.save(1, &[data("a"), data("b")], &[], json!(null)).unwrap();
    let file = folder.path().join("step-000000000001/optim-00001-of-00001.safetensors");
    let import = Import::open(file.to_str().unwrap(), Format::HuggingFace).unwrap();
    let saved = steps.save_made(2, &import, &[], json!(null), ConvertLimits::default(), &|_| ());
    let text = saved.unwrap_err().to_string();
    assert!(text.contains("__pad__"), "{text}");
    assert_eq!(steps.steps().unwrap(), [1]);
}

/// Invalid shapes, and rows that do not fit into memory, are rejected.
#[test]
fn vocabulary_without_rows_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("f.safetensors");
    for shape in ["[0,1152921504606846976]", "[0,4]"] {
        let json = format!(
            "{{\"transformer.wte.weight\":{{\"dtype\":\"F32\",\"shape\":{shape},\
             \"data_offsets\":[0,0]}}}}"
        );
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        std::fs::write(&file, bytes).unwrap();
        let mut import = Import::open(file.to_str().unwrap(), Format::HuggingFace).unwrap();
        let grown = import.set_vocab(8, &NewRows::Mean);
        assert!(matches!(grown, Err(Error::Unfit { .. })), "{shape}: {grown:?}");
    }
}
