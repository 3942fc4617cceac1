//! A process that saves in a trainer's stead, and the deaths of either.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::children::{await_true, dead_are_known, has_ended, signal, signal_if_there};
use crate::common::{Folder, SERIAL, State, Tensor};
use ckpt::{
    Agent, AsyncSaveOptions, AsyncSaver, Blob, Checkpoints, Error, LivenessTimeouts, SaveStart,
};
use storage::Key;

const PATIENCE: LivenessTimeouts =
    LivenessTimeouts { beat: Duration::from_secs(1), silence_max: Duration::from_secs(5) };

/// Tells the child processes what they are, and where to save.
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

/// This very program, as another process.
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

/// Not a test of its own, but what the child processes of those below do.
#[test]
fn roles_of_child_processes() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "agent" => ckpt::serve_agent().unwrap(),
        "trainer" => train_and_die(),
        _ => panic!("there is no role {role}"),
    }
}

/// A trainer that is killed between its copy and the first byte of the save: the agent is stopped
/// until then.
fn train_and_die() {
    let folder = std::env::var(FOLDER).unwrap();
    let folder = Path::new(&folder);
    let (background, agent, steps) = background(folder);
    // It writes beside a trainer that holds the folder.
    let _lease = steps.lock().unwrap();
    begin(&background, 1).wait().unwrap();
    signal(agent, "-STOP");
    begin(&background, 2);
    std::fs::write(folder.join("agent"), agent.to_string()).unwrap();
    signal(std::process::id(), "-KILL");
}

#[test]
fn a_trainer_that_dies_has_still_saved() {
    if !dead_are_known() {
        return;
    }
    let folder = Folder::new();
    let mut trainer = child("trainer");
    let status = trainer.env(FOLDER, folder.temp.path()).status().unwrap();
    assert_eq!(status.code(), None, "the trainer ended by itself");
    let agent = std::fs::read_to_string(folder.temp.path().join("agent")).unwrap();
    let agent: u32 = agent.parse().unwrap();
    let steps = steps(folder.temp.path());
    // What a scheduler sends before it kills. The kernel may have let it go on already, for its
    // parent is dead, and it may have come to its end.
    signal_if_there(agent, "-TERM");
    signal_if_there(agent, "-CONT");
    await_true("the second step", || steps.steps().unwrap() == [1, 2]);
    State::of_model(2).check(&steps.newest().unwrap().unwrap());
    steps.newest().unwrap().unwrap().verify().unwrap();
    await_true("the end of the agent", || has_ended(agent));
    assert!(steps.sweep().unwrap().kept.is_empty());
    assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"]);
}

#[test]
fn an_agent_that_dies_is_replaced_by_its_trainer() {
    if !dead_are_known() {
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

/// It has committed and cannot say so, which this process plays for it.
#[test]
fn what_a_dead_agent_has_saved_is_saved() {
    if !dead_are_known() {
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
            Ok(told) if is_same => assert_eq!((told.step, told.bytes), (2, report.bytes)),
            Err(Error::StepExists { .. }) if !is_same => {}
            other => panic!("{other:?}"),
        }
        drop(background);
        State::of_model(there).check(&steps.open_step(2).unwrap());
        assert_eq!(folder.names(), ["step-000000000001", "step-000000000002"]);
    }
}

#[test]
fn an_agent_can_be_told_to_end_a_save() {
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
        // It may have been quicker.
        let due: &[u64] = if cancelled.is_some() { &[1, 2] } else { &[1] };
        assert_eq!(steps.steps().unwrap(), due);
    });
    begin(&background, 3).wait().unwrap();
    drop(background);
    assert!(folder.names().iter().all(|name| name.starts_with("step-")), "{:?}", folder.names());
}

#[test]
fn errors_of_the_agent_come_back() {
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
    let told = start(Command::new("true"), url);
    assert!(told.contains("exited at startup"), "{told}");
    let told = start(Command::new("/no/such/program"), url);
    assert!(told.contains("No such file"), "{told}");
    let told = start(child("agent"), "gopher://x/y");
    assert!(told.contains("gopher"), "{told}");
    // Without a trainer there is no agent.
    assert!(ckpt::serve_agent().is_err());
}
