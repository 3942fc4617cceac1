//! Power cuts at every operation of a retention pass and of a drain, on a disk that loses what was
//! not synced, in any combination.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Folder, SERIAL, State};
use ckpt::{Checkpoints, Drain, DrainOptions, Retention};
use storage::testing::fault_store::{FaultPlan, FaultStore};
use storage::{Key, Storage as _};

/// Images that are checked per operation.
const IMAGES: u64 = 3;

fn run() -> Key {
    Key::new("run").unwrap()
}

fn open(store: &FaultStore) -> Checkpoints {
    Checkpoints::open(Arc::new(store.clone()), run()).with_options(SERIAL)
}

/// The store after a power cut after `ops` operations. This process acts as its own successor,
/// which would know that its predecessor, of another boot, is dead.
fn after(store: &FaultStore, ops: usize, seed: u64) -> FaultStore {
    let image = store.crash_at(ops, seed);
    for name in image.list_names(&run()).unwrap() {
        if name.starts_with(".lease-") || name.starts_with(".pin-") {
            image.delete(&run().join(&name).unwrap()).unwrap();
        }
    }
    image
}

/// All names except `latest`, the epoch, and marks of existing steps.
fn names(store: &FaultStore) -> Vec<String> {
    let all = store.list_names(&run()).unwrap();
    let is_of_step = |name: &String| {
        let rest = name.strip_prefix(".verified-");
        rest.is_some_and(|rest| all.iter().any(|step| rest.starts_with(step.as_str())))
    };
    let is_kept = |name: &&String| *name == "latest" || name.starts_with(".epoch-");
    all.iter().filter(|name| !is_kept(name) && !is_of_step(name)).cloned().collect()
}

fn check(steps: &Checkpoints, allowed: &[u64], context: &str) -> Vec<u64> {
    let there = steps.steps().unwrap();
    for &step in &there {
        assert!(allowed.contains(&step), "{context}: {there:?}");
        let checkpoint = steps.open_step(step).unwrap();
        checkpoint.verify().expect(context);
        let differs = State::of_model(step).differs_from(&checkpoint).unwrap();
        assert_eq!(differs, None, "{context}, step {step}");
    }
    there
}

#[test]
fn crash_in_retention_pass() {
    let policy = Retention { keep_last: 1, keep_every: NonZeroU64::new(3), ..Retention::default() };
    let store = FaultStore::new(1, FaultPlan::default());
    for step in [1, 2, 3, 4] {
        State::of_model(step).save(&open(&store), step).unwrap();
    }
    let begin = store.op_count();
    assert_eq!(open(&store).retain_by(&policy, &[]).unwrap().delete, [1, 2]);
    let mut seen = std::collections::BTreeSet::new();
    for ops in begin..=store.op_count() {
        for seed in (0..IMAGES).map(|seed| seed + IMAGES * ops as u64) {
            let context = format!("operation {} of the pass, seed {seed}", ops - begin);
            let image = after(&store, ops, seed);
            let steps = open(&image);
            let there = check(&steps, &[1, 2, 3, 4], &context);
            assert!(there.ends_with(&[3, 4]), "{context}: {there:?}");
            seen.insert(there.len());
            steps.sweep().unwrap();
            steps.retain_by(&policy, &[]).unwrap();
            assert_eq!(check(&steps, &[3, 4], &context), [3, 4], "{context}");
            let names = names(&image);
            assert_eq!(names, ["step-000000000003", "step-000000000004"], "{context}");
        }
    }
    assert_eq!(Vec::from_iter(seen), [2, 3, 4], "the pass was caught at every stage");
}

#[test]
fn crash_in_drain() {
    let near = Folder::in_memory();
    for step in [1, 2, 3] {
        State::of_model(step).save(&near.steps(SERIAL), step).unwrap();
    }
    let drain = |store: &FaultStore| {
        let retention = Retention { keep_last: 2, ..Retention::default() };
        let options = DrainOptions { retention, pause: Duration::ZERO, ..DrainOptions::default() };
        Drain::new(Arc::new(near.steps(SERIAL)), Arc::new(open(store)), options)
    };
    // The second store has step 1, and receives 3 and 2; then 1 is deleted.
    let store = FaultStore::new(2, FaultPlan::default());
    State::of_model(1).save(&open(&store), 1).unwrap();
    let begin = store.op_count();
    let pass = drain(&store).run().unwrap();
    assert_eq!(pass.drained.iter().map(|report| report.step).collect::<Vec<_>>(), [3, 2]);
    assert_eq!(pass.deleted, [1]);
    let mut resumed = 0;
    for ops in begin..=store.op_count() {
        for seed in (0..IMAGES).map(|seed| seed + IMAGES * ops as u64) {
            let context = format!("operation {} of the drain, seed {seed}", ops - begin);
            let image = after(&store, ops, seed);
            let steps = open(&image);
            let there = check(&steps, &[1, 2, 3], &context);
            assert!(there.contains(&1) || there == [2, 3], "{context}: {there:?}");
            steps.sweep().unwrap();
            let pass = drain(&image).run().unwrap_or_else(|e| panic!("{context}: {e}"));
            assert!(pass.failed.is_empty(), "{context}: {:?}", pass.failed);
            resumed += pass.drained.iter().filter(|report| report.resumed_bytes > 0).count();
            assert_eq!(check(&steps, &[2, 3], &context), [2, 3], "{context}");
            let names = names(&image);
            assert_eq!(names, ["step-000000000002", "step-000000000003"], "{context}");
        }
    }
    assert!(resumed > 25, "only {resumed} drains resumed existing files");
}

/// The checks must be able to fail: on a disk that ignores the sync of folders, steps are lost.
#[test]
fn lying_disk_is_detected() {
    let store = FaultStore::new(3, FaultPlan { sync_lies: true, ..FaultPlan::default() });
    State::of_model(1).save(&open(&store), 1).unwrap();
    let is_torn = |seed| {
        let steps = open(&after(&store, store.op_count(), seed));
        !steps.steps().is_ok_and(|there| there == [1])
            || steps.open_step(1).unwrap().verify().is_err()
    };
    assert!((0..50).any(is_torn));
}
