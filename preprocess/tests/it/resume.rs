//! Runs that are killed, stopped or fail, and are gone on with.
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::common::{Random, print_seed};

/// A run of nine outputs, so that a kill finds them in every state.
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

    /// A run that has committed something, is not complete, and is stopped.
    fn begun(&self) -> Begun {
        let arguments = ["--block-bytes", "2000", "--commit-interval", "1ms"];
        let mut first = Begun(self.command("out", &arguments).spawn().unwrap());
        let journal = self.folder.path().join("out/.p_text_document.journal.draft");
        wait_until(&mut first.0, || {
            // Its header and a commit. What follows the last line is padding.
            fs::read_to_string(&journal).is_ok_and(|text| text.matches('\n').count() >= 2)
        });
        signal(&first.0, "STOP");
        assert!(first.0.try_wait().unwrap().is_none(), "it ended before it was stopped");
        first
    }

    /// What a run that nothing happens to writes: names and bytes.
    pub(crate) fn due(&self, more: &[&str]) -> Vec<(String, Vec<u8>)> {
        let output = self.command("due", more).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        files(&self.folder.path().join("due"))
    }
}

/// A stopped run. Dropped, it is killed.
struct Begun(Child);

impl Begun {
    /// Continues it and waits for its end.
    fn end(mut self) {
        signal(&self.0, "CONT");
        assert!(self.0.wait().unwrap().success(), "the first was disturbed");
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal, by a shell: not every system has a program for that.
pub(crate) fn signal(child: &Child, name: &str) {
    let kill = format!("kill -{name} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

/// Waits until a process has come somewhere, at which it does not end.
pub(crate) fn wait_until(child: &mut Child, condition: impl Fn() -> bool) {
    while !condition() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was seen there");
        sleep(Duration::from_millis(1));
    }
}

/// All files of a folder, hidden ones too, but the manifests, which tell of the run.
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

/// A run that version 0.1 had begun when it was killed; `due` is what that version makes of it.
#[test]
fn what_a_version_before_has_begun_is_resumed() {
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
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // Its journal has no identities.
    assert!(said.contains("1 of 1 inputs: not compared"), "{said}");
    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path().join("report.json")).unwrap()).unwrap();
    assert_eq!(report["resumed"], true, "{report}");
    let due =
        ["bin", "idx"].map(|of| (format!("p_text_document.{of}"), read(&format!("due.{of}"))));
    // That version made no checksums of blocks.
    let mut made = files(&folder.path().join("out"));
    made.retain(|(name, _)| !name.ends_with(".crc"));
    assert!(made == due);
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
        // With records, and without any before its end.
        let interval = ["1ms", "60min"][round % 2];
        let arguments = ["--resume", "--commit-interval", interval, "--block-bytes", "20000"];
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
    let mut child = run.command("out", &["--block-bytes", "4000"]).spawn().unwrap();
    let journal = run.folder.path().join("out/.p_text_document.journal.draft");
    wait_until(&mut child, || journal.exists());
    signal(&child, "TERM");
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{said}");
    assert!(said.contains("--resume continues"), "{said}");

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
    // What is complete is not what another run was to make.
    let other = run.command("out", &["--resume", "--empty-docs", "skip"]).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr);
    assert_eq!(other.status.code(), Some(2), "{said}");
    assert!(said.contains("outputs are complete, but of other settings"), "{said}");
    // A job that is put into the queue again has nothing to do, and its report is there.
    let report = run.folder.path().join("report.json");
    fs::write(&report, "{}").unwrap();
    let arguments = ["--resume", "--report", report.to_str().unwrap()];
    let again = run.command("out", &arguments).output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.success() && said.contains("already complete"), "{said}");
}

/// A pipe may be silent for hours; to wait for its next line would be to be killed.
#[test]
fn asked_to_stop_it_waits_for_nobody() {
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
        assert!(waits < 6000, "it waits for its input");
        sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(75), "{said}");

    for (out, how) in [("out", &["--resume"][..]), ("due", &[])] {
        let mut child = command(out).args(how).spawn().unwrap();
        feed(&mut child, &text);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(files(&folder.path().join("out")), files(&folder.path().join("due")));
}

fn check_refused(second: &Output, how: &[&str]) {
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{how:?}: {said}");
    assert!(said.contains("another process") || said.contains("still running"), "{said}");
}

#[test]
fn a_second_writer_is_refused() {
    let run = Run::new(4, 4000);
    let first = run.begun();
    for how in [&["--resume"][..], &["--restart"], &[]] {
        let second = run.command("out", how).output().unwrap();
        check_refused(&second, how);
    }
    first.end();
}

/// The journal is that of the first key: a run of other keys has another.
#[test]
fn a_second_writer_of_other_keys_is_refused() {
    let run = Run::new(6, 4000);
    let due = run.due(&[]);
    let first = run.begun();
    for how in [&["--resume"][..], &["--restart"], &[]] {
        let mut second = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        second.arg("--json-in").arg(&run.inputs[0]).args(["--json-keys", "title"]).args(how);
        let second = second.arg("--out").arg(run.folder.path().join("out/p")).output().unwrap();
        check_refused(&second, how);
    }
    first.end();
    assert_eq!(files(&run.folder.path().join("out")), due);
}

#[test]
fn one_output_of_two_is_not_complete() {
    let run = Run::new(7, 50);
    run.due(&[]);
    let due = run.folder.path().join("due");
    for suffix in ["bin", "idx", "manifest.json"] {
        fs::remove_file(due.join(format!("p_title_document.{suffix}"))).unwrap();
    }
    let output = run.command("due", &["--resume"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("p_text_document.manifest.json: already exists"), "{said}");
}

/// Leaves a run that has committed the first two inputs and something of the last.
pub(crate) fn interrupted(run: &Run) {
    let end = fs::metadata(&run.inputs[2]).unwrap().len();
    interrupted_at(run, end as usize);
}

/// Leaves a run that has met a bad line before the line at a byte of the last input.
pub(crate) fn interrupted_at(run: &Run, line: usize) {
    let last = &run.inputs[2];
    let good = fs::read(last).unwrap();
    fs::write(last, [&good[..line], b"bad\n", &good[line..]].concat()).unwrap();
    let arguments = ["--commit-interval", "1ms", "--block-bytes", "20000"];
    assert_eq!(run.command("out", &arguments).status().unwrap().code(), Some(2));
    fs::write(last, good).unwrap();
}

/// What was read of it is in the outputs, and is not what it holds now.
#[test]
fn an_input_that_became_shorter_is_refused() {
    let run = Run::new(8, 1000);
    let due = run.due(&[]);
    interrupted(&run);
    let good = fs::read(&run.inputs[2]).unwrap();
    fs::write(&run.inputs[2], &good[..100]).unwrap();
    let output = run.command("out", &["--resume"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("in2.jsonl: expected") && said.contains("found 100 bytes"), "{said}");
    fs::write(&run.inputs[2], good).unwrap();
    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&run.folder.path().join("out")), due);
}

#[test]
fn other_rules_for_inputs_are_refused() {
    let run = Run::new(9, 1000);
    interrupted(&run);
    for (flags, key) in
        [(["--input-format", "jsonl"], "input_format"), (["--txt-separator", "blank-line"], "text")]
    {
        let output = run.command("out", &[&flags[..], &["--resume"]].concat()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(&format!("expected {key} = ")), "{said}");
    }
}

/// A mended line moves the bounds of all shares.
#[test]
fn a_shard_of_other_lengths_is_refused() {
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
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("expected shard_of_bytes = "), "{said}");
}

/// Killed between the two files of an output, it goes on with what it had then.
#[test]
fn an_input_that_grew_too_late_is_left_out() {
    let run = Run::new(11, 20);
    let due = run.due(&[]);
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
    let bin = due.iter().find(|(name, _)| name == "p_text_document.bin").unwrap();
    fs::remove_file(folder.join(".p_text_document.bin.draft")).unwrap();
    fs::write(folder.join(&bin.0), &bin.1).unwrap();
    let more = b"{\"text\":\"a\",\"title\":\"b\"}\n";
    fs::write(last, [&good[..], more].concat()).unwrap();
    assert!(run.command("out", &["--resume"]).status().unwrap().success());
    assert_eq!(files(&folder), due);
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
    assert!(said.contains("--resume continues"), "{said}");
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
