//! Manifests and headers with valid checksums and invalid contents.

use std::fs;

use crate::common::{Folder, Random, SMALL, State, Tensor};
use ckpt::{CheckpointOptions, Dtype, Group};
use serde_json::{Value, json};
use storage::{FileEntry, Key, Manifest, crc64};

const STEP: &str = "step-000000000005";

/// Two steps; the newer one gets another manifest with a valid checksum.
struct Victim {
    folder: Folder,
    good: Manifest,
}

impl Victim {
    fn new() -> Self {
        let folder = Folder::new();
        let mut random = Random(3);
        let tensors = vec![
            Tensor::new("a", Group::Model, Dtype::F32, &[4, 6], &mut random),
            Tensor::new("b", Group::Model, Dtype::F32, &[4, 6], &mut random),
            Tensor::new("c", Group::Master, Dtype::U8, &[10, 1000], &mut random),
            Tensor::new("d", Group::Master, Dtype::U8, &[1, 9000], &mut random),
        ];
        let state = State { tensors, blobs: vec![("x".to_owned(), vec![1])], meta: json!({}) };
        state.save(&folder.steps(SMALL), 4).unwrap();
        state.save(&folder.steps(SMALL), 5).unwrap();
        let good = Manifest::read(&*folder.store(), &Self::key()).unwrap();
        Victim { folder, good }
    }

    fn key() -> Key {
        Key::new(format!("run/{STEP}/MANIFEST.json")).unwrap()
    }

    fn write(&self, manifest: &Manifest) {
        fs::remove_file(self.folder.path(STEP).join("MANIFEST.json")).unwrap();
        manifest.write(&*self.folder.store(), &Self::key()).unwrap();
    }

    /// The changed manifest is rejected with this message, and the older step is found.
    fn check(&self, change: impl Fn(&mut Manifest), expected: &str) {
        let mut manifest = self.good.clone();
        change(&mut manifest);
        assert_ne!(manifest, self.good, "nothing was changed for '{expected}'");
        self.write(&manifest);
        let steps = self.folder.steps(SMALL);
        let text = steps.open_step(5).expect_err(expected).to_string();
        assert!(text.contains(expected), "expected '{expected}', found '{text}'");
        assert_eq!(steps.newest().unwrap().unwrap().step(), 4, "{expected}");
    }

    fn check_meta(&self, pointer: &str, value: &Value, expected: &str) {
        let change = |manifest: &mut Manifest| {
            *manifest.meta.pointer_mut(pointer).expect(pointer) = value.clone();
        };
        self.check(change, expected);
    }
}

#[test]
fn invalid_manifest_fields_are_rejected() {
    let victim = Victim::new();
    victim.check(
        |m| m.format = "feedline-tokens".to_owned(),
        "expected feedline-ckpt, found feedline-tokens",
    );
    victim.check(|m| m.version = 3, "version: expected 1 or 2, the supported versions, found 3");
    victim.check(|m| m.meta = json!([]), "meta: expected");
    victim.check(|m| m.meta["extra"] = json!(1), "unknown field `extra`");
    victim.check(|m| drop(m.meta.as_object_mut().unwrap().remove("blobs")), "missing field");
    victim.check_meta("/step", &json!(6), "expected step 5 as in the folder name, found step 6");
    victim.check_meta("/step", &json!(-5), "meta: expected");
    for block_bytes in [json!(0), json!(4095), json!(5000), json!(1_u64 << 40), json!(u64::MAX)] {
        victim.check_meta("/block_bytes", &block_bytes, "block_bytes: expected");
    }
    // A valid block size, but not that of the checksums.
    victim.check_meta(
        "/block_bytes",
        &json!(8192),
        "expected 2 block checksums for 9000 bytes, found 3",
    );
}

/// A duplicate key within a tensor, with a valid checksum: two readers could use different values.
#[test]
fn duplicate_names_are_rejected() {
    let victim = Victim::new();
    let path = victim.folder.path(STEP).join("MANIFEST.json");
    let good = fs::read_to_string(&path).unwrap();
    for (from, to) in [
        ("\"name\": \"a\",", "\"name\": \"b\", \"name\": \"a\","),
        ("\"step\": 5,", "\"step\": 4, \"step\": 5,"),
        ("\"user\": {}", "\"user\": {\"x\": 1, \"x\": 2}"),
    ] {
        let body = good.replacen(from, to, 1);
        assert_ne!(body, good, "{from}");
        let (open, _) = body.rsplit_once("\n  \"manifest_crc64\"").unwrap();
        let sum = crc64(open.as_bytes());
        let text = format!("{open}\n  \"manifest_crc64\": \"{sum:016x}\"\n}}\n");
        fs::write(&path, text).unwrap();
        let text = victim.folder.steps(SMALL).open_step(5).unwrap_err().to_string();
        assert!(text.contains("duplicate key"), "{text}");
    }
}

/// A file longer than any manifest is rejected by its length, and not read.
#[test]
fn manifest_above_1_gib_is_not_read() {
    let victim = Victim::new();
    let path = victim.folder.path(STEP).join("MANIFEST.json");
    let len = (1 << 30) + 1;
    fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
    let steps = victim.folder.steps(SMALL);
    let text = steps.open_step(5).unwrap_err().to_string();
    assert!(
        text.contains(
            "MANIFEST.json: expected a manifest of at most 1073741824 bytes, found 1073741825 bytes"
        ),
        "{text}"
    );
    assert_eq!(steps.newest().unwrap().unwrap().step(), 4);
    assert!(steps.verify_step(5).is_err());
}

#[test]
fn invalid_file_entries_are_rejected() {
    let victim = Victim::new();
    for path in ["../step-000000000004/extra/x", "/etc/passwd", "a/./b", "", "extra//x", "a\0b"] {
        victim.check(|m| m.files[0].path = path.to_owned(), "cannot use key ");
    }
    victim.check(|m| m.files[0].path = m.files[1].path.clone(), "each file once");
    victim.check(|m| m.files[0].path = "absent".to_owned(), "expected a listed file");
    let absent = FileEntry { path: "absent".to_owned(), bytes: 0, crc64: 0 };
    victim.check(|m| m.files.push(absent.clone()), "absent: no such file");
    victim.check(|m| m.files[0].bytes += 1, "as in the manifest");
    victim.check(|m| m.files[0].bytes = u64::MAX, "as in the manifest");
    victim.check(|m| m.files[0].bytes = 0, "a range of its own");
    victim.check_meta("/blobs/0/file", &json!("../x"), "expected a listed file");
    let twice = |m: &mut Manifest| {
        let blob = m.meta["blobs"][0].clone();
        m.meta["blobs"].as_array_mut().unwrap().push(blob);
    };
    victim.check(twice, "each blob once");
}

#[test]
fn invalid_tensors_are_rejected() {
    let victim = Victim::new();
    let a = |field: &str| format!("/tensors/0/{field}");
    victim.check_meta(&a("dtype"), &json!("F33"), "unknown variant");
    victim.check_meta(&a("dtype"), &json!("F64"), "96 bytes for box");
    victim.check_meta(&a("group"), &json!("secret"), "unknown variant");
    victim.check_meta(
        &a("name"),
        &json!("b"),
        "model 'b': expected one entry of this name, found two",
    );
    victim.check_meta(&a("shape"), &json!(vec![1; 33]), "at most 32 axes");
    victim.check_meta(&a("shape"), &json!([1_u64 << 40, 1_u64 << 40]), "fewer than 2^64 bytes");
    victim.check_meta(&a("shape"), &json!([u64::MAX, 1]), "fewer than 2^64 bytes");
    victim.check_meta(&a("shape"), &json!([4, 6.5]), "meta: expected");
    victim.check_meta(&a("shape"), &json!([6, 4]), "a box within [6, 4]");
    victim.check_meta(&a("shape"), &json!([5, 6]), "disjoint boxes that cover");
    victim.check_meta(&a("shape"), &json!([24]), "a box within");
    victim.check_meta(&a("chunks"), &json!([]), "0 boxes that overlap or leave gaps");
    for shape in [json!([]), json!([0, 1_u64 << 63])] {
        let packed = |m: &mut Manifest| {
            m.meta["tensors"][0]["dtype"] = json!("F4_X2");
            m.meta["tensors"][0]["shape"] = shape.clone();
        };
        victim.check(packed, "found F4_X2 of shape");
    }
}

#[test]
fn invalid_chunks_are_rejected() {
    let victim = Victim::new();
    let a = |field: &str| format!("/tensors/0/chunks/0/{field}");
    victim.check_meta(&a("file"), &json!("MANIFEST.json"), "expected a listed file");
    victim.check_meta(&a("bytes"), &json!(95), "95 bytes for box");
    victim.check_meta(&a("offset"), &json!(u64::MAX), "a range of its own");
    victim.check_meta(&a("offset"), &json!(4096 + 96 + 96), "a range of its own");
    victim.check_meta(&a("offset"), &json!(4096 + 8), "a range of its own");
    victim.check_meta(&a("crc64"), &json!("123"), "16 hexadecimal digits");
    victim.check_meta(&a("crc64"), &json!("+23456789abcdef0"), "16 hexadecimal digits");
    victim.check_meta(&a("crc64"), &json!("表表表表表1"), "16 hexadecimal digits");
    victim.check_meta(&a("box"), &json!([[0, 4]]), "a box within");
    victim.check_meta(&a("box"), &json!([[1, 4], [0, 6]]), "a box within");
    victim.check_meta(&a("box"), &json!([[u64::MAX, 4], [0, 6]]), "a box within");
    victim.check_meta(&a("box"), &json!([[0, u64::MAX], [0, u64::MAX]]), "a box within");
    victim.check_meta(&a("box/0"), &json!([0, 4, 0]), "meta: expected");

    let c = |field: &str| format!("/tensors/2/chunks/{field}");
    victim.check_meta(&c("1/box"), &json!([[0, 3], [0, 1000]]), "disjoint boxes that cover");
    victim.check_meta(&c("1/box"), &json!([[4, 3], [0, 1000]]), "disjoint boxes that cover");
    let drop_last = |m: &mut Manifest| {
        m.meta["tensors"][2]["chunks"].as_array_mut().unwrap().pop().unwrap();
    };
    victim.check(drop_last, "disjoint boxes that cover");
    let in_one_place = |m: &mut Manifest| {
        m.meta["tensors"][0]["chunks"] = m.meta["tensors"][1]["chunks"].clone();
    };
    victim.check(in_one_place, "a range of its own");
    for blocks in ["0", "zz", "00000000000000000"] {
        let add = |m: &mut Manifest| {
            m.meta["tensors"][0]["chunks"][0]["blocks"] = json!(blocks);
        };
        victim.check(add, "meta: expected");
    }
    let one = |m: &mut Manifest| {
        m.meta["tensors"][0]["chunks"][0]["blocks"] = json!("0123456789abcdef");
    };
    victim.check(one, "expected 0 block checksums for 96 bytes, found 1");
}

/// Ranges of boxes that are valid except for one defect.
#[test]
fn invalid_flat_ranges_are_rejected() {
    let victim = Victim::new();
    let with_flat = |flat: Value| {
        move |m: &mut Manifest| {
            let chunk = &mut m.meta["tensors"][2]["chunks"][1];
            chunk["box"] = json!([[0, 10], [0, 1000]]);
            chunk["flat"] = flat.clone();
        }
    };
    // The rows that the box had: the same elements in another notation.
    let mut same = victim.good.clone();
    with_flat(json!([3000, 3000]))(&mut same);
    victim.write(&same);
    let mut row = vec![0; 1000];
    let spans = [[4, 1].into(), [0, 1000].into()];
    let checkpoint = victim.folder.steps(SMALL).open_step(5).unwrap();
    checkpoint.read_box("c", Group::Master, &spans, &mut row).unwrap();
    assert!(checkpoint.verify().is_err(), "the header has it as a box");

    victim.check(with_flat(json!([2999, 3000])), "disjoint boxes that cover");
    victim.check(with_flat(json!([3001, 3000])), "disjoint boxes that cover");
    victim.check(with_flat(json!([7001, 3000])), "a box within");
    victim.check(with_flat(json!([u64::MAX, 3000])), "a box within");
    victim.check(with_flat(json!([3000, u64::MAX])), "a box within");
    victim.check(with_flat(json!([3000, 2999])), "3000 bytes for [3000, 2999] of box");
    victim.check(with_flat(json!([3000])), "meta: expected");
    victim.check(with_flat(json!([3000, -1])), "meta: expected");
    victim.check_meta(
        "/tensors/0/name",
        &json!("__pad__.0"),
        "expected a tensor name, found one reserved for padding",
    );
}

/// Padding between two tensors: an entry of the header, and bytes that only `verify` reads.
#[test]
fn invalid_gaps_are_rejected() {
    let folder = Folder::new();
    let mut random = Random(5);
    let mut tensor =
        |name: &str, bytes: u64| Tensor::new(name, Group::ExpAvg, Dtype::U8, &[bytes], &mut random);
    let tensors = vec![tensor("a", (1 << 20) + 5), tensor("b", 1 << 20)];
    let state = State { tensors, blobs: vec![], meta: json!(null) };
    state.save(&folder.steps(CheckpointOptions::default()), 5).unwrap();
    let open = || folder.steps(CheckpointOptions::default()).open_step(5).unwrap();
    open().verify().unwrap();
    state.check(&open());
    let path = folder.path(STEP).join("optim-00001-of-00001.safetensors");
    let good = fs::read(&path).unwrap();
    let stock = safetensors::SafeTensors::deserialize(&good).unwrap();
    assert_eq!(stock.len(), 3, "two tensors and a pad");
    assert!(stock.tensor("__pad__.0").unwrap().data() == vec![0; 4091]);

    let victim = Victim { good: Manifest::read(&*folder.store(), &Victim::key()).unwrap(), folder };
    let check = |bytes: &[u8], expected: &str| {
        fs::write(&path, bytes).unwrap();
        let mut manifest = victim.good.clone();
        manifest.files[0].crc64 = crc64(bytes);
        victim.write(&manifest);
        let text = victim.folder.steps(SMALL).open_step(5).unwrap().verify().unwrap_err();
        assert!(text.to_string().contains(expected), "expected '{expected}', found '{text}'");
    };
    let mut secret = good.clone();
    secret[4096 + (1 << 20) + 100] = 1;
    check(&secret, "CRC-64");
    let (old, new) = (format!("[{},", (1 << 20) + 5), format!("[{},", (1 << 20) + 4));
    let claim = |from: &str, to: &str| {
        let at = good.windows(from.len()).rposition(|w| w == from.as_bytes()).unwrap();
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    check(&claim(&old, &new), "as in the manifest");
    check(&claim("__pad__.0", "__pad__.1"), "as in the manifest");
    // A gap of a page is more than any alignment needs.
    let wide = |m: &mut Manifest| {
        m.meta["tensors"][1]["chunks"][0]["offset"] = json!(4096 + (2 << 20));
        m.files[0].bytes = 4096 + (3 << 20);
    };
    let mut manifest = victim.good.clone();
    wide(&mut manifest);
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(4096 + (3 << 20)).unwrap();
    victim.write(&manifest);
    let text = victim.folder.steps(SMALL).open_step(5).unwrap().verify().unwrap_err().to_string();
    assert!(text.contains("within 4096 bytes"), "{text}");
}

/// The data and all checksums are valid, but the header of the file differs from the manifest.
#[test]
fn headers_that_differ_from_manifest_are_rejected() {
    let victim = Victim::new();
    let path = victim.folder.path(STEP).join("model-00001-of-00001.safetensors");
    let good = fs::read(&path).unwrap();
    let end = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let json = std::str::from_utf8(&good[8..end]).unwrap().trim_end().to_owned();
    let check = |bytes: &[u8], expected: &str| {
        fs::write(&path, bytes).unwrap();
        let mut manifest = victim.good.clone();
        let file = manifest.files.iter_mut().find(|file| path.ends_with(&file.path)).unwrap();
        (file.bytes, file.crc64) = (bytes.len() as u64, crc64(bytes));
        victim.write(&manifest);
        let text = victim.folder.steps(SMALL).open_step(5).unwrap().verify().expect_err(expected);
        assert!(text.to_string().contains(expected), "expected '{expected}', found '{text}'");
    };
    let with_json = |json: &str| {
        let mut bytes = good.clone();
        bytes[8..end].fill(b' ');
        bytes[8..8 + json.len()].copy_from_slice(json.as_bytes());
        bytes
    };
    let swapped =
        json.replace("\"a\"", "\"t\"").replace("\"b\"", "\"a\"").replace("\"t\"", "\"b\"");
    check(&with_json(&swapped), "as in the manifest");
    check(&with_json(&json.replace("\"b\"", "\"a\"")), "duplicate name 'a'");
    check(&with_json(&json.replace("F32", "I32")), "as in the manifest");
    check(&with_json(&json.replace("[4,6]", "[6,4]")), "as in the manifest");
    check(&with_json(&json.replace("\"b\"", "\"d\"")), "as in the manifest");
    check(&with_json("{}"), "expected 2 tensors as in the manifest, found 0 tensors");
    check(&with_json("[]"), "no '{'");
    check(&with_json("{} x"), "JSON");
    check(&with_json(&json.replace("\"shape\"", "\"shapes\"")), "unknown field");
    let len_max = good.len() - 8;
    let too_long =
        |len: u64| format!("expected at most {len_max} bytes, found a header of {len} bytes");
    for (header_bytes, expected) in [
        (u64::MAX, too_long(u64::MAX)),
        (100_000_001, too_long(100_000_001)),
        (4089, "JSON".to_owned()),
    ] {
        let mut bytes = good.clone();
        bytes[..8].copy_from_slice(&header_bytes.to_le_bytes());
        check(&bytes, &expected);
    }
    check(&[good.as_slice(), &[0; 8]].concat(), "8 bytes after the last tensor");
    // A header that does not end at a page, and tensors at that offset in the manifest.
    let mut shifted = good[..end - 8].to_vec();
    shifted[..8].copy_from_slice(&(end as u64 - 16).to_le_bytes());
    shifted.extend(&good[end..]);
    let mut manifest = victim.good.clone();
    for place in 0..2 {
        let chunk = &mut manifest.meta["tensors"][place]["chunks"][0];
        chunk["offset"] = json!(chunk["offset"].as_u64().unwrap() - 8);
    }
    let file = manifest.files.iter_mut().find(|file| path.ends_with(&file.path)).unwrap();
    (file.bytes, file.crc64) = (shifted.len() as u64, crc64(&shifted));
    fs::write(&path, &shifted).unwrap();
    victim.write(&manifest);
    let text = victim.folder.steps(SMALL).open_step(5).unwrap().verify().unwrap_err().to_string();
    assert!(text.contains("expected tensors from a multiple of 4096"), "{text}");
    fs::write(&path, &good).unwrap();
    victim.write(&victim.good);
    victim.folder.steps(SMALL).open_step(5).unwrap().verify().unwrap();
}

/// Checksums that are each valid, but inconsistent with each other.
#[test]
fn inconsistent_checksums_are_rejected() {
    let victim = Victim::new();
    let zeros = json!("0000000000000000");
    let change = |pointer: &str| {
        let mut manifest = victim.good.clone();
        *manifest.meta.pointer_mut(pointer).unwrap() = zeros.clone();
        victim.write(&manifest);
        victim.folder.steps(SMALL).open_step(5).unwrap().verify().unwrap_err()
    };
    change("/tensors/0/chunks/0/crc64");
    change("/tensors/2/chunks/0/crc64");
    change("/tensors/3/chunks/0/crc64");
    let mut manifest = victim.good.clone();
    manifest.files[0].crc64 ^= 1;
    victim.write(&manifest);
    victim.folder.steps(SMALL).open_step(5).unwrap().verify().unwrap_err();
}

/// A manifest of another writer, with boxes cut along two axes, which this release does not write.
#[test]
fn boxes_cut_along_two_axes_are_read() {
    let folder = Folder::new();
    let bytes: Vec<u8> = (0..24).collect();
    // A pinwheel of five boxes in a tensor of 4 rows and 6 columns.
    let boxes: [[[usize; 2]; 2]; 5] =
        [[[0, 1], [0, 4]], [[0, 3], [4, 2]], [[3, 1], [2, 4]], [[1, 3], [0, 2]], [[1, 2], [2, 2]]];
    let parts = boxes.map(|[rows, columns]| -> Vec<u8> {
        let row = |x: usize| bytes[x * 6 + columns[0]..][..columns[1]].to_vec();
        (rows[0]..rows[0] + rows[1]).flat_map(row).collect()
    });
    // Written as separate tensors, then declared to be one.
    let shapes = boxes.map(|[rows, columns]| [rows[1] as u64, columns[1] as u64]);
    let tensors = (0..5).map(|k| Tensor {
        name: format!("t{k}"),
        group: Group::ExpAvg,
        dtype: Dtype::U8,
        shape: shapes[k].to_vec(),
        bytes: parts[k].clone(),
    });
    let state = State { tensors: tensors.collect(), blobs: vec![], meta: json!(null) };
    state.save(&folder.steps(SMALL), 5).unwrap();
    let mut manifest = Manifest::read(&*folder.store(), &Victim::key()).unwrap();
    let mut chunks = Vec::new();
    for (k, spans) in boxes.iter().enumerate() {
        let mut chunk = manifest.meta["tensors"][k]["chunks"][0].clone();
        chunk["box"] = json!(spans);
        chunks.push(chunk);
    }
    let mut one = manifest.meta["tensors"][0].clone();
    (one["name"], one["shape"], one["chunks"]) = (json!("t"), json!([4, 6]), json!(chunks));
    manifest.meta["tensors"] = json!([one]);
    let victim = Victim { folder, good: manifest };
    victim.write(&victim.good);
    let mut read = vec![0; 24];
    let checkpoint = victim.folder.steps(SMALL).newest().unwrap().unwrap();
    checkpoint.read_tensor("t", Group::ExpAvg, &mut read).unwrap();
    assert_eq!(read, bytes);
    let wanted = [[1, 2].into(), [1, 5].into()];
    let mut read = vec![0; 10];
    checkpoint.read_box("t", Group::ExpAvg, &wanted, &mut read).unwrap();
    assert_eq!(read, [&bytes[7..12], &bytes[13..18]].concat());
}
