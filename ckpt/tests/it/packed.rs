//! Packed tensors: every read returns the original bytes, and damage is detected.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use crate::common::ranks::Ranks;
use crate::common::{Folder, Random, SMALL, State, Tensor};
use ckpt::{
    CheckpointOptions, Checkpoints, Codec, Drain, DrainOptions, Dtype, Durability, Error, Group,
    JointSaveOptions, PlanLimits,
};
use serde_json::{Value, json};
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore};
use storage::{Key, Manifest, Storage};

const PACKED: CheckpointOptions = CheckpointOptions { codec: Some(Codec::Planes), ..SMALL };

/// Bytes of normally distributed values, like weights.
fn weights(dtype: Dtype, items: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..items {
        let sum: u64 = (0..12).map(|_| random.below(1 << 20)).sum();
        let x = (sum as f64 / f64::from(1 << 20) - 6.0) * 0.02;
        match dtype {
            Dtype::F64 => bytes.extend(x.to_le_bytes()),
            Dtype::F32 => bytes.extend((x as f32).to_le_bytes()),
            Dtype::BF16 => bytes.extend(&(x as f32).to_le_bytes()[2..]),
            _ => panic!("no weights of {dtype}"),
        }
    }
    bytes
}

#[test]
fn every_type_round_trips() {
    let mut random = Random(1);
    for dtype in Dtype::ALL {
        let item = dtype.item_bytes() as usize;
        for items in [0, 1, 2, 255, 8192, 8193, 50_000] {
            let noise = random.bytes(items * item);
            let few: Vec<u8> = noise.iter().map(|byte| byte & 3).collect();
            for bytes in [noise, few, vec![0; items * item], vec![0xff; items * item]] {
                let packed = Codec::Planes.pack(dtype, &bytes);
                assert!(packed.len() <= bytes.len() + 4 * item, "{dtype} {items}");
                let mut back = vec![0x55; bytes.len()];
                Codec::Planes.unpack(dtype, &packed, &mut back).unwrap();
                assert!(back == bytes, "{dtype} {items}");
            }
        }
    }
}

/// Packed sizes of planes: a third for exponents, and almost nothing for zeros.
#[test]
fn weights_shrink() {
    let mut random = Random(2);
    for (dtype, share) in [(Dtype::BF16, 0.70), (Dtype::F32, 0.86), (Dtype::F64, 0.93)] {
        let bytes = weights(dtype, 300_000, &mut random);
        let packed = Codec::Planes.pack(dtype, &bytes);
        let found = packed.len() as f64 / bytes.len() as f64;
        assert!(found < share, "{dtype}: {found}");
    }
    assert!(Codec::Planes.pack(Dtype::F32, &vec![0; 1 << 20]).len() < 1000);
}

/// Planes are frames that any zstd reads, most significant first, the sign among the low bits.
#[test]
fn planes_are_zstd_frames() {
    let bytes: Vec<u8> = (0..40_000_u32)
        .flat_map(|n| f32::from_bits((n << 31) | (127 << 23)).to_le_bytes())
        .collect();
    let packed = Codec::Planes.pack(Dtype::F32, &bytes);
    let (lens, mut rest) = packed.split_at(16);
    let mut planes = Vec::new();
    for len in lens.chunks_exact(4) {
        let len = u32::from_le_bytes(len.try_into().unwrap()) as usize;
        let (frame, after) = rest.split_at(len);
        rest = after;
        planes.push(zstd::bulk::decompress(frame, 40_000).unwrap());
    }
    assert!(planes[0] == vec![127; 40_000]);
    assert!(planes[1] == vec![0; 40_000] && planes[2] == planes[1]);
    assert_eq!(planes[3][..4], [0, 1, 0, 1]);
}

#[test]
fn invalid_packed_bytes_are_rejected() {
    let mut random = Random(3);
    let bytes = weights(Dtype::F32, 20_000, &mut random);
    let good = Codec::Planes.pack(Dtype::F32, &bytes);
    let check = |packed: &[u8], items: usize| {
        let mut into = vec![0; items * 4];
        Codec::Planes.unpack(Dtype::F32, packed, &mut into).is_ok() && into == bytes
    };
    assert!(check(&good, 20_000));
    assert!(!check(&good, 19_999) && !check(&good, 20_001) && !check(&[], 20_000));
    assert!(!check(&[good.as_slice(), &[0]].concat(), 20_000));
    for cut in (0..good.len()).step_by(501) {
        assert!(!check(&good[..cut], 20_000), "cut to {cut}");
    }
    for len in [0, 1, 20_001, u32::MAX] {
        let mut bad = good.clone();
        bad[..4].copy_from_slice(&len.to_le_bytes());
        assert!(!check(&bad, 20_000), "a plane of {len}");
    }
    // A frame whose header claims more bytes than the plane.
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
    let mut bad = (bomb.len() as u32).to_le_bytes().to_vec();
    bad.extend([0; 12]);
    bad.extend(&bomb);
    assert!(Codec::Planes.unpack(Dtype::F32, &bad, &mut vec![0; 1 << 20]).is_err());
}

fn state() -> State {
    let mut random = Random(7);
    let mut state = State::of_model(4);
    let bytes = weights(Dtype::F32, 6000, &mut random);
    let (name, shape) = ("head.weight".to_owned(), vec![60, 100]);
    let tensor = Tensor { name, group: Group::Master, dtype: Dtype::F32, shape, bytes };
    state.tensors.push(tensor);
    let none = Tensor::new("none", Group::Model, Dtype::F32, &[0, 3], &mut random);
    state.tensors.push(none);
    state
}

fn saved() -> (Folder, State) {
    let (folder, state) = (Folder::new(), state());
    state.save(&folder.steps(PACKED), 1).unwrap();
    (folder, state)
}

#[test]
fn packed_step_reads_like_plain_step() {
    let (folder, state) = saved();
    let steps = folder.steps(SMALL);
    let open = steps.open_step(1).unwrap();
    state.check(&open);
    let report = open.verify().unwrap();
    assert_eq!((report.files, report.bytes), open.size());
    let names: Vec<String> = folder.files(1).into_iter().map(|(name, _)| name).collect();
    assert!(names.iter().any(|name| name == "model-00001-of-00002.planes"), "{names:?}");
    assert!(!names.iter().any(|name| name.contains("safetensors")), "{names:?}");
    for (name, bytes) in folder.files(1).iter().filter(|(name, _)| name.ends_with(".planes")) {
        assert!(safetensors::SafeTensors::deserialize(bytes).is_err(), "{name}");
    }
    // The same state in plain files has the same checksums of unpacked bytes.
    let plain = Folder::new();
    state.save(&plain.steps(SMALL), 1).unwrap();
    let expected = plain.steps(SMALL).open_step(1).unwrap();
    for (a, b) in open.tensors().iter().zip(expected.tensors()) {
        assert_eq!(a.bytes(), b.bytes());
        for (a, b) in a.chunks.iter().zip(&b.chunks) {
            assert_eq!((a.crc64, &a.blocks, &a.spans), (b.crc64, &b.blocks, &b.spans));
            assert!(a.packed.is_some() && b.packed.is_none());
        }
    }
    assert!(open.size().1 < expected.size().1);
}

/// Reading a box reads only its blocks, and fewer bytes than they unpack to.
#[test]
fn box_reads_only_its_blocks() {
    let (folder, state) = saved();
    let open = folder.steps(SMALL).open_step(1).unwrap();
    let tensor = state.tensors.iter().find(|tensor| tensor.name == "head.weight").unwrap();
    for first in [0, 7, 31, 58] {
        let mut into = vec![0; 2 * 400];
        let region = ckpt::Region::of_box(vec![[first, 2].into(), [0, 100].into()]);
        let (name, group) = ("head.weight", Group::Master);
        let want = ckpt::RegionRequest { name, group, region, into: &mut into };
        let report = open.read(vec![want]).unwrap();
        assert!(report.block_bytes <= 2 * 4096, "{report:?}");
        assert!(into == tensor.bytes[first as usize * 400..][..800], "rows from {first}");
    }
}

/// Flips bits in every region of a packed file, and in its manifest entries.
#[test]
fn every_flipped_bit_is_detected() {
    let (folder, _) = saved();
    for (name, good) in folder.files(1) {
        let path = folder.path("step-000000000001").join(&name);
        for place in (0..good.len()).step_by(good.len() / 40 + 1) {
            let mut bad = good.clone();
            bad[place] ^= 1 << (place % 8);
            fs::write(&path, &bad).unwrap();
            let seen = folder.steps(SMALL).open_step(1).and_then(|open| open.verify());
            assert!(seen.is_err(), "{name}, byte {place}");
        }
        fs::write(&path, &good).unwrap();
    }
    folder.steps(SMALL).open_step(1).unwrap().verify().unwrap();
}

/// The checksums of stored bytes are valid, but the unpacked bytes differ from the original.
#[test]
fn unpacked_bytes_are_verified() {
    let (folder, _) = saved();
    let open = || folder.steps(SMALL).open_step(1).unwrap();
    let key = Key::new("run/step-000000000001/MANIFEST.json").unwrap();
    let good = Manifest::read(&*folder.store(), &key).unwrap();
    let check = |change: &dyn Fn(&mut Value), expected: &str| {
        let mut manifest = good.clone();
        let tensors = manifest.meta["tensors"].as_array_mut().unwrap();
        let head = tensors.iter_mut().find(|tensor| tensor["name"] == "head.weight").unwrap();
        change(&mut head["chunks"][0]);
        assert_ne!(manifest, good, "nothing was changed for '{expected}'");
        fs::remove_file(folder.path("step-000000000001/MANIFEST.json")).unwrap();
        manifest.write(&*folder.store(), &key).unwrap();
        let outcome = folder.steps(SMALL).open_step(1).and_then(|open| open.verify());
        let text = outcome.expect_err(expected).to_string();
        assert!(text.contains(expected), "expected '{expected}', found '{text}'");
    };
    let zero = "0000000000000000";
    check(&|chunk| chunk["crc64"] = json!(zero), "CRC-64");
    check(&|chunk| chunk["packed"]["codec"] = json!("zip"), "unknown variant");
    check(
        &|chunk| chunk["packed"]["blocks"] = json!(""),
        "expected 1 packed blocks for 2800 bytes, found 0",
    );
    check(&|chunk| chunk["packed"]["blocks"] = json!("0"), "24 hexadecimal digits");
    check(&|chunk| chunk["packed"]["blocks"] = json!(format!("00000001{zero}")), "");
    let large = format!("ffffffff{zero}");
    check(&|chunk| chunk["packed"]["blocks"] = json!(large), "a packed block of 4294967295 bytes");
    check(
        &|chunk| drop(chunk.as_object_mut().unwrap().remove("packed")),
        "expected packed chunks in *.planes and nowhere else",
    );
    check(&|chunk| chunk["offset"] = json!(15), "");
    fs::remove_file(folder.path("step-000000000001/MANIFEST.json")).unwrap();
    good.write(&*folder.store(), &key).unwrap();
    open().verify().unwrap();
}

/// A plain file with the name of a packed one, and vice versa.
#[test]
fn file_names_must_match_codec() {
    let (folder, _) = saved();
    let key = Key::new("run/step-000000000001/MANIFEST.json").unwrap();
    let mut manifest = Manifest::read(&*folder.store(), &key).unwrap();
    let text = manifest.meta.to_string().replace(".planes", ".safetensors");
    manifest.meta = serde_json::from_str(&text).unwrap();
    for file in &mut manifest.files {
        let plain = file.path.replace(".planes", ".safetensors");
        let folder = folder.path("step-000000000001");
        fs::rename(folder.join(&file.path), folder.join(&plain)).unwrap();
        file.path = plain;
    }
    fs::remove_file(folder.path("step-000000000001/MANIFEST.json")).unwrap();
    manifest.write(&*folder.store(), &key).unwrap();
    let outcome = folder.steps(SMALL).open_step(1);
    assert!(matches!(&outcome, Err(Error::BadManifest { .. })), "{outcome:?}");
}

/// A packed step is copied as a plain one, and a plain one as a packed one.
#[test]
fn step_is_packed_and_unpacked() {
    let (folder, state) = saved();
    let import = |steps: &Checkpoints, step| {
        ckpt::convert::Import::of_step(steps.open_step(step).unwrap()).unwrap()
    };
    let (mut from, mut step) = (folder.steps(SMALL), 1);
    for options in [SMALL, PACKED, PACKED, SMALL] {
        let import = import(&from, step);
        let blobs = import.source.blobs().iter();
        let blobs: Vec<_> = blobs.map(|(name, bytes)| ckpt::Blob { name, bytes }).collect();
        let to = folder.steps(options);
        let bounds = ckpt::convert::ConvertLimits { shard_bytes_max: 9000, ..Default::default() };
        to.save_made(step + 1, &import, &blobs, state.meta.clone(), bounds, &|_| ()).unwrap();
        step += 1;
        from = to;
        let open = from.open_step(step).unwrap();
        open.verify().unwrap();
        state.check(&open);
        assert_eq!(open.tensors()[0].chunks[0].packed.is_some(), options.codec.is_some());
    }
}

fn drain_to(
    near: &Folder,
    far: &Arc<dyn Storage>,
    options: CheckpointOptions,
) -> (Drain, Arc<Checkpoints>) {
    let to = Checkpoints::open(Arc::clone(far), Key::new("run").unwrap()).with_options(options);
    let to = Arc::new(to);
    let options = DrainOptions { pause: Duration::ZERO, ..DrainOptions::default() };
    (Drain::new(Arc::new(near.steps(SMALL)), Arc::clone(&to), options), to)
}

/// A step that a drain packs has the same contents, and a packed step is copied unchanged.
#[test]
fn drain_packs_steps() {
    let near = Folder::new();
    let state = state();
    state.save(&near.steps(SMALL), 1).unwrap();
    for no_exclusive_rename in [false, true] {
        let faults = FaultPlan { no_exclusive_rename, ..FaultPlan::default() };
        let far: Arc<dyn Storage> = Arc::new(FaultStore::new(1, faults));
        let (drain, to) = drain_to(&near, &far, PACKED);
        assert_eq!(drain.run().unwrap().drained.len(), 1);
        let open = to.open_step(1).unwrap();
        open.verify().unwrap();
        state.check(&open);
        assert!(open.tensors().iter().all(|t| t.chunks.iter().all(|c| c.packed.is_some())));
        assert!(open.size().1 < near.steps(SMALL).open_step(1).unwrap().size().1);
        for options in [PACKED, SMALL] {
            let (drain, _) = drain_to(&near, &far, options);
            assert!(drain.pending().unwrap().is_empty(), "the step exists, packed or not");
            assert_eq!(drain.levels().unwrap(), [(1, Durability::Remote)]);
        }
    }
    let (near, third) = (saved().0, Folder::new());
    let (drain, to) = drain_to(&near, &third.store(), PACKED);
    assert_eq!(drain.run().unwrap().drained.len(), 1);
    state.check(&to.open_step(1).unwrap());
    assert!(third.files(1) == near.files(1));
}

/// Whatever operation fails, another try succeeds, and existing files are not written again.
#[test]
fn packing_drain_is_retried() {
    let near = Folder::in_memory();
    let state = State { tensors: state().tensors.split_off(9), ..state() };
    state.save(&near.steps(CheckpointOptions { threads: 1, ..SMALL }), 1).unwrap();
    let mut resumed = 0;
    for fails_at in (0..).step_by(2) {
        let store = FaultStore::new(1, FaultPlan::default());
        store.fail_op(fails_at, FaultKind::Io);
        let far: Arc<dyn Storage> = Arc::new(store.clone());
        let (drain, to) = drain_to(&near, &far, CheckpointOptions { threads: 1, ..PACKED });
        let report = drain.step(1).unwrap_or_else(|e| panic!("operation {fails_at}: {e}"));
        let open = to.newest().unwrap().unwrap();
        open.verify().unwrap();
        state.check(&open);
        resumed += u64::from(report.resumed_bytes > 0);
        if store.op_count() <= fails_at {
            assert!(fails_at > 50, "a drain of only {fails_at} operations");
            break;
        }
    }
    assert!(resumed > 10, "only {resumed} drains resumed existing files");
}

/// Damaged bytes of the first store are not copied with valid checksums.
#[test]
fn damaged_step_is_not_packed() {
    let near = Folder::new();
    state().save(&near.steps(SMALL), 1).unwrap();
    let path = near.path("step-000000000001/model-00001-of-00002.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
    let far: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
    let (drain, to) = drain_to(&near, &far, PACKED);
    let pass = drain.run().unwrap();
    assert!(matches!(&pass.failed[..], [(1, Error::Corrupt { .. })]), "{:?}", pass.failed);
    assert!(to.steps().unwrap().is_empty());
}

/// All writers of a joint save use the same codec, or all fail with that reason.
#[test]
fn writers_pack_jointly() {
    let limits = PlanLimits {
        shard_bytes_max: 3000,
        cut_bytes_min: 500,
        header_bytes_max: 1 << 20,
        align_all: false,
        folders: 1,
    };
    let folder = Folder::new();
    let state = state();
    let ranks = Ranks::new(&state, 3, limits);
    let save = |options: [CheckpointOptions; 3], step, token| {
        std::thread::scope(|scope| {
            let save = |(writer, options)| {
                let (ranks, steps) = (&ranks, folder.steps(options));
                let deadline = Duration::from_secs(30);
                scope.spawn(move || {
                    ranks.save(&steps, step, &JointSaveOptions { token, writer, deadline })
                })
            };
            let threads: Vec<_> = options.into_iter().enumerate().map(save).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    for saved in save([PACKED; 3], 1, "a") {
        saved.unwrap();
    }
    let open = folder.steps(SMALL).open_step(1).unwrap();
    open.verify().unwrap();
    state.check(&open);
    for saved in save([PACKED, PACKED, SMALL], 2, "b") {
        let text = saved.unwrap_err().to_string();
        assert!(text.contains("unpacked") && text.contains("planes-zstd"), "{text}");
    }
}
