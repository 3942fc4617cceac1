//! Imports of one small GPT-2 in the formats of torch, Megatron-LM, DeepSpeed and
//! torch.distributed: every tensor equals that of the reference writer of safetensors.
//! `reference/foreign.py` wrote the files.

mod model_folders;
mod torch_files;

use std::path::{Path, PathBuf};

use ckpt::convert::{ConvertLimits, Family, Format, Import};
use ckpt::{Checkpoint, Checkpoints, Error, Group};
use safetensors::SafeTensors;
use serde_json::json;
use storage::Key;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn open(name: &str, format: Format) -> Import {
    let mut import = Import::open(golden(name).to_str().unwrap(), format).unwrap();
    assert_eq!(import.normalize().unwrap(), Some(Family::Gpt2), "{name}");
    import
}

/// Saves an import and returns the verified step.
fn saved(import: &Import) -> (tempfile::TempDir, Checkpoint) {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let steps = Checkpoints::open(store, Key::root());
    let step = import.step.unwrap_or(0);
    steps.save_made(step, import, &[], json!({}), ConvertLimits::default(), &|_| ()).unwrap();
    let step = steps.open_step(step).unwrap();
    step.verify().unwrap();
    (folder, step)
}

/// The tensors of a group equal those of the reference, and there are no others.
fn check_group(name: &str, step: &Checkpoint, group: Group) {
    let bytes = std::fs::read(golden("gpt2.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let prefix = if group == Group::Model { String::new() } else { format!("{group}/") };
    let names = expected.names();
    let mut names: Vec<&str> = names
        .into_iter()
        .filter_map(|name| name.strip_prefix(&prefix))
        .filter(|name| !name.contains('/'))
        .collect();
    names.sort_unstable();
    let mut found: Vec<&str> = step
        .tensors()
        .iter()
        .filter(|tensor| tensor.group == group)
        .map(|tensor| tensor.name.as_str())
        .collect();
    found.sort_unstable();
    assert_eq!(found, names, "{name} {group}");
    for tensor in found {
        let view = expected.tensor(&format!("{prefix}{tensor}")).unwrap();
        let entry = step.tensor(tensor, group).unwrap();
        let shape: Vec<u64> = view.shape().iter().map(|&len| len as u64).collect();
        assert_eq!(entry.shape, shape, "{name} {group} {tensor}");
        let mut bytes = vec![0; entry.bytes() as usize];
        step.read_tensor(tensor, group, &mut bytes).unwrap();
        assert_eq!(bytes, view.data(), "{name} {group} {tensor}");
    }
}

#[test]
fn torch_files_are_imported() {
    let files = [("zip.pt", Some(7)), ("stream.pt", None), ("views.pt", None), ("marked.pt", None)];
    for (name, step) in files {
        let import = open(name, Format::Torch);
        assert_eq!(import.step, step, "{name}");
        let (_folder, step) = saved(&import);
        check_group(name, &step, Group::Model);
    }
}

/// Weights with Adam's moments.
#[test]
fn dcp_folders_are_imported() {
    let import = open("dcp", Format::Dcp);
    let (_folder, step) = saved(&import);
    for group in [Group::Model, Group::ExpAvg, Group::ExpAvgSq] {
        check_group("dcp", &step, group);
    }
}

/// Tensor and pipeline parallel, every order of the rows of queries, keys and values, and the names
/// of Megatron-Core.
#[test]
fn megatron_ranks_are_merged() {
    for name in ["megatron-v0", "megatron-v1", "megatron-v3", "megatron-core"] {
        let import = open(name, Format::Megatron);
        assert_eq!((import.step, import.heads), (Some(100), Some(2)), "{name}");
        let (_folder, step) = saved(&import);
        check_group(name, &step, Group::Model);
    }
}

/// ZeRO stages that split groups and parameters, with numbers of ranks that do not divide them.
#[test]
fn deepspeed_partitions_are_imported() {
    for name in ["zero-2", "zero-3"] {
        let mut import = open(name, Format::DeepSpeed);
        assert_eq!(import.step, Some(9), "{name}");
        let (_folder, step) = saved(&import);
        for group in [Group::Model, Group::ExpAvg, Group::ExpAvgSq] {
            check_group(name, &step, group);
        }
        import.without_optimizer();
        let (_folder, step) = saved(&import);
        assert!(step.tensors().iter().all(|tensor| tensor.group == Group::Model), "{name}");
    }
}

/// Models with the names of a GPT-2 and another meaning, tensors that are not dense, and cyclic
/// objects are rejected with the reason.
#[test]
fn unsupported_models_are_rejected() {
    let refused = |name: &str, format, expected: &str| {
        let name = format!("refused/{name}");
        let opened = Import::open(golden(&name).to_str().unwrap(), format);
        let text = opened.expect_err(&name).to_string();
        assert!(text.contains(expected), "{name}: {text}");
    };
    // A rule could drop the tensor, so only the save rejects it.
    let sparse =
        Import::open(golden("refused/sparse.pt").to_str().unwrap(), Format::Torch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let steps = Checkpoints::open(store, Key::root());
    let saved = steps.save_made(0, &sparse, &[], json!({}), ConvertLimits::default(), &|_| ());
    let text = saved.unwrap_err().to_string();
    assert!(text.contains("_rebuild_sparse_tensor"), "{text}");
    open("refused/plain", Format::Megatron);
    refused("groups", Format::Megatron, "three times the width");
    refused("groups-said", Format::Megatron, "query groups");
    refused("gated", Format::Megatron, "not gated");
    refused("gated-said", Format::Megatron, "swiglu");
    refused("ranks", Format::Megatron, "all 2 tensor-parallel ranks");
    refused("again.pt", Format::Torch, "no object that contains itself");
    refused("overlap", Format::Dcp, "boxes that tile [12, 4]");
    refused("axes", Format::Dcp, "boxes that tile [24]");
    refused(
        "two-rows",
        Format::Megatron,
        "expected a positive multiple of 3, at most 786432, found \
         'transformer.h.0.attn.c_attn.weight' of 2 rows",
    );
    refused("endless", Format::Megatron, "at most 786432");
    refused("shapes", Format::DeepSpeed, "no object that contains itself");
    refused("ranked.pt", Format::Torch, "size, stride and storage");
    refused("runs.pt", Format::Torch, "4 million runs in a file");
}

/// An untied head is kept, and a copy of the embedding is dropped.
#[test]
fn untied_megatron_head_is_imported() {
    for (name, heads) in [("tied", 0), ("untied", 1)] {
        let import = open(&format!("refused/{name}"), Format::Megatron);
        let count = import.made.iter().filter(|made| made.name == "lm_head.weight").count();
        assert_eq!(count, heads, "{name}");
    }
}

/// A text in the memo can be the name of many classes, and is copied each time.
#[test]
fn class_name_length_is_limited() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("class.pt");
    for (len, expected) in [(4096, "magic number"), (4097, "not text of at most 4 KiB")] {
        // Old files are five pickles; the first is a number.
        let mut bytes = b"\x80\x04\x8c\x01mX".to_vec();
        bytes.extend(u32::try_from(len).unwrap().to_le_bytes());
        bytes.extend(vec![b'x'; len]);
        bytes.extend(b"\x93.\x80\x02N.\x80\x02N.\x80\x02N.\x80\x02N.");
        std::fs::write(&file, bytes).unwrap();
        let opened = Import::open(file.to_str().unwrap(), Format::Torch);
        let text = opened.expect_err(expected).to_string();
        assert!(text.contains(expected), "{text}");
    }
}

/// Half of the ranks, a gap in them, half of the stages, and a second copy of a rank.
#[test]
fn missing_ranks_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str| {
        let to = folder.path().join(to);
        std::fs::create_dir_all(&to).unwrap();
        let from = golden(from).join("iter_0000100").join(from_rank(&to));
        std::fs::copy(from.join("model_optim_rng.pt"), to.join("model_optim_rng.pt")).unwrap();
    };
    let refused = |name: &str| {
        let opened = Import::open(folder.path().join(name).to_str().unwrap(), Format::Megatron);
        assert!(matches!(opened, Err(Error::Unfit { .. })), "{name}: {opened:?}");
    };
    copy("megatron-v0", "half/mp_rank_00");
    refused("half");
    copy("megatron-v3", "first/mp_rank_00_000");
    copy("megatron-v3", "first/mp_rank_01_000");
    refused("first");
    copy("megatron-v3", "last/mp_rank_00_001");
    copy("megatron-v3", "last/mp_rank_01_001");
    refused("last");
    copy("megatron-v0", "gap/mp_rank_00");
    copy("megatron-v0", "gap/mp_rank_01");
    std::fs::rename(folder.path().join("gap/mp_rank_01"), folder.path().join("gap/mp_rank_02"))
        .unwrap();
    refused("gap");
    copy("megatron-v1", "old/mp_rank_00");
    copy("megatron-v1", "old/mp_rank_00_old");
    refused("old");
}

/// The folder of the rank to copy from.
fn from_rank(to: &Path) -> String {
    to.file_name().unwrap().to_str().unwrap().trim_end_matches("_old").to_owned()
}

/// A missing rank, a truncated file, and a file of another program.
#[test]
fn incomplete_checkpoints_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str, len: usize| {
        let to = folder.path().join(to);
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        let bytes = std::fs::read(golden(from)).unwrap();
        std::fs::write(to, &bytes[..bytes.len().min(len)]).unwrap();
    };
    let refused = |name: &str, format| {
        let opened = Import::open(folder.path().join(name).to_str().unwrap(), format);
        assert!(
            matches!(opened, Err(Error::Corrupt { .. } | Error::Unfit { .. } | Error::Storage(_))),
            "{name}: {opened:?}"
        );
    };
    for stage in 0..2 {
        let from = format!("megatron-v3/iter_0000100/mp_rank_00_00{stage}/model_optim_rng.pt");
        copy(&from, &format!("ranks/mp_rank_00_00{stage}/model_optim_rng.pt"), usize::MAX);
    }
    let from = "megatron-v3/iter_0000100/mp_rank_01_001/model_optim_rng.pt";
    copy(from, "ranks/mp_rank_01_001/model_optim_rng.pt", usize::MAX);
    refused("ranks", Format::Megatron);

    for file in ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"] {
        copy(&format!("zero-2/global_step9/{file}"), &format!("zero/{file}"), usize::MAX);
    }
    refused("zero", Format::DeepSpeed);
    for name in ["zip.pt", "stream.pt"] {
        let whole = std::fs::metadata(golden(name)).unwrap().len() as usize;
        for len in [0, 1, 100, whole / 2, whole - 1] {
            copy(name, "cut.pt", len);
            refused("cut.pt", Format::Torch);
        }
    }
    copy("gpt2.safetensors", "other.pt", usize::MAX);
    refused("other.pt", Format::Torch);
}

/// Each format is given the checkpoints of the others.
#[test]
fn checkpoints_of_other_formats_are_rejected() {
    let all = [
        ("gpt2.safetensors", Format::HuggingFace),
        ("zip.pt", Format::Torch),
        ("dcp", Format::Dcp),
        ("megatron-v0", Format::Megatron),
        ("megatron-v0/iter_0000100", Format::Megatron),
        ("zero-2", Format::DeepSpeed),
        ("zero-2/global_step9", Format::DeepSpeed),
    ];
    for (name, own) in all {
        for format in all.map(|(_, format)| format) {
            let opened = Import::open(golden(name).to_str().unwrap(), format);
            assert_eq!(opened.is_ok(), format == own, "{name} as {format:?}: {opened:?}");
        }
    }
}

/// A distributed checkpoint with half of its metadata, with the pickle of another program, and with
/// half of a file, or none.
#[test]
fn damaged_dcp_folders_are_rejected() {
    let data = "__0_0.distcp";
    let [metadata, bytes] =
        [".metadata", data].map(|name| std::fs::read(golden("dcp").join(name)).unwrap());
    let cut = |bytes: &[u8]| bytes[..bytes.len() / 2].to_vec();
    let cases = [
        (cut(&metadata), Some(bytes.clone()), ".metadata"),
        (b"\x80\x02}X\x01\0\0\0aK\x01s.".to_vec(), Some(bytes.clone()), "another pickle"),
        (metadata.clone(), Some(cut(&bytes)), data),
        (metadata, None, data),
    ];
    for (metadata, bytes, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(".metadata"), metadata).unwrap();
        if let Some(bytes) = bytes {
            std::fs::write(folder.path().join(data), bytes).unwrap();
        }
        let opened = Import::open(folder.path().to_str().unwrap(), Format::Dcp);
        let text = opened.unwrap_err().to_string();
        assert!(text.contains(expected), "without '{expected}': {text}");
    }
}

/// DeepSpeed writes experts and the layers of a pipeline into files of their own. They were left
/// out in silence.
#[test]
fn experts_and_pipeline_layers_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let golden = golden("zero-2/global_step9");
    for entry in std::fs::read_dir(&golden).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let open = || Import::open(folder.path().to_str().unwrap(), Format::DeepSpeed);
    open().unwrap();
    for name in [
        "layer_0_expert_0_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
        "layer_01-model_00-model_states.pt",
    ] {
        let file = folder.path().join(name);
        std::fs::copy(golden.join("mp_rank_00_model_states.pt"), &file).unwrap();
        let text = open().unwrap_err().to_string();
        assert!(text.contains(name), "{text}");
        std::fs::remove_file(file).unwrap();
    }
}

/// Files that hold settings, and no tensor.
#[test]
fn checkpoints_without_tensors_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let settings = torch_files::dict([("epoch", torch_files::text("3"))]);
    torch_files::write_torch(&at("mp_rank_00_model_states.pt"), &settings, &[]);
    torch_files::write_torch(&at("a.pt"), &settings, &[]);
    for (name, format) in [("", Format::DeepSpeed), ("a.pt", Format::Torch)] {
        let text = Import::open(at(name).to_str().unwrap(), format).unwrap_err().to_string();
        assert!(text.contains("expected the tensors of a checkpoint, found no tensor"), "{text}");
    }
}

/// A flipped bit in an archive of torch is detected by a checksum of the archive, or does not
/// change what is imported.
#[test]
fn flipped_bits_in_archive_are_detected() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flipped.pt");
    let good = std::fs::read(golden("zip.pt")).unwrap();
    let import = |bytes: &[u8]| -> Result<Vec<Vec<u8>>, Error> {
        std::fs::write(&path, bytes).unwrap();
        let mut import = Import::open(path.to_str().unwrap(), Format::Torch)?;
        import.normalize()?;
        let out = tempfile::tempdir().unwrap();
        let store = storage::open_url(out.path().to_str().unwrap()).unwrap();
        let steps = Checkpoints::open(store, Key::root());
        let step = import.step.unwrap_or(0);
        steps.save_made(step, &import, &[], json!({}), ConvertLimits::default(), &|_| ())?;
        let tensors = steps.open_step(step)?;
        let read = |entry: &ckpt::TensorEntry| {
            let elements: u64 = entry.shape.iter().product();
            let mut bytes = vec![0; (elements * entry.dtype.item_bytes()) as usize];
            tensors.read_tensor(&entry.name, entry.group, &mut bytes)?;
            Ok(bytes)
        };
        tensors.tensors().iter().map(read).collect()
    };
    let expected = import(&good).unwrap();
    let (mut state, mut refused) = (11_u64, 0);
    for round in 0..100 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let bit = (state >> 20) as usize % (8 * good.len());
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        match import(&bad) {
            // The bit may be in a gap between members.
            Ok(tensors) => assert!(tensors == expected, "round {round}: bit {bit} was imported"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("flipped.pt"), "round {round}, bit {bit}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 60, "{refused} of 100");
}
