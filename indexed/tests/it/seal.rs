//! A checked cache is sealed, and the seal matches no other data.

use crate::common;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use crate::common::{Dice, key};
use indexed::{Builder, Dtype, Error, GptIndex, GptIndexConfig, IndexedDataset, Split};
use storage::testing::fault_store::HookLayer;
use storage::{Key, Storage};

fn write(store: &Arc<dyn Storage>, lengths: &[u32]) {
    let mut builder = Builder::create(store, &key("a"), Dtype::U8).unwrap();
    for &len in lengths {
        builder.add_encoded(&vec![7; len as usize], &[len]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

fn config() -> GptIndexConfig {
    GptIndexConfig {
        dataset_path: "a".to_owned(),
        split: Some("9,1".to_owned()),
        seq_len: 16,
        seed: 7,
        num_samples: None,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::Value::Null,
    }
}

fn load(store: &Arc<dyn Storage>) -> (IndexedDataset, indexed::Result<GptIndex>) {
    let dataset = IndexedDataset::open_ready(store, &key("a")).unwrap();
    let index =
        GptIndex::load_or_build(&dataset, Split::Train, &config(), store.as_ref(), &key("cache"));
    (dataset, index)
}

fn seal(store: &Arc<dyn Storage>) -> String {
    let names = store.list_names(&key("cache")).unwrap();
    let name = names.iter().find(|name| name.ends_with("feedline.json")).unwrap();
    String::from_utf8(common::read(store.as_ref(), &format!("cache/{name}"))).unwrap()
}

/// Writes bytes into a file and preserves its modification time.
fn patch(path: &Path, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(path).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.write_all_at(bytes, offset).unwrap();
    file.set_modified(modified).unwrap();
}

/// A seal of version 0.1 is accepted: its text is the same, except the parts that depend on this
/// machine.
#[test]
fn seals_of_version_0_1_are_accepted() {
    let (guard, store) = common::temp_store();
    write(&store, &[30; 100]);
    load(&store).1.unwrap();
    let line = |line: &str| match line.split_once("\"modified_ns\": ") {
        Some((before, _)) => format!("{before}\"modified_ns\": \"MODIFIED\",\n"),
        None => format!("{line}\n"),
    };
    let text: String = seal(&store).lines().map(line).collect();
    let folder = guard.path().to_str().unwrap();
    assert_eq!(text.replace(folder, "FOLDER"), include_str!("../golden/seal.json"));
}

/// The same number of documents and tokens, the same name, even the same time: the description and
/// the shapes are the same.
#[test]
fn other_data_of_the_same_size_invalidates_the_seal() {
    let (guard, store) = common::temp_store();
    let mut lengths: Vec<u32> = (0..300).map(|nth| 1 + nth % 50).collect();
    write(&store, &lengths);
    load(&store).1.unwrap();
    let old = File::open(guard.path().join("a.idx")).unwrap().metadata().unwrap();
    for suffix in [".bin", ".idx", ".crc"] {
        store.delete(&key("a").with_suffix(suffix).unwrap()).unwrap();
    }
    lengths.reverse();
    write(&store, &lengths);
    let new = File::options().write(true).open(guard.path().join("a.idx")).unwrap();
    new.set_modified(old.modified().unwrap()).unwrap();
    assert_eq!(new.metadata().unwrap().len(), old.len());
    let (dataset, index) = load(&store);
    let fresh = GptIndex::build(&dataset, Split::Train, &config()).unwrap();
    assert!(index.unwrap().sample_index().file() == fresh.sample_index().file());
}

/// The same files with another time are checked and sealed again.
#[test]
fn a_copy_is_checked_and_sealed_again() {
    let (guard, store) = common::temp_store();
    write(&store, &[30; 100]);
    load(&store).1.unwrap();
    let before = seal(&store);
    load(&store).1.unwrap();
    assert_eq!(seal(&store), before);
    let file = File::options().write(true).open(guard.path().join("a.idx")).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    load(&store).1.unwrap();
    let after = seal(&store);
    assert!(after != before && after.contains("\"modified_ns\": \"0\""), "{after}");
}

/// A cache is checked against the data for which another run sealed it.
#[test]
fn verify_finds_a_damaged_array_with_a_valid_seal() {
    let (guard, store) = common::temp_store();
    write(&store, &[30; 100]);
    let good = load(&store).1.unwrap().shuffle_index().file().to_vec();
    let names = store.list_names(&key("cache")).unwrap();
    let name = names.iter().find(|name| name.ends_with("shuffle_index.npy")).unwrap();
    patch(&guard.path().join("cache").join(name), 130, &[9]);
    assert!(load(&store).1.unwrap().shuffle_index().file() == good);
    assert!(common::read(store.as_ref(), &format!("cache/{name}")) == good);
}

/// A seal misses a number that was changed in the middle of a large file with its time preserved.
/// The result is an error or the changed number, never a panic.
#[test]
fn damage_that_a_seal_misses_does_not_panic() {
    let (guard, store) = common::temp_store();
    write(&store, &vec![3; 60_000]);
    let samples = load(&store).1.unwrap().sample_count();
    let mut rng = Dice(1);
    let (mut refused, mut sealed) = (0, 0);
    for _ in 0..30 {
        // A length, which is not checked again, or a pointer.
        let number = rng.below(60_000);
        let (place, good) = match rng.below(2) {
            0 => (34 + 4 * number, 3_u32.to_le_bytes()),
            _ => (34 + 4 * 60_000 + 8 * number, (3 * number as u32).to_le_bytes()),
        };
        let wrong = [0, 1, 200, u32::MAX][rng.below(4) as usize];
        patch(&guard.path().join("a.idx"), place, &wrong.to_le_bytes());
        let (dataset, index) = load(&store);
        match index {
            Err(Error::Malformed { .. }) => {}
            Err(error) => panic!("{error}"),
            Ok(index) => {
                sealed += 1;
                let each = |sample| index.for_each_part(&dataset, sample, |_, _| ());
                refused += (0..samples).filter(|&sample| each(sample).is_err()).count();
            }
        }
        patch(&guard.path().join("a.idx"), place, &good);
    }
    assert!(sealed > 10 && refused > 0, "{sealed} were taken, {refused} samples refused");
}

#[test]
fn a_dataset_is_checked_before_an_index_is_built() {
    let (guard, store) = common::temp_store();
    write(&store, &[3; 1000]);
    patch(&guard.path().join("a.idx"), 34 + 4 * 500, &4_u32.to_le_bytes());
    let (dataset, index) = load(&store);
    assert!(matches!(index.unwrap_err(), Error::Malformed { .. }));
    assert!(GptIndex::build(&dataset, Split::Train, &config()).is_err());
    assert!(IndexedDataset::open(&store, &key("a")).is_err());
    assert!(store.list_names(&Key::root()).unwrap().iter().all(|name| name != "cache"));
}

/// A run continues without a cache; a caller that needs the cache gets an error.
#[test]
fn an_order_that_cannot_be_saved() {
    let (_guard, inner) = common::temp_store();
    write(&inner, &[30; 100]);
    let full = HookLayer::new(Arc::clone(&inner), |_, call, key| {
        let object = key.to_string();
        let no_space = storage::Error::NoSpace { object, need_bytes: 1, free_bytes: Some(0) };
        if call == "create" { Err(no_space) } else { Ok(()) }
    });
    let keep = |store: &Arc<dyn Storage>| {
        let (dataset, _) = load(store);
        let (store, folder) = (store.as_ref(), key("cache"));
        GptIndex::load_or_keep(&dataset, Split::Train, &config(), store, &folder)
    };
    load(&full).1.unwrap();
    let refused = keep(&full).unwrap_err();
    assert!(matches!(refused, Error::NotKept { .. }), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("cannot save") && text.contains("no space left"), "{text}");
    assert!(inner.list_names(&key("cache")).unwrap().is_empty());
    // An existing cache is used even if it could not be written now.
    keep(&inner).unwrap();
    keep(&full).unwrap();
}
