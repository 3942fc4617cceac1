//! Interrupted runs whose inputs or drafts change before they are resumed. No output may mix two
//! versions of an input or use a damaged draft.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::resume::{Run, files, interrupted, interrupted_at};

/// Replaces a file by another with its modification time, as `cp -p` or `touch -r` leave it.
fn replace(path: &Path, bytes: &[u8]) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let other = path.with_extension("other");
    fs::write(&other, bytes).unwrap();
    File::options().write(true).open(&other).unwrap().set_modified(modified).unwrap();
    fs::rename(&other, path).unwrap();
}

/// The same lines, with another letter in the first title at or after a byte.
fn with_other_title(lines: &[u8], from: usize) -> Vec<u8> {
    const TITLE: &[u8] = b"\"title\":\"t";
    let at = lines[from..].windows(TITLE.len()).position(|bytes| bytes == TITLE).unwrap();
    let mut other = lines.to_vec();
    other[from + at + TITLE.len() - 1] = b'u';
    other
}

fn resume(run: &Run) -> Output {
    run.command("out", &["--resume"]).output().unwrap()
}

fn check_refused(output: &Output, words: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for word in ["cannot resume with", "--restart"].iter().chain(words) {
        assert!(message.contains(word), "{word}: {message}");
    }
}

/// The resumed run writes the same files as a run that was not interrupted.
fn check_resumed(run: &Run) {
    let output = resume(run);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(files(&run.folder.path().join("out")), run.expected(&[]));
}

/// The last record of the journal. Bytes after the last line are padding.
fn last_record(run: &Run) -> serde_json::Value {
    let journal = run.folder.path().join("out/.p_text_document.journal.draft");
    let journal = fs::read_to_string(journal).unwrap();
    let (lines, _) = journal.rsplit_once('\n').unwrap();
    let (_, json) = lines.lines().last().unwrap().split_once(' ').unwrap();
    serde_json::from_str(json).unwrap()
}

#[test]
fn a_finished_input_that_changed_is_refused() {
    let run = Run::new(12, 1000);
    interrupted(&run);
    let first = &run.inputs[0];
    let good = fs::read(first).unwrap();
    replace(first, &with_other_title(&good, 0));
    check_refused(&resume(&run), &["in0.jsonl", "first and last 64 KiB"]);
    let middle = good.len() / 2;
    assert!(
        (64 << 10..good.len() - (80 << 10)).contains(&middle),
        "only a checksum of the content can detect it"
    );
    replace(first, &with_other_title(&good, middle));
    check_refused(&resume(&run), &["in0.jsonl", "bytes of content with CRC-64"]);
    replace(first, &[&good[..], b"\n"].concat());
    check_refused(&resume(&run), &["in0.jsonl", &format!("found {} bytes", good.len() + 1)]);
    replace(first, &good);
    // Copies of the inputs are accepted.
    for input in &run.inputs {
        replace(input, &fs::read(input).unwrap());
    }
    check_resumed(&run);
}

#[test]
fn an_input_in_progress_may_change_after_the_committed_offset() {
    let run = Run::new(13, 1000);
    let last = &run.inputs[2];
    let good = fs::read(last).unwrap();
    let half = good.len() / 2;
    let line = half + good[half..].iter().position(|&byte| byte == b'\n').unwrap() + 1;
    interrupted_at(&run, line);
    let record = last_record(&run);
    assert!(record["input_idx"] == 2 && record["offset"].as_u64() > Some(0), "{record}");
    replace(last, &with_other_title(&good, 0));
    check_refused(&resume(&run), &["in2.jsonl", "bytes of content with CRC-64"]);
    replace(last, &with_other_title(&good, line));
    check_resumed(&run);
}

/// A stream cannot be read twice: its skipped part is compared.
#[test]
fn a_stream_with_another_beginning_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let run = |out: &str, input: &[u8], how: &[&str]| {
        fs::write(at("stdin"), input).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.args(["--json-in", "-", "--commit-interval", "1ms", "--block-bytes", "20000"]);
        command.args(how).arg("--out").arg(at(out).join("p"));
        command.stdin(File::open(at("stdin")).unwrap()).stdout(Stdio::null());
        command.output().unwrap()
    };
    let lines: String = (0..5000).map(|n| format!("{{\"text\":\"line {n}\"}}\n")).collect();
    let bad = format!("{lines}bad\n");
    assert_eq!(run("out", bad.as_bytes(), &[]).status.code(), Some(2));
    let other = lines.replacen("line", "LINE", 1);
    check_refused(&run("out", other.as_bytes(), &["--resume"]), &["cannot resume with -:"]);
    for (out, how) in [("out", &["--resume"][..]), ("expected", &[])] {
        let output = run(out, lines.as_bytes(), how);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(files(&at("out")), files(&at("expected")));
}

#[test]
fn a_draft_with_a_flipped_bit_is_refused() {
    let run = Run::new(14, 1000);
    interrupted(&run);
    let record = last_record(&run);
    for file in ["bin", "outline"] {
        let end = record["builders"][0][file]["bytes"].as_u64().unwrap();
        let name = format!(".p_text_document.{file}.draft");
        let path = run.folder.path().join("out").join(&name);
        let flip = || {
            let mut bytes = fs::read(&path).unwrap();
            bytes[end as usize - 1] ^= 1;
            fs::write(&path, bytes).unwrap();
        };
        flip();
        check_refused(&resume(&run), &[&name, &format!("..{end} of ")]);
        flip();
    }
    check_resumed(&run);
}

/// Runs on a text and JSON lines until a bad line ends the run. Returns a function that runs again.
fn interrupted_text(folder: &Path, more: &[&str]) -> impl Fn(&[&str]) -> Output {
    let folder = folder.to_owned();
    fs::write(folder.join("a.txt"), "one\rtwo\nthree\n".repeat(2000)).unwrap();
    fs::write(folder.join("b.jsonl"), "{\"text\":[\"a\",\"b\"]}\n".repeat(2000) + "bad\n").unwrap();
    let run = move |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
        command.args(["--json-in", "a.txt", "b.jsonl", "--out", "out/p", "--block-bytes", "2000"]);
        command.args(["--commit-interval", "1ms", "--workers", "2"]).args(more);
        command.current_dir(&folder).stdin(Stdio::null()).output().unwrap()
    };
    let output = run(more);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    run
}

/// The run is refused because the journal is of another run: the message has the setting's name and
/// value.
fn check_other_run(output: &Output, words: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for word in ["p_text_document.journal", "--restart"].iter().chain(words) {
        assert!(message.contains(word), "{word}: {message}");
    }
}

/// Earlier versions ended lines of text at `\n` alone, and their journals do not have the setting.
/// Their documents differ from those of this version.
#[test]
fn a_journal_without_line_ends_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = interrupted_text(folder.path(), &[]);
    let journal = folder.path().join("out/.p_text_document.journal.draft");
    let whole = fs::read_to_string(&journal).unwrap();
    let (settings, records) = whole.split_once('\n').unwrap();
    let mut settings: serde_json::Value =
        serde_json::from_str(settings.split_once(' ').unwrap().1).unwrap();
    settings.as_object_mut().unwrap().remove("line_ends").expect("the setting");
    let json = settings.to_string();
    let checksum = storage::crc64(json.as_bytes());
    fs::write(&journal, format!("{checksum:016x} {json}\n{records}")).unwrap();
    check_other_run(&run(&["--resume"]), &["line_ends", "Universal"]);
}

/// A setting that only the journal has means another run.
#[test]
fn lists_that_were_joined_are_not_resumed_as_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let run = interrupted_text(folder.path(), &["--lists", "joined"]);
    check_other_run(&run(&["--resume"]), &["lists", "Joined"]);
}
