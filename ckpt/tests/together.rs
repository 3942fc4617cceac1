//! Saves of several writers, here threads, which share nothing but the store.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use ckpt::{Checkpoints, Options, Patience, PlanLimits, Result, SaveReport, Together};
use common::ranks::Ranks;
use common::{Folder, SMALL, State};
use storage::sim::{Fail, Faults, SimStore};
use storage::{Key, Storage};

const OPTIONS: Options = Options { threads: 1, ..SMALL };
const LIMITS: PlanLimits =
    PlanLimits { shard_bytes_max: 3000, cut_bytes_min: 500, header_bytes_max: 1 << 20 };

/// Far longer than any of these takes, and short enough to see that something waits for it.
const DEADLINE: Duration = Duration::from_secs(30);

/// Quick signs of life, and no death by silence unless a test wants it.
const PATIENCE: Patience =
    Patience { beat: Duration::from_millis(20), silence_max: Duration::from_secs(20) };

fn steps_on(store: Arc<dyn Storage>) -> Checkpoints {
    let steps = Checkpoints::open(store, Key::new("run").unwrap());
    steps.with_options(OPTIONS).with_patience(PATIENCE)
}

/// All writers at once, each with the store that it is given.
fn save_all(
    stores: &[Arc<dyn Storage>],
    ranks: &Ranks,
    step: u64,
    token: &str,
    deadline: Duration,
) -> Vec<Result<SaveReport>> {
    thread::scope(|scope| {
        let save = |(writer, store): (usize, &Arc<dyn Storage>)| {
            let steps = steps_on(Arc::clone(store));
            scope.spawn(move || ranks.save(&steps, step, &Together { token, writer, deadline }))
        };
        let threads: Vec<_> = stores.iter().enumerate().map(save).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn stores_in(folder: &Folder, writers: usize) -> Vec<Arc<dyn Storage>> {
    (0..writers).map(|_| folder.store()).collect()
}

#[test]
fn what_several_wrote_is_one_step() {
    for writers in [1, 2, 3, 7] {
        let folder = Folder::new();
        let state = State::of_model(writers as u64);
        let ranks = Ranks::new(&state, writers, LIMITS);
        let reports = save_all(&stores_in(&folder, writers), &ranks, 12, "first", DEADLINE);
        let bytes: u64 = reports.iter().map(|report| report.as_ref().unwrap().bytes).sum();
        let steps = folder.steps(OPTIONS);
        let newest = steps.newest().unwrap().unwrap();
        state.check(&newest);
        newest.verify().unwrap();
        assert!(bytes <= newest.size().1, "{bytes} bytes by the reports");
        // The state of another run's layout comes next, and finds nothing in its way.
        let next = State::of_model(50);
        let ranks = Ranks::new(&next, 2, LIMITS);
        for report in save_all(&stores_in(&folder, 2), &ranks, 13, "second", DEADLINE) {
            report.unwrap();
        }
        next.check(&steps.newest().unwrap().unwrap());
        let names = folder.names();
        assert_eq!(names.iter().filter(|name| name.starts_with(".save-")).count(), 1, "{names:?}");
        steps.sweep().unwrap();
        assert_eq!(folder.names(), ["step-000000000012", "step-000000000013"]);
    }
}

fn same(store: &SimStore, writers: usize) -> Vec<Arc<dyn Storage>> {
    (0..writers).map(|_| Arc::new(store.clone()) as Arc<dyn Storage>).collect()
}

/// A store that fails for one writer: it says why, and all others say the same.
#[test]
fn the_failure_of_one_is_that_of_all() {
    let state = State::of_model(3);
    let ranks = Ranks::new(&state, 3, LIMITS);
    for victim in 0..3 {
        for marked in [false, true] {
            let faults = Faults { no_exclusive_rename: marked, ..Faults::default() };
            let store = SimStore::new(5, faults);
            let mut stores: Vec<Arc<dyn Storage>> = same(&store, 3);
            stores[victim] = Arc::new(Full(Arc::new(store.clone())));
            let reports = save_all(&stores, &ranks, 4, "t", DEADLINE);
            for (writer, report) in reports.iter().enumerate() {
                let text = report.as_ref().unwrap_err().to_string();
                if writer != victim {
                    let due = format!("given up by all: writer {victim} of 3 (process ");
                    assert!(text.contains(&due), "writer {writer}: {text}");
                }
                assert!(text.contains("no space"), "writer {writer}: {text}");
            }
            let steps = steps_on(Arc::new(store.clone()));
            assert!(steps.newest().unwrap().is_none());
            let stores: Vec<Arc<dyn Storage>> = same(&store, 3);
            for report in save_all(&stores, &ranks, 4, "t2", DEADLINE) {
                report.unwrap();
            }
            state.check(&steps.newest().unwrap().unwrap());
            let left = steps.sweep().unwrap();
            assert_eq!(left.kept, [""; 0], "{left:?}");
            let staged =
                |path: &&String| path.contains(".tmp-") || path.matches("/data-").count() > 1;
            assert_eq!(store.raw_paths().iter().find(staged), None);
        }
    }
}

/// Another store, which is full when files of tensors are to be written.
#[derive(Debug)]
struct Full(Arc<dyn Storage>);

impl Storage for Full {
    fn open(&self, key: &Key) -> storage::Result<Arc<dyn storage::Object>> {
        self.0.open(key)
    }

    fn create(&self, key: &Key, bytes: u64) -> storage::Result<Box<dyn storage::Upload>> {
        if key.as_str().ends_with(".safetensors") {
            let what = self.0.display(key);
            let free_bytes = Some(17);
            return Err(storage::Error::NoSpace { what, need_bytes: bytes, free_bytes });
        }
        self.0.create(key, bytes)
    }

    fn list(&self, folder: &Key) -> storage::Result<Vec<storage::Entry>> {
        self.0.list(folder)
    }

    fn names(&self, folder: &Key) -> storage::Result<Vec<String>> {
        self.0.names(folder)
    }

    fn delete(&self, key: &Key) -> storage::Result<()> {
        self.0.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> storage::Result<()> {
        self.0.publish(staged, target)
    }

    fn can_publish(&self, folder: &Key) -> storage::Result<bool> {
        self.0.can_publish(folder)
    }

    fn delete_folder(&self, folder: &Key) -> storage::Result<()> {
        self.0.delete_folder(folder)
    }

    fn free_bytes(&self) -> storage::Result<Option<u64>> {
        Ok(None)
    }

    fn display(&self, key: &Key) -> String {
        self.0.display(key)
    }
}

/// A writer whose store takes its part, says that it did not, and is then gone until the others
/// have ended. It deletes nothing, for the step is there; and it finds that out, even if the
/// meeting was swept away in between.
#[test]
fn a_writer_that_was_cut_off_finds_the_step() {
    let state = State::of_model(3);
    let ranks = Ranks::new(&state, 2, LIMITS);
    for (marked, is_swept) in [(false, false), (false, true), (true, false), (true, true)] {
        let faults = Faults { no_exclusive_rename: marked, ..Faults::default() };
        let store = SimStore::new(5, faults);
        let steps = steps_on(Arc::new(store.clone()));
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = Cut { store: store.clone(), is_cut: Arc::clone(&is_cut) };
        let (lead, follow) = thread::scope(|scope| {
            let ranks = &ranks;
            let follow = scope.spawn(move || {
                let together = Together { token: "t", writer: 1, deadline: DEADLINE };
                ranks.save(&steps_on(Arc::new(cut)), 4, &together)
            });
            let together = Together { token: "t", writer: 0, deadline: DEADLINE };
            let lead = ranks.save(&steps, 4, &together);
            if is_swept {
                steps.sweep().unwrap();
            }
            is_cut.store(false, Ordering::SeqCst);
            (lead, follow.join().unwrap())
        });
        let context = format!("marked {marked}, swept {is_swept}: {lead:?} {follow:?}");
        assert!(lead.is_ok() && follow.is_ok(), "{context}");
        state.check(&steps.newest().unwrap().expect(&context));
    }
}

#[derive(Debug)]
struct Cut {
    store: SimStore,
    is_cut: Arc<AtomicBool>,
}

impl Cut {
    fn reach(&self) -> storage::Result<&SimStore> {
        if self.is_cut.load(Ordering::SeqCst) {
            let what = "a store that is out of reach".to_owned();
            return Err(storage::Error::Unsupported { doing: "reach", what });
        }
        Ok(&self.store)
    }
}

impl Storage for Cut {
    fn open(&self, key: &Key) -> storage::Result<Arc<dyn storage::Object>> {
        self.reach()?.open(key)
    }

    fn create(&self, key: &Key, bytes: u64) -> storage::Result<Box<dyn storage::Upload>> {
        let upload = self.reach()?.create(key, bytes)?;
        if key.as_str().ends_with("/part/00001") {
            return Ok(Box::new(Unanswered { upload, is_cut: Arc::clone(&self.is_cut) }));
        }
        Ok(upload)
    }

    fn list(&self, folder: &Key) -> storage::Result<Vec<storage::Entry>> {
        self.reach()?.list(folder)
    }

    fn names(&self, folder: &Key) -> storage::Result<Vec<String>> {
        self.reach()?.names(folder)
    }

    fn delete(&self, key: &Key) -> storage::Result<()> {
        self.reach()?.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> storage::Result<()> {
        self.reach()?.publish(staged, target)
    }

    fn can_publish(&self, folder: &Key) -> storage::Result<bool> {
        self.reach()?.can_publish(folder)
    }

    fn delete_folder(&self, folder: &Key) -> storage::Result<()> {
        self.reach()?.delete_folder(folder)
    }

    fn free_bytes(&self) -> storage::Result<Option<u64>> {
        Ok(None)
    }

    fn display(&self, key: &Key) -> String {
        self.store.display(key)
    }
}

#[derive(Debug)]
struct Unanswered {
    upload: Box<dyn storage::Upload>,
    is_cut: Arc<AtomicBool>,
}

impl storage::Upload for Unanswered {
    fn write(&mut self, bytes: &[u8]) -> storage::Result<()> {
        self.upload.write(bytes)
    }

    fn len_bytes(&self) -> u64 {
        self.upload.len_bytes()
    }

    fn finish(self: Box<Self>) -> storage::Result<storage::FileEntry> {
        // From before the part is seen: the others may end at once.
        self.is_cut.store(true, Ordering::SeqCst);
        self.upload.finish()?;
        let what = "the answer".to_owned();
        Err(storage::Error::Unsupported { doing: "receive", what })
    }
}

/// One writer alone: what it says of the others.
fn alone(folder: &Folder, ranks: &Ranks, writer: usize, token: &str, patience: Patience) -> String {
    let steps = steps_on(folder.store()).with_patience(patience);
    let deadline = Duration::from_millis(400);
    let saved = ranks.save(&steps, 4, &Together { token, writer, deadline });
    assert!(steps.newest().unwrap().is_none());
    saved.unwrap_err().to_string()
}

#[test]
fn who_is_missing_is_named() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 3, LIMITS);
    let text = alone(&folder, &ranks, 0, "a", PATIENCE);
    let due = "writer 1 of 3: never came; writer 2 of 3: never came; the deadline is 400ms";
    assert!(text.ends_with(due), "{text}");
    let text = alone(&folder, &ranks, 2, "b", PATIENCE);
    assert!(text.ends_with("writer 0 did not begin within 400ms"), "{text}");
    // Who comes late finds that it was given up.
    let text = alone(&folder, &ranks, 0, "b", PATIENCE);
    assert!(text.ends_with("writer 0 did not begin within 400ms"), "{text}");

    // A sign of a process of another machine, and no second one.
    let sign = |token: &str, writer: usize| {
        let alive = folder.path(&format!(".save-step-000000000004-{token}/alive"));
        fs::create_dir_all(&alive).unwrap();
        fs::write(alive.join(format!("{writer:05}-elsewhere.m.b.1.77.5.0")), "").unwrap();
    };
    let quick =
        Patience { beat: Duration::from_millis(20), silence_max: Duration::from_millis(100) };
    sign("c", 2);
    let text = alone(&folder, &ranks, 0, "c", quick);
    assert!(text.contains("writer 2 of 3 (process 77 on elsewhere): no sign of life"), "{text}");
    sign("d", 2);
    let text = alone(&folder, &ranks, 0, "d", PATIENCE);
    let due = "writer 1 of 3: never came; writer 2 of 3 (process 77 on elsewhere): not done";
    assert!(text.contains(due), "{text}");
}

#[test]
fn what_cannot_be_saved_together() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
    for token in ["", "a/b", "a b", &"x".repeat(101)] {
        let text = alone(&folder, &ranks, 0, token, PATIENCE);
        assert!(text.contains("1 to 100 letters, digits"), "{text}");
    }
    let text = alone(&folder, &ranks, 2, "t", PATIENCE);
    assert!(text.contains("step 4 as writer 2: the plan has 2 writers"), "{text}");

    // Another plan of as many writers.
    let other = Ranks::new(&State::of_model(3), 2, PlanLimits { shard_bytes_max: 9000, ..LIMITS });
    let texts = thread::scope(|scope| {
        let lead = scope.spawn(|| alone(&folder, &ranks, 0, "u", PATIENCE));
        let follow = alone(&folder, &other, 1, "u", PATIENCE);
        [lead.join().unwrap(), follow]
    });
    for text in texts {
        assert!(text.contains("hint: all processes are to plan the same tensors"), "{text}");
    }
    // What a token stood for once it stands for always.
    let text = alone(&folder, &ranks, 1, "u", PATIENCE);
    assert!(text.contains("given up by all: "), "{text}");
    let saved = save_all(&stores_in(&folder, 2), &ranks, 4, "v", DEADLINE);
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    for saved in save_all(&stores_in(&folder, 2), &ranks, 4, "w", DEADLINE) {
        let text = saved.unwrap_err().to_string();
        assert!(text.contains("this step is saved already"), "{text}");
    }
}

/// While somebody else holds the lease, all writers are told who.
#[test]
fn a_folder_in_use_is_told_to_all() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
    let other = folder.steps(OPTIONS);
    let lease = other.lock().unwrap();
    for saved in save_all(&stores_in(&folder, 2), &ranks, 4, "a", DEADLINE) {
        let text = saved.unwrap_err().to_string();
        assert!(text.contains("holds it; hint: stop that run"), "{text}");
    }
    drop(lease);
    for saved in save_all(&stores_in(&folder, 2), &ranks, 4, "b", DEADLINE) {
        saved.unwrap();
    }
}

/// Whichever operation of the disk fails, of whichever writer: all come to the same end, and the
/// next try succeeds.
#[test]
fn any_failing_operation_gives_one_outcome() {
    let state = State { tensors: State::of_model(1).tensors.split_off(12), ..State::of_model(1) };
    let ranks = Ranks::new(&state, 2, LIMITS);
    for nth in (0..).step_by(3) {
        let store = SimStore::new(nth as u64, Faults::default());
        store.fail_op(nth, Fail::Io);
        let stores: Vec<Arc<dyn Storage>> = same(&store, 2);
        let saved = save_all(&stores, &ranks, 4, "a", Duration::from_secs(3));
        let context = format!("operation {nth}: {saved:?}");
        let steps = steps_on(Arc::new(store.clone()));
        let there = steps.newest().unwrap();
        assert!(saved.iter().all(|one| one.is_ok() == there.is_some()), "{context}");
        if let Some(newest) = there {
            state.check(&newest);
        } else {
            for saved in save_all(&stores, &ranks, 4, "b", DEADLINE) {
                saved.expect(&context);
            }
        }
        if store.op_count() <= nth {
            assert!(nth > 60, "a save of {nth} operations");
            break;
        }
    }
}

/// Every image that a power cut may leave, at every operation that any of the writers makes.
#[test]
fn a_power_cut_leaves_the_old_step_or_the_new() {
    let small = |seed| State {
        tensors: State::of_model(seed).tensors.split_off(12),
        ..State::of_model(seed)
    };
    for marked in [false, true] {
        let store = SimStore::new(7, Faults { no_exclusive_rename: marked, ..Faults::default() });
        let stores: Vec<Arc<dyn Storage>> = same(&store, 3);
        let (old, new) = (small(1), small(2));
        let save = |step, state: &State, token| {
            for saved in save_all(&stores, &Ranks::new(state, 3, LIMITS), step, token, DEADLINE) {
                saved.unwrap();
            }
        };
        save(1, &old, "a");
        let from = store.op_count();
        save(2, &new, "b");
        let to = store.op_count();
        assert!(to > from + 60, "a save of few operations");
        for (ops, seed) in (from..=to).flat_map(|ops| (0..4).map(move |seed| (ops, seed))) {
            let after = store.crash_at(ops, seed);
            let steps = steps_on(Arc::new(after));
            let newest = steps.newest().unwrap().unwrap();
            let state = [&old, &new][newest.step() as usize - 1];
            assert_eq!(state.differs_from(&newest).unwrap(), None, "after {ops}, image {seed}");
            assert!(ops < to || newest.step() == 2, "image {seed}: it was there");
        }
    }
}
