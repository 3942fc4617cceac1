//! The errors of a run with bad input or a failing disk, and what it leaves unchanged.

#![expect(clippy::print_stdout, reason = "a skipped test prints the reason")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;

use crate::common::{Lab, alone, assert_success, text, train, trainer};

/// Asserts that a run fails with code 2 and a message that contains each of these.
fn check_fails(config: &Path, expected: &[&str]) {
    let output = train(config);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for expected in expected {
        assert!(stderr.contains(expected), "{expected:?} is not in: {stderr}");
    }
}

#[test]
fn an_unknown_key_is_named() {
    let lab = Lab::new();
    check_fails(
        &lab.config("run", &[("model.layer", "2")]),
        &["model.layer: unknown key", "layers"],
    );
    assert!(!lab.path("run").exists(), "nothing was made");
}

#[test]
fn a_missing_corpus_is_named() {
    let lab = Lab::new();
    let config = lab.config("run", &[("data.train", "'no/such_text_document'")]);
    check_fails(&config, &["no/such_text_document.idx", "found neither"]);
}

#[test]
fn a_token_beyond_the_vocabulary_is_named() {
    let lab = Lab::new();
    check_fails(
        &lab.config("run", &[("model.vocab", "400")]),
        &["expected token ids below model.vocab = 400, found "],
    );
}

#[test]
fn a_corpus_that_is_too_small_is_refused() {
    let lab = Lab::new();
    let config = lab.config("run", &[("model.seq_len", "100000")]);
    check_fails(
        &config,
        &["expected at least 100001 tokens in the training split", "model.seq_len"],
    );
    let config = lab.config("run", &[("data.split", "'1,0,0'")]);
    check_fails(&config, &["data.split '1,0,0' has no share for validation"]);
}

/// Flipped bits of tokens end the run before it trains on them; `feed` tries a hundred.
#[test]
fn a_damaged_corpus_is_not_trained_on() {
    let lab = Lab::new();
    let path = lab.path("corpus.bin");
    let mut bytes = fs::read(&path).expect("a corpus");
    bytes[5000] ^= 1;
    fs::write(&path, bytes).expect("room");
    check_fails(
        &lab.config("run", &[]),
        &["corpus.bin: expected ", "found CRC-32C ", " at byte 4608", "corpus.crc"],
    );
}

#[test]
fn another_model_is_refused_key_by_key() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("run", &[])));
    let before = lab.final_tensors("run");
    let config = lab.config("run", &[("model.hidden", "32"), ("run.seed", "5")]);
    check_fails(
        &config,
        &[
            "model.hidden: 64 in the checkpoint, 32 in the config",
            "run.seed: 1234 in the checkpoint, 5 in the config",
        ],
    );
    assert_eq!(lab.final_tensors("run"), before);
    check_fails(&lab.config("run", &[("checkpoint.load", "'none'")]), &["is not overwritten"]);
}

#[test]
fn another_corpus_is_refused() {
    let lab = Lab::new();
    let config = lab.config("run", &[("run.budget", "{ steps = 4 }")]);
    assert_success(&train(&config));
    let bin = lab.path("corpus.bin");
    let mut bytes = fs::read(&bin).unwrap();
    bytes[100] ^= 1;
    fs::write(&bin, bytes).unwrap();
    // With its checksums the corpus would be reported as corrupt.
    fs::remove_file(lab.path("corpus.crc")).unwrap();
    check_fails(&config, &["corpus:", "ends_crc64"]);
}

#[test]
fn other_numeric_settings_resume_with_a_warning() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("run", &[])));
    let output = train(&lab.config("run", &[("optim.clip", "0.5"), ("run.threads", "2")]));
    assert_success(&output);
    let stderr = text(&output.stderr);
    for expected in ["warning: resume: not bit-identical: optim.clip: 1.0 in", "run.threads: 1 in"]
    {
        assert!(stderr.contains(expected), "{expected:?} is not in: {stderr}");
    }
}

/// Damage in the middle of a file, which only its checksum detects.
#[test]
fn a_damaged_checkpoint_is_skipped_and_saved_again() {
    let lab = Lab::new();
    assert_success(&train(&lab.config("whole", &[])));
    let config = lab.config("run", &[]);
    assert_success(&train(&config));
    let damage = |step: &str| {
        let folder = lab.path("run/ckpt").join(step);
        let weights = folder.join("model-00001-of-00001.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        fs::write(&weights, bytes).unwrap();
    };
    damage("step-000000000048");
    let output = train(&config);
    assert_success(&output);
    let stderr = text(&output.stderr);
    for expected in
        ["warning: checkpoint: step 48 is corrupt", "resuming from", "step-000000000044"]
    {
        assert!(stderr.contains(expected), "{expected:?} is not in: {stderr}");
    }
    lab.assert_same("run", "whole");

    damage("step-000000000048");
    damage("step-000000000044");
    check_fails(&config, &["step-000000000048 is corrupt", "step-000000000044 is corrupt"]);
}

#[test]
fn a_second_writer_is_kept_out() {
    let lab = Lab::new();
    let folder = lab.path("run/ckpt");
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let steps = ckpt::Checkpoints::open(store, storage::Key::root());
    let lease = steps.lock().unwrap();
    let config = lab.config("run", &[]);
    check_fails(&config, &["ckpt"]);
    drop(lease);
    assert_success(&train(&config));
}

/// A small file system in memory, in a folder of the lab. `None` if it cannot be mounted.
fn disk<'a>(path: &'a Path, size: &str) -> Option<Unmount<'a>> {
    fs::create_dir(path).expect("a new folder");
    let mount = ["-t", "tmpfs", "-o", size, "tmpfs"];
    if !Command::new("mount").args(mount).arg(path).output().is_ok_and(|o| o.status.success()) {
        println!("SKIPPED: a tmpfs cannot be mounted here, which takes root");
        return None;
    }
    Some(Unmount(path))
}

/// A file system of 12 MiB: a run of 5 MiB a checkpoint fills it. The run continues to its end,
/// which it cannot save.
#[test]
fn a_full_disk_spares_the_last_checkpoint() {
    let lab = Lab::new();
    let path = lab.path("disk");
    let Some(unmount) = disk(&path, "size=12m") else { return };
    let size = [("model.hidden", "128"), ("checkpoint.keep.last", "3")];
    let config = lab.config("disk/run", &size);
    let output = train(&config);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    for expected in ["error: step 12 was not saved: ", "no space left", "step 48/48"] {
        assert!(stderr.contains(expected), "{expected:?} is not in: {stderr}");
    }
    assert!(lab.final_tensors("disk/run")[0].0.starts_with("8: "), "{stderr}");
    drop(unmount);
}

/// A disk that is full for a while: a failed save is logged at once, and reported by the exit code.
#[test]
fn a_failed_save_does_not_end_the_run() {
    let lab = Lab::new();
    let path = lab.path("disk");
    let Some(unmount) = disk(&path, "size=24m") else { return };
    let place = format!("'{}/ckpt'", path.display());
    let size = [("model.hidden", "128"), ("checkpoint.dir", &*place)];
    let config = lab.config("run", &size);
    fs::write(path.join("other"), vec![1; 22 << 20]).unwrap();
    let mut command = trainer("train", &config);
    let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
    let mut stderr = String::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        if line.contains("was not saved") && path.join("other").exists() {
            fs::remove_file(path.join("other")).unwrap();
        }
        stderr += &format!("{line}\n");
    }
    assert_eq!(child.wait().unwrap().code(), Some(4), "{stderr}");
    assert!(stderr.contains("error: step 4 was not saved: "), "{stderr}");
    assert!(stderr.contains("done and saved, but "), "{stderr}");
    assert!(path.join("ckpt/step-000000000048").exists(), "{stderr}");
    drop(unmount);
}

struct Unmount<'a>(&'a Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).output();
    }
}

#[test]
fn plan_answers_by_its_exit_code() {
    let lab = Lab::new();
    let plan = |config: &Path| trainer("plan", config).arg("--json").output().unwrap();
    let output = plan(&lab.config("run", &[]));
    assert_success(&output);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["run"]["steps"], 48);
    let output = plan(&lab.config("run", &[("model.seq_len", "100000")]));
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    // The memory of `--memory` is a condition; that of the planning machine is not.
    let wide = lab.config("run", &[("model.hidden", "8192"), ("model.layers", "48")]);
    assert_success(&plan(&wide));
    let output = trainer("plan", &wide).args(["--memory", "1GiB"]).output().unwrap();
    let table = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{table}");
    assert!(table.contains("of memory and has 1 GiB"), "{table}");
}

/// A run whose state does not fit is refused before anything is allocated.
#[test]
fn a_run_that_memory_cannot_hold_is_refused() {
    let lab = Lab::new();
    let wide = lab.config("run", &[("model.hidden", "8192"), ("model.layers", "48")]);
    // 38.7 billion parameters of 12 bytes; the limit is of this process alone.
    let mut command = Command::new("prlimit");
    command.args(["--as=16000000000", env!("CARGO_BIN_EXE_trainer"), "train"]).arg(&wide);
    let output = alone(&mut command).output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("weights and moments of a rank need"), "{stderr}");
    assert!(!lab.path("run/ckpt").exists());
}
