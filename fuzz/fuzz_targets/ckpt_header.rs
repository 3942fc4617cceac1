//! The header of a safetensors file, in a checkpoint with correct checksums.

#![no_main]

use ckpt::Checkpoints;
use fuzz::{key, store_with};
use libfuzzer_sys::fuzz_target;
use serde_json::json;
use storage::{FileEntry, Manifest, crc64};

fuzz_target!(|file: &[u8]| {
    // Files shorter than a length field are refused by other stores; this store panics.
    let Some(len) = file.first_chunk() else { return };
    let header = u64::from_le_bytes(*len).saturating_add(8);
    let start = usize::try_from(header).unwrap_or(usize::MAX).min(file.len());
    let data = &file[start..];
    let chunk = json!({
        "file": "model-00001-of-00001.safetensors",
        "offset": start,
        "bytes": data.len(),
        "crc64": format!("{:016x}", crc64(data)),
        "box": [[0, data.len()]],
    });
    let tensor = json!({
        "name": "w", "group": "model", "dtype": "U8", "shape": [data.len()], "chunks": [chunk],
    });
    let meta = json!({
        "step": 5, "block_bytes": 4 << 20, "tensors": [tensor], "blobs": [], "user": null,
    });
    let path = "model-00001-of-00001.safetensors".to_owned();
    let entry = FileEntry { path, bytes: file.len() as u64, crc64: crc64(file) };
    let manifest =
        Manifest { format: "feedline-ckpt".to_owned(), version: 1, files: vec![entry], meta };
    let at = "run/step-000000000005";
    let store = store_with(&[(&format!("{at}/model-00001-of-00001.safetensors"), file)]);
    manifest.write(store.as_ref(), &key(&format!("{at}/MANIFEST.json"))).expect("room in memory");
    let checkpoint = Checkpoints::open(store, key("run")).open_step(5).expect("a valid manifest");
    if checkpoint.verify().is_ok() {
        let text = String::from_utf8_lossy(&file[8..start]);
        assert!(text.contains("\"w\"") || text.contains('\\'), "{text}");
    }
});
