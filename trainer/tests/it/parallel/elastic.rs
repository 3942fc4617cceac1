//! Runs of several processes that are killed, and resume with other numbers of processes in other
//! layouts: they are bit-identical to an uninterrupted run of one process.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{Lab, assert_success, text, train};
use crate::kills::{kill_after, launch, lines, run, wait_until};
use trainer::rng::Stream;

const SIGTERM: i32 = 15;

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

/// Kills a run in each of these layouts, and finishes it on one rank: as an uninterrupted run.
fn check(more: &[(&str, &str)], layouts: &[(usize, &str)]) {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &keys(more))));
    let folder = lab.path("run");
    for (number, (ranks, parallel)) in layouts.iter().enumerate() {
        let more = [more, &[("parallel", *parallel)]].concat();
        let pause = Duration::from_millis(3 * number as u64);
        kill_after(*ranks, &lab.config("run", &keys(&more)), &folder, 5 + 10 * number, pause);
    }
    let output = run(1, &lab.config("run", &keys(more)));
    assert_success(&output);
    assert!(text(&output.stderr).contains("resuming from"), "{}", text(&output.stderr));
    lab.assert_same("run", "whole");
}

#[test]
fn a_run_resumes_in_any_layout() {
    let two = [(4, "{ zero = 1 }"), (2, "{ pp = 2 }")];
    check(&[], &[&two[..], &[(4, "{ pp = 2, zero = 1 }"), (2, "{ zero = 3 }")]].concat());
}

#[test]
fn dropout_is_the_same_after_a_kill() {
    check(&[("model.dropout", "0.1")], &[(4, "{ zero = 1 }"), (2, "{ pp = 2 }")]);
}

/// Killed during the batch ramp-up, and after it.
#[test]
fn batches_grow_in_any_layout() {
    let layouts = [(4, "{ zero = 1 }"), (2, "{ pp = 2 }"), (4, "{ pp = 2, zero = 1 }")];
    check(&[("batch.rampup", "{ start = 8, increment = 8, samples = 160 }")], &layouts);
}

/// The newest complete step of a run.
fn newest(folder: &Path) -> u64 {
    let names = fs::read_dir(folder.join("ckpt")).expect("it has saved").flatten();
    let step = |entry: fs::DirEntry| ckpt::step_of(entry.file_name().to_str()?);
    names.filter_map(step).max().expect("a step")
}

/// The norm of the difference of the weights of two runs, in units of the first's.
fn apart(lab: &Lab, one: &str, other: &str) -> f64 {
    let weights = |run: &str| {
        let mut all = lab.final_tensors(run);
        all.retain(|(name, _)| name.contains("Model"));
        let bytes = all.into_iter().flat_map(|(_, bytes)| bytes).collect::<Vec<u8>>();
        let values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        values.map(f64::from).collect::<Vec<f64>>()
    };
    let (one, other) = (weights(one), weights(other));
    assert_eq!(one.len(), other.len());
    let squares = one.iter().zip(&other).map(|(a, b)| (a - b) * (a - b));
    (squares.sum::<f64>() / one.iter().map(|a| a * a).sum::<f64>()).sqrt()
}

/// Four replicas, then tensor parallel ranks in two stages, then one rank, in bf16. Before the
/// tensor parallel part the bits are those of one rank; its results are close, and the rest from
/// there has the same bits in every layout.
#[test]
fn a_run_passes_through_a_tensor_parallel_layout() {
    let lab = Lab::new();
    let layout =
        |parallel: &'static str| keys(&[("precision.dtype", "'bf16'"), ("parallel", parallel)]);
    assert_success(&train(&lab.config("whole", &layout("{}"))));
    let folder = lab.path("run");
    kill_after(4, &lab.config("run", &layout("{}")), &folder, 10, Duration::ZERO);
    let first = newest(&folder);
    let shared = lab.config("run", &layout("{ tp = 2, pp = 2 }"));
    kill_after(4, &shared, &folder, 28, Duration::ZERO);
    let second = newest(&folder);
    assert!(first < second, "{first}, {second}");
    let copied = Command::new("cp").arg("-r").arg(&folder).arg(lab.path("other")).status();
    assert!(copied.is_ok_and(|status| status.success()));
    assert_success(&run(1, &lab.config("run", &layout("{}"))));
    assert_success(&run(4, &lab.config("other", &layout("{ pp = 2 }"))));
    lab.assert_same("other", "run");

    let (found, expected) = (lab.log_lines("run"), lab.log_lines("whole"));
    assert_eq!(found.len(), expected.len());
    let loss = |line: &serde_json::Value| line["loss"].as_f64().expect("a loss");
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found["step"], expected["step"]);
        assert!(
            found["step"].as_u64() > Some(first) || found == expected,
            "{found} is not {expected}"
        );
        assert!(
            (loss(found) / loss(expected) - 1.0).abs() < 2e-3,
            "{found} is far from {expected}"
        );
    }
    assert_ne!(found, expected, "ranks that share matrices add in another order");
    let weights = apart(&lab, "whole", "run");
    assert!(weights < 2e-2, "weights are {weights} apart");
    println!("steps {first} to {second}: weights {weights:.1e} apart");
}

/// Kills at random moments, also within asynchronous joint saves; agents save what they had copied.
#[test]
fn kills_during_joint_saves_change_no_bit() {
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
fn a_stopped_run_is_saved_by_all_ranks() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &keys(&[]))));
    let config = lab.config("run", &keys(&[("parallel", "{ pp = 2 }")]));
    let folder = lab.path("run");
    let mut command = launch(4, &config);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    wait_until("a line", || lines(&folder) >= 8);
    assert!(bridge::runtime::signal(child.id(), SIGTERM));
    assert_eq!(child.wait().expect("a child process").code(), Some(75));
    let logged = lab.log_lines("run").last().and_then(|line| line["step"].as_u64());
    let saved = lab.final_tensors("run")[0].0.split(':').next().map(str::to_owned);
    assert_eq!(saved, logged.map(|step| step.to_string()), "every logged step is saved");
    assert_success(&run(1, &lab.config("run", &keys(&[]))));
    lab.assert_same("run", "whole");
}

/// Damage that only one of the ranks can detect, because only it reads those bytes.
#[test]
fn corruption_on_one_rank_is_skipped_by_all() {
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
    let printed = text(&output.stderr) + &text(&output.stdout);
    for expected in ["step 48 is corrupt", "resuming from", "step-000000000045"] {
        assert!(printed.contains(expected), "{expected:?} is not in: {printed}");
    }
    assert_eq!(lab.final_tensors("run"), before);

    // A checkpoint of another model: all ranks end with the reason.
    let other = lab.config("run", &keys(&[("parallel", "{ pp = 2 }"), ("model.ffn", "64")]));
    let output = run(2, &other);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let printed = text(&output.stderr) + &text(&output.stdout);
    assert!(printed.contains("model.ffn: 256 in the checkpoint, 64 in the config"), "{printed}");
}
