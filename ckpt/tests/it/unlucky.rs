//! Rare races and faults that could lose a step or a run.

use std::fs::{self, File};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::common::gate::device_error;
use crate::common::ranks::{LIMITS, Ranks};
use crate::common::{Folder, SERIAL, State};
use ckpt::{
    Check, Checkpoints, Drain, DrainOptions, Error, JointSaveOptions, LivenessTimeouts, Retention,
};
use storage::testing::fault_store::{FaultPlan, FaultStore, HookLayer};
use storage::{Key, Storage, write_all};

/// Longer than any operation here takes.
const LONG: Duration = Duration::from_secs(30);

fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

fn steps_on(store: Arc<dyn Storage>) -> Checkpoints {
    Checkpoints::open(store, key("run")).with_options(SERIAL)
}

fn marked() -> FaultStore {
    FaultStore::new(3, FaultPlan { no_exclusive_rename: true, ..FaultPlan::default() })
}

/// The commit record of a step in the second store cannot be read, permanently or temporarily. The
/// first store no longer has the step, so these files are the only ones.
#[test]
fn files_of_unreadable_record_are_kept() {
    for is_corrupt in [true, false] {
        let near = Folder::in_memory();
        for step in [1, 2] {
            State::of_model(step).save(&near.steps(SERIAL), step).unwrap();
        }
        let store = marked();
        let record = key("run/step-000000000001/COMMIT");
        let fails = Arc::new(AtomicBool::new(false));
        let (theirs, at) = (Arc::clone(&fails), record.clone());
        let far = HookLayer::new(Arc::new(store.clone()), move |_, call, key| {
            let is_it = call == "open" && *key == at && theirs.load(Ordering::SeqCst);
            if is_it { Err(device_error(key)) } else { Ok(()) }
        });
        let drain = || {
            let retention = Retention { keep_last: 5, ..Retention::default() };
            let options = DrainOptions { retention, pause: Duration::ZERO, ..Default::default() };
            let near = Arc::new(near.steps(SERIAL));
            Drain::new(near, Arc::new(steps_on(Arc::clone(&far))), options)
        };
        assert_eq!(drain().run().unwrap().drained.len(), 2);
        near.steps(SERIAL).retain(1).unwrap();
        State::of_model(3).save(&near.steps(SERIAL), 3).unwrap();
        let files = |store: &FaultStore| store.list(&key("run/step-000000000001")).unwrap().len();
        let before = files(&store);
        if is_corrupt {
            store.delete(&record).unwrap();
            write_all(&store, &record, b"{").unwrap();
        } else {
            fails.store(true, Ordering::SeqCst);
        }
        let pass = drain().run();
        assert_eq!(pass.is_ok(), is_corrupt, "{pass:?}");
        steps_on(Arc::clone(&far)).sweep().ok();
        assert_eq!(files(&store), before, "corrupt {is_corrupt}");
        fails.store(false, Ordering::SeqCst);
        if !is_corrupt {
            State::of_model(1).check(&steps_on(far).open_step(1).unwrap());
        }
    }
}

/// A heartbeat that was written although the store returned an error, and one that it did not
/// delete: later heartbeats are still written, and no leftovers stay.
#[test]
fn heartbeats_survive_store_errors() {
    let folder = Folder::in_memory();
    let once = [AtomicBool::new(true), AtomicBool::new(true)];
    let store = HookLayer::new(folder.store(), move |inner, call, key| {
        let is_lease = key.name().starts_with(".lease-");
        let fails = |place: usize| once[place].swap(false, Ordering::SeqCst);
        if is_lease && call == "delete" && key.name().ends_with("~1") && fails(0) {
            return Err(device_error(key));
        }
        if is_lease && call == "create" && key.name().ends_with("~3") && fails(1) {
            write_all(inner, key, b"sign").unwrap();
            return Err(device_error(key));
        }
        Ok(())
    });
    let patience = LivenessTimeouts { beat: Duration::from_millis(5), silence_max: LONG };
    let steps = steps_on(store).with_patience(patience);
    let lease = steps.lock().unwrap();
    let started = Instant::now();
    let beats = || {
        let names = folder.names();
        names.iter().filter_map(|name| name.split_once('~')?.1.parse().ok()).max().unwrap_or(0_u32)
    };
    while beats() < 6 {
        let is_late = started.elapsed() > LONG;
        assert!(!is_late, "heartbeats stopped at {}", beats());
        thread::sleep(patience.beat);
    }
    State::of_model(1).save(&steps, 1).unwrap();
    drop(lease);
    assert_eq!(folder.names(), ["step-000000000001"]);
    State::of_model(2).save(&folder.steps(SERIAL), 2).unwrap();
}

/// A writer commits a step and deletes the older ones after a reader has listed those.
#[test]
fn newest_is_found_during_saves_and_deletions() {
    let folder = Folder::in_memory();
    for step in [1, 2, 3] {
        State::of_model(step).save(&folder.steps(SERIAL), step).unwrap();
    }
    let writer = folder.steps(SERIAL);
    let come = AtomicUsize::new(3);
    let reader = steps_on(HookLayer::new(folder.store(), move |_, call, key| {
        let last = come.load(Ordering::SeqCst);
        let is_newest = key.as_str().ends_with(&format!("step-{last:012}/MANIFEST.json"));
        if call == "open" && is_newest && last < 6 {
            come.store(last + 1, Ordering::SeqCst);
            State::of_model(last as u64 + 1).save(&writer, last as u64 + 1).unwrap();
            writer.retain(1).unwrap();
        }
        Ok(())
    }));
    State::of_model(6).check(&reader.newest().unwrap().unwrap());
}

/// After one writer aborts a joint save, the others stop writing.
#[test]
fn aborted_save_stops_writing() {
    let store = FaultStore::new(5, FaultPlan::default());
    let state = State::of_model(3);
    let ranks = Ranks::new(&state, 2, LIMITS);
    let patience = LivenessTimeouts { beat: Duration::from_millis(10), silence_max: LONG };
    let full = HookLayer::new(Arc::new(store.clone()), |_, call, key| {
        let is_file = call == "create" && key.name().ends_with(".safetensors");
        if is_file { Err(device_error(key)) } else { Ok(()) }
    });
    // Slow enough to see the abort: the first file starts after the others have aborted.
    let slow = HookLayer::new(Arc::new(store.clone()), move |inner, call, file| {
        if call == "create" && file.name().ends_with(".safetensors") {
            let started = Instant::now();
            let decision = key("run/.save-step-000000000004-t/decision");
            while inner.open(&decision).is_err() && started.elapsed() < LONG {
                thread::sleep(patience.beat);
            }
            thread::sleep(patience.beat * 100);
        }
        Ok(())
    });
    let texts = thread::scope(|scope| {
        let save = |(writer, store): (usize, Arc<dyn Storage>)| {
            let (ranks, steps) = (&ranks, steps_on(store).with_patience(patience));
            scope.spawn(move || {
                let together = JointSaveOptions { token: "t", writer, deadline: LONG };
                ranks.save(&steps, 4, &together).unwrap_err().to_string()
            })
        };
        let threads: Vec<_> = [full, slow].into_iter().enumerate().map(save).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(texts[1].contains("aborted by all writers: writer 0 of 2 (process "), "{texts:?}");
    let written: Vec<String> =
        store.raw_paths().into_iter().filter(|path| path.ends_with(".safetensors")).collect();
    assert_eq!(written, [""; 0], "files of an aborted save");
}

/// A damaged step with this number exists, a save that would replace it is aborted and swept, and
/// one writer was disconnected meanwhile: it does not mistake the damaged step for its own.
#[test]
fn damaged_step_is_not_mistaken_for_saved_step() {
    for no_exclusive_rename in [false, true] {
        let store = FaultStore::new(5, FaultPlan { no_exclusive_rename, ..FaultPlan::default() });
        let all = || Arc::new(store.clone()) as Arc<dyn Storage>;
        let patience = LivenessTimeouts { beat: Duration::from_millis(10), silence_max: LONG };
        State::of_model(9).save(&steps_on(all()), 4).unwrap();
        let files = store.list(&key("run/step-000000000004")).unwrap();
        let blob = files.iter().find(|file| file.key.name() == "rng.bin").unwrap();
        store.delete(&blob.key).unwrap();
        let ranks = Ranks::new(&State::of_model(3), 2, LIMITS);
        // The leader has every part, but no space for the manifest.
        let full = HookLayer::new(all(), |_, call, key| {
            let is_it = call == "create" && key.name() == "MANIFEST.json";
            if is_it { Err(device_error(key)) } else { Ok(()) }
        });
        let (is_cut, part) = (Arc::new(AtomicBool::new(false)), "part/00001");
        let theirs = Arc::clone(&is_cut);
        let cut = HookLayer::new(all(), move |_, call, key| {
            let is_after = theirs.load(Ordering::SeqCst);
            if call == "names" && key.as_str().ends_with("/lead") && is_after {
                return Err(device_error(key));
            }
            if call == "open" && key.name() == "decision" && is_after {
                return Err(device_error(key));
            }
            theirs.fetch_or(key.as_str().ends_with(part), Ordering::SeqCst);
            Ok(())
        });
        let save = |store: &Arc<dyn Storage>, writer| {
            let steps = steps_on(Arc::clone(store)).with_patience(patience);
            ranks.save(&steps, 4, &JointSaveOptions { token: "t", writer, deadline: LONG })
        };
        let (lead, follow) = thread::scope(|scope| {
            let follow = scope.spawn(|| save(&cut, 1));
            let lead = save(&full, 0);
            steps_on(all()).sweep().unwrap();
            is_cut.store(false, Ordering::SeqCst);
            (lead, follow.join().unwrap())
        });
        assert!(lead.is_err() && follow.is_err(), "{no_exclusive_rename}: {lead:?} {follow:?}");
    }
}

/// Steps, leases and marks may have any file time: clocks are never compared.
#[test]
fn file_times_are_ignored() {
    let folder = Folder::in_memory();
    for step in [1, 2, 3] {
        State::of_model(step).save(&folder.steps(SERIAL), step).unwrap();
    }
    let century = Duration::from_secs(100 * 365 * 86_400);
    let times = [SystemTime::UNIX_EPOCH, SystemTime::now() + century];
    let held = folder.steps(SERIAL);
    for (place, time) in times.into_iter().enumerate() {
        let lease = held.lock().unwrap();
        for name in folder.names() {
            File::open(folder.path(&name)).unwrap().set_modified(time).unwrap();
        }
        let refused = folder.steps(SERIAL).lock();
        assert!(matches!(refused, Err(Error::Held { .. })), "{refused:?}");
        drop(lease);
        let old = folder.path("step-000000000002");
        File::open(old).unwrap().set_modified(SystemTime::now() + century * 2).unwrap();
        let steps = folder.steps(SERIAL);
        assert_eq!(steps.newest().unwrap().unwrap().step(), 3);
        if place == 1 {
            assert_eq!(steps.retain(1).unwrap(), [1, 2]);
        }
    }
}

/// A `latest` file of another program is not changed, whatever it contains; ours is never read.
#[test]
fn foreign_latest_file_is_not_changed() {
    for text in ["global_step9", "", "step", "../../etc/passwd\n"] {
        let folder = Folder::in_memory();
        fs::create_dir(folder.path("")).unwrap();
        fs::write(folder.path("latest"), text).unwrap();
        let steps = folder.steps(SERIAL);
        State::of_model(1).save(&steps, 1).unwrap();
        assert_eq!(fs::read_to_string(folder.path("latest")).unwrap(), text);
        State::of_model(1).check(&steps.newest().unwrap().unwrap());
    }
    let folder = Folder::in_memory();
    let steps = folder.steps(SERIAL);
    State::of_model(1).save(&steps, 1).unwrap();
    fs::write(folder.path("latest"), "step-000000000077\n").unwrap();
    assert_eq!(steps.newest().unwrap().unwrap().step(), 1);
    State::of_model(2).save(&steps, 2).unwrap();
    assert_eq!(fs::read_to_string(folder.path("latest")).unwrap(), "step-000000000002\n");
}

/// A retention pass uses the record that exactly this step was verified.
#[test]
fn verified_steps_are_recorded() {
    let folder = Folder::in_memory();
    let steps = folder.steps(SERIAL);
    let save = |range: std::ops::RangeInclusive<u64>| {
        for step in range {
            State::of_model(step).save(&steps, step).unwrap();
        }
    };
    let flip = |step: u64| {
        let path = folder.path(&format!("step-{step:012}/extra/rng.bin"));
        let mut bytes = fs::read(&path).unwrap();
        bytes[7] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    let is_recorded = |step| steps.is_verified(&steps.open_step(step).unwrap()).unwrap();
    let keep = |keep_last, check| Retention { keep_last, keep_every: None, check };
    save(1..=4);
    let plan = steps.plan_retention(&keep(2, Check::NewestBytes), &[]).unwrap();
    assert_eq!((plan.delete, is_recorded(4)), (vec![1, 2], false), "a plan changes nothing");
    steps.retain_by(&keep(2, Check::NewestBytes), &[]).unwrap();
    assert!(is_recorded(4) && !is_recorded(3));
    // 4 is one of two, so 5 is not read.
    save(5..=5);
    flip(5);
    assert_eq!(steps.retain_by(&keep(2, Check::NewestBytes), &[]).unwrap().delete, [3]);
    assert!(!is_recorded(5));
    // By lengths alone, it is retained in addition to the newest.
    save(6..=6);
    flip(6);
    let plan = steps.retain_by(&keep(1, Check::Lengths), &[]).unwrap();
    assert_eq!((plan.delete, plan.keep.len()), (vec![5], 2), "{:?}", plan.keep);
    // It is no longer one of the newest: those are read, and the first good one counts.
    save(7..=7);
    flip(7);
    let plan = steps.retain_by(&keep(1, Check::NewestBytes), &[]).unwrap();
    assert!(plan.delete.is_empty(), "6 and 7 are damaged, and 4 is the last good one: {plan:?}");
    save(8..=8);
    assert_eq!(steps.retain_by(&keep(1, Check::NewestBytes), &[]).unwrap().delete, [4, 6, 7]);
    assert!(is_recorded(8));
    assert_eq!(folder.names().iter().filter(|name| name.starts_with(".verified-")).count(), 1);
    // Recorded as verified, and damaged since: only a pass that reads again detects that.
    save(9..=10);
    (8..=10).for_each(flip);
    let plan = steps.plan_retention(&keep(1, Check::NewestBytes), &[]).unwrap();
    assert!(plan.delete.is_empty(), "the newest are read: {plan:?}");
    let plan = steps.retain_by(&keep(1, Check::NewestBytesAlways), &[]).unwrap();
    assert!(plan.delete.is_empty(), "{plan:?}");
    assert!(!is_recorded(8));
    // Another step of that number is not the verified one.
    steps.verify_step(9).unwrap_err();
    fs::remove_dir_all(folder.path("step-000000000009")).unwrap();
    save(9..=9);
    steps.verify_step(9).unwrap();
    fs::remove_dir_all(folder.path("step-000000000009")).unwrap();
    State::of_model(77).save(&steps, 9).unwrap();
    assert!(!is_recorded(9));
    fs::remove_dir_all(folder.path("step-000000000009")).unwrap();
    assert_eq!(steps.sweep().unwrap().removed.len(), 1, "the mark of a deleted step is removed");
}
