//! A builder on a store that fails at its n-th call, for every n.

use std::sync::Arc;

use crate::common::{failing, key, temp_store};
use indexed::{Builder, Built, Dtype, Error, IndexedDataset, Result};
use storage::{Key, Storage};

/// More than one write to the `.bin`, small ones and large.
fn build(store: &Arc<dyn Storage>) -> Result<Built> {
    let mut builder = Builder::create(store, &key("folder/a"), Dtype::U16)?;
    let large = vec![7; 3 << 20];
    for _ in 0..3 {
        builder.add_sequence(&[1, 2, 3])?;
        builder.add_encoded(&large, &[1 << 20, 1 << 19])?;
        builder.end_document()?;
    }
    builder.finish()
}

/// The calls of a successful build, in order.
fn calls() -> Vec<String> {
    let (_guard, store) = temp_store();
    let (store, calls) = failing(&store, 0..0);
    build(&store).unwrap();
    let calls = calls.lock().unwrap();
    calls.clone()
}

#[test]
fn files_are_complete_before_any_is_visible() {
    let calls = calls();
    let (work, finish) = calls.split_at(calls.len() - 3);
    assert_eq!(finish, ["finish folder/a.bin", "finish folder/a.crc", "finish folder/a.idx"]);
    assert_eq!(work[..3], ["a.idx", "a.bin", "a.crc"].map(|name| format!("create folder/{name}")));
    assert!(work[3..].iter().all(|call| call.starts_with("write ")), "{work:?}");
}

#[test]
fn a_failed_build_leaves_no_file() {
    for fail in 0..calls().len() {
        let (_guard, store) = temp_store();
        let (failing, _) = failing(&store, fail..fail + 1);
        let error = build(&failing).unwrap_err();
        assert!(error.to_string().contains("as the test wants it"), "call {fail}: {error}");
        assert_eq!(store.list(&Key::root()).unwrap(), [], "call {fail}");
        // No file is left, so the next run succeeds.
        build(&store).unwrap();
    }
}

#[test]
fn a_failed_rollback_names_the_file() {
    let last = calls().len() - 1;
    let (_guard, store) = temp_store();
    let (failing, _) = failing(&store, last..usize::MAX);
    let error = build(&failing).unwrap_err();
    assert!(matches!(error, Error::LeftBehind { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("cannot roll back "), "{text}");
    assert!(text.contains("folder/a.bin of the same dataset: "), "{text}");
    // The next run names the file that exists.
    let error = build(&store).unwrap_err();
    assert!(matches!(error, Error::Orphan { .. }), "{error}");
    assert!(error.to_string().contains("folder/a.bin: it exists without its .idx"));
}

#[test]
fn existing_files_are_not_overwritten() {
    let (_guard, store) = temp_store();
    build(&store).unwrap();
    let error = build(&store).unwrap_err();
    assert!(matches!(error, Error::Storage(storage::Error::Exists { .. })), "{error}");
    IndexedDataset::open(&store, &key("folder/a")).unwrap().check().unwrap();
}

#[test]
fn a_dropped_builder_leaves_no_file() {
    let (guard, store) = temp_store();
    let mut builder = Builder::create(&store, &key("a"), Dtype::U16).unwrap();
    builder.add_encoded(&vec![0; 4 << 20], &[2 << 20]).unwrap();
    drop(builder);
    assert_eq!(std::fs::read_dir(guard.path()).unwrap().count(), 0);
}

#[test]
fn a_long_dataset_round_trips() {
    let (_guard, store) = temp_store();
    let built = build(&store).unwrap();
    let dataset = IndexedDataset::open(&store, &key("folder/a")).unwrap();
    assert_eq!((built.sequences, built.documents), (9, 3));
    assert_eq!(built.tokens, 3 * (3 + (3 << 19)));
    assert_eq!((dataset.token_count(), dataset.document_count()), (built.tokens, 3));
    assert_eq!(dataset.document(1), 3..6);
    assert_eq!(dataset.read_sequence(3).unwrap(), [1, 2, 3]);
    assert_eq!(dataset.read_sequence(4).unwrap(), vec![0x0707; 1 << 20]);
}
