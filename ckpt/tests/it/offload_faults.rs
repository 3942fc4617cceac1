//! A state on a disk that fails, is full, loses power or is modified.

use crate::common;
use std::path::PathBuf;
use std::sync::Arc;

use crate::common::beside::{Rank, SMALL, contents, meshes};
use ckpt::offload::Folder as Place;
use ckpt::{Checkpoints, Error, Result};
use serde_json::Value;
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore};
use storage::{Key, Storage};

const STEPS: u64 = 3;

/// Opens a state on several disks, which lose power together.
fn open_on(store: &FaultStore, disks: usize) -> Result<Rank> {
    let folder = |disk| {
        let key = Key::new(format!("disk-{disk}/state")).unwrap();
        Place { store: Arc::new(store.clone()), key }
    };
    Rank::on_disks((0..disks).map(folder).collect(), "test", meshes()[0], 0, SMALL)
}

fn open(store: &FaultStore) -> Result<Rank> {
    open_on(store, 1)
}

fn steps(store: &Arc<dyn Storage>) -> Checkpoints {
    let options = ckpt::CheckpointOptions { block_bytes: SMALL.block_bytes, ..common::SERIAL };
    Checkpoints::open(Arc::clone(store), Key::new("run").unwrap()).with_options(options)
}

/// The weights after each step.
fn expected_weights() -> Vec<Vec<Vec<u8>>> {
    let mut rank = Rank::in_memory(meshes()[0], 0, SMALL);
    rank.fill().unwrap();
    let mut all = vec![rank.state_weights().unwrap()];
    for step in 1..=STEPS + 1 {
        rank.step(step).unwrap();
        all.push(rank.weights.clone());
    }
    all
}

/// The store has one complete earlier state, which resumes with bitwise equal results.
fn check(
    (store, disks): (&FaultStore, usize),
    at_least: Option<u64>,
    expected: &[Vec<Vec<u8>>],
    what: &str,
) {
    let mut rank = open_on(store, disks).unwrap_or_else(|error| panic!("{what}: {error}"));
    let Some(step) = rank.state.generation().map(|generation| generation.step) else {
        assert_eq!(at_least, None, "{what}: no generation");
        return;
    };
    assert!(
        at_least.is_none_or(|least| step >= least),
        "{what}: {step}, expected at least {at_least:?}"
    );
    assert!(rank.state_weights().unwrap() == expected[step as usize], "{what}: step {step}");
    if step <= STEPS {
        rank.step(step + 1).unwrap();
        assert!(rank.weights == expected[step as usize + 1], "{what}: the step after {step}");
    }
}

/// Whatever a power cut interrupts, the previous generation is complete, and settled ones are
/// durable.
#[test]
fn power_cut_leaves_complete_generation() {
    power_cuts_of(1);
}

/// Whatever has reached only one of the disks, they have the same generation.
#[test]
fn power_cut_of_several_disks_leaves_one_generation() {
    power_cuts_of(3);
}

fn power_cuts_of(disks: usize) {
    let expected = expected_weights();
    let store = FaultStore::new(5, FaultPlan::default());
    let mut durable = Vec::new();
    let mut rank = open_on(&store, disks).unwrap();
    rank.fill().unwrap();
    rank.state.settle().unwrap();
    durable.push(store.op_count());
    for step in 1..=STEPS {
        rank.step(step).unwrap();
        rank.state.settle().unwrap();
        durable.push(store.op_count());
    }
    drop(rank);
    for ops in 0..=store.op_count() {
        let at_least = durable.iter().rposition(|end| ops >= *end).map(|step| step as u64);
        for seed in 0..6 {
            let what = format!("{ops} of {} operations, seed {seed}", store.op_count());
            check((&store.crash_at(ops, seed), disks), at_least, &expected, &what);
        }
    }
}

/// Each operation fails once, in each way: it is reported as an error, and the previous state
/// resumes.
#[test]
fn failing_operations_are_reported() {
    let expected = expected_weights();
    let count = {
        let store = FaultStore::new(6, FaultPlan::default());
        run(&store, &mut None).unwrap();
        store.op_count()
    };
    for how in [FaultKind::Io, FaultKind::NoSpace, FaultKind::DiskLost] {
        let mut failed = 0;
        for op in 0..count {
            let store = FaultStore::new(6, FaultPlan::default());
            store.fail_op(op, how);
            let mut at_least = None;
            let outcome = run(&store, &mut at_least);
            failed += usize::from(outcome.is_err());
            let what = format!("{how:?} at {op}: {outcome:?}");
            check((&store.crash(op as u64), 1), at_least, &expected, &what);
            if how == FaultKind::NoSpace
                && let Err(error) = outcome
            {
                assert!(matches!(error, Error::Storage(_)), "{what}: {error}");
            }
        }
        assert!(failed * 2 > count, "{failed} of {count} failures were reported");
    }
}

/// Fills and updates; sets `durable` to the last durable step.
fn run(store: &FaultStore, durable: &mut Option<u64>) -> Result<()> {
    let mut rank = open(store)?;
    rank.fill()?;
    rank.state.settle()?;
    *durable = Some(0);
    for step in 1..=STEPS {
        rank.step(step)?;
        rank.state.settle()?;
        *durable = Some(step);
    }
    Ok(())
}

/// A disk without space for a second generation is reported before any change.
#[test]
fn full_disk_is_reported_before_changes() {
    let store =
        FaultStore::new(7, FaultPlan { capacity_bytes: Some(200_000), ..FaultPlan::default() });
    let mut rank = open(&store).unwrap();
    rank.fill().unwrap();
    let error = rank.step(1).unwrap_err();
    let is_space = matches!(error, Error::Storage(storage::Error::NoSpace { .. }));
    assert!(is_space, "{error}");
    assert_eq!(rank.state.generation().unwrap().step, 0);
    assert!(rank.state_weights().unwrap() == expected_weights()[0]);
}

struct Folder(tempfile::TempDir, Arc<dyn Storage>);

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
        Folder(folder, store)
    }

    fn open(&self) -> Rank {
        Rank::on_disk(Arc::clone(&self.1), meshes()[0], 0, SMALL).unwrap()
    }

    /// The slot folders, the newest last.
    fn slots(&self) -> Vec<PathBuf> {
        let all = std::fs::read_dir(self.0.path().join("state-0")).unwrap();
        let mut all: Vec<PathBuf> = all.map(|entry| entry.unwrap().path()).collect();
        all.retain(|path| path.is_dir());
        all.sort();
        all
    }
}

/// Files that another process removes are detected by the next step at the latest, and a checkpoint
/// of them stays intact.
#[test]
fn removed_files_are_detected() {
    let folder = Folder::new();
    let mut rank = folder.open();
    rank.fill().unwrap();
    rank.step(1).unwrap();
    let steps = steps(&folder.1);
    steps.save_offloaded(1, &mut rank.state, &[], Value::Null, None).unwrap();
    let saved = contents(&steps.open_step(1).unwrap());
    rank.step(2).unwrap();
    rank.state.settle().unwrap();
    for slot in folder.slots() {
        std::fs::remove_dir_all(slot).unwrap();
    }
    let error = rank.step(3).unwrap_err().to_string();
    assert!(error.contains("removed while it was in use"), "{error}");
    std::fs::remove_dir_all(folder.0.path().join("state-0")).unwrap();
    assert!(rank.step(3).is_err());
    let step = steps.open_step(1).unwrap();
    step.verify().unwrap();
    assert!(contents(&step) == saved);
}

/// A bit flipped by the disk fails the step with its location; the state does not change.
#[test]
fn flipped_bit_is_detected() {
    use std::os::unix::fs::FileExt as _;
    for file in ["model-00001-of-00001.safetensors", "optim-00001-of-00001.safetensors"] {
        let folder = Folder::new();
        let mut rank = folder.open();
        rank.fill().unwrap();
        rank.state.settle().unwrap();
        let path = folder.slots().pop().unwrap().join(file);
        let open = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        open.read_exact_at(&mut byte, 4096 + 5000).unwrap();
        open.write_all_at(&[byte[0] ^ 4], 4096 + 5000).unwrap();
        open.sync_all().unwrap();
        let error = rank.step(1).unwrap_err();
        assert!(matches!(error, Error::Corrupt { offset: 8192, .. }), "{error}");
        assert!(error.to_string().contains(file), "{error}");
        assert_eq!(rank.state.generation().unwrap().step, 0);
    }
}
