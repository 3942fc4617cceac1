//! A checkpoint's manifest with its checksum corrected, and files of the lengths that it lists: if
//! it opens, reading returns the tensors or an error.

#![no_main]

use ckpt::Checkpoints;
use fuzz::{FILE_BYTES_MAX, key, some_bytes, store_with};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use storage::{FileEntry, Manifest, write_all};

/// Tensors of more bytes are not read: their length is checked like that of others.
const TENSOR_BYTES_MAX: u64 = 1 << 20;

fuzz_target!(|text: &[u8]| {
    type Body = (Vec<FileEntry>, Value);
    let Ok((files, meta)) = serde_json::from_slice::<Body>(text) else { return };
    let store = store_with(&[]);
    let folder = key("run/step-000000000005");
    for file in files.iter().take(8).filter(|file| file.bytes <= FILE_BYTES_MAX) {
        // The key may be invalid or exist already: the reader must handle the same list.
        let _ = folder
            .join(&file.path)
            .and_then(|key| write_all(store.as_ref(), &key, &some_bytes(file.bytes)).map(drop));
    }
    let manifest = Manifest { format: "feedline-ckpt".to_owned(), version: 1, files, meta };
    let record = folder.join("MANIFEST.json").expect("a valid key");
    if manifest.write(store.as_ref(), &record).is_err() {
        return; // one of the files has its name
    }
    let Ok(checkpoint) = Checkpoints::open(store, key("run")).open_step(5) else { return };
    for tensor in checkpoint.tensors() {
        let bytes: u64 = tensor.shape.iter().product::<u64>() * tensor.dtype.item_bytes();
        assert_eq!(tensor.bytes(), bytes, "{tensor:?}");
        if bytes <= TENSOR_BYTES_MAX {
            let mut into = vec![0; bytes as usize];
            let _ = checkpoint.read_tensor(&tensor.name, tensor.group, &mut into);
        }
    }
    let _ = checkpoint.verify();
});
