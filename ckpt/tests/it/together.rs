//! Joint saves: the writers are threads, which share nothing but the store.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::common::gate::{Gate, GateState, device_error};
use crate::common::ranks::{LIMITS, PATIENCE, Ranks, check_images, same, steps_on};
use crate::common::{Folder, SERIAL, State};
use ckpt::{JointSaveOptions, LivenessTimeouts, PlanLimits, Result, SaveReport};
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore, HookLayer};
use storage::{Key, Storage};

/// Far longer than any save here takes, and short enough to notice a wait until the deadline.
const DEADLINE: Duration = Duration::from_secs(30);

/// All writers save concurrently, each with its own store.
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
            scope.spawn(move || {
                ranks.save(&steps, step, &JointSaveOptions { token, writer, deadline })
            })
        };
        let threads: Vec<_> = stores.iter().enumerate().map(save).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn stores_in(folder: &Folder, writers: usize) -> Vec<Arc<dyn Storage>> {
    (0..writers).map(|_| folder.store()).collect()
}

#[test]
fn joint_save_writes_one_step() {
    for writers in [1, 2, 3, 7] {
        let folder = Folder::new();
        let state = State::of_model(writers as u64);
        let ranks = Ranks::new(&state, writers, LIMITS);
        let reports = save_all(&stores_in(&folder, writers), &ranks, 12, "first", DEADLINE);
        let bytes: u64 = reports.iter().map(|report| report.as_ref().unwrap().bytes).sum();
        let steps = folder.steps(SERIAL);
        let newest = steps.newest().unwrap().unwrap();
        state.check(&newest);
        newest.verify().unwrap();
        assert!(bytes <= newest.size().1, "{bytes} bytes by the reports");
        // The next save has another layout, and no leftovers block it.
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

/// The store of one writer fails: it reports the cause, and all others report the same.
#[test]
fn failure_of_one_writer_fails_all() {
    let state = State::of_model(3);
    let ranks = Ranks::new(&state, 3, LIMITS);
    for victim in 0..3 {
        for marked in [false, true] {
            let faults = FaultPlan { no_exclusive_rename: marked, ..FaultPlan::default() };
            let store = FaultStore::new(5, faults);
            let mut stores: Vec<Arc<dyn Storage>> = same(&store, 3);
            let gate = Gate::new(Arc::new(store.clone()));
            gate.set(GateState::Full);
            stores[victim] = gate.store();
            let reports = save_all(&stores, &ranks, 4, "t", DEADLINE);
            for (writer, report) in reports.iter().enumerate() {
                let text = report.as_ref().unwrap_err().to_string();
                if writer != victim {
                    let expected =
                        format!("aborted by all writers: writer {victim} of 3 (process ");
                    assert!(text.contains(&expected), "writer {writer}: {text}");
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

/// A panic of one writer, whose process continues, aborts the save of all long before the deadline.
#[test]
fn panic_of_one_writer_aborts_all() {
    let ranks = Ranks::new(&State::of_model(3), 3, LIMITS);
    for victim in 0..3 {
        let folder = Folder::new();
        for report in save_all(&stores_in(&folder, 3), &ranks, 3, "earlier", DEADLINE) {
            report.unwrap();
        }
        let mut stores = stores_in(&folder, 3);
        let gate = Gate::new(folder.store());
        gate.set(GateState::Panics);
        stores[victim] = gate.store();
        for (writer, report) in save_all(&stores, &ranks, 4, "t", DEADLINE).iter().enumerate() {
            let text = report.as_ref().unwrap_err().to_string();
            assert!(text.contains("a thread panicked"), "writer {writer}: {text}");
            let names_it = text.contains(&format!("writer {victim} of 3 (process "));
            assert!(names_it || writer == victim, "writer {writer}: {text}");
        }
        let steps = folder.steps(SERIAL);
        assert_eq!(steps.newest().unwrap().unwrap().step(), 3);
        steps.sweep().unwrap();
        assert_eq!(folder.names(), ["step-000000000003"], "writer {victim}");
    }
}

/// The store of a writer accepts its part, returns an error, and then fails until the others have
/// ended. The writer deletes nothing, since the step exists; and it detects that, even if the
/// rendezvous was swept in between.
#[test]
fn disconnected_writer_finds_committed_step() {
    let state = State::of_model(3);
    let ranks = Ranks::new(&state, 2, LIMITS);
    for (marked, is_swept) in [(false, false), (false, true), (true, false), (true, true)] {
        let faults = FaultPlan { no_exclusive_rename: marked, ..FaultPlan::default() };
        let store = FaultStore::new(5, faults);
        let steps = steps_on(Arc::new(store.clone()));
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = cut_off_after_its_part(&store, &is_cut);
        let (lead, follow) = thread::scope(|scope| {
            let ranks = &ranks;
            let follow = scope.spawn(move || {
                let together = JointSaveOptions { token: "t", writer: 1, deadline: DEADLINE };
                ranks.save(&steps_on(cut), 4, &together)
            });
            let together = JointSaveOptions { token: "t", writer: 0, deadline: DEADLINE };
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

/// Its part arrives, but the reply and all later calls fail.
fn cut_off_after_its_part(store: &FaultStore, is_cut: &Arc<AtomicBool>) -> Arc<dyn Storage> {
    let is_part = |call: &str, key: &Key| call == "finish" && key.as_str().ends_with("/part/00001");
    let is_cut = Arc::clone(is_cut);
    let before = move |_: &dyn Storage, call: &str, key: &Key| {
        // Set before the part is visible: the others may end at once.
        let was_cut = is_cut.fetch_or(is_part(call, key), Ordering::SeqCst);
        if was_cut { Err(device_error(key)) } else { Ok(()) }
    };
    let after = move |_: &dyn Storage, call: &str, key: &Key| {
        if is_part(call, key) { Err(device_error(key)) } else { Ok(()) }
    };
    HookLayer::around(Arc::new(store.clone()), before, after)
}

/// A single writer: its report about the others at its deadline, or before.
fn alone(
    folder: &Folder,
    ranks: &Ranks,
    writer: usize,
    token: &str,
    patience: LivenessTimeouts,
) -> String {
    let deadline = Duration::from_millis(400);
    refused(folder, ranks, &JointSaveOptions { token, writer, deadline }, patience)
}

/// The same with any deadline.
fn refused(
    folder: &Folder,
    ranks: &Ranks,
    together: &JointSaveOptions<'_>,
    patience: LivenessTimeouts,
) -> String {
    let steps = steps_on(folder.store()).with_patience(patience);
    let saved = ranks.save(&steps, 4, together);
    assert!(steps.newest().unwrap().is_none());
    saved.unwrap_err().to_string()
}

#[test]
fn missing_writers_are_reported() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 3, LIMITS);
    let text = alone(&folder, &ranks, 0, "a", PATIENCE);
    let expected =
        "writer 1 of 3: never joined; writer 2 of 3: never joined; the deadline is 400ms";
    assert!(text.ends_with(expected), "{text}");
    let text = alone(&folder, &ranks, 2, "b", PATIENCE);
    assert!(text.ends_with("writer 0 did not start within 400ms"), "{text}");
    // A late writer finds that the save was aborted.
    let text = alone(&folder, &ranks, 0, "b", PATIENCE);
    assert!(text.ends_with("writer 0 did not start within 400ms"), "{text}");

    // The heartbeat of a process of another machine, without a second one.
    let sign = |token: &str, writer: usize| {
        let alive = folder.path(&format!(".save-step-000000000004-{token}/alive"));
        fs::create_dir_all(&alive).unwrap();
        fs::write(alive.join(format!("{writer:05}-elsewhere.m.b.1.77.5.0")), "").unwrap();
    };
    let quick = LivenessTimeouts {
        beat: Duration::from_millis(20),
        silence_max: Duration::from_millis(100),
    };
    sign("c", 2);
    let together = JointSaveOptions { token: "c", writer: 0, deadline: DEADLINE };
    let text = refused(&folder, &ranks, &together, quick);
    assert!(text.contains("writer 2 of 3 (process 77 on elsewhere): no heartbeat"), "{text}");
    sign("d", 2);
    let text = alone(&folder, &ranks, 0, "d", PATIENCE);
    let expected =
        "writer 1 of 3: never joined; writer 2 of 3 (process 77 on elsewhere): not finished";
    assert!(text.contains(expected), "{text}");
}

#[test]
fn invalid_joint_saves_are_rejected() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
    for token in ["", "a/b", "a b", &"x".repeat(101)] {
        let text = alone(&folder, &ranks, 0, token, PATIENCE);
        assert!(text.contains("1 to 100 letters, digits"), "{text}");
    }
    let text = alone(&folder, &ranks, 2, "t", PATIENCE);
    assert!(text.contains("step 4 as writer 2: the plan has 2 writers"), "{text}");

    // Another plan with the same number of writers.
    let other = Ranks::new(&State::of_model(3), 2, PlanLimits { shard_bytes_max: 9000, ..LIMITS });
    let u = |writer| JointSaveOptions { token: "u", writer, deadline: DEADLINE };
    let texts = thread::scope(|scope| {
        let lead = scope.spawn(|| refused(&folder, &ranks, &u(0), PATIENCE));
        let follow = refused(&folder, &other, &u(1), PATIENCE);
        [lead.join().unwrap(), follow]
    });
    for text in texts {
        assert!(text.contains("hint: plan the same tensors"), "{text}");
    }
    // A token cannot be reused for another save.
    let text = alone(&folder, &ranks, 1, "u", PATIENCE);
    assert!(text.contains("aborted by all writers: "), "{text}");
    let saved = save_all(&stores_in(&folder, 2), &ranks, 4, "v", DEADLINE);
    assert!(saved.iter().all(Result::is_ok), "{saved:?}");
    for saved in save_all(&stores_in(&folder, 2), &ranks, 4, "w", DEADLINE) {
        let text = saved.unwrap_err().to_string();
        assert!(text.contains("step already exists"), "{text}");
    }
}

/// While another process holds the lease, all writers report that process.
#[test]
fn folder_in_use_is_reported_to_all() {
    let folder = Folder::new();
    let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
    let other = folder.steps(SERIAL);
    let lease = other.lock().unwrap();
    for saved in save_all(&stores_in(&folder, 2), &ranks, 4, "a", DEADLINE) {
        let text = saved.unwrap_err().to_string();
        assert!(text.contains("(hint: stop that run, or delete "), "{text}");
    }
    drop(lease);
    for saved in save_all(&stores_in(&folder, 2), &ranks, 4, "b", DEADLINE) {
        saved.unwrap();
    }
}

/// Whichever disk operation of any writer fails: all writers get the same outcome, and the next try
/// succeeds.
#[test]
fn all_writers_agree_after_any_failure() {
    let state = State::small(1);
    let ranks = Ranks::new(&state, 2, LIMITS);
    for nth in (0..).step_by(3) {
        let store = FaultStore::new(nth as u64, FaultPlan::default());
        store.fail_op(nth, FaultKind::Io);
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

/// Writer 0 dies anywhere between the rename of the step and its report: its store accepts some
/// more operations, fails a few, and then fails permanently. The outcome of a follower holds in
/// every image that a power cut may leave after that, also if the name existed but was not durable.
#[test]
fn leader_death_before_name_is_durable() {
    let (old, new) = (State::small(1), State::small(2));
    let quick = LivenessTimeouts {
        beat: Duration::from_millis(50),
        silence_max: Duration::from_millis(300),
    };
    for marked in [false, true] {
        let mut followers_that_committed = 0;
        for more in 0..8 {
            let faults = FaultPlan { no_exclusive_rename: marked, ..FaultPlan::default() };
            let store = FaultStore::new(more as u64, faults);
            old.save(&steps_on(Arc::new(store.clone())), 1).unwrap();
            let leader = dies_while_it_commits(&store, more);
            let ranks = Ranks::new(&new, 2, LIMITS);
            let save = |store: Arc<dyn Storage>, writer| {
                let steps = steps_on(store).with_patience(quick);
                ranks.save(&steps, 2, &JointSaveOptions { token: "t", writer, deadline: DEADLINE })
            };
            let (lead, follow, ops) = thread::scope(|scope| {
                let lead = scope.spawn(|| save(leader, 0));
                let follow = save(Arc::new(store.clone()), 1);
                (lead.join().unwrap(), follow, store.op_count())
            });
            let context = format!("marked {marked}, after {more}: {lead:?} {follow:?}");
            followers_that_committed += usize::from(lead.is_err() && follow.is_ok());
            for seed in 0..20 {
                let newest = steps_on(Arc::new(store.crash_at(ops, seed))).newest().unwrap();
                let newest = newest.expect(&context);
                [&old, &new][newest.step() as usize - 1].check(&newest);
                assert!(newest.step() == 2 || follow.is_err(), "image {seed}, {context}");
            }
        }
        assert!(
            followers_that_committed > 0,
            "marked {marked}: no follower saw a name before it was durable"
        );
    }
}

/// Counts from the call that commits.
fn dies_while_it_commits(store: &FaultStore, more: usize) -> Arc<dyn Storage> {
    let (disk, is_dead) = (store.clone(), AtomicBool::new(false));
    HookLayer::new(Arc::new(store.clone()), move |_, call, key| {
        if is_dead.load(Ordering::SeqCst) {
            return Err(device_error(key));
        }
        if call == "publish" || (call == "finish" && key.name() == "COMMIT") {
            is_dead.store(true, Ordering::SeqCst);
            let next = disk.op_count() + more;
            (next..next + 4).for_each(|op| disk.fail_op(op, FaultKind::Io));
        }
        Ok(())
    })
}

/// Checks every image that a power cut may leave, at every operation of any writer.
#[test]
fn power_cut_leaves_old_or_new_step() {
    for marked in [false, true] {
        let store =
            FaultStore::new(7, FaultPlan { no_exclusive_rename: marked, ..FaultPlan::default() });
        let stores: Vec<Arc<dyn Storage>> = same(&store, 3);
        let (old, new) = (State::small(1), State::small(2));
        let save = |step, state: &State, token| {
            for saved in save_all(&stores, &Ranks::new(state, 3, LIMITS), step, token, DEADLINE) {
                saved.unwrap();
            }
        };
        save(1, &old, "a");
        let from = store.op_count();
        save(2, &new, "b");
        check_images(&store, from, 4, (&old, &new));
    }
}
