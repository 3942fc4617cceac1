//! A process that updates a state on a disk without end, and SIGKILL.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use ckpt::Checkpoints;
use ckpt::offload::Weights;
use common::beside::{Rank, SMALL, meshes};
use common::{Folder, Random};
use serde_json::Value;
use storage::{Key, Storage};

/// Tells the child process where its state is.
const FOLDER: &str = "CKPT_TEST_OFFLOAD_FOLDER";

fn open(store: &Arc<dyn Storage>) -> Rank {
    Rank::on_disk(Arc::clone(store), meshes()[0], 0, SMALL).unwrap()
}

fn steps(store: &Arc<dyn Storage>) -> Checkpoints {
    let options = ckpt::Options { block_bytes: SMALL.block_bytes, ..ckpt::Options::default() };
    Checkpoints::open(Arc::clone(store), Key::new("run").unwrap()).with_options(options)
}

/// Not a test of its own, but what the child process of the one below does.
#[test]
fn child_updates_until_it_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let store = storage::open_url(&folder).unwrap();
    let mut rank = open(&store);
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
fn a_killed_process_leaves_a_whole_generation() {
    let seed = 43;
    let mut random = Random(seed);
    let folder = Folder::new();
    let store = storage::open_url(folder.temp.path().to_str().unwrap()).unwrap();
    let mut due = Rank::in_memory(meshes()[0], 0, SMALL);
    due.fill().unwrap();
    let mut last = 0;
    for round in 0..100 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_updates_until_it_is_killed"])
            .env(FOLDER, folder.temp.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(random.below(120_000)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.code(), None, "the child failed by itself in round {round}");
        let mut rank = open(&store);
        let Some(step) = rank.state.generation().map(|generation| generation.step) else {
            assert_eq!(last, 0, "seed {seed}, round {round}: everything is gone");
            continue;
        };
        assert!(step >= last, "seed {seed}, round {round}: {step} is older than {last}");
        for step in last + 1..=step {
            due.step(step).unwrap();
        }
        last = step;
        let mut into: Vec<_> = rank
            .weights
            .iter_mut()
            .map(|bytes| Weights { dtype: ckpt::Dtype::F32, bytes })
            .collect();
        rank.state.weights(&mut into).unwrap();
        let is_new = step == 0;
        assert!(is_new || rank.weights == due.weights, "seed {seed}, round {round}: step {step}");
        if let Some(newest) = steps(&store).newest().unwrap() {
            newest.verify().unwrap();
        }
    }
    assert!(last > 5, "only {last} steps were made in all rounds");
}
