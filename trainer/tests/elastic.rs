//! Runs of several processes that are killed, and go on as other numbers of processes in other
//! layouts: they end in the bits of a run by one that never was.

mod common;
#[path = "common/kills.rs"]
mod kills;

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Lab, assert_success, text, train};
use kills::{kill_after, launch, lines, run, wait_until};
use trainer::rng::Stream;

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
