//! Retention policies, pins, and drains to a second store.

use std::fs;
use std::num::NonZeroU64;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::common::children::can_detect_dead_processes;
use crate::common::{Folder, SERIAL, SMALL, State};
use ckpt::{Check, Checkpoints, Drain, DrainOptions, Durability, Error, Keep, Retention};
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore, HookLayer};
use storage::{Key, ProcessIdentity, Storage, write_all};

fn keep(keep_last: usize, every: u64) -> Retention {
    Retention { keep_last, keep_every: NonZeroU64::new(every), check: Check::Lengths }
}

/// Changes a byte of a step without changing a length.
fn flip(folder: &Folder, step: u64) {
    let path = folder.path(&format!("step-{step:012}/extra/rng.bin"));
    let mut bytes = fs::read(&path).unwrap();
    bytes[77] ^= 4;
    fs::write(&path, bytes).unwrap();
}

#[test]
fn multiples_are_retained_forever() {
    let folder = Folder::new();
    folder.save(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let steps = folder.steps(SMALL);
    let before = folder.names();
    let plan = steps.plan_retention(&keep(2, 3), &[4]).unwrap();
    assert_eq!(folder.names(), before, "a plan changes nothing");
    assert_eq!(plan.delete, [1, 2, 5]);
    let every = Keep::Every(NonZeroU64::new(3).unwrap());
    let last = [(6, every.clone()), (7, Keep::Last), (8, Keep::Last)];
    assert_eq!(plan.keep[..2], [(3, every), (4, Keep::Undrained)]);
    assert_eq!(plan.keep[2..], last);
    assert_eq!(steps.retain_by(&keep(2, 3), &[4]).unwrap(), plan);
    assert_eq!(steps.steps().unwrap(), [3, 4, 6, 7, 8]);
    assert_eq!(folder.names().len(), 5, "no hidden name remains: {:?}", folder.names());
}

/// The newest step looks complete but is damaged: a policy that counts it would delete the last
/// good one.
#[test]
fn newest_verified_step_is_retained() {
    let folder = Folder::new();
    folder.save(&[1, 2, 3, 4]);
    flip(&folder, 4);
    flip(&folder, 3);
    let steps = folder.steps(SMALL);
    assert_eq!(steps.plan_retention(&keep(1, 0), &[]).unwrap().delete, [1, 2, 3]);
    let careful = Retention { keep_last: 1, ..Retention::default() };
    let plan = steps.retain_by(&careful, &[]).unwrap();
    assert_eq!((plan.keep, plan.delete), (vec![(2, Keep::Last)], vec![1]));
    assert_eq!(steps.steps().unwrap(), [2, 3, 4], "damaged ones are not touched");
    flip(&folder, 2);
    folder.save(&[1]);
    flip(&folder, 1);
    let plan = steps.retain_by(&careful, &[]).unwrap();
    assert!(plan.delete.is_empty(), "no step is verified: {plan:?}");
    assert!(plan.keep.iter().all(|(_, why)| *why == Keep::NoneVerified));
}

#[test]
fn pinned_step_is_retained() {
    let folder = Folder::new();
    folder.save(&[1, 2, 3]);
    let steps = folder.steps(SMALL);
    let reader = folder.steps(SMALL);
    let pin = reader.pin(1).unwrap();
    let again = reader.pin(1).unwrap();
    assert_eq!(steps.retain(1).unwrap(), [2]);
    let plan = steps.plan_retention(&keep(1, 0), &[]).unwrap();
    assert!(matches!(&plan.keep[0], (1, Keep::Pinned { holder }) if holder.contains("process")));
    drop(pin);
    assert!(steps.retain(1).unwrap().is_empty(), "one of two pins is held");
    steps.sweep().unwrap();
    State::of_model(1).check(&reader.open_step(1).unwrap());
    drop(again);
    assert_eq!(steps.retain(1).unwrap(), [1]);
    let result = reader.pin(1);
    assert!(matches!(&result, Err(Error::NoStep { similar, .. }) if *similar == [3]), "{result:?}");
    assert_eq!(folder.names(), ["step-000000000003"]);
}

/// A pin of a dead process is ignored; a pin with an unknown owner is respected.
#[test]
fn pins_of_dead_processes_are_void() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    folder.save(&[1, 2, 3]);
    let steps = folder.steps(SMALL);
    let pin = steps.pin(1).unwrap();
    let mark = folder.names().into_iter().find(|name| name.starts_with(".pin-")).unwrap();
    drop(pin);
    let mut child = Command::new("true").spawn().unwrap();
    let parts: Vec<&str> = mark.rsplitn(4, '.').collect();
    let dead = format!("{}.{}.{}.{}", parts[3], child.id(), parts[1], parts[0]);
    child.wait().unwrap();
    fs::write(folder.path(&dead), "").unwrap();
    fs::write(folder.path(&mark.replace("step-000000000001", "step-000000000002")), "").unwrap();
    let unknown = ".pin-step-000000000002-what";
    fs::write(folder.path(unknown), "").unwrap();
    assert_eq!(steps.retain(1).unwrap(), [1]);
    assert_eq!(steps.sweep().unwrap().removed, [dead]);
    assert!(folder.names().contains(&unknown.to_owned()));
}

struct Tiers {
    near: Folder,
    far: Folder,
}

impl Tiers {
    fn new(steps: &[u64]) -> Self {
        let tiers = Tiers { near: Folder::new(), far: Folder::new() };
        tiers.near.save(steps);
        fs::create_dir(tiers.far.path("")).unwrap();
        tiers
    }

    fn drain(&self, retention: Retention) -> Drain {
        let options = DrainOptions { retention, pause: Duration::ZERO, ..DrainOptions::default() };
        let [from, to] = [&self.near, &self.far].map(|folder| Arc::new(folder.steps(SMALL)));
        Drain::new(from, to, options)
    }
}

#[test]
fn drained_steps_are_identical() {
    let tiers = Tiers::new(&[1, 2, 3, 4]);
    let drain = tiers.drain(keep(2, 2));
    assert!(drain.levels().unwrap().iter().all(|(_, level)| *level == Durability::Local));
    // The retention of the second store would delete 1 at once.
    assert_eq!(drain.pending().unwrap(), [4, 3, 2]);
    let undrained = drain.pending().unwrap();
    assert_eq!(tiers.near.steps(SMALL).retain_by(&keep(1, 0), &undrained).unwrap().delete, [1]);
    let pass = drain.run().unwrap();
    assert_eq!(pass.drained.iter().map(|report| report.step).collect::<Vec<_>>(), [4, 3, 2]);
    assert!(pass.failed.is_empty() && pass.deleted.is_empty());
    assert!(drain.pending().unwrap().is_empty());
    assert!(drain.levels().unwrap().iter().all(|(_, level)| *level == Durability::Remote));
    let far = tiers.far.steps(SMALL);
    for step in [2, 3, 4] {
        assert!(tiers.far.files(step) == tiers.near.files(step), "step {step}");
        far.open_step(step).unwrap().verify().unwrap();
    }
    assert_eq!(tiers.far.names().len(), 3);
    assert_eq!(tiers.near.steps(SMALL).retain_by(&keep(1, 0), &[]).unwrap().delete, [2, 3]);
    // Steps that the first store has deleted are not copied back, and are not pending.
    tiers.near.save(&[5]);
    let pass = drain.run().unwrap();
    assert_eq!((pass.drained.len(), pass.deleted), (1, vec![3]));
    assert_eq!(far.steps().unwrap(), [2, 4, 5]);
}

#[test]
fn damaged_step_is_not_drained() {
    let tiers = Tiers::new(&[1, 2, 3]);
    flip(&tiers.near, 2);
    let pass = tiers.drain(keep(3, 0)).run().unwrap();
    assert_eq!(pass.drained.iter().map(|report| report.step).collect::<Vec<_>>(), [3, 1]);
    let [(2, Error::Corrupt { object, .. })] = &pass.failed[..] else {
        panic!("{:?}", pass.failed);
    };
    assert!(object.contains("rng.bin"), "{object}");
    assert_eq!(tiers.far.steps(SMALL).steps().unwrap(), [1, 3]);
}

/// Two runs with the same folder in the second store: neither overwrites the other.
#[test]
fn other_contents_are_not_overwritten() {
    let tiers = Tiers::new(&[1, 2]);
    State::of_model(77).save(&tiers.far.steps(SMALL), 2).unwrap();
    let before = tiers.far.files(2);
    let drain = tiers.drain(keep(3, 0));
    assert_eq!(drain.pending().unwrap(), [2, 1]);
    let pass = drain.run().unwrap();
    assert!(matches!(&pass.failed[..], [(2, Error::Differs { .. })]), "{:?}", pass.failed);
    assert_eq!(pass.drained.len(), 1);
    assert!(tiers.far.files(2) == before);
    // A damaged step there is replaced.
    fs::remove_file(tiers.far.path("step-000000000002/extra/rng.bin")).unwrap();
    assert_eq!(drain.run().unwrap().drained.len(), 1);
    assert!(tiers.far.files(2) == tiers.near.files(2));
}

/// Whatever operation of the second store fails once, another try succeeds, and does not copy
/// existing files again.
#[test]
fn failed_drain_is_retried() {
    let near = Folder::in_memory();
    near.save(&[1]);
    let state = State::of_model(1);
    let mut resumed = 0;
    for fails_at in 0.. {
        let store = FaultStore::new(1, FaultPlan::default());
        store.fail_op(fails_at, FaultKind::Io);
        let far = Checkpoints::open(Arc::new(store.clone()), Key::new("run").unwrap());
        let far = Arc::new(far.with_options(SERIAL));
        let options = DrainOptions { pause: Duration::ZERO, tries: 3, ..DrainOptions::default() };
        let drain = Drain::new(Arc::new(near.steps(SMALL)), Arc::clone(&far), options);
        let report = drain.step(1).unwrap_or_else(|e| panic!("operation {fails_at}: {e}"));
        state.check(&far.newest().unwrap().unwrap());
        resumed += u64::from(report.resumed_bytes > 0);
        if store.op_count() <= fails_at {
            assert!(fails_at > 50, "a drain of only {fails_at} operations");
            break;
        }
    }
    assert!(resumed > 20, "only {resumed} drains resumed existing files");
}

/// The first store's retention deletes a step between the listing and the pin of a drain, which is
/// not an error.
#[test]
fn step_deleted_by_retention_is_skipped() {
    let tiers = Tiers::new(&[1, 2, 3]);
    let retired = Key::new("run/step-000000000002").unwrap();
    let near = HookLayer::new(tiers.near.store(), move |store, call, key| {
        let marks = call == "create" && key.name().starts_with(".pin-step-000000000002");
        if marks { store.delete_folder(&retired) } else { Ok(()) }
    });
    let near = Checkpoints::open(near, Key::new("run").unwrap()).with_options(SMALL);
    let options =
        DrainOptions { retention: keep(3, 0), pause: Duration::ZERO, ..DrainOptions::default() };
    let drain = Drain::new(Arc::new(near), Arc::new(tiers.far.steps(SMALL)), options);
    let pass = drain.run().unwrap();
    assert!(pass.failed.is_empty(), "{:?}", pass.failed);
    assert_eq!(pass.drained.iter().map(|report| report.step).collect::<Vec<_>>(), [3, 1]);
    assert_eq!(tiers.near.steps(SMALL).steps().unwrap(), [1, 3], "deleted by retention");
}

/// Where a record commits, a step is copied into the folder of a damaged one.
#[test]
fn damaged_copy_is_repaired() {
    let near = Folder::in_memory();
    near.save(&[1, 2]);
    for no_exclusive_rename in [false, true] {
        let store = FaultStore::new(9, FaultPlan { no_exclusive_rename, ..FaultPlan::default() });
        let far = Checkpoints::open(Arc::new(store.clone()), Key::new("run").unwrap());
        let far = Arc::new(far.with_options(SERIAL));
        let options = DrainOptions { pause: Duration::ZERO, ..DrainOptions::default() };
        let drain = Drain::new(Arc::new(near.steps(SMALL)), Arc::clone(&far), options);
        assert_eq!(drain.run().unwrap().drained.len(), 2);
        let below = Key::new("run/step-000000000002").unwrap();
        let files = store.list(&below).unwrap();
        let cut = files.iter().find(|file| file.key.name() == "rng.bin").unwrap();
        store.delete(&cut.key).unwrap();
        write_all(&store, &cut.key, b"cut").unwrap();
        assert_eq!(far.steps().unwrap(), [1]);
        let pass = drain.run().unwrap();
        assert!(pass.failed.is_empty(), "{:?}", pass.failed);
        assert_eq!(pass.drained.len(), 1);
        State::of_model(2).check(&far.newest().unwrap().unwrap());
        assert_eq!(far.steps().unwrap(), [1, 2]);
    }
}

/// A reader considers a slow pass dead, and continues to read while the pass reaches its step.
#[test]
fn step_pinned_during_pass_is_retained() {
    let folder = Folder::new();
    folder.save(&[1, 2, 3, 4]);
    // A reader pins step 2 while step 1 is being deleted.
    let store = HookLayer::new(folder.store(), |inner, call, _| {
        let mark = Key::new(format!("run/.pin-step-000000000002-{}", ProcessIdentity::new()))?;
        if call == "delete_folder" { write_all(inner, &mark, b"").map(drop) } else { Ok(()) }
    });
    let steps = Checkpoints::open(store, Key::new("run").unwrap()).with_options(SERIAL);
    let plan = steps.retain_by(&keep(1, 0), &[]).unwrap();
    assert_eq!(plan.delete, [1, 3]);
    assert!(matches!(&plan.keep[..], [(2, Keep::Pinned { .. }), (4, Keep::Last)]), "{plan:?}");
    State::of_model(2).check(&steps.open_step(2).unwrap());
}

#[test]
fn drain_runs_in_background() {
    let tiers = Tiers::new(&[1]);
    let draining = tiers.drain(keep(3, 0)).start().unwrap();
    let wait = || {
        let status = draining.wait_idle(Duration::from_secs(60));
        assert!(!status.busy, "{status:?}");
        status
    };
    assert_eq!(wait().drained, 1);
    tiers.near.save(&[2]);
    draining.wake();
    let status = wait();
    assert_eq!((status.drained, status.last.unwrap().step, status.failure), (2, 2, None));
    tiers.near.save(&[3]);
    flip(&tiers.near, 3);
    draining.wake();
    let failure = wait().failure.unwrap();
    assert!(failure.starts_with("step 3: "), "{failure}");
    drop(draining);
    assert_eq!(tiers.far.steps(SMALL).steps().unwrap(), [1, 2]);
}
