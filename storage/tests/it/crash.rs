//! Power cuts and failing operations at every step of every operation of a store.

use std::panic::{AssertUnwindSafe, catch_unwind};

use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore};
use storage::{Error, FileEntry, Key, Manifest, Result, Storage, SyncPoint, read_all, write_all};

const SEEDS: u64 = 40;

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn bytes_of(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

/// Lengths of small and of large uploads, aligned and not.
const LENS: [usize; 4] = [0, 3000, 262_144 + 5, 1_048_576];

/// A store that has `old/a` and `old/b`.
fn filled_store(faults: FaultPlan) -> FaultStore {
    let store = FaultStore::new(1, faults);
    write_all(&store, &key("old/a"), &bytes_of(700, 1)).unwrap();
    write_all(&store, &key("old/b"), &bytes_of(300_000, 2)).unwrap();
    store
}

/// Checks that the objects that were durable before are unchanged.
fn check_old(store: &FaultStore, context: &str) {
    assert_eq!(read_all(store, &key("old/a")).unwrap(), bytes_of(700, 1), "{context}");
    assert_eq!(read_all(store, &key("old/b")).unwrap(), bytes_of(300_000, 2), "{context}");
}

/// Runs `act`, and simulates a crash after each of its operations. `check` is called with the store
/// after the crash, and whether `act` had returned by then.
fn crash_everywhere(
    faults: &FaultPlan,
    act: impl Fn(&FaultStore) -> Result<()>,
    check: impl Fn(&FaultStore, bool, &str),
) {
    let store = filled_store(faults.clone());
    let first = store.op_count();
    act(&store).unwrap();
    let last = store.op_count();
    assert!(last > first + 1, "nothing was done");
    for ops in first..=last {
        for seed in 0..SEEDS {
            let after = store.crash_at(ops, seed);
            check(
                &after,
                ops == last,
                &format!("{ops} of {first}..{last} operations, seed {seed}"),
            );
            // A sweep removes the leftovers of the dead process; only final names remain.
            sweep_all(&after, &Key::root());
            let leftover = after.raw_paths().into_iter().find(|path| path.contains(".tmp-sim."));
            assert_eq!(leftover, None, "{ops} operations, seed {seed}");
        }
    }
}

fn sweep_all(store: &FaultStore, folder: &Key) {
    store.remove_orphans(folder).unwrap();
    for name in store.list_names(folder).unwrap() {
        if store.open(&folder.join(&name).unwrap()).is_err() {
            sweep_all(store, &folder.join(&name).unwrap());
        }
    }
}

fn check_upload(faults: &FaultPlan, len: usize, known: u64) {
    let bytes = bytes_of(len, 3);
    let act = |store: &FaultStore| {
        let mut upload = store.create(&key("new/deep/c"), known * len as u64)?;
        bytes.chunks(100_000).try_for_each(|chunk| upload.write(chunk))?;
        upload.finish().map(drop)
    };
    crash_everywhere(faults, act, |after, finished, context| {
        check_old(after, context);
        match read_all(after, &key("new/deep/c")) {
            Ok(found) => assert!(found == bytes, "{context}: the object is not complete"),
            Err(Error::NotFound { .. }) => assert!(!finished, "{context}: the object is missing"),
            Err(e) => panic!("{context}: {e}"),
        }
    });
}

#[test]
fn an_upload_is_absent_or_complete_after_a_crash() {
    for len in LENS {
        check_upload(&FaultPlan::default(), len, 0);
        check_upload(&FaultPlan::default(), len, 1);
    }
}

/// Checks the test itself: on a disk that ignores fsync it must detect the damage.
#[test]
fn a_disk_that_ignores_fsync_fails_the_crash_test() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let plans = [
        FaultPlan { sync_lies: true, ..FaultPlan::default() },
        FaultPlan { sync_dir_lies: true, ..FaultPlan::default() },
    ];
    let outcomes = plans
        .map(|plan| catch_unwind(AssertUnwindSafe(|| check_upload(&plan, 262_149, 0))).is_err());
    std::panic::set_hook(hook);
    assert_eq!(outcomes, [true, true], "ignored syncs of files and of folders were not detected");
}

fn stage(store: &FaultStore) -> Result<()> {
    let staged = key(".tmp-step-1");
    let write = |name: &str, len| -> Result<FileEntry> {
        let entry = write_all(store, &staged.join(name)?, &bytes_of(len, 4))?;
        Ok(FileEntry { path: name.to_owned(), ..entry })
    };
    let files = vec![write("a", 5000)?, write("b", 300_001)?, write("sub/c", 0)?];
    let meta = serde_json::Value::Null;
    let manifest = Manifest { format: "test".to_owned(), version: 1, files, meta };
    manifest.write(store, &staged.join("manifest.json")?)?;
    store.publish(&staged, &key("run/step-1"))
}

#[test]
fn a_published_folder_is_absent_or_complete_after_a_crash() {
    crash_everywhere(&FaultPlan::default(), stage, |after, finished, context| {
        check_old(after, context);
        if after.list_names(&key("run")).unwrap().is_empty() {
            assert!(!finished, "{context}: the folder is missing");
            return;
        }
        let target = key("run/step-1");
        let manifest = Manifest::read(after, &target.join("manifest.json").unwrap());
        let report = manifest.and_then(|manifest| manifest.verify(after, &target));
        assert_eq!(report.map(|r| r.files).map_err(|e| e.to_string()), Ok(3), "{context}");
        assert_eq!(after.list(&target).unwrap().len(), 4, "{context}");
    });
}

#[test]
fn a_deleted_object_is_complete_or_absent_after_a_crash() {
    let act = |store: &FaultStore| store.delete(&key("old/b"));
    crash_everywhere(&FaultPlan::default(), act, |after, finished, context| {
        assert_eq!(read_all(after, &key("old/a")).unwrap(), bytes_of(700, 1), "{context}");
        match read_all(after, &key("old/b")) {
            Ok(found) => {
                assert!(!finished, "{context}: it still exists");
                assert_eq!(found, bytes_of(300_000, 2), "{context}");
            }
            Err(e) => assert!(matches!(e, Error::NotFound { .. }), "{context}: {e}"),
        }
    });
}

#[test]
fn a_deleted_folder_is_complete_or_absent_after_a_crash() {
    let act = |store: &FaultStore| store.delete_folder(&key("old"));
    crash_everywhere(&FaultPlan::default(), act, |after, finished, context| {
        match after.list_names(&key("old")).unwrap().is_empty() {
            true => assert!(after.list(&Key::root()).unwrap().is_empty(), "{context}"),
            false => {
                assert!(!finished, "{context}: it still exists");
                check_old(after, context);
            }
        }
    });
}

/// Makes every operation of `act` fail in every way, and calls `check` with the store and whether
/// `act` succeeded.
fn fail_everywhere(
    act: &dyn Fn(&FaultStore) -> Result<()>,
    check: &dyn Fn(&FaultStore, bool, &str),
) {
    let counting = filled_store(FaultPlan::default());
    let first = counting.op_count();
    act(&counting).unwrap();
    for how in [FaultKind::Io, FaultKind::NoSpace, FaultKind::Denied, FaultKind::DiskLost] {
        for op in first..counting.op_count() {
            let store = filled_store(FaultPlan::default());
            store.fail_op(op, how);
            let outcome = act(&store);
            let context =
                format!("operation {op} failed with {how:?}, and the call returned {outcome:?}");
            // A lost disk cannot be checked before a restart.
            if how != FaultKind::DiskLost {
                check(&store, outcome.is_ok(), &context);
            }
            if how == FaultKind::NoSpace
                && let Err(e) = &outcome
            {
                assert!(matches!(e, Error::NoSpace { .. } | Error::Exists { .. }), "{context}");
            }
            // Whatever failed, a crash afterwards leaves no partial result.
            for seed in 0..SEEDS / 4 {
                check(&store.crash(seed), outcome.is_ok(), &format!("{context}, then seed {seed}"));
            }
        }
    }
}

#[test]
fn a_failed_upload_leaves_nothing() {
    for len in [3000, 262_144 + 5] {
        let bytes = bytes_of(len, 5);
        let act = |store: &FaultStore| write_all(store, &key("new/c"), &bytes).map(drop);
        fail_everywhere(&act, &|store, done, context| {
            check_old(store, context);
            match read_all(store, &key("new/c")) {
                Ok(found) => assert!(found == bytes, "{context}: the object is not complete"),
                Err(Error::NotFound { .. }) => assert!(!done, "{context}: the object is missing"),
                Err(e) => panic!("{context}: {e}"),
            }
        });
    }
}

/// Without a crash no temporary file is left either, unless its removal is the operation that
/// failed.
#[test]
fn a_failed_upload_removes_its_temporary() {
    let act = |store: &FaultStore| write_all(store, &key("new/c"), &bytes_of(300_000, 6)).map(drop);
    let counting = filled_store(FaultPlan::default());
    let first = counting.op_count();
    act(&counting).unwrap();
    for op in first..counting.op_count() {
        let store = filled_store(FaultPlan::default());
        store.fail_op(op, FaultKind::Io);
        assert!(act(&store).is_err(), "the failure of operation {op} was not reported");
        assert_eq!(store.raw_paths(), ["old", "old/a", "old/b"], "operation {op}");
    }
}

#[test]
fn a_failed_publish_leaves_one_name() {
    fail_everywhere(&stage, &|store, done, context| {
        let target = key("run/step-1");
        match Manifest::read(store, &target.join("manifest.json").unwrap()) {
            Ok(manifest) => {
                assert_eq!(manifest.verify(store, &target).unwrap().files, 3, "{context}");
            }
            Err(Error::NotFound { .. }) => assert!(!done, "{context}: the folder is missing"),
            Err(e) => panic!("{context}: {e}"),
        }
    });
}

#[test]
fn create_reports_a_full_store() {
    let store =
        FaultStore::new(1, FaultPlan { capacity_bytes: Some(1 << 20), ..FaultPlan::default() });
    assert_eq!(store.free_bytes().unwrap(), Some(1 << 20));
    let Err(Error::NoSpace { need_bytes, free_bytes, .. }) = store.create(&key("a"), 2 << 20)
    else {
        panic!("an upload of 2 MiB was accepted with 1 MiB free")
    };
    assert_eq!((need_bytes, free_bytes), (2 << 20, Some(1 << 20)));
    // With an unknown length the full store is detected during the upload, and no file is left.
    let outcome = (0..40).try_fold(store.create(&key("a"), 0).unwrap(), |mut upload, _| {
        upload.write(&bytes_of(100_000, 7))?;
        Ok(upload)
    });
    let outcome = outcome.and_then(storage::Upload::finish);
    assert!(matches!(outcome, Err(Error::NoSpace { .. })), "{outcome:?}");
    assert!(store.raw_paths().is_empty(), "{:?}", store.raw_paths());
    assert_eq!(store.free_bytes().unwrap(), Some(1 << 20));
}

/// After a failure every later call of an upload fails.
#[test]
fn a_failed_upload_stays_failed() {
    let store =
        FaultStore::new(1, FaultPlan { capacity_bytes: Some(1 << 20), ..FaultPlan::default() });
    let mut upload = store.create(&key("a"), 0).unwrap();
    let failed = (0..40).find_map(|_| upload.write(&bytes_of(1_000_000, 8)).err());
    assert!(matches!(failed, Some(Error::NoSpace { .. })), "{failed:?}");
    assert!(matches!(upload.write(&[]), Err(Error::Poisoned { .. })));
    assert!(matches!(upload.finish(), Err(Error::Poisoned { .. })));
    assert!(store.raw_paths().is_empty());
}

/// After a crash a resumable upload has at least the synced bytes, and an upload resumed from there
/// makes the intended object.
#[test]
fn a_resumable_upload_survives_every_crash() {
    let (first, rest) = (bytes_of(9_001, 4), bytes_of(300_000, 5));
    let all = [&first[..], &rest].concat();
    let store = filled_store(FaultPlan::default());
    let mut draft = store.create_resumable(&key("new/d")).unwrap();
    draft.write(&first).unwrap();
    let synced_point = draft.sync().unwrap();
    let synced = store.op_count();
    draft.write(&rest).unwrap();
    draft.sync().unwrap();
    draft.finish().unwrap();
    for ops in synced..=store.op_count() {
        for seed in 0..SEEDS {
            let context = format!("{ops} operations, seed {seed}");
            let after = store.crash_at(ops, seed);
            check_old(&after, &context);
            if let Ok(bytes) = read_all(&after, &key("new/d")) {
                assert_eq!(bytes, all, "{context}");
                continue;
            }
            let mut draft = after.resume(&key("new/d"), synced_point).expect(&context);
            draft.write(&rest).unwrap();
            draft.finish().unwrap();
            assert_eq!(read_all(&after, &key("new/d")).unwrap(), all, "{context}");
        }
    }
    let expected = SyncPoint { bytes: 9_001, crc64: storage::crc64(&first) };
    assert_eq!(synced_point, expected);
}
