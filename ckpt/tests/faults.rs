//! A store that fails: at any one call, from any call on, or by being full.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::io;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ckpt::{Check, Checkpoints, Dtype, Error, Group, Options, Retention};
use common::{Folder, Random, SMALL, State, Tensor};
use storage::sim::Mount;
use storage::{Entry, FileEntry, Key, Object, Result, Storage, Upload};

/// One thread, so that the n-th call is always the same.
const OPTIONS: Options = Options { threads: 1, ..SMALL };

/// When calls fail, counted over the store and all its uploads.
#[derive(Debug)]
struct Plan {
    calls: AtomicU64,
    fails_at: u64,
    how: How,
    free_bytes: Option<u64>,
    created: AtomicBool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    /// That call fails, and nothing else.
    Once,
    /// It is done, but said to have failed.
    Afterwards,
    /// That call and all later ones fail: the device is gone.
    ForGood,
}

impl Plan {
    fn new(fails_at: u64, how: How, free_bytes: Option<u64>) -> Arc<Self> {
        let (calls, created) = (AtomicU64::new(0), AtomicBool::new(false));
        Arc::new(Plan { calls, fails_at, how, free_bytes, created })
    }

    fn run<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let fails = number == self.fails_at || (self.how == How::ForGood && number > self.fails_at);
        if !fails {
            return call();
        }
        if self.how == How::Afterwards {
            call()?;
        }
        Err(storage::Error::from_io("call", format!("number {number}"), io::Error::other("pulled")))
    }

    fn failed(&self) -> bool {
        self.calls.load(Ordering::Relaxed) > self.fails_at
    }
}

#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn Storage>,
    plan: Arc<Plan>,
}

impl Storage for Faulty {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.plan.run(|| self.inner.open(key))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.plan.created.store(true, Ordering::Relaxed);
        let inner = self.plan.run(|| self.inner.create(key, len_bytes_max))?;
        Ok(Box::new(FaultyUpload { inner, plan: Arc::clone(&self.plan) }))
    }

    fn list(&self, folder: &Key) -> Result<Vec<Entry>> {
        self.plan.run(|| self.inner.list(folder))
    }

    fn names(&self, folder: &Key) -> Result<Vec<String>> {
        self.plan.run(|| self.inner.names(folder))
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.plan.run(|| self.inner.delete(key))
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.plan.run(|| self.inner.publish(staged, target))
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        self.plan.run(|| self.inner.delete_folder(folder))
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.plan.run(|| Ok(self.plan.free_bytes))
    }

    fn display(&self, key: &Key) -> String {
        self.inner.display(key)
    }
}

#[derive(Debug)]
struct FaultyUpload {
    inner: Box<dyn Upload>,
    plan: Arc<Plan>,
}

impl Upload for FaultyUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let FaultyUpload { inner, plan } = self;
        plan.run(|| inner.write(bytes))
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn finish(self: Box<Self>) -> Result<FileEntry> {
        let FaultyUpload { inner, plan } = *self;
        plan.run(|| inner.finish())
    }
}

impl Folder {
    fn faulty(&self, plan: &Arc<Plan>) -> Checkpoints {
        let store = Faulty { inner: self.store(), plan: Arc::clone(plan) };
        Checkpoints::open(Arc::new(store), Key::new("run").unwrap()).with_options(OPTIONS)
    }
}

/// Whichever call of a save fails: the old step is whole, the new one whole or absent, and a second
/// try succeeds.
#[test]
fn a_save_survives_any_failing_call() {
    let (old, new) = (State::of_model(1), State::of_model(2));
    for how in [How::Once, How::Afterwards, How::ForGood] {
        for fails_at in 0.. {
            let folder = Folder::in_memory();
            old.save(&folder.steps(OPTIONS), 1).unwrap();
            let plan = Plan::new(fails_at, how, None);
            let faulty = folder.faulty(&plan);
            let saved = new.save(&faulty, 2);
            if !plan.failed() {
                saved.unwrap();
                assert!(fails_at > 20, "a save of only {fails_at} calls");
                break;
            }
            let context = format!("{how:?} at call {fails_at}");
            let steps = folder.steps(OPTIONS);
            old.check(&steps.open_step(1).unwrap());
            let newest = steps.newest().unwrap().unwrap();
            newest.verify().unwrap();
            if newest.step() == 2 {
                new.check(&newest);
                // Only the last calls may fail and leave it there: those after its name is given.
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
                // The device is back, and another process, which knows that this one is gone.
                drop(faulty);
                for name in folder.names().iter().filter(|name| name.starts_with(".lease-")) {
                    std::fs::remove_file(folder.path(name)).unwrap();
                }
                folder.steps(OPTIONS)
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

/// Whichever call of a retention pass fails, the newest step is whole and no step is half there.
#[test]
fn retention_survives_any_failing_call() {
    let states: Vec<State> = (1..=3).map(State::of_model).collect();
    let template = Folder::new();
    for (step, state) in (1..).zip(&states) {
        state.save(&template.steps(OPTIONS), step).unwrap();
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
            let plan = Plan::new(fails_at, how, None);
            let retained = folder.faulty(&plan).retain(1);
            let steps = folder.steps(OPTIONS);
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

/// An unreadable store is not an empty one: the run must not begin anew, nor from an old step.
#[test]
fn a_store_that_fails_is_not_passed_over() {
    let folder = Folder::new();
    State::of_model(1).save(&folder.steps(OPTIONS), 1).unwrap();
    State::of_model(2).save(&folder.steps(OPTIONS), 2).unwrap();
    for fails_at in 0.. {
        let plan = Plan::new(fails_at, How::Once, None);
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
fn a_full_store_is_found_before_the_first_byte() {
    let folder = Folder::new();
    let steps = folder.steps(OPTIONS);
    State::of_model(1).save(&steps, 1).unwrap();
    let bytes = steps.newest().unwrap().unwrap().size().1;
    let free_bytes = Some(bytes + 4096);
    // The lease is written before; nothing of the step is.
    let plan = Plan::new(u64::MAX, How::Once, free_bytes);
    let faulty = folder.faulty(&plan);
    let lease = faulty.lock().unwrap();
    plan.created.store(false, Ordering::Relaxed);
    match State::of_model(2).save(&faulty, 2).unwrap_err() {
        Error::Storage(storage::Error::NoSpace { need_bytes, free_bytes: free, .. }) => {
            assert!(need_bytes > bytes);
            assert_eq!(free, free_bytes);
        }
        other => panic!("{other}"),
    }
    assert!(!plan.created.load(Ordering::Relaxed));
    drop(lease);
    assert_eq!(folder.names(), ["step-000000000001"]);
}

/// A real disk that fills up in the middle, behind a store that did not see it coming.
#[test]
fn a_disk_that_fills_up_leaves_the_old_step() {
    let mount = match Mount::new("size=400k") {
        Ok(mount) => mount,
        Err(e) => {
            eprintln!("SKIPPED a_disk_that_fills_up_leaves_the_old_step: no right to mount: {e}");
            return;
        }
    };
    let inner = storage::open_url(mount.path().to_str().unwrap()).unwrap();
    let plan = Plan::new(u64::MAX, How::Once, None);
    let store = Arc::new(Faulty { inner, plan });
    let steps = Checkpoints::open(store, Key::new("run").unwrap()).with_options(OPTIONS);
    let state = State::of_model(1);
    let mut saved = 0;
    let error = loop {
        match state.save(&steps, saved) {
            Ok(_) => saved += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Storage(storage::Error::NoSpace { .. })), "{error}");
    assert!(saved > 0);
    for step in 0..saved {
        state.check(&steps.open_step(step).unwrap());
    }
    assert_eq!(std::fs::read_dir(mount.path().join("run")).unwrap().count() as u64, saved);
    // Room is made, and the run goes on.
    steps.retain(1).unwrap();
    state.save(&steps, saved).unwrap();
}

/// Large enough to go around the page cache, and to have its space reserved.
fn large_state() -> State {
    let mut random = Random(11);
    let mut state = State::of_model(11);
    for group in [Group::Model, Group::ExpAvg] {
        let shape = [3, 500_000];
        state.tensors.push(Tensor::new("large", group, Dtype::F32, &shape, &mut random));
    }
    state
}

/// A file system without direct IO and without the reservation of space: a save goes through the
/// page cache, and is a save all the same.
#[test]
fn what_a_file_system_refuses_is_done_without() {
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
        for options in [Options::default(), OPTIONS] {
            let steps = Checkpoints::open(Arc::clone(&store), run.clone()).with_options(options);
            let step = options.block_bytes;
            state.save(&steps, step).unwrap();
            let open = steps.open_step(step).unwrap();
            open.verify().unwrap();
            state.check(&open);
        }
    }
}

/// A folder that became read-only: what is there is read and verified, every change says where it
/// failed, and nothing is lost.
#[test]
fn a_read_only_folder_is_read_and_not_changed() {
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
        Checkpoints::open(store, Key::new("run").unwrap()).with_options(OPTIONS)
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
