//! Runs of several processes that are ended by SIGKILL.

#![allow(clippy::print_stdout, reason = "a failure shows the kills before it")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::trainer;

/// The longest wait of a test for the progress of a process.
const PATIENCE: Duration = Duration::from_secs(120);

/// `trainer launch`, or the program alone.
pub fn launch(ranks: usize, config: &Path) -> Command {
    if ranks == 1 {
        return trainer("train", config);
    }
    let mut command = trainer("launch", Path::new("-n"));
    command.arg(ranks.to_string()).args(["--", "train"]).arg(config);
    command
}

pub fn run(ranks: usize, config: &Path) -> Output {
    launch(ranks, config).output().expect("the binary starts")
}

pub fn lines(run: &Path) -> usize {
    fs::read(run.join("log.jsonl")).map_or(0, |log| log.iter().filter(|b| **b == b'\n').count())
}

pub fn has_checkpoint(run: &Path) -> bool {
    let names = fs::read_dir(run.join("ckpt")).into_iter().flatten().flatten();
    names.map(|entry| entry.file_name()).any(|name| name.as_encoded_bytes().starts_with(b"step-"))
}

pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process has this in its command line; agents, which outlive their trainers, have not.
fn is_running(config: &Path) -> bool {
    let config = config.to_str().expect("UTF-8");
    fs::read_dir("/proc").expect("a /proc").flatten().any(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(config)
    })
}

/// Starts a run, and kills all of its processes when its log has `line` lines and a checkpoint is
/// committed: that may take longer, because the save is asynchronous.
pub fn kill_after(ranks: usize, config: &Path, folder: &Path, line: usize, pause: Duration) {
    let mut command = launch(ranks, config);
    let mut child: Child =
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    wait_until("a line", || {
        assert!(
            child.try_wait().expect("a child process").is_none(),
            "the run ended before the kill"
        );
        lines(folder) >= line && has_checkpoint(folder)
    });
    std::thread::sleep(pause);
    // SIGKILL. Ranks end with their launcher.
    child.kill().expect("a child process");
    child.wait().expect("a child process");
    wait_until("the end of all ranks", || !is_running(config));
    println!("{ranks} ranks killed after line {} of {line}", lines(folder));
}
