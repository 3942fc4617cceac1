//! Bytes that change after a save: `verify` detects all of them, and a read those of its blocks.

use std::fs;
use std::sync::Mutex;

use crate::common::{Folder, Random, SMALL, State, Tensor};
use ckpt::{Dtype, Error, Group};
use serde_json::json;

const STEP: &str = "step-000000000005";

/// Offsets to flip: the first bytes, both sides of a page boundary, the last, and random ones.
fn places(len: usize, random: &mut Random) -> Vec<usize> {
    let edges = [0, 1, 7, 8, 9, 100, 4095, 4096, 4097, 8191, 8192, len.wrapping_sub(1)];
    let mut places: Vec<usize> = edges.into_iter().filter(|&place| place < len).collect();
    if len > 0 {
        places.extend((0..40).map(|_| random.below(len as u64) as usize));
    }
    places
}

#[test]
fn every_flipped_bit_is_detected() {
    let seed = 31;
    let mut random = Random(seed);
    let folder = Folder::new();
    State::of_model(1).save(&folder.steps(SMALL), 5).unwrap();
    let mut flips = 0;
    for (name, bytes) in folder.files(5) {
        let path = folder.path(STEP).join(&name);
        for place in places(bytes.len(), &mut random) {
            let bit = random.below(8);
            let mut bad = bytes.clone();
            bad[place] ^= 1 << bit;
            // The case of the hexadecimal digits of a manifest's own checksum does not matter.
            if name == "MANIFEST.json" && bad.eq_ignore_ascii_case(&bytes) {
                continue;
            }
            fs::write(&path, &bad).unwrap();
            let seen = folder.steps(SMALL).open_step(5).and_then(|step| step.verify());
            let seen = seen.expect_err(&format!("seed {seed}: bit {bit} at {place} of {name}"));
            let text = seen.to_string();
            assert!(text.contains(&name), "{text} should name {name}");
            flips += 1;
        }
        fs::write(&path, &bytes).unwrap();
    }
    assert!(flips > 300, "only {flips} flips");
    folder.steps(SMALL).open_step(5).unwrap().verify().unwrap();
}

/// The error names the file and the block, and other tensors can still be read.
#[test]
fn read_detects_only_damage_of_its_blocks() {
    let mut random = Random(5);
    let folder = Folder::new();
    let mut state = State::of_model(2);
    state.tensors.push(Tensor::new("big", Group::Model, Dtype::U8, &[5, 20_000], &mut random));
    let steps = folder.steps(ckpt::CheckpointOptions { shard_bytes_max: 50_000, ..SMALL });
    state.save(&steps, 5).unwrap();
    let checkpoint = steps.open_step(5).unwrap();
    for entry in checkpoint.tensors() {
        for chunk in &entry.chunks {
            let path = folder.path(STEP).join(&chunk.file);
            let good = fs::read(&path).unwrap();
            let mut bad = good.clone();
            let place = chunk.offset + random.below(chunk.bytes);
            bad[place as usize] ^= 1 << random.below(8);
            fs::write(&path, &bad).unwrap();
            for tensor in &state.tensors {
                let mut bytes = vec![0; tensor.bytes.len()];
                let read = checkpoint.read_tensor(&tensor.name, tensor.group, &mut bytes);
                if (&entry.name, entry.group) != (&tensor.name, tensor.group) {
                    read.unwrap();
                    assert!(bytes == tensor.bytes);
                    continue;
                }
                match read.unwrap_err() {
                    Error::Corrupt { object, offset, .. } => {
                        assert!(object.ends_with(&chunk.file), "{object}");
                        assert!((offset..offset + 4096).contains(&place), "{offset} of {place}");
                    }
                    other => panic!("{other}"),
                }
            }
            fs::write(&path, &good).unwrap();
        }
    }
}

#[test]
fn damaged_blob_is_rejected() {
    let folder = Folder::new();
    State::of_model(3).save(&folder.steps(SMALL), 5).unwrap();
    let path = folder.path(STEP).join("extra/rng.bin");
    let mut bytes = fs::read(&path).unwrap();
    bytes[4000] ^= 4;
    fs::write(&path, &bytes).unwrap();
    let checkpoint = folder.steps(SMALL).open_step(5).unwrap();
    assert!(matches!(checkpoint.blob("rng.bin"), Err(Error::Corrupt { .. })));
    checkpoint.blob("loader.json").unwrap();
}

/// The log of all tests of this file.
static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() == log::Level::Warn {
            WARNINGS.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// A file is truncated, extended, or deleted: the step is skipped with a warning, and the previous
/// one is the newest.
#[test]
fn newest_complete_step_is_found() {
    log::set_logger(&Warnings).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let folder = Folder::new();
    let steps = folder.steps(SMALL);
    let older = State::of_model(4);
    older.save(&steps, 4).unwrap();
    State::of_model(5).save(&steps, 5).unwrap();
    for (name, bytes) in folder.files(5) {
        let path = folder.path(STEP).join(&name);
        let mut variants = vec![[bytes.as_slice(), b"x"].concat()];
        if !bytes.is_empty() {
            variants.push(bytes[..bytes.len() - 1].to_vec());
            variants.push(bytes[..bytes.len() / 2].to_vec());
            variants.push(Vec::new());
        }
        for bad in variants {
            fs::write(&path, &bad).unwrap();
            let newest = steps.newest().unwrap().unwrap();
            assert_eq!(newest.step(), 4, "{name} of {} bytes", bad.len());
            let why = format!("step 5 is incomplete; skipped: cannot read {}", path.display());
            let mut warnings = WARNINGS.lock().unwrap();
            assert!(warnings.iter().any(|text| text.starts_with(&why)), "{why}: {warnings:?}");
            warnings.clear();
            drop(warnings);
            older.check(&newest);
            assert_eq!(steps.steps().unwrap(), [4]);
            assert!(steps.open_step(5).is_err());
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(steps.newest().unwrap().unwrap().step(), 4, "without {name}");
        fs::write(&path, &bytes).unwrap();
        assert_eq!(steps.newest().unwrap().unwrap().step(), 5, "{name} is back");
    }
}

/// Files of the right length in the wrong place: from another step, or swapped.
#[test]
fn swapped_files_are_detected() {
    let mut random = Random(8);
    let mut tensor = |name| Tensor::new(name, Group::Model, Dtype::U8, &[2500], &mut random);
    let tensors = vec![tensor("a"), tensor("b")];
    let state = State { tensors, blobs: vec![], meta: json!(null) };
    let mut other = state.clone();
    other.tensors[0].bytes[7] ^= 1;
    let folder = Folder::new();
    let steps = folder.steps(SMALL);
    state.save(&steps, 5).unwrap();
    other.save(&steps, 4).unwrap();
    let (first, second) = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors");
    let path = |step: &str, name: &str| folder.path(step).join(name);
    let good = fs::read(path(STEP, first)).unwrap();

    fs::copy(path("step-000000000004", first), path(STEP, first)).unwrap();
    let checkpoint = steps.newest().unwrap().unwrap();
    assert_eq!(checkpoint.step(), 5, "the lengths are right");
    assert!(checkpoint.verify().is_err());
    assert!(checkpoint.read_tensor("a", Group::Model, &mut [0; 2500]).is_err());
    checkpoint.read_tensor("b", Group::Model, &mut [0; 2500]).unwrap();

    fs::copy(path(STEP, second), path(STEP, first)).unwrap();
    fs::write(path(STEP, second), &good).unwrap();
    let checkpoint = steps.newest().unwrap().unwrap();
    assert!(checkpoint.verify().is_err());
    assert!(checkpoint.read_tensor("a", Group::Model, &mut [0; 2500]).is_err());
    assert!(checkpoint.read_tensor("b", Group::Model, &mut [0; 2500]).is_err());
}

/// A file is truncated after its step was opened.
#[test]
fn file_truncated_while_open_is_an_error() {
    let folder = Folder::new();
    let steps = folder.steps(SMALL);
    State::of_model(6).save(&steps, 5).unwrap();
    let checkpoint = steps.newest().unwrap().unwrap();
    let file = &checkpoint.tensor("norm.weight", Group::Model).unwrap().chunks[0].file;
    let path = folder.path(STEP).join(file);
    fs::write(&path, &fs::read(&path).unwrap()[..4100]).unwrap();
    let read = checkpoint.read_tensor("norm.weight", Group::Model, &mut [0; 32]);
    assert!(matches!(read, Err(Error::Corrupt { .. })), "{read:?}");
}
