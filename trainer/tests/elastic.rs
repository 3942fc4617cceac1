//! Runs of several processes that are killed, and go on as other numbers of processes in other
//! layouts: they end in the bits of a run by one that never was.

#![expect(clippy::print_stdout, reason = "a failure shows the kills before it")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Lab, assert_success, text, train, trainer};
use trainer::rng::Stream;

/// Longest that a test waits for a process to come somewhere.
const PATIENCE: Duration = Duration::from_secs(120);

/// Eight micro-batches a step, which four replicas divide.
const BATCH: [(&str, &str); 4] = [
    ("batch.global", "16"),
    ("batch.micro", "2"),
    ("eval.every", "0"),
    ("checkpoint.every.steps", "3"),
];

fn keys<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    [&BATCH[..], more].concat()
}

/// `trainer launch`, or the program alone.
fn launch(ranks: usize, config: &Path) -> Command {
    if ranks == 1 {
        return trainer("train", config);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_trainer"));
    command.args(["launch", "-n", &ranks.to_string(), "--"]);
    command.arg("train").arg(config);
    command.env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(ranks: usize, config: &Path) -> Output {
    launch(ranks, config).output().expect("the binary starts")
}

fn lines(run: &Path) -> usize {
    fs::read(run.join("log.jsonl")).map_or(0, |log| log.iter().filter(|b| **b == b'\n').count())
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        if begun.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a process has this in its command line, but for agents, which outlive their trainers.
fn is_running(config: &Path) -> bool {
    let config = config.to_str().expect("UTF-8");
    fs::read_dir("/proc").expect("a /proc").flatten().any(|entry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(config)
    })
}

/// Starts a run, and kills all of its processes when its log has so many lines.
fn kill_after(ranks: usize, config: &Path, folder: &Path, line: usize, pause: Duration) {
    let mut command = launch(ranks, config);
    let mut child: Child =
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    wait_until("a line", || {
        assert!(child.try_wait().expect("a child of ours").is_none(), "it ended by itself");
        lines(folder) >= line
    });
    std::thread::sleep(pause);
    // SIGKILL. Ranks end with their launcher.
    child.kill().expect("a child of ours");
    child.wait().expect("a child of ours");
    wait_until("the end of all ranks", || !is_running(config));
    println!("{ranks} ranks killed after line {} of {line}", lines(folder));
}

#[test]
fn a_run_goes_on_in_any_layout() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &keys(&[]))));
    let folder = lab.path("run");
    let layouts =
        [(4, "{ zero = 1 }"), (2, "{ pp = 2 }"), (4, "{ pp = 2, zero = 1 }"), (2, "{ zero = 3 }")];
    for (number, (ranks, parallel)) in layouts.into_iter().enumerate() {
        let config = lab.config("run", &keys(&[("parallel", parallel)]));
        let pause = Duration::from_millis(3 * number as u64);
        kill_after(ranks, &config, &folder, 5 + 10 * number, pause);
    }
    let output = run(1, &lab.config("run", &keys(&[])));
    assert_success(&output);
    assert!(text(&output.stderr).contains("going on from"), "{}", text(&output.stderr));
    lab.assert_same("run", "whole");
}

/// Kills at random moments, within saves too, that several ranks make together behind the run; with
/// agents what they had copied is saved.
#[test]
fn kills_of_ranks_that_save_together_change_no_bit() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &keys(&[]))));
    for agent in ["false", "true"] {
        let name = format!("agent-{agent}");
        let more = [("checkpoint.agent", agent), ("checkpoint.every.steps", "1")];
        let config = lab.config(&name, &keys(&more));
        let (random, folder) = (Stream::new(5, &name), lab.path(&name));
        for kill in 0..3 {
            let line = 3 + 12 * kill as usize + (random.uniform(kill) * 8.0) as usize;
            let pause = Duration::from_micros((random.uniform(100 + kill) * 20_000.0) as u64);
            kill_after(2, &config, &folder, line, pause);
        }
        assert_success(&run(2, &config));
        lab.assert_same(&name, "whole");
    }
}

#[test]
fn ranks_that_are_told_to_stop_are_saved() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &keys(&[]))));
    let config = lab.config("run", &keys(&[("parallel", "{ pp = 2 }")]));
    let folder = lab.path("run");
    let mut command = launch(4, &config);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    wait_until("a line", || lines(&folder) >= 8);
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()));
    assert_eq!(child.wait().expect("a child of ours").code(), Some(75));
    let logged = lab.log_lines("run").last().and_then(|line| line["step"].as_u64());
    let saved = lab.final_tensors("run")[0].0.split(':').next().map(str::to_owned);
    assert_eq!(saved, logged.map(|step| step.to_string()), "nothing is lost that was logged");
    assert_success(&run(1, &lab.config("run", &keys(&[]))));
    lab.assert_same("run", "whole");
}

/// Damage that one of the ranks alone can see, for it alone reads those bytes.
#[test]
fn damage_that_one_rank_sees_is_passed_over_by_all() {
    let lab = Lab::new();
    let config = lab.config("run", &keys(&[("parallel", "{ pp = 2 }")]));
    assert_success(&run(2, &config));
    let before = lab.final_tensors("run");
    let folder = lab.path("run/ckpt/step-000000000048");
    // The last file is of the last stage.
    let mut files: Vec<_> = fs::read_dir(&folder).expect("a step").flatten().collect();
    files.retain(|file| file.file_name().to_string_lossy().starts_with("optim-"));
    files.sort_by_key(fs::DirEntry::file_name);
    let file = files.last().expect("one").path();
    let mut bytes = fs::read(&file).expect("readable");
    let last = bytes.len() - 9;
    bytes[last] ^= 0x10;
    fs::write(&file, bytes).expect("writable");
    let output = run(2, &config);
    assert_success(&output);
    let words = text(&output.stderr) + &text(&output.stdout);
    for due in ["step 48 is damaged", "going on from", "step-000000000045"] {
        assert!(words.contains(due), "{due:?} is not in: {words}");
    }
    assert_eq!(lab.final_tensors("run"), before);

    // Of another model: all end, and say why.
    let other = lab.config("run", &keys(&[("parallel", "{ pp = 2 }"), ("model.ffn", "64")]));
    let output = run(2, &other);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let words = text(&output.stderr) + &text(&output.stdout);
    assert!(words.contains("model.ffn: 256 in the checkpoint, 64 in the config"), "{words}");
}
