//! Power cuts at every operation of the disk, with every kind of image that they may leave:
//! contents or names that were not synced, and a truncated last write. With an exclusive rename,
//! and without one, where a record commits.

use std::sync::Arc;

use crate::common::{Random, SERIAL, State, Tensor};
use ckpt::{Checkpoints, Dtype, Error, Group};
use serde_json::json;
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore};
use storage::{Key, Storage as _};

/// Images that are checked at each moment.
const IMAGES: u64 = 5;

/// The ways in which a store commits.
const FORMS: [bool; 2] = [false, true];

fn new_store(seed: u64, no_exclusive_rename: bool) -> FaultStore {
    FaultStore::new(seed, FaultPlan { no_exclusive_rename, ..FaultPlan::default() })
}

fn steps_on(store: &FaultStore) -> Checkpoints {
    Checkpoints::open(Arc::new(store.clone()), key("run")).with_options(SERIAL)
}

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

/// A state of few files, so that every image can be read completely.
fn small_state(seed: u64) -> State {
    let mut random = Random(seed);
    let tensors = vec![
        Tensor::new("a", Group::Model, Dtype::U8, &[10, 500], &mut random),
        Tensor::new("a", Group::ExpAvg, Dtype::F32, &[7], &mut random),
    ];
    State { tensors, blobs: vec![("rng".to_owned(), random.bytes(700))], meta: json!(seed) }
}

/// The store as seen by the next process, which knows that its predecessor is dead.
fn after_crash(store: &FaultStore, ops: usize, seed: u64) -> FaultStore {
    let after = store.crash_at(ops, seed);
    for name in after.list_names(&key("run")).unwrap() {
        if name.starts_with(".lease-") {
            after.delete(&key(&format!("run/{name}"))).unwrap();
        }
    }
    after
}

/// Every image of every moment from `from` on.
fn each_image(store: &FaultStore, from: usize, check: impl Fn(&FaultStore, &str)) {
    for ops in from..=store.op_count() {
        for seed in 0..IMAGES {
            let context = format!("after {ops} operations, image {seed}");
            check(&after_crash(store, ops, seed), &context);
        }
    }
}

/// The newest step, and every other listed step, is bitwise one of these.
fn check_newest(steps: &Checkpoints, expected: &[(u64, &State)], context: &str) -> Option<u64> {
    for step in steps.steps().expect(context) {
        let (_, state) = expected.iter().find(|(number, _)| *number == step).expect(context);
        let checkpoint = steps.open_step(step).expect(context);
        checkpoint.verify().expect(context);
        assert_eq!(state.differs_from(&checkpoint).expect(context), None, "{context}");
    }
    steps.newest().expect(context).map(|newest| newest.step())
}

#[test]
fn power_cut_leaves_old_or_new_step() {
    for marked in FORMS {
        let store = new_store(3, marked);
        let (old, new) = (small_state(1), small_state(2));
        old.save(&steps_on(&store), 1).unwrap();
        let from = store.op_count();
        new.save(&steps_on(&store), 2).unwrap();
        assert!(store.op_count() > from + 30, "a save of few operations");
        each_image(&store, from, |after, context| {
            let steps = steps_on(after);
            let newest = check_newest(&steps, &[(1, &old), (2, &new)], context);
            assert!(newest.is_some(), "{context}");
            // Steps whose save returned are durable.
            steps.sweep().expect(context);
            match new.save(&steps, 2) {
                Ok(_) => assert_eq!(newest, Some(1), "{context}"),
                Err(Error::StepExists { .. }) => assert_eq!(newest, Some(2), "{context}"),
                Err(error) => panic!("{context}: {error}"),
            }
            assert_eq!(check_newest(&steps, &[(1, &old), (2, &new)], context), Some(2));
        });
        each_image(&store, store.op_count(), |after, context| {
            assert_eq!(check_newest(&steps_on(after), &[(1, &old), (2, &new)], context), Some(2));
        });
    }
}

#[test]
fn power_cut_during_deletion_keeps_newest_step() {
    for marked in FORMS {
        let store = new_store(4, marked);
        let states: Vec<State> = (1..=3).map(small_state).collect();
        let expected: Vec<(u64, &State)> = (1..).zip(&states).collect();
        for (step, state) in &expected {
            state.save(&steps_on(&store), *step).unwrap();
        }
        let from = store.op_count();
        assert_eq!(steps_on(&store).retain(1).unwrap(), [1, 2]);
        each_image(&store, from, |after, context| {
            let steps = steps_on(after);
            assert_eq!(check_newest(&steps, &expected, context), Some(3), "{context}");
            steps.sweep().expect(context);
            steps.retain(1).expect(context);
            assert_eq!(steps.steps().expect(context), [3], "{context}");
            let left = after.raw_paths();
            let ours =
                |path: &&String| path.contains("step-") && !path.contains("step-000000000003");
            assert_eq!(left.iter().find(ours), None, "{context}: {left:?}");
        });
    }
}

/// A damaged step is set aside before its replacement: in between, only the previous step exists.
#[test]
fn power_cut_while_damaged_step_is_replaced() {
    for marked in FORMS {
        let store = new_store(5, marked);
        let (old, bad, new) = (small_state(1), small_state(2), small_state(3));
        old.save(&steps_on(&store), 1).unwrap();
        bad.save(&steps_on(&store), 2).unwrap();
        let entries = store.list(&key("run/step-000000000002")).unwrap();
        let blob = entries.iter().find(|entry| entry.key.name() == "rng").unwrap();
        store.delete(&blob.key).unwrap();
        let from = store.op_count();
        new.save(&steps_on(&store), 2).unwrap();
        each_image(&store, from, |after, context| {
            let newest = check_newest(&steps_on(after), &[(1, &old), (2, &new)], context);
            assert!(newest.is_some(), "{context}");
        });
        let swept = steps_on(&store).sweep().unwrap();
        assert_eq!((swept.removed.len(), swept.kept.len()), (0, 1), "the damaged step is kept");
    }
}

/// Whichever operation of the disk fails, in any way: the old step is complete, the new one exists
/// or not, and the next try succeeds.
#[test]
fn save_recovers_from_any_failing_operation() {
    for (marked, how) in FORMS.into_iter().flat_map(|marked| {
        [FaultKind::Io, FaultKind::NoSpace, FaultKind::Denied].map(|how| (marked, how))
    }) {
        let (old, new) = (small_state(1), small_state(2));
        for nth in 0.. {
            let store = new_store(6, marked);
            old.save(&steps_on(&store), 1).unwrap();
            let before = store.op_count();
            store.fail_op(before + nth, how);
            let saved = new.save(&steps_on(&store), 2);
            let context = format!("{how:?} of operation {nth}: {saved:?}");
            if let Err(error) = &saved {
                let (text, expected) = (error.to_string(), message_of(how));
                assert!(
                    text.contains("sim:/run") && text.contains(expected),
                    "{expected}: {context}"
                );
            }
            let steps = steps_on(&store);
            let newest = check_newest(&steps, &[(1, &old), (2, &new)], &context);
            assert_eq!(newest.is_some_and(|newest| newest == 2), saved.is_ok(), "{context}");
            if store.op_count() <= before + nth {
                assert!(nth > 30, "a save of {nth} operations");
                break;
            }
            if saved.is_err() {
                for name in store.list_names(&key("run")).unwrap() {
                    if name.starts_with(".lease-") {
                        store.delete(&key(&format!("run/{name}"))).unwrap();
                    }
                }
                new.save(&steps, 2).expect(&context);
                assert_eq!(check_newest(&steps, &[(1, &old), (2, &new)], &context), Some(2));
            }
        }
    }
}

fn message_of(how: FaultKind) -> &'static str {
    match how {
        FaultKind::NoSpace => "no space left",
        FaultKind::Denied => "Permission denied",
        FaultKind::Io | FaultKind::DiskLost => "Input/output error",
    }
}

/// The names in the folder on a store without an exclusive rename, as in `FORMAT.md`.
#[test]
fn record_commits_without_rename() {
    let store = new_store(7, true);
    let steps = steps_on(&store);
    let state = small_state(9);
    state.save(&steps, 9).unwrap();
    let names = store.list_names(&key("run/step-000000000009")).unwrap();
    assert_eq!(names.len(), 2, "{names:?}");
    assert!(names[0] == "COMMIT" && names[1].starts_with("data-"), "{names:?}");
    let latest = storage::read_all(&store, &key("run/latest")).unwrap();
    assert_eq!(latest, format!("step-000000000009/{}\n", names[1]).into_bytes());
    let again = state.save(&steps, 9);
    assert!(matches!(again, Err(Error::StepExists { .. })), "{again:?}");

    // Without its record, a step is neither counted nor reported as damaged.
    store.delete(&key("run/step-000000000009/COMMIT")).unwrap();
    assert!(steps.newest().unwrap().is_none());
    let opened = steps.open_step(9);
    assert!(matches!(opened, Err(Error::Uncommitted { .. })), "{opened:?}");
    assert_eq!(steps.sweep().unwrap().removed, [format!("step-000000000009/{}", names[1])]);
    assert_eq!(store.list_names(&key("run")).unwrap(), [".epoch-000000000003", "latest"]);
}

/// Records with valid checksums and invalid contents.
#[test]
fn invalid_records_are_rejected() {
    let store = new_store(8, true);
    let steps = steps_on(&store);
    small_state(4).save(&steps, 4).unwrap();
    small_state(5).save(&steps, 5).unwrap();
    let record = key("run/step-000000000005/COMMIT");
    let good = storage::Manifest::read(&store, &record).unwrap();
    let other = store.list_names(&key("run/step-000000000004")).unwrap().remove(1);
    let check = |change: &dyn Fn(&mut storage::Manifest), expected: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        store.delete(&record).unwrap();
        bad.write(&store, &record).unwrap();
        let text = steps.open_step(5).unwrap_err().to_string();
        assert!(
            text.contains(expected) && text.contains("COMMIT"),
            "expected '{expected}', found '{text}'"
        );
        assert_eq!(steps.newest().unwrap().unwrap().step(), 4, "{expected}");
        assert!(
            steps.sweep().unwrap().removed.is_empty(),
            "{expected}: it is damaged, not abandoned"
        );
    };
    check(&|m| m.version = 2, "expected feedline-ckpt-commit 1, found feedline-ckpt-commit 2");
    check(&|m| m.format = "feedline-ckpt".to_owned(), "found feedline-ckpt 1");
    check(&|m| m.meta = json!({ "step": 4 }), "step: 4");
    check(&|m| m.meta = json!({ "step": 5, "more": 1 }), "unknown field `more`");
    check(&|m| m.files.push(m.files[0].clone()), "found 2 files");
    check(&|m| m.files[0].bytes += 1, "bytes as committed");
    for path in [
        format!("../step-000000000004/{other}/MANIFEST.json"),
        format!("{other}/MANIFEST.json/MANIFEST.json"),
        "data-x/../../MANIFEST.json".to_owned(),
        "MANIFEST.json".to_owned(),
        "/etc/MANIFEST.json".to_owned(),
    ] {
        check(&|m| m.files[0].path.clone_from(&path), "expected data-OWNER/MANIFEST.json");
    }
    check(&|m| m.files[0].path = format!("{other}/MANIFEST.json"), "found none");
    store.delete(&record).unwrap();
    storage::write_all(&store, &record, b"").unwrap();
    assert!(steps.open_step(5).unwrap_err().to_string().contains("COMMIT"));
}
