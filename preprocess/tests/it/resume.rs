//! Runs that are killed, stopped or fail, and are then resumed.
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::common::{Random, print_seed};

/// Three inputs and two keys, so that a kill finds the outputs in every state.
pub(crate) struct Run {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) inputs: Vec<PathBuf>,
}

impl Run {
    pub(crate) fn new(seed: u64, lines: usize) -> Self {
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

    pub(crate) fn command(&self, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.arg("--json-in").args(&self.inputs).arg("--out");
        command.arg(self.folder.path().join(out).join("p"));
        command.args(["--json-keys", "text", "title", "--append-eod", "--workers", "2"]);
        command.args(more).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Starts a run and stops it after its first commit, before it is complete.
    fn start_and_stop(&self) -> Begun {
        let arguments = ["--block-bytes", "2000", "--commit-interval", "1ms"];
        let mut first = Begun(self.command("out", &arguments).spawn().unwrap());
        let journal = self.folder.path().join("out/.p_text_document.journal.draft");
        wait_until(&mut first.0, || {
            // Its header and a commit. Bytes after the last line are padding.
            fs::read_to_string(&journal).is_ok_and(|text| text.matches('\n').count() >= 2)
        });
        signal(&first.0, "STOP");
        assert!(first.0.try_wait().unwrap().is_none(), "the run ended before it was stopped");
        first
    }

    /// The files of a run that is not interrupted: names and bytes.
    pub(crate) fn expected(&self, more: &[&str]) -> Vec<(String, Vec<u8>)> {
        let output = self.command("expected", more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        files(&self.folder.path().join("expected"))
    }
}

/// A stopped run. Dropping it kills the process.
struct Begun(Child);

impl Begun {
    /// Continues the process and waits for its end.
    fn finish(mut self) {
        signal(&self.0, "CONT");
        assert!(self.0.wait().unwrap().success(), "the first run failed");
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal with the `kill` of a shell: not every system has a program for that.
pub(crate) fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

/// Waits until the condition holds. Panics if the process ends first.
pub(crate) fn wait_until(child: &mut Child, condition: impl Fn() -> bool) {
    while !condition() {
        assert!(child.try_wait().unwrap().is_none(), "the process ended before the condition held");
        sleep(Duration::from_millis(1));
    }
}

/// All files of a folder, hidden ones too, except the manifests, which have details of the run.
pub(crate) fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = entries
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path))
        .filter(|(name, _)| !name.ends_with(".manifest.json"))
        .map(|(name, path)| (name, fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

/// A run of version 0.1 that was killed. The files `due.*` are the complete output of that version.
#[test]
fn an_interrupted_run_of_version_0_1_is_resumed() {
    let released = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/interrupted");
    let folder = tempfile::tempdir().unwrap();
    let read = |name: &str| fs::read(released.join(name)).unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    fs::write(folder.path().join("in.jsonl"), read("in.jsonl")).unwrap();
    for part in ["bin", "outline", "journal"] {
        let name = format!(".p_text_document.{part}.draft");
        fs::write(folder.path().join("out").join(&name), read(&name)).unwrap();
    }
    let output = Command::new(env!("CARGO_BIN_EXE_preprocess"))
        .args(["--json-in", "in.jsonl", "--out", "out/p", "--tokenizer", "gpt2", "--append-eod"])
        .args(["--resume", "--report", "report.json"])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}");
    // Its journal has no identities of inputs.
    assert!(message.contains("1 of 1 inputs: not compared"), "{message}");
    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path().join("report.json")).unwrap()).unwrap();
    assert_eq!(report["resumed"], true, "{report}");
    let expected =
        ["bin", "idx"].map(|of| (format!("p_text_document.{of}"), read(&format!("due.{of}"))));
    // That version wrote no checksums of blocks.
    let mut written = files(&folder.path().join("out"));
    written.retain(|(name, _)| !name.ends_with(".crc"));
    assert!(written == expected);
}

/// Killed at random moments at least fifty times, a run writes the same files as one that was not
/// interrupted.
#[test]
fn fifty_kills_change_no_byte() {
    const SEED: u64 = 20;
    print_seed("fifty_kills_change_no_byte", SEED);
    let run = Run::new(SEED, 1500);
    let expected = run.expected(&["--block-bytes", "20000"]);
    let mut random = Random::new(SEED);
    let (mut kills, mut round) = (0, 0);
    while kills < 50 {
        let out = format!("out{round}");
        round += 1;
        // With commits during the run, and with none before its end.
        let interval = ["1ms", "60min"][round % 2];
        let arguments = ["--resume", "--commit-interval", interval, "--block-bytes", "20000"];
        // Each process lives a little longer, so that a slow machine finishes, too.
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
            let message = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), None, "failed, not killed: {message}");
            kills += 1;
            assert!(life_us < 60_000_000, "the run never completes");
        }
        assert_eq!(files(&run.folder.path().join(&out)), expected, "after {kills} kills");
    }
}

#[test]
fn sigterm_stops_a_run_and_resume_continues_it() {
    let run = Run::new(3, 4000);
    let expected = run.expected(&[]);
    let mut child = run.command("out", &["--block-bytes", "4000"]).spawn().unwrap();
    let journal = run.folder.path().join("out/.p_text_document.journal.draft");
    wait_until(&mut child, || journal.exists());
    signal(&child, "TERM");
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{message}");
    assert!(message.contains("--resume continues"), "{message}");

    let again = run.command("out", &[]).output().unwrap();
    let message = String::from_utf8_lossy(&again.stderr);
    assert_eq!(again.status.code(), Some(2), "{message}");
    assert!(message.contains("interrupted") && message.contains("--restart"), "{message}");
    let other = run.command("out", &["--resume", "--empty-docs", "skip"]).output().unwrap();
    let message = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{message}");
    assert!(message.contains("empty_documents") && message.contains("Megatron"), "{message}");

    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("out")), expected);
    // Complete outputs of other settings are refused.
    let other = run.command("out", &["--resume", "--empty-docs", "skip"]).output().unwrap();
    let message = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{message}");
    assert!(message.contains("outputs are complete, but of other settings"), "{message}");
    // A requeued job has nothing to do, and accepts that its report exists.
    let report = run.folder.path().join("report.json");
    fs::write(&report, "{}").unwrap();
    let arguments = ["--resume", "--report", report.to_str().unwrap()];
    let again = run.command("out", &arguments).output().unwrap();
    let message = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success() && message.contains("already complete"), "{message}");
}

/// A pipe may be idle for hours: a run that waits for its next line is killed by the scheduler.
#[test]
fn sigterm_does_not_wait_for_input() {
    let folder = tempfile::tempdir().unwrap();
    let command = |out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.args(["--json-in", "-", "--out"]).arg(folder.path().join(out).join("p"));
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    };
    let text = "{\"text\":\"a line of some words\"}\n".repeat(20_000);
    let feed = |child: &mut Child, bytes: &str| {
        child.stdin.as_mut().unwrap().write_all(bytes.as_bytes()).unwrap();
    };
    let mut child = command("out").args(["--block-bytes", "10000"]).spawn().unwrap();
    feed(&mut child, &text[..text.len() / 2]);
    let journal = folder.path().join("out/.p_text_document.journal.draft");
    wait_until(&mut child, || journal.exists());
    signal(&child, "TERM");
    let mut waits = 0;
    while child.try_wait().unwrap().is_none() {
        waits += 1;
        assert!(waits < 6000, "the run waits for its input");
        sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{message}");

    for (out, how) in [("out", &["--resume"][..]), ("expected", &[])] {
        let mut child = command(out).args(how).spawn().unwrap();
        feed(&mut child, &text);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(files(&folder.path().join("out")), files(&folder.path().join("expected")));
}

fn check_refused(second: &Output, how: &[&str]) {
    let message = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{how:?}: {message}");
    assert!(message.contains("another process") || message.contains("still running"), "{message}");
}

#[test]
fn a_second_writer_is_refused() {
    let run = Run::new(4, 4000);
    let first = run.start_and_stop();
    for how in [&["--resume"][..], &["--restart"], &[]] {
        let second = run.command("out", how).output().unwrap();
        check_refused(&second, how);
    }
    first.finish();
}

/// The journal is named for the first key, so a run of other keys has another journal.
#[test]
fn a_second_writer_of_other_keys_is_refused() {
    let run = Run::new(6, 4000);
    let expected = run.expected(&[]);
    let first = run.start_and_stop();
    for how in [&["--resume"][..], &["--restart"], &[]] {
        let mut second = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        second.arg("--json-in").arg(&run.inputs[0]).args(["--json-keys", "title"]).args(how);
        let second = second.arg("--out").arg(run.folder.path().join("out/p")).output().unwrap();
        check_refused(&second, how);
    }
    first.finish();
    assert_eq!(files(&run.folder.path().join("out")), expected);
}

#[test]
fn one_complete_output_of_two_is_refused() {
    let run = Run::new(7, 50);
    run.expected(&[]);
    let expected = run.folder.path().join("expected");
    for suffix in ["bin", "idx", "manifest.json"] {
        fs::remove_file(expected.join(format!("p_title_document.{suffix}"))).unwrap();
    }
    let output = run.command("expected", &["--resume"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("p_text_document.manifest.json: already exists"), "{message}");
}

/// Makes an interrupted run that has committed the first two inputs and a part of the last.
pub(crate) fn interrupted(run: &Run) {
    let end = fs::metadata(&run.inputs[2]).unwrap().len();
    interrupted_at(run, end as usize);
}

/// Makes a run that was interrupted by a bad line before the given byte of the last input.
pub(crate) fn interrupted_at(run: &Run, line: usize) {
    let last = &run.inputs[2];
    let good = fs::read(last).unwrap();
    fs::write(last, [&good[..line], b"bad\n", &good[line..]].concat()).unwrap();
    let arguments = ["--commit-interval", "1ms", "--block-bytes", "20000"];
    assert_eq!(run.command("out", &arguments).status().unwrap().code(), Some(2));
    fs::write(last, good).unwrap();
}

/// The outputs have lines that the input does not have any more.
#[test]
fn an_input_that_became_shorter_is_refused() {
    let run = Run::new(8, 1000);
    let expected = run.expected(&[]);
    interrupted(&run);
    let good = fs::read(&run.inputs[2]).unwrap();
    fs::write(&run.inputs[2], &good[..100]).unwrap();
    let output = run.command("out", &["--resume"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(
        message.contains("in2.jsonl: expected") && message.contains("found 100 bytes"),
        "{message}"
    );
    fs::write(&run.inputs[2], good).unwrap();
    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("out")), expected);
}

#[test]
fn other_rules_for_inputs_are_refused() {
    let run = Run::new(9, 1000);
    interrupted(&run);
    for (flags, key) in
        [(["--input-format", "jsonl"], "input_format"), (["--txt-separator", "blank-line"], "text")]
    {
        let output = run.command("out", &[&flags[..], &["--resume"]].concat()).output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(&format!("expected {key} = ")), "{message}");
    }
}

/// Correcting a line moves the bounds of all shards.
#[test]
fn a_shard_of_inputs_with_other_lengths_is_refused() {
    let run = Run::new(10, 1000);
    let [first, last] = [&run.inputs[0], &run.inputs[2]];
    let good = fs::read(first).unwrap();
    let half = good.len() / 2;
    let line = half + good[half..].iter().position(|&byte| byte == b'\n').unwrap() + 1;
    fs::write(first, [&good[..line], b"bad\n", &good[line..]].concat()).unwrap();
    let command = |how: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.arg("--json-in").args([first, last]).args(how).args(["--shard", "0/2"]);
        command.args(["--commit-interval", "1ms", "--block-bytes", "20000", "--out"]);
        command.arg(run.folder.path().join("out/p")).output().unwrap()
    };
    assert_eq!(command(&[]).status.code(), Some(2));
    fs::write(first, good).unwrap();
    let output = command(&["--resume"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("expected shard_of_bytes = "), "{message}");
}

/// A run that was killed between publishing the files of an output ignores lines added since.
#[test]
fn lines_added_after_the_bin_was_published_are_ignored() {
    let run = Run::new(11, 20);
    let expected = run.expected(&[]);
    let last = &run.inputs[2];
    let good = fs::read(last).unwrap();
    fs::write(last, [&good[..], b"bad\n"].concat()).unwrap();
    let folder = run.folder.path().join("out");
    let inputs = run.inputs.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    let mut options =
        preprocess::PreprocessOptions::new(inputs, folder.join("p").to_str().unwrap());
    options.keys = vec!["text".to_owned(), "title".to_owned()];
    options.append_eod = true;
    options.block_bytes = Some(1);
    options.commit_every = Duration::ZERO;
    preprocess::run(&options, &mut |_| {}).unwrap_err();
    let bin = expected.iter().find(|(name, _)| name == "p_text_document.bin").unwrap();
    fs::remove_file(folder.join(".p_text_document.bin.draft")).unwrap();
    fs::write(folder.join(&bin.0), &bin.1).unwrap();
    let more = b"{\"text\":\"a\",\"title\":\"b\"}\n";
    fs::write(last, [&good[..], more].concat()).unwrap();
    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&folder), expected);
}

/// After a bad line is corrected, the run resumes from the commit before it.
#[test]
fn commits_before_a_bad_line_are_kept() {
    let run = Run::new(5, 2000);
    let expected = run.expected(&[]);
    let last = &run.inputs[2];
    let good = fs::read(last).unwrap();
    let half = good.len() / 2;
    let line = half + good[half..].iter().position(|&byte| byte == b'\n').unwrap() + 1;
    fs::write(last, [&good[..line], b"bad\n", &good[line..]].concat()).unwrap();
    let arguments = ["--resume", "--commit-interval", "1ms", "--block-bytes", "20000"];
    let output = run.command("out", &arguments).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains(&format!("(byte {line} of the file)")), "{message}");
    assert!(message.contains("--resume continues"), "{message}");
    fs::write(last, good).unwrap();
    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("out")), expected);

    // Or the line is skipped and counted.
    fs::write(last, [&fs::read(last).unwrap()[..], b"{\"text\":\"a\"}\n"].concat()).unwrap();
    let report = run.folder.path().join("report.json");
    let arguments = ["--on-error", "skip", "--report", report.to_str().unwrap()];
    assert!(run.command("skipping", &arguments).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("skipping")), expected);
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert_eq!(report["skipped"]["bad_lines"], 1);
    let bad_line = report["bad_lines"][0].as_str().unwrap();
    assert!(bad_line.contains("line 2001") && bad_line.contains("the key 'title'"), "{bad_line}");
}
