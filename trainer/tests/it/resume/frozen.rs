//! A trainer that is frozen while another takes over its run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{lines, wait_until};
use crate::common::{Lab, assert_success, text, train, trainer};
use crate::kills::has_checkpoint;

/// Every file below the folder.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
        let (path, name) = (entry.path(), entry.file_name().into_string().expect("UTF-8"));
        if path.is_dir() {
            let below = files_below(&name, &path);
            files.extend(below);
        } else {
            files.insert(name, fs::read(path).expect("readable"));
        }
    }
    files
}

fn files_below(name: &str, folder: &Path) -> BTreeMap<String, Vec<u8>> {
    files(folder).into_iter().map(|(below, bytes)| (format!("{name}/{below}"), bytes)).collect()
}

fn signal(child: &Child, name: &str) {
    let kill = format!("kill {name} {}", child.id());
    let status = Command::new("sh").args(["-c", &kill]).status();
    assert!(status.is_ok_and(|status| status.success()), "{kill}");
}

/// Stops a process, and waits until all its threads are stopped: a thread on another core runs for
/// a moment after the signal.
fn freeze(child: &mut Child) {
    signal(child, "-STOP");
    let tasks = format!("/proc/{}/task", child.id());
    let is_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|it| it.starts_with('T'));
    let all_stopped = || {
        let threads = fs::read_dir(&tasks).expect("its threads").flatten();
        let mut stats = threads.map(|thread| fs::read_to_string(thread.path().join("stat")));
        stats.all(|stat| stat.is_ok_and(is_stopped))
    };
    assert!(wait_until(child, all_stopped), "the process ended");
}

/// It wakes when its successor is done: it ends with an error that names the successor, and changes
/// no file in the run's folder.
#[test]
fn a_frozen_trainer_ends_after_a_takeover() {
    for (name, more) in [
        ("behind", vec![("checkpoint.every.steps", "1")]),
        ("waiting", vec![("checkpoint.every.steps", "1"), ("checkpoint.async", "false")]),
        ("agent", vec![("checkpoint.every.steps", "1"), ("checkpoint.agent", "true")]),
    ] {
        let lab = Lab::new();
        let config = lab.config(name, &more);
        let folder = lab.path(name);
        let mut frozen =
            trainer("train", &config).stdout(Stdio::null()).spawn().expect("the binary starts");
        let is_far = || lines(&folder) >= 4 && has_checkpoint(&folder);
        assert!(wait_until(&mut frozen, is_far), "{name}: the run ended early");
        freeze(&mut frozen);
        // As after missed heartbeats of a process of another machine.
        for entry in fs::read_dir(folder.join("ckpt")).expect("a folder").flatten() {
            if entry.file_name().to_string_lossy().starts_with(".lease-") {
                fs::remove_file(entry.path()).expect("removable");
            }
        }
        assert_success(&train(&config));
        let expected = files(&folder);
        signal(&frozen, "-CONT");
        let output = frozen.wait_with_output().expect("its outcome");
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {message}");
        assert!(message.contains("was taken over by"), "{name}: {message}");
        let left = files(&folder);
        // It removes its temporary files: of steps, notes of the newest one; and the mark of its
        // retention, if it was frozen in the middle of one.
        let is_mark = |name: &str| name.starts_with("ckpt/.retain-") && !left.contains_key(name);
        let is_its_own = |name: &str| name.contains(".tmp-") || is_mark(name);
        let is_same = |name: &&String| is_its_own(name) || left.get(*name) == expected.get(*name);
        let changed: Vec<_> =
            left.keys().chain(expected.keys()).filter(|name| !is_same(name)).collect();
        assert!(changed.is_empty(), "{name}: {changed:?} changed: {message}");
    }
}
