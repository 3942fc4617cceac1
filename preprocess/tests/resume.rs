//! Runs that are killed, stopped or fail, and are gone on with.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use common::{Random, print_seed};

/// A run of nine outputs, so that a kill finds them in every state.
struct Run {
    folder: tempfile::TempDir,
    inputs: Vec<PathBuf>,
}

impl Run {
    fn new(seed: u64, lines: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut random = Random::new(seed);
        let mut inputs = Vec::new();
        for number in 0..3 {
            let mut text = String::new();
            for line in 0..lines {
                let body = match line % 7 {
                    0 => String::new(),
                    1 => random.chinese(300),
                    _ => random.english(500),
                };
                let document = serde_json::json!({ "text": body, "title": format!("t{line}") });
                text += &format!("{document}\n");
            }
            let path = folder.path().join(format!("in{number}.jsonl"));
            if number == 1 {
                fs::write(&path, zstd::encode_all(text.as_bytes(), 1).unwrap()).unwrap();
            } else {
                fs::write(&path, text).unwrap();
            }
            inputs.push(path);
        }
        Run { folder, inputs }
    }

    fn command(&self, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.arg("--json-in").args(&self.inputs).arg("--out");
        command.arg(self.folder.path().join(out).join("p"));
        command.args(["--json-keys", "text", "title", "--append-eod", "--workers", "2"]);
        command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// What a run that nothing happens to writes: names and bytes.
    fn due(&self, more: &[&str]) -> Vec<(String, Vec<u8>)> {
        let output = self.command("due", more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        files(&self.folder.path().join("due"))
    }
}

/// All files of a folder, hidden ones too, but the manifests, which tell of the run.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path))
        .filter(|(name, _)| !name.ends_with(".manifest.json"))
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

/// Killed at random moments until it has ended fifty times or more without being done, it writes
/// what a run in one go writes.
#[test]
fn fifty_kills_change_no_byte() {
    const SEED: u64 = 20;
    print_seed("fifty_kills_change_no_byte", SEED);
    let run = Run::new(SEED, 1500);
    let due = run.due(&["--block-bytes", "20000"]);
    let mut random = Random::new(SEED);
    let (mut kills, mut round) = (0, 0);
    while kills < 50 {
        let out = format!("out{round}");
        round += 1;
        let arguments = ["--resume", "--commit-interval", "1ms", "--block-bytes", "20000"];
        // Each time it lives a little longer, so that it comes to its end however slow it is.
        let mut life_us = 1_000;
        loop {
            let mut child = run.command(&out, &arguments).spawn().unwrap();
            sleep(Duration::from_micros(random.below(life_us)));
            life_us += life_us / 8;
            let _ = child.kill();
            let output = child.wait_with_output().unwrap();
            if output.status.success() {
                break;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), None, "not killed, but failed: {said}");
            kills += 1;
            assert!(life_us < 60_000_000, "it never comes to its end");
        }
        assert_eq!(files(&run.folder.path().join(&out)), due, "after {kills} kills");
    }
}

#[test]
fn asked_to_stop_it_stops_and_goes_on() {
    let run = Run::new(3, 4000);
    let due = run.due(&[]);
    let child = run.command("out", &["--block-bytes", "4000"]).spawn().unwrap();
    let journal = run.folder.path().join("out/.p_text_document.journal.draft");
    while !journal.exists() {
        sleep(Duration::from_millis(1));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(said.contains("--resume goes on"), "{said}");

    let again = run.command("out", &[]).output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(2), "{said}");
    assert!(said.contains("interrupted") && said.contains("--restart"), "{said}");
    let other = run.command("out", &["--resume", "--empty-docs", "skip"]).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{said}");
    assert!(said.contains("empty_documents") && said.contains("Megatron"), "{said}");

    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("out")), due);
    // A job that is put into the queue again has nothing to do.
    let again = run.command("out", &["--resume"]).output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success() && said.contains("complete already"), "{said}");
}

#[test]
fn a_second_writer_is_refused() {
    let run = Run::new(4, 4000);
    let arguments = ["--block-bytes", "2000", "--commit-interval", "1ms"];
    let mut first = run.command("out", &arguments).spawn().unwrap();
    let journal = run.folder.path().join("out/.p_text_document.journal.draft");
    while fs::read_to_string(&journal).map_or(0, |text| text.lines().count()) < 2 {
        sleep(Duration::from_millis(1));
    }
    for how in [&["--resume"][..], &["--restart"], &[]] {
        let second = run.command("out", how).output().unwrap();
        let said = String::from_utf8_lossy(&second.stderr);
        assert_eq!(second.status.code(), Some(2), "{how:?}: {said}");
        assert!(said.contains("another process") || said.contains("at work"), "{said}");
    }
    assert!(first.wait().unwrap().success(), "the first was disturbed");
}

/// A bad line may be mended, and the run goes on from before it.
#[test]
fn what_was_committed_before_a_bad_line_stays() {
    let run = Run::new(5, 2000);
    let due = run.due(&[]);
    let last = &run.inputs[2];
    let good = fs::read(last).unwrap();
    let half = good.len() / 2;
    let line = half + good[half..].iter().position(|&byte| byte == b'\n').unwrap() + 1;
    fs::write(last, [&good[..line], b"bad\n", &good[line..]].concat()).unwrap();
    let arguments = ["--resume", "--commit-interval", "1ms", "--block-bytes", "20000"];
    let output = run.command("out", &arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(&format!("(byte {line} of the file)")), "{said}");
    assert!(said.contains("--resume goes on"), "{said}");
    fs::write(last, good).unwrap();
    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("out")), due);

    // Or it is left out, and counted.
    fs::write(last, [&fs::read(last).unwrap()[..], b"{\"text\":\"a\"}\n"].concat()).unwrap();
    let report = run.folder.path().join("report.json");
    let arguments = ["--on-error", "skip", "--report", report.to_str().unwrap()];
    assert!(run.command("skipping", &arguments).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("skipping")), due);
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!(report["skipped"]["bad_lines"], 1);
    let told = report["bad_lines"][0].as_str().unwrap();
    assert!(told.contains("line 2001") && told.contains("the key 'title'"), "{told}");
}
