//! Saves by an agent process, and the death of the trainer or the agent.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::children::{
    await_true, can_detect_dead_processes, has_ended, signal, signal_if_running,
};
use crate::common::{Folder, SERIAL, State, Tensor};
use ckpt::{
    Agent, AsyncSaveOptions, AsyncSaver, Blob, Checkpoints, Error, LivenessTimeouts, SaveStart,
};
use storage::Key;

const PATIENCE: LivenessTimeouts =
    LivenessTimeouts { beat: Duration::from_secs(1), silence_max: Duration::from_secs(5) };

/// Environment variables with the role of a child process and the folder to save in.
const ROLE: &str = "CKPT_TEST_AGENT_ROLE";
const FOLDER: &str = "CKPT_TEST_AGENT_FOLDER";

fn steps(folder: &Path) -> Arc<Checkpoints> {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    Arc::new(
        Checkpoints::open(store, Key::new("run").unwrap())
            .with_options(SERIAL)
            .with_patience(PATIENCE),
    )
}

/// This program as a child process.
fn child(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "agent::roles_of_child_processes"])
        .env(ROLE, role)
        .stdout(Stdio::null());
    command
}

fn background(folder: &Path) -> (AsyncSaver, u32, Arc<Checkpoints>) {
    let url = folder.to_str().unwrap();
    let agent = Agent::start(child("agent"), url, "run", SERIAL, PATIENCE).unwrap();
    let pid = agent.pid();
    let options = AsyncSaveOptions::default();
    let steps = steps(folder);
    (AsyncSaver::with_agent(Arc::clone(&steps), options, agent).unwrap(), pid, steps)
}

fn begin(background: &AsyncSaver, step: u64) -> ckpt::SaveHandle {
    let state = State::of_model(step);
    let tensors: Vec<_> = state.tensors.iter().map(Tensor::data).collect();
    let blobs: Vec<_> = state.blobs.iter().map(|(name, bytes)| Blob { name, bytes }).collect();
    let SaveStart { save, failed } =
        background.save(step, &tensors, &blobs, state.meta.clone()).unwrap();
    assert!(failed.is_none(), "{failed:?}");
    save.unwrap()
}

/// The entry point of the child processes of the tests below; not a test itself.
#[test]
fn roles_of_child_processes() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "agent" => ckpt::serve_agent().unwrap(),
        "trainer" => train_and_die(),
        _ => panic!("unknown role {role}"),
    }
}

/// The trainer is killed after its copy and before the first byte of the save: the agent is stopped
/// until then.
fn train_and_die() {
    let folder = std::env::var(FOLDER).unwrap();
    let folder = Path::new(&folder);
    let (background, agent, steps) = background(folder);
    // The agent writes while the trainer holds the lease.
    let _lease = steps.lock().unwrap();
    begin(&background, 1).wait().unwrap();
    signal(agent, "-STOP");
    begin(&background, 2);
    std::fs::write(folder.join("agent"), agent.to_string()).unwrap();
    signal(std::process::id(), "-KILL");
}

#[test]
fn agent_completes_save_of_dead_trainer() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    let mut trainer = child("trainer");
    let status = trainer.env(FOLDER, folder.temp.path()).status().unwrap();
    assert_eq!(status.code(), None, "the trainer exited before it was killed");
    let agent = std::fs::read_to_string(folder.temp.path().join("agent")).unwrap();
    let agent: u32 = agent.parse().unwrap();
    let steps = steps(folder.temp.path());
    // The signal that a scheduler sends before SIGKILL. The kernel may have resumed the agent,
    // since its parent is dead, and it may have come to its end.
    signal_if_running(agent, "-TERM");
    signal_if_running(agent, "-CONT");
    await_true("the second step", || steps.steps().unwrap() == [1, 2]);
    State::of_model(2).check(&steps.newest().unwrap().unwrap());
    steps.newest().unwrap().unwrap().verify().unwrap();
    await_true("the end of the agent", || has_ended(agent));
    assert!(steps.sweep().unwrap().kept.is_empty());
    assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"]);
}

#[test]
fn trainer_saves_after_agent_dies() {
    if !can_detect_dead_processes() {
        return;
    }
    let folder = Folder::new();
    let (background, agent, steps) = background(folder.temp.path());
    let _lease = steps.lock().unwrap();
    begin(&background, 1).wait().unwrap();
    signal(agent, "-STOP");
    let handle = begin(&background, 2);
    signal(agent, "-KILL");
    handle.wait().unwrap();
    begin(&background, 3).wait().unwrap();
    drop(background);
    assert_eq!(steps.steps().unwrap(), [1, 2, 3]);
    for step in [1, 2, 3] {
        State::of_model(step).check(&steps.open_step(step).unwrap());
    }
}

/// The agent dies after the commit and before its reply. This process commits in its place.
#[test]
fn step_committed_by_dead_agent_is_found() {
    if !can_detect_dead_processes() {
        return;
    }
    for (there, is_same) in [(2, true), (77, false)] {
        let folder = Folder::new();
        let (background, agent, steps) = background(folder.temp.path());
        begin(&background, 1).wait().unwrap();
        signal(agent, "-STOP");
        let handle = begin(&background, 2);
        let report = State::of_model(there).save(&steps, 2).unwrap();
        signal(agent, "-KILL");
        match handle.wait() {
            Ok(saved) if is_same => assert_eq!((saved.step, saved.bytes), (2, report.bytes)),
            Err(Error::StepExists { .. }) if !is_same => {}
            other => panic!("{other:?}"),
        }
        drop(background);
        State::of_model(there).check(&steps.open_step(2).unwrap());
        assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"]);
    }
}

#[test]
fn save_in_agent_can_be_cancelled() {
    let folder = Folder::new();
    let (background, agent, steps) = background(folder.temp.path());
    begin(&background, 1).wait().unwrap();
    signal(agent, "-STOP");
    let handle = begin(&background, 2);
    std::thread::scope(|scope| {
        let cancelled = scope.spawn(|| handle.cancel());
        while !handle.progress().is_cancelled {
            std::thread::yield_now();
        }
        signal(agent, "-CONT");
        let cancelled = cancelled.join().unwrap().unwrap();
        // The save may have committed before the cancellation.
        let expected: &[u64] = if cancelled.is_some() { &[1, 2] } else { &[1] };
        assert_eq!(steps.steps().unwrap(), expected);
    });
    begin(&background, 3).wait().unwrap();
    drop(background);
    assert!(folder.names().iter().all(|name| name.starts_with("step-")), "{:?}", folder.names());
}

#[test]
fn agent_errors_are_returned() {
    let folder = Folder::new();
    let (background, ..) = background(folder.temp.path());
    begin(&background, 1).wait().unwrap();
    let again = begin(&background, 1).wait().unwrap_err();
    assert!(
        matches!(&again, Error::Agent { reason } if reason.contains("step already exists")),
        "{again}"
    );
    let start = |command: Command, url: &str| {
        let started = Agent::start(command, url, "run", SERIAL, PATIENCE);
        started.unwrap_err().to_string()
    };
    let url = folder.temp.path().to_str().unwrap();
    let message = start(Command::new("true"), url);
    assert!(message.contains("exited at startup"), "{message}");
    let message = start(Command::new("/no/such/program"), url);
    assert!(message.contains("No such file"), "{message}");
    let message = start(child("agent"), "gopher://x/y");
    assert!(message.contains("gopher"), "{message}");
    // Without a trainer, no agent starts.
    assert!(ckpt::serve_agent().is_err());
}
