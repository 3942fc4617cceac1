//! Processes make joint saves in a loop, and one at a time gets SIGKILL. In every other round they
//! make async saves.
//!
//! `CKPT_TEST_KILLS=200` kills 200 processes; the default takes a few seconds.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::children::can_detect_dead_processes;
use crate::common::ranks::{LIMITS, Ranks};
use crate::common::{Folder, Random, SERIAL, State};
use ckpt::{AsyncSaver, Checkpoints, JointSaveOptions, LivenessTimeouts};
use storage::Key;

const WRITERS: usize = 3;

/// All processes are of this machine, so that dead ones are detected at once, without a timeout.
const PATIENCE: LivenessTimeouts =
    LivenessTimeouts { beat: Duration::from_millis(50), silence_max: Duration::from_secs(60) };

/// The wait for a writer that was killed before its first heartbeat.
const DEADLINE: Duration = Duration::from_millis(1500);

/// Environment variables: the folder, the number of the writer, and a prefix of the round's tokens.
const FOLDER: &str = "CKPT_TEST_TOGETHER_FOLDER";
const WRITER: &str = "CKPT_TEST_TOGETHER_WRITER";
const ROUND: &str = "CKPT_TEST_TOGETHER_ROUND";

/// The entry point of the child processes of the test below; not a test itself.
#[test]
fn child_saves_with_others_until_one_is_killed() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let (writer, round) = (std::env::var(WRITER).unwrap(), std::env::var(ROUND).unwrap());
    let store = storage::open_url(&folder).unwrap();
    let steps = Checkpoints::open(store, Key::new("run").unwrap());
    let steps = Arc::new(steps.with_options(SERIAL).with_patience(PATIENCE));
    let writer: usize = writer.parse().unwrap();
    let in_background = round.parse::<u64>().unwrap() % 2 == 1;
    let background = AsyncSaver::new(Arc::clone(&steps), Default::default()).unwrap();
    // No step is saved until all processes run: until then, all see the same newest step.
    let first = steps.newest().unwrap().map_or(0, |newest| newest.step() + 1);
    for step in first.. {
        let token = format!("{round}-{step}");
        let together = JointSaveOptions { token: &token, writer, deadline: DEADLINE };
        let ranks = Ranks::new(&State::of_model(step), WRITERS, LIMITS);
        let saved = if in_background {
            let started = ranks.begin(&background, step, &together);
            started.and_then(|started| started.save.unwrap().wait())
        } else {
            ranks.save(&steps, step, &together)
        };
        match saved {
            Ok(_) if writer == 0 => drop(steps.retain(2).unwrap()),
            Ok(_) => {}
            // Another process was killed, which the parent detects next.
            Err(ckpt::Error::Aborted { reason, .. }) => {
                eprintln!("writer {writer}: {reason}");
                return;
            }
            Err(error) => panic!("writer {writer}: {error}"),
        }
    }
}

fn start(folder: &Folder, writer: usize, round: u64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::together::child_saves_with_others_until_one_is_killed"])
        .env(FOLDER, folder.temp.path())
        .env(WRITER, writer.to_string())
        .env(ROUND, round.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Waits for a newer step, or for the end of a child.
fn wait_for_a_step(folder: &Folder, before: Option<u64>, children: &mut [Child]) {
    let steps = folder.steps(SERIAL);
    while steps.newest().unwrap().map(|newest| newest.step()) <= before {
        if children.iter_mut().any(|child| child.try_wait().unwrap().is_some()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn killed_writer_leaves_complete_steps() {
    if !can_detect_dead_processes() {
        return;
    }
    let kills: u64 =
        std::env::var("CKPT_TEST_KILLS").map_or(8, |text| text.parse().expect("a number"));
    let seed = 43;
    let mut random = Random(seed);
    let folder = Folder::new();
    let mut newest_before = None;
    for round in 0..kills {
        let mut children: Vec<Child> =
            (0..WRITERS).map(|writer| start(&folder, writer, round)).collect();
        // Sometimes one is killed before all have joined.
        if random.below(8) > 0 {
            wait_for_a_step(&folder, newest_before, &mut children);
        }
        std::thread::sleep(Duration::from_millis(random.below(150)));
        let victim = random.below(WRITERS as u64) as usize;
        children[victim].kill().unwrap();
        for (writer, mut child) in children.into_iter().enumerate() {
            let code = child.wait().unwrap().code();
            // The victim may have exited before.
            let is_due = code == Some(0) || (writer == victim && code.is_none());
            assert!(is_due, "seed {seed}, round {round}: {code:?} of writer {writer}");
        }
        let newest = folder.newest();
        assert!(newest >= newest_before, "seed {seed}, round {round}: {newest:?} is older");
        newest_before = newest;
    }
    eprintln!("{kills} kills, newest step {newest_before:?}");
    folder.check_swept();
}
