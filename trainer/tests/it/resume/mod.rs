//! A run that is killed anywhere and restarted is bit-identical to an uninterrupted one.

#![expect(clippy::print_stdout, reason = "a failure shows the seed and the kills before it")]

mod frozen;
mod released;
mod saves;

use std::fs;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::common::{Lab, assert_success, spawn_train, text, train};
use bridge::runtime::signal;
use trainer::rng::Stream;

/// The longest wait of a test for the progress of a process.
const PATIENCE: Duration = Duration::from_secs(120);

const SIGTERM: i32 = 15;

/// `FEEDLINE_SEED=n` repeats a run with the printed seed.
fn seed() -> u64 {
    let given = std::env::var("FEEDLINE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or(20_240_131);
    println!("FEEDLINE_SEED={seed}");
    seed
}

/// Waits until the condition holds or the process has ended; false if it ended first.
fn wait_until(child: &mut Child, condition: impl Fn() -> bool) -> bool {
    let started = Instant::now();
    while !condition() {
        if started.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}");
        }
        if child.try_wait().expect("a child process").is_some() {
            return false;
        }
    }
    true
}

fn lines(run: &Path) -> usize {
    fs::read(run.join("log.jsonl")).map_or(0, |log| log.iter().filter(|b| **b == b'\n').count())
}

/// Whether a checkpoint is being written.
fn is_saving(run: &Path) -> bool {
    let Ok(folder) = fs::read_dir(run.join("ckpt")) else { return false };
    folder.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(".tmp-"))
}

/// Kills a run `kills` times at growing steps, every other time within a save, then lets it end.
/// Returns how many kills left an unfinished save.
fn kill_and_resume(lab: &Lab, run: &str, config: &Path, kills: u64) -> usize {
    let random = Stream::new(seed(), run);
    let folder = lab.path(run);
    let mut inside = 0;
    for kill in 0..kills {
        // 48 step lines and 6 of evaluations in all; the last kill is well before the end.
        let line = 1.0 + (kill as f64 + random.uniform(kill)) / kills as f64 * 44.0;
        let pause = Duration::from_micros((random.uniform(1_000 + kill) * 3_000.0) as u64);
        let mut child = spawn_train(config);
        let mut alive = wait_until(&mut child, || lines(&folder) >= line as usize);
        if kill % 2 == 1 {
            alive = alive && wait_until(&mut child, || is_saving(&folder));
        }
        // Every other one of those is immediate, because a quick disk could finish the save first.
        if kill % 4 != 1 {
            std::thread::sleep(pause);
        }
        // SIGKILL.
        child.kill().expect("a child process");
        let status = child.wait().expect("a child process");
        let left = is_saving(&folder);
        inside += usize::from(left);
        println!(
            "kill {kill}: after line {} of {line:.1}, {status}, in a save: {left}",
            lines(&folder)
        );
        assert!(alive, "the run ended before kill {kill}");
    }
    assert_success(&train(config));
    assert!(!is_saving(&folder), "the last start removed the unfinished saves");
    inside
}

#[test]
fn ten_kills_change_no_bit() {
    let lab = Lab::new();
    // Big enough that a save takes a while: half of the kills must hit one.
    let size = [("model.hidden", "256")];
    assert_success(&train(&lab.config("whole", &size)));
    let inside = kill_and_resume(&lab, "killed", &lab.config("killed", &size), 10);
    assert!(inside >= 2, "only {inside} kills hit a save");
    lab.assert_same("killed", "whole");
    assert_eq!(lab.log_lines("killed").len(), 48 + 6);
}

#[test]
fn kills_change_no_bit_in_bf16() {
    let lab = Lab::new();
    let bf16 = [("precision.dtype", "'bf16'")];
    assert_success(&train(&lab.config("whole", &bf16)));
    kill_and_resume(&lab, "killed", &lab.config("killed", &bf16), 3);
    lab.assert_same("killed", "whole");
    // The computation differs from that in fp32; otherwise this would be the test above.
    assert_success(&train(&lab.config("fp32", &[])));
    assert_ne!(lab.log_lines("fp32"), lab.log_lines("whole"));
}

/// The loss scale is state too: it doubles every five steps here, from where a kill left it.
#[test]
fn kills_change_no_bit_in_fp16() {
    let lab = Lab::new();
    let fp16 = [
        ("precision.dtype", "'fp16'"),
        ("precision.loss_scale", "{ init = 256, window = 5, hysteresis = 2, min = 1 }"),
    ];
    assert_success(&train(&lab.config("whole", &fp16)));
    kill_and_resume(&lab, "killed", &lab.config("killed", &fp16), 3);
    lab.assert_same("killed", "whole");
    let scales: Vec<f64> =
        lab.log_lines("killed").iter().filter_map(|line| line["loss_scale"].as_f64()).collect();
    assert!(scales.first() < scales.last(), "it grows: {scales:?}");
}

#[test]
fn sigterm_saves_and_exits_with_75() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &[])));
    let config = lab.config("stopped", &[("checkpoint.every.steps", "0")]);
    let folder = lab.path("stopped");
    let mut child = spawn_train(&config);
    assert!(wait_until(&mut child, || lines(&folder) >= 7));
    assert!(signal(child.id(), SIGTERM));
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(75), "saved, submit again");

    let output = train(&config);
    assert_success(&output);
    assert!(text(&output.stderr).contains("resuming from"), "{}", text(&output.stderr));
    lab.assert_same("stopped", "whole");
}

#[test]
fn max_wall_saves_and_exits_with_75() {
    let lab = Lab::new();
    let wall = [("run.max_wall", "'1s'"), ("run.budget", "{ steps = 1000000 }")];
    let config = lab.config("run", &[&wall[..], &[("checkpoint.every.steps", "0")]].concat());
    let output = train(&config);
    assert_eq!(output.status.code(), Some(75), "{}", text(&output.stderr));
    assert!(lab.path("run/ckpt").read_dir().unwrap().flatten().count() > 0);
}

#[test]
fn a_finished_run_is_not_changed() {
    let lab = Lab::new();
    let config = lab.config("run", &[]);
    assert_success(&train(&config));
    let before = (lab.final_tensors("run"), lab.log_lines("run"));
    let output = train(&config);
    assert_success(&output);
    assert_eq!((lab.final_tensors("run"), lab.log_lines("run")), before);
}

/// Accumulation and evaluation do not leak into one another: with another `eval.every` the training
/// lines are the same.
#[test]
fn evaluation_and_saving_do_not_change_training() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("often", &[])));
    let rare = [("eval.every", "0"), ("checkpoint.every.steps", "0")];
    assert_success(&train(&lab.config("rare", &rare)));
    let steps = |run: &str| {
        let mut lines = lab.log_lines(run);
        lines.retain(|line| line.get("loss").is_some());
        lines
    };
    assert_eq!(steps("often"), steps("rare"));
    let all: Vec<f64> = steps("often").iter().filter_map(|line| line["loss"].as_f64()).collect();
    assert!(all[0] > 6.0 && all[47] < all[0] - 0.5, "it does not learn: {all:?}");
}
