//! A process that updates a state on disks in a loop gets SIGKILL.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::beside::{Rank, SMALL, meshes};
use crate::common::children::can_detect_dead_processes;
use crate::common::{Folder, Random};
use ckpt::Checkpoints;
use ckpt::offload::Folder as Place;
use serde_json::Value;
use storage::{Key, Storage};

/// Environment variable: the folder of the child process's state.
const FOLDER: &str = "CKPT_TEST_OFFLOAD_FOLDER";

/// Environment variable: the number of its disks.
const DISKS: &str = "CKPT_TEST_OFFLOAD_DISKS";

fn open(store: &Arc<dyn Storage>, disks: usize) -> Rank {
    let place = |disk| {
        let key = Key::new(format!("disk-{disk}/state")).unwrap();
        Place { store: Arc::clone(store), key }
    };
    Rank::on_disks((0..disks).map(place).collect(), "test", meshes()[0], 0, SMALL).unwrap()
}

fn steps(store: &Arc<dyn Storage>) -> Checkpoints {
    let options = ckpt::CheckpointOptions {
        block_bytes: SMALL.block_bytes,
        ..ckpt::CheckpointOptions::default()
    };
    Checkpoints::open(Arc::clone(store), Key::new("run").unwrap()).with_options(options)
}

/// The entry point of the child process of the tests below; not a test itself.
#[test]
fn child_updates_until_it_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let disks = std::env::var(DISKS).unwrap().parse().unwrap();
    let store = storage::open_url(&folder).unwrap();
    let mut rank = open(&store, disks);
    if rank.state.generation().is_none() {
        rank.fill().unwrap();
    }
    let steps = steps(&store);
    let _lease = steps.lock().unwrap();
    steps.sweep().unwrap();
    let first = rank.state.generation().unwrap().step + 1;
    for step in first.. {
        rank.step(step).unwrap();
        if step % 3 == 0 && steps.newest().unwrap().is_none_or(|newest| newest.step() < step) {
            steps.save_offloaded(step, &mut rank.state, &[], Value::Null, None).unwrap();
            steps.retain(2).unwrap();
        }
    }
}

#[test]
fn killed_process_leaves_complete_generation() {
    kill_and_check(1, 43);
}

/// Also if it is killed between the writes to two disks.
#[test]
fn killed_process_leaves_complete_generation_on_several_disks() {
    kill_and_check(3, 44);
}

fn kill_and_check(disks: usize, seed: u64) {
    if !can_detect_dead_processes() {
        return;
    }
    let mut random = Random(seed);
    let folder = Folder::new();
    let store = storage::open_url(folder.temp.path().to_str().unwrap()).unwrap();
    let mut expected = Rank::in_memory(meshes()[0], 0, SMALL);
    expected.fill().unwrap();
    let mut last = 0;
    // On a loaded machine, a child may be killed before its first step: then more are needed,
    // which have more time.
    for round in 0..400 {
        if round >= 50 && last > 5 {
            break;
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "offload_kill::child_updates_until_it_is_killed"])
            .env(FOLDER, folder.temp.path())
            .env(DISKS, disks.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let longest_us = 120_000 * (1 + round / 50);
        std::thread::sleep(Duration::from_micros(random.below(longest_us)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), None, "the child exited before it was killed in round {round}");
        let mut rank = open(&store, disks);
        for disk in 0..disks {
            let left = names(&folder.temp.path().join(format!("disk-{disk}/state")));
            assert!(!left.iter().any(|name| name.starts_with('.')), "round {round}: {left:?}");
            assert!(left.iter().filter(|name| name.starts_with("slot-")).count() <= 1, "{left:?}");
        }
        let Some(step) = rank.state.generation().map(|generation| generation.step) else {
            assert_eq!(last, 0, "seed {seed}, round {round}: the state is lost");
            continue;
        };
        assert!(step >= last, "seed {seed}, round {round}: {step} is older than {last}");
        for step in last + 1..=step {
            expected.step(step).unwrap();
        }
        last = step;
        let kept = rank.state_weights().unwrap();
        assert!(step == 0 || kept == expected.weights, "seed {seed}, round {round}: step {step}");
        if let Some(newest) = steps(&store).newest().unwrap() {
            newest.verify().unwrap();
        }
    }
    assert!(last > 5, "only {last} steps were made in all rounds");
}

fn names(folder: &Path) -> Vec<String> {
    let all = std::fs::read_dir(folder).unwrap();
    all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}
