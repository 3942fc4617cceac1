//! Processes that are killed or frozen while they save.

mod frozen;
mod together;

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::children::can_detect_dead_processes;
use crate::common::{Folder, Random, SERIAL, State};
use storage::Key;

/// Environment variable: the folder that the child process saves in.
const FOLDER: &str = "CKPT_TEST_KILL_FOLDER";

/// The entry point of the child process of the test below; not a test itself.
#[test]
fn child_saves_until_it_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let store = storage::open_url(&folder).unwrap();
    let steps = ckpt::Checkpoints::open(store, Key::new("run").unwrap()).with_options(SERIAL);
    let _lease = steps.lock().unwrap();
    steps.sweep().unwrap();
    let first = steps.newest().unwrap().map_or(0, |newest| newest.step() + 1);
    for step in first.. {
        State::of_model(step).save(&steps, step).unwrap();
        steps.retain(2).unwrap();
    }
}

#[test]
fn killed_process_leaves_complete_steps() {
    if !can_detect_dead_processes() {
        return;
    }
    let seed = 41;
    let mut random = Random(seed);
    let folder = Folder::new();
    let mut newest_before = None;
    // On a loaded machine, a child may be killed before its first save: then more children are
    // needed, which have more time.
    for round in 0..400 {
        if round >= 25 && newest_before > Some(5) {
            break;
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kill::child_saves_until_it_is_killed"])
            .env(FOLDER, folder.temp.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let longest_ms = 150 * (1 + round / 25);
        std::thread::sleep(Duration::from_millis(random.below(longest_ms)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), None, "the child exited before it was killed in round {round}");
        let newest = folder.newest();
        assert!(newest >= newest_before, "seed {seed}, round {round}: {newest:?} is older");
        newest_before = newest;
    }
    assert!(newest_before > Some(5), "only {newest_before:?} steps were saved in all rounds");
    folder.check_swept();
}
