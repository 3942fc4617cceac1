//! A store that fails: at one call, from one call on, or because it is full.

use std::fs::File;
use std::io::Write as _;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::gate::device_error;
use crate::common::{Folder, Random, SERIAL, State, Tensor};
use ckpt::{Check, CheckpointOptions, Checkpoints, Dtype, Error, Group, Retention};
use storage::testing::fault_store::{FaultPlan, FaultStore, HookLayer, Mount};
use storage::{Key, Result, Storage};

/// When calls fail, counted over the store and all its uploads.
#[derive(Debug)]
struct Plan {
    calls: AtomicU64,
    fails_at: u64,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// Only that call fails.
    Once,
    /// That call takes effect, but returns an error.
    Afterwards,
    /// That call and all later ones fail: the device is lost.
    ForGood,
}

impl Plan {
    fn new(fails_at: u64, how: How) -> Arc<Self> {
        Arc::new(Plan { calls: AtomicU64::new(0), fails_at, how })
    }

    fn before(&self, key: &Key) -> Result<()> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let fails = match self.how {
            How::Once => number == self.fails_at,
            How::Afterwards => false,
            How::ForGood => number >= self.fails_at,
        };
        if fails { Err(device_error(key)) } else { Ok(()) }
    }

    fn after(&self, key: &Key) -> Result<()> {
        let is_it = self.calls.load(Ordering::Relaxed) == self.fails_at + 1;
        if self.how == How::Afterwards && is_it { Err(device_error(key)) } else { Ok(()) }
    }

    fn failed(&self) -> bool {
        self.calls.load(Ordering::Relaxed) > self.fails_at
    }
}

impl Folder {
    fn faulty(&self, plan: &Arc<Plan>) -> Checkpoints {
        let [before, after] = [(); 2].map(|()| Arc::clone(plan));
        let before = move |_: &dyn Storage, _: &str, key: &Key| before.before(key);
        let after = move |_: &dyn Storage, _: &str, key: &Key| after.after(key);
        let store = HookLayer::around(self.store(), before, after);
        Checkpoints::open(store, Key::new("run").unwrap()).with_options(SERIAL)
    }
}

/// Whichever call of a save fails: the old step is complete, the new one complete or absent, and a
/// second try succeeds.
#[test]
fn save_recovers_from_any_failing_call() {
    let (old, new) = (State::of_model(1), State::of_model(2));
    for how in [How::Once, How::Afterwards, How::ForGood] {
        for fails_at in 0.. {
            let folder = Folder::in_memory();
            old.save(&folder.steps(SERIAL), 1).unwrap();
            let plan = Plan::new(fails_at, how);
            let faulty = folder.faulty(&plan);
            let saved = new.save(&faulty, 2);
            if !plan.failed() {
                saved.unwrap();
                assert!(fails_at > 20, "a save of only {fails_at} calls");
                break;
            }
            let context = format!("{how:?} at call {fails_at}");
            let steps = folder.steps(SERIAL);
            old.check(&steps.open_step(1).unwrap());
            let newest = steps.newest().unwrap().unwrap();
            newest.verify().unwrap();
            if newest.step() == 2 {
                new.check(&newest);
                // The step may only exist if one of the last calls failed: those after the rename.
                assert!(saved.is_ok() || how == How::Afterwards, "{context}");
            } else {
                assert!(saved.is_err(), "{context}");
            }
            if how == How::Once {
                let left: Vec<String> =
                    folder.names().into_iter().filter(|name| name.starts_with(".tmp-")).collect();
                assert_eq!(left, [""; 0], "{context}");
            }
            let again = if how == How::ForGood {
                // The device works again, and another process knows that this one is dead.
                drop(faulty);
                for name in folder.names().iter().filter(|name| name.starts_with(".lease-")) {
                    std::fs::remove_file(folder.path(name)).unwrap();
                }
                folder.steps(SERIAL)
            } else {
                faulty
            };
            again.sweep().unwrap();
            match new.save(&again, 2) {
                Err(Error::StepExists { .. }) if newest.step() == 2 => {}
                other => drop(other.unwrap()),
            }
            new.check(&steps.newest().unwrap().unwrap());
            assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"], "{context}");
        }
    }
}

/// Whichever call of a retention pass fails, the newest step is complete and no step is partial.
#[test]
fn retention_recovers_from_any_failing_call() {
    let states: Vec<State> = (1..=3).map(State::of_model).collect();
    let template = Folder::new();
    for (step, state) in (1..).zip(&states) {
        state.save(&template.steps(SERIAL), step).unwrap();
    }
    for how in [How::Once, How::Afterwards, How::ForGood] {
        for fails_at in 0.. {
            let folder = Folder::in_memory();
            let copied = Command::new("cp")
                .arg("-r")
                .arg(template.path(""))
                .arg(folder.temp.path())
                .status();
            assert!(copied.unwrap().success());
            let plan = Plan::new(fails_at, how);
            let retained = folder.faulty(&plan).retain(1);
            let steps = folder.steps(SERIAL);
            for step in steps.steps().unwrap() {
                states[step as usize - 1].check(&steps.open_step(step).unwrap());
            }
            assert_eq!(steps.newest().unwrap().unwrap().step(), 3, "{how:?} at call {fails_at}");
            let visible: Vec<_> =
                folder.names().into_iter().filter(|name| !name.starts_with('.')).collect();
            assert_eq!(visible.len(), steps.steps().unwrap().len(), "{visible:?}");
            if !plan.failed() {
                assert_eq!(retained.unwrap(), [1, 2]);
                break;
            }
        }
    }
}

/// An unreadable store is not an empty one: the run must not start from scratch or an old step.
#[test]
fn newest_fails_if_store_is_unreadable() {
    let folder = Folder::new();
    State::of_model(1).save(&folder.steps(SERIAL), 1).unwrap();
    State::of_model(2).save(&folder.steps(SERIAL), 2).unwrap();
    for fails_at in 0.. {
        let plan = Plan::new(fails_at, How::Once);
        let newest = folder.faulty(&plan).newest();
        if !plan.failed() {
            assert_eq!(newest.unwrap().unwrap().step(), 2);
            assert!(fails_at > 2);
            break;
        }
        assert!(matches!(newest, Err(Error::Storage(storage::Error::Io { .. }))), "{fails_at}");
    }
}

#[test]
fn full_store_is_detected_before_first_write() {
    let save = |store: &FaultStore, step| {
        let steps = Checkpoints::open(Arc::new(store.clone()), Key::new("run").unwrap());
        let steps = steps.with_options(SERIAL);
        let lease = steps.lock().unwrap();
        // Only the lease is written before the check.
        let before = store.op_count();
        let saved = State::of_model(step).save(&steps, step);
        let ops = store.op_count() - before;
        drop(lease);
        (saved.map(|_| steps.newest().unwrap().unwrap().size().1), ops)
    };
    let bytes = save(&FaultStore::new(1, FaultPlan::default()), 1).0.unwrap();
    // A save leaves a MiB free. There is space for one and a half steps.
    let capacity_bytes = Some((1 << 20) + bytes * 3 / 2);
    let store = FaultStore::new(1, FaultPlan { capacity_bytes, ..FaultPlan::default() });
    save(&store, 1).0.unwrap();
    let (error, ops) = save(&store, 2);
    match error.unwrap_err() {
        Error::Storage(storage::Error::NoSpace { need_bytes, free_bytes: Some(free), .. }) => {
            assert!(need_bytes > bytes && free < need_bytes, "{need_bytes} of {free}");
        }
        other => panic!("{other}"),
    }
    assert_eq!(ops, 0, "operations that change the disk");
    assert_eq!(
        store.list_names(&Key::new("run").unwrap()).unwrap(),
        [".epoch-000000000002", "latest", "step-000000000001"]
    );
}

/// A real disk that another process fills after the check of its free space.
#[test]
fn full_disk_keeps_old_step() {
    let mount = match Mount::new("size=4m") {
        Ok(mount) => mount,
        Err(e) => {
            eprintln!("SKIPPED full_disk_keeps_old_step: no right to mount: {e}");
            return;
        }
    };
    let inner = storage::open_url(mount.path().to_str().unwrap()).unwrap();
    let open = |store| Checkpoints::open(store, Key::new("run").unwrap()).with_options(SERIAL);
    let steps = open(Arc::clone(&inner));
    State::of_model(1).save(&steps, 1).unwrap();
    let filler = mount.path().join("filler");
    let theirs = filler.clone();
    let full = HookLayer::new(inner, move |_, call, key| {
        if call == "create" && key.name().ends_with(".safetensors") {
            let mut file = File::options().create(true).append(true).open(&theirs).unwrap();
            while file.write_all(&[7; 4096]).is_ok() {}
        }
        Ok(())
    });
    let error = State::of_model(2).save(&open(full), 2).unwrap_err();
    let is_full = matches!(&error, Error::Storage(storage::Error::NoSpace { .. }));
    assert!(is_full && error.to_string().contains(".tmp-step-000000000002"), "{error}");
    State::of_model(1).check(&steps.newest().unwrap().unwrap());
    let left = steps.sweep().unwrap();
    assert!(left.removed.is_empty() && left.kept.is_empty(), "{left:?}");
    // Space is freed, and the run continues.
    std::fs::remove_file(filler).unwrap();
    State::of_model(2).save(&steps, 2).unwrap();
    State::of_model(2).check(&steps.newest().unwrap().unwrap());
}

/// Large enough for direct I/O and preallocation.
fn large_state() -> State {
    let mut random = Random(11);
    let mut state = State::of_model(11);
    for group in [Group::Model, Group::ExpAvg] {
        let shape = [3, 500_000];
        state.tensors.push(Tensor::new("large", group, Dtype::F32, &shape, &mut random));
    }
    state
}

/// On a file system without direct I/O and preallocation, a save uses buffered I/O.
#[test]
fn save_works_without_direct_io_and_preallocation() {
    let mount = match Mount::of("ramfs", "mode=755") {
        Ok(mount) => mount,
        Err(e) => {
            eprintln!("SKIPPED what_a_file_system_refuses: no right to mount: {e}");
            return;
        }
    };
    let state = large_state();
    for query in ["", "?direct=on", "?engine=pread", "?direct=off"] {
        let url = format!("file:{}{query}", mount.path().display());
        let store = storage::open_url(&url).unwrap();
        let run = Key::new(format!("run-{}", query.len())).unwrap();
        for options in [CheckpointOptions::default(), SERIAL] {
            let steps = Checkpoints::open(Arc::clone(&store), run.clone()).with_options(options);
            let step = options.block_bytes;
            state.save(&steps, step).unwrap();
            let open = steps.open_step(step).unwrap();
            open.verify().unwrap();
            state.check(&open);
        }
    }
}

/// A folder that became read-only: its steps are read and verified, every change reports where it
/// failed, and nothing is lost.
#[test]
fn read_only_folder_is_read_and_not_changed() {
    let mount = match Mount::new("size=8m") {
        Ok(mount) => mount,
        Err(e) => {
            eprintln!("SKIPPED a_read_only_folder_is_read: no right to mount: {e}");
            return;
        }
    };
    let url = mount.path().to_str().unwrap();
    let open = || {
        let store = storage::open_url(url).unwrap();
        Checkpoints::open(store, Key::new("run").unwrap()).with_options(SERIAL)
    };
    for step in [1, 2] {
        State::of_model(step).save(&open(), step).unwrap();
    }
    mount.remount("ro").unwrap();
    let steps = open();
    steps.verify_step(2).unwrap();
    State::of_model(2).check(&steps.newest().unwrap().unwrap());
    let by_bytes = Retention { keep_last: 1, keep_every: None, check: Check::NewestBytes };
    assert_eq!(steps.plan_retention(&by_bytes, &[]).unwrap().delete, [1]);
    let refused = [
        State::of_model(3).save(&steps, 3).map(drop),
        steps.retain(1).map(drop),
        steps.retain_by(&by_bytes, &[]).map(drop),
        steps.sweep().map(drop),
        steps.pin(2).map(drop),
        steps.lock().map(drop),
    ];
    for outcome in refused {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("Read-only file system") && text.contains(url), "{text}");
    }
    mount.remount("rw").unwrap();
    State::of_model(3).save(&open(), 3).unwrap();
    assert_eq!(open().steps().unwrap(), [1, 2, 3]);
}
