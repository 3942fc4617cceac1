//! Asynchronous saves: in another process, to a second store, with little time; and the start of a
//! run from a checkpoint.

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::common::{Lab, assert_success, spawn_train, text, train};
use bridge::runtime;
use trainer::rng::Stream;

/// The longest wait of a test for the progress of a process.
const PATIENCE: Duration = Duration::from_secs(120);

fn wait_until(child: &mut Child, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}");
        }
        assert!(child.try_wait().expect("a child process").is_none(), "the run ended early");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn lines(run: &Path) -> usize {
    fs::read(run.join("log.jsonl")).map_or(0, |log| log.iter().filter(|b| **b == b'\n').count())
}

const SIGINT: i32 = 2;
const SIGUSR1: i32 = 10;
const SIGTERM: i32 = 15;

fn signal(child: &Child, signal: i32) {
    assert!(runtime::signal(child.id(), signal), "a child process");
}

/// The steps in a folder of checkpoints.
fn steps(folder: &Path) -> Vec<u64> {
    let names = fs::read_dir(folder).into_iter().flatten().flatten();
    let step = |name: std::ffi::OsString| ckpt::step_of(name.to_str().unwrap_or_default());
    let mut steps: Vec<u64> = names.filter_map(|entry| step(entry.file_name())).collect();
    steps.sort_unstable();
    steps
}

/// Asynchronous saves, blocking saves and saves by an agent: the same checkpoints.
#[test]
fn all_save_modes_write_the_same_checkpoints() {
    let lab = Lab::new();
    for (run, keys) in [
        ("behind", &[][..]),
        ("waiting", &[("checkpoint.async", "false")]),
        ("agent", &[("checkpoint.agent", "true"), ("checkpoint.keep.every", "20")]),
    ] {
        assert_success(&train(&lab.config(run, keys)));
        lab.assert_same(run, "behind");
    }
    assert_eq!(steps(&lab.path("behind/ckpt")), [44, 48]);
    assert_eq!(steps(&lab.path("waiting/ckpt")), [44, 48]);
    assert_eq!(steps(&lab.path("agent/ckpt")), [20, 40, 44, 48]);
}

/// The agent saves what it copied before its trainer was killed, and the next run finds it, after a
/// wait if necessary.
#[test]
fn kills_lose_nothing_that_an_agent_copied() {
    let lab = Lab::new();
    let size = [("model.hidden", "192"), ("checkpoint.agent", "true")];
    assert_success(&train(&lab.config("whole", &size[..1])));
    let config = lab.config("killed", &size);
    let (random, folder) = (Stream::new(71, "agent"), lab.path("killed"));
    for kill in 0..4 {
        // A step line after which a save starts at once.
        let line = 4 + 10 * kill as usize + (random.uniform(kill) * 6.0) as usize;
        let mut child = spawn_train(&config);
        wait_until(&mut child, || lines(&folder) >= line);
        std::thread::sleep(Duration::from_micros((random.uniform(100 + kill) * 9_000.0) as u64));
        child.kill().expect("a child process");
        child.wait().expect("a child process");
        println!("kill {kill}: after line {}", lines(&folder));
    }
    assert_success(&train(&config));
    lab.assert_same("killed", "whole");
}

/// The machine is lost with its disk: the run resumes from the second store.
#[test]
fn a_run_resumes_from_the_second_store() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &[])));
    let second = lab.path("second");
    let url = format!("'{}'", second.display());
    let config = lab.config("run", &[("checkpoint.drain_to", &url)]);
    let mut child = spawn_train(&config);
    wait_until(&mut child, || steps(&second).last() >= Some(&12));
    signal(&child, SIGTERM);
    assert_eq!(child.wait().expect("a child process").code(), Some(75));
    fs::remove_dir_all(lab.path("run/ckpt")).expect("it is there");
    let output = train(&config);
    assert_success(&output);
    let stderr = text(&output.stderr);
    assert!(stderr.contains(&format!("resuming from {}", second.display())), "{stderr}");
    lab.assert_same("run", "whole");
    assert_eq!(steps(&second), [44, 48], "all retained steps are copied when the run ends");
}

/// Repeated signals during a save: each time the run is saved.
#[test]
fn signals_lose_no_step() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &[])));
    let config = lab.config("run", &[]);
    let folder = lab.path("run");
    for (line, sent) in [(5, SIGTERM), (14, SIGUSR1), (27, SIGINT)] {
        let mut child = spawn_train(&config);
        wait_until(&mut child, || lines(&folder) >= line);
        signal(&child, sent);
        assert_eq!(child.wait().expect("a child process").code(), Some(75));
        let step = steps(&folder.join("ckpt")).last().copied().unwrap_or(0);
        let logged = lab.log_lines("run").last().map(|line| line["step"].as_u64());
        assert_eq!(logged, Some(Some(step)), "every logged step is saved");
    }
    assert_success(&train(&config));
    lab.assert_same("run", "whole");
}

/// Only the weights of another run: steps start at 1, and the run then resumes from its own.
#[test]
fn a_run_starts_with_the_weights_of_another() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("base", &[])));
    let base = format!("'{}'", lab.path("base/ckpt/step-000000000048").display());
    let tuned = [
        ("checkpoint.load", &*base),
        ("checkpoint.load_parts", "['model']"),
        ("run.seed", "7"),
        ("run.budget", "{ steps = 12 }"),
        ("optim.lr.peak", "0.0001"),
    ];
    let config = lab.config("tuned", &tuned);
    let output = train(&config);
    assert_success(&output);
    assert!(text(&output.stderr).contains("starting with the weights of"));
    let loss = |run: &str, line: usize| lab.log_lines(run)[line]["loss"].as_f64().expect("a loss");
    assert_eq!(lab.log_lines("tuned")[0]["step"], 1);
    assert!(loss("tuned", 0) < loss("base", 0) - 0.5, "{} {}", loss("tuned", 0), loss("base", 0));
    let before = lab.final_tensors("tuned");
    let output = train(&config);
    assert_success(&output);
    assert!(text(&output.stderr).contains("resuming from"), "{}", text(&output.stderr));
    assert_eq!(lab.final_tensors("tuned"), before);

    // Weights of another shape are refused, tensor by tensor.
    let other = [&tuned[..], &[("model.hidden", "32")]].concat();
    let output = train(&lab.config("other", &other));
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    for expected in ["model does not match", "different: ", "transformer.h.0.attn.c_attn.weight"] {
        assert!(stderr.contains(expected), "{expected:?} is not in: {stderr}");
    }
}
