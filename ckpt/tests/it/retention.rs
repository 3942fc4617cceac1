//! Retention, deletion, leases and sweeps.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Child, Command};
use std::sync::Barrier;
use std::time::Duration;

use crate::common::children::can_detect_dead_processes;
use crate::common::{Folder, SMALL, State};
use ckpt::{CheckpointOptions, Error, LivenessTimeouts};

fn damage(folder: &Folder, step: u64) {
    let path = folder.path(&format!("step-{step:012}/extra/rng.bin"));
    fs::remove_file(path).unwrap();
}

#[test]
fn newest_steps_are_retained() {
    let folder = Folder::new();
    folder.save(&[10, 9, 100, 20, 11]);
    let steps = folder.steps(SMALL);
    assert!(steps.retain(9).unwrap().is_empty());
    assert_eq!(steps.retain(3).unwrap(), [9, 10]);
    assert_eq!(steps.steps().unwrap(), [11, 20, 100]);
    // `keep_last` of 0 counts as 1.
    assert_eq!(steps.retain(0).unwrap(), [11, 20]);
    State::of_model(100).check(&steps.newest().unwrap().unwrap());
    assert_eq!(folder.names(), ["step-000000000100"]);
}

/// Damaged steps are neither counted nor deleted: the last good one may be far from the last.
#[test]
fn damaged_steps_are_not_counted() {
    let folder = Folder::new();
    folder.save(&[1, 2, 3, 4]);
    damage(&folder, 4);
    damage(&folder, 2);
    let steps = folder.steps(SMALL);
    assert_eq!(steps.retain(1).unwrap(), [1]);
    State::of_model(3).check(&steps.newest().unwrap().unwrap());
    assert_eq!(folder.names(), ["step-000000000002", "step-000000000003", "step-000000000004"]);
}

#[test]
fn foreign_names_are_not_steps() {
    let folder = Folder::new();
    folder.save(&[5]);
    fs::write(folder.path("latest"), "step-000000000009").unwrap();
    fs::write(folder.path("LATEST"), "9").unwrap();
    fs::write(folder.path("step-000000000006"), "a file").unwrap();
    fs::create_dir(folder.path("step-000000000007")).unwrap();
    fs::create_dir(folder.path("step-8")).unwrap();
    fs::create_dir(folder.path("global_step9")).unwrap();
    let steps = folder.steps(SMALL);
    assert_eq!(steps.newest().unwrap().unwrap().step(), 5);
    assert_eq!(steps.steps().unwrap(), [5]);
    assert!(steps.retain(1).unwrap().is_empty());
    let before = folder.names();
    assert_eq!(steps.sweep().unwrap().removed, [""; 0]);
    assert_eq!(folder.names(), before);
}

/// A link may point to foreign data, or to a step of another run.
#[test]
fn links_are_not_steps() {
    let folder = Folder::new();
    folder.save(&[5]);
    let elsewhere = Folder::new();
    elsewhere.save(&[4, 6]);
    let there = |step: u64| elsewhere.path(&format!("step-{step:012}"));
    symlink(there(4), folder.path("step-000000000004")).unwrap();
    symlink(there(6), folder.path("step-000000000006")).unwrap();
    symlink(folder.path("step-000000000005"), folder.path("step-000000000007")).unwrap();
    symlink(folder.path("nowhere"), folder.path("step-000000000008")).unwrap();
    let steps = folder.steps(SMALL);
    assert_eq!(steps.newest().unwrap().unwrap().step(), 5);
    assert!(steps.retain(1).unwrap().is_empty());
    for step in [4, 6] {
        elsewhere.steps(SMALL).open_step(step).unwrap().verify().unwrap();
    }
    // A link inside a step is not one of its files.
    let blob = folder.path("step-000000000005/extra/rng.bin");
    let copy = folder.path("copy");
    fs::rename(&blob, &copy).unwrap();
    symlink(&copy, &blob).unwrap();
    fs::remove_file(&copy).unwrap();
    assert!(steps.newest().unwrap().is_none());
}

#[test]
fn existing_step_is_not_overwritten() {
    let folder = Folder::new();
    folder.save(&[1, 2]);
    let before = folder.files(2);
    let again = State::of_model(77).save(&folder.steps(SMALL), 2);
    assert!(matches!(again, Err(Error::StepExists { .. })), "{again:?}");
    assert!(folder.files(2) == before);
    assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"]);
}

/// A run that resumed from step 1 saves step 2 again, which exists and is damaged.
#[test]
fn damaged_step_is_set_aside() {
    let folder = Folder::new();
    folder.save(&[1, 2]);
    damage(&folder, 2);
    let steps = folder.steps(SMALL);
    assert_eq!(steps.newest().unwrap().unwrap().step(), 1);
    State::of_model(22).save(&steps, 2).unwrap();
    State::of_model(22).check(&steps.newest().unwrap().unwrap());
    let names = folder.names();
    assert!(names[0].starts_with(".damaged-step-000000000002-"), "{names:?}");
    assert!(folder.path(&names[0]).join("extra/loader.json").exists());
    let swept = steps.sweep().unwrap();
    assert_eq!((swept.removed.len(), swept.kept), (0, vec![names[0].clone()]));
}

/// An idle process, and its identity as in the names of its files.
struct Other {
    child: Child,
    owner: String,
}

impl Other {
    /// `ours` is `host.machine.boot.namespace.pid.started.number`.
    fn new(ours: &str) -> Self {
        let child = Command::new("sleep").arg("100").spawn().unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        let started = after_name.split_ascii_whitespace().nth(19).unwrap().to_owned();
        let mut parts: Vec<&str> = ours.rsplitn(4, '.').collect();
        parts.reverse();
        let owner = format!("{}.{}.{started}.0", parts[0], child.id());
        Other { child, owner }
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn our_mark(folder: &Folder) -> String {
    let _lease = folder.steps(SMALL).lock().unwrap();
    let names = folder.names();
    let lease = names.iter().find_map(|name| name.strip_prefix(".lease-")).unwrap();
    lease.to_owned()
}

#[test]
fn one_writer_at_a_time() {
    let folder = Folder::new();
    let (mine, yours) = (folder.steps(SMALL), folder.steps(SMALL));
    folder.save(&[1]);
    let lease = mine.lock().unwrap();
    let again = mine.lock().unwrap();
    for refused in [
        yours.lock().map(drop),
        State::of_model(2).save(&yours, 2).map(drop),
        yours.retain(1).map(drop),
        yours.sweep().map(drop),
    ] {
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(&format!("process {} on", std::process::id())), "{text}");
    }
    State::of_model(3).save(&mine, 3).unwrap();
    // Readers need no lease.
    assert_eq!(yours.newest().unwrap().unwrap().step(), 3);
    drop(lease);
    assert!(yours.lock().is_err(), "one of two is still held");
    drop(again);
    yours.lock().unwrap();
    assert_eq!(folder.names(), ["step-000000000001", "step-000000000003"]);
}

#[test]
fn lease_of_dead_process_is_void() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    folder.save(&[1]);
    let mut other = Other::new(&our_mark(&folder));
    fs::write(folder.path(&format!(".lease-{}", other.owner)), "").unwrap();
    let refused = folder.steps(SMALL).lock().unwrap_err();
    assert!(matches!(&refused, Error::Held { .. }), "{refused}");
    assert!(refused.to_string().contains(&format!("process {} on", other.child.id())));
    other.kill();
    folder.steps(SMALL).lock().unwrap();
    assert_eq!(folder.names(), ["step-000000000001"]);
}

/// For processes of other machines, and unknown identities, only heartbeats show whether they live.
#[test]
fn lease_without_heartbeats_is_void() {
    let folder = Folder::new();
    folder.save(&[1]);
    let patience = LivenessTimeouts {
        beat: Duration::from_millis(20),
        silence_max: Duration::from_millis(200),
    };
    let mark = format!("elsewhere.{}", our_mark(&folder));
    for mark in [&mark, "what"] {
        fs::write(folder.path(&format!(".lease-{mark}")), "").unwrap();
        folder.steps(SMALL).with_patience(patience).lock().unwrap();
        assert_eq!(folder.names(), ["step-000000000001"]);
    }
    // A process with a new heartbeat is alive, however late it is.
    let alive = std::thread::scope(|scope| {
        let path = |beat: u32| folder.path(&format!(".lease-{mark}~{beat}"));
        fs::write(path(1), "").unwrap();
        let refused = scope.spawn(|| {
            let forever = LivenessTimeouts { silence_max: Duration::from_secs(1000), ..patience };
            folder.steps(SMALL).with_patience(forever).lock().unwrap_err()
        });
        for beat in 2.. {
            if refused.is_finished() {
                return refused.join().unwrap();
            }
            fs::write(path(beat), "").unwrap();
            fs::remove_file(path(beat - 1)).unwrap();
            std::thread::sleep(patience.beat);
        }
        unreachable!("heartbeats do not end");
    });
    assert!(alive.to_string().contains("delete "), "{alive}");
}

/// A process that was considered dead detects that before it commits, and never writes again.
#[test]
fn lost_lease_is_never_regained() {
    let folder = Folder::new();
    let patience =
        LivenessTimeouts { beat: Duration::from_millis(5), silence_max: Duration::from_secs(9) };
    let slow = folder.steps(SMALL).with_patience(patience);
    let lease = slow.lock().unwrap();
    let held = |folder: &Folder| {
        let names = folder.names();
        names.into_iter().filter(|name| name.starts_with(".lease-")).collect::<Vec<_>>()
    };
    let delete = || {
        for name in held(&folder) {
            let _ = fs::remove_file(folder.path(&name));
        }
    };
    // The deletion of its heartbeats alone does not lose the lease, unless another process takes
    // it.
    for step in 1..4 {
        delete();
        State::of_model(step).save(&slow, step).unwrap();
    }
    // Another process deletes one, between two heartbeats or during one, and saves a step.
    let other = folder.steps(SMALL);
    loop {
        delete();
        match State::of_model(7).save(&other, 7) {
            Ok(_) => break,
            Err(Error::Held { .. }) => std::thread::sleep(patience.beat),
            Err(error) => panic!("{error}"),
        }
    }
    let expected = format!("process {}", std::process::id());
    let check = |refused: ckpt::Result<()>| match refused {
        Err(Error::LeaseLost { holder, .. }) => assert!(holder.contains(&expected), "{holder}"),
        refused => panic!("{refused:?}"),
    };
    check(State::of_model(8).save(&slow, 8).map(drop));
    check(slow.retain(1).map(drop));
    check(slow.sweep().map(drop));
    check(lease.check());
    drop(lease);
    check(slow.lock().map(drop));
    check(State::of_model(8).save(&slow, 8).map(drop));
    assert_eq!(slow.steps().unwrap(), [1, 2, 3, 7]);
    assert_eq!(held(&folder), [""; 0]);
    // The folder is free for others, in this process too.
    State::of_model(8).save(&folder.steps(SMALL), 8).unwrap();
}

/// Whatever the order of their calls, and whether they save the same step or not.
#[test]
fn one_of_two_concurrent_writers_wins() {
    for round in 0..20 {
        let folder = Folder::in_memory();
        let start = Barrier::new(2);
        let save = |step: u64| {
            let steps = folder.steps(SMALL);
            start.wait();
            State::small(step).save(&steps, step)
        };
        let second = 1 + round % 2;
        let outcomes = std::thread::scope(|scope| {
            let threads = [scope.spawn(|| save(1)), scope.spawn(|| save(second))];
            threads.map(|thread| thread.join().unwrap())
        });
        let mut expected: Vec<u64> = Vec::new();
        for (outcome, step) in outcomes.iter().zip([1, second]) {
            match outcome {
                Ok(_) => expected.push(step),
                Err(Error::Held { .. } | Error::StepExists { .. }) => {}
                Err(error) => panic!("round {round}: {error}"),
            }
        }
        assert!(!expected.is_empty(), "round {round}: {outcomes:?}");
        assert_eq!(folder.steps(SMALL).steps().unwrap(), expected, "round {round}");
    }
}

#[test]
fn sweep_removes_only_orphans() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    folder.save(&[1]);
    let ours = our_mark(&folder);
    let (alive, mut dead) = (Other::new(&ours), Other::new(&ours));
    dead.kill();
    let make = |name: String| {
        fs::create_dir_all(folder.path(&name).join("extra")).unwrap();
        fs::write(folder.path(&name).join("extra/a"), "x").unwrap();
        name
    };
    let mut due_removed = vec![
        make(format!(".tmp-step-000000000002-{}", dead.owner)),
        make(format!(".tmp-step-000000000003-{ours}")),
        // Its process has no heartbeats, or this process could not have the lease.
        make(format!(".tmp-step-000000000002-elsewhere.{}", dead.owner)),
        make(format!(".trash-step-000000000000-{}", dead.owner)),
    ];
    let mut due_kept = vec![
        make(format!(".tmp-step-000000000002-{}", alive.owner)),
        make(".tmp-step-000000000002-what".to_owned()),
        make(".tmp-表表表表表表表表".to_owned()),
    ];
    make(".hidden".to_owned());
    let mut swept = folder.steps(SMALL).sweep().unwrap();
    for names in [&mut swept.removed, &mut swept.kept, &mut due_removed, &mut due_kept] {
        names.sort();
    }
    assert_eq!((&swept.removed, &swept.kept), (&due_removed, &due_kept));
    let names = folder.names();
    assert!(due_kept.iter().all(|name| names.contains(name)));
    assert!(!due_removed.iter().any(|name| names.contains(name)));
    assert!(names.contains(&".hidden".to_owned()));
    let mut alive = alive;
    alive.kill();
}

/// Threads of one process share the folder: saves wait for one another, and a sweep for a save.
#[test]
fn threads_are_serialized() {
    let folder = Folder::new();
    let steps = folder.steps(CheckpointOptions { threads: 1, ..SMALL });
    std::thread::scope(|scope| {
        for step in 0..8 {
            let steps = &steps;
            scope.spawn(move || {
                State::of_model(step).save(steps, step).unwrap();
                steps.sweep().unwrap();
            });
        }
    });
    assert_eq!(steps.steps().unwrap(), (0..8).collect::<Vec<_>>());
    for step in 0..8 {
        State::of_model(step).check(&steps.open_step(step).unwrap());
    }
}
