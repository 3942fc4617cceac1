//! The command line: messages, exit codes, and the files that a run leaves.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests fail by panicking, and print what was skipped"
)]

use std::fs;
use std::io::ErrorKind::{InvalidInput, PermissionDenied};
use std::io::Write as _;
use std::os::unix::{fs::PermissionsExt as _, process::CommandExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use storage::testing::fault_store::Mount;

const GOOD: &str = "{\"text\":\"good\"}\n";

fn preprocess(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder of inputs for commands that must fail and write no outputs.
struct Refusal {
    folder: tempfile::TempDir,
}

impl Refusal {
    fn new() -> Self {
        Refusal { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Exit code 2, all the words on standard error, nothing on standard output, no outputs.
    #[track_caller]
    fn check(&self, inputs: &[&Path], more: &[&str], words: &[&str]) {
        let out = self.folder.path().join("out");
        let prefix = out.join("p");
        let mut arguments = vec!["--json-in"];
        arguments.extend(inputs.iter().map(|path| path.to_str().unwrap()));
        arguments.extend(["--out", prefix.to_str().unwrap()]);
        arguments.extend(more);
        let output = preprocess(&arguments).output().unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.starts_with("error: ") || message.contains("Usage"), "{message}");
        for word in words {
            assert!(message.contains(word), "without '{word}': {message}");
        }
        assert_eq!(message.trim_end().lines().count(), 1, "more than one line: {message}");
        assert!(output.stdout.is_empty());
        assert_eq!(names(&out), [""; 0], "leftover files");
    }

    /// As `check`, for one bad line after two good ones and a blank one.
    #[track_caller]
    fn check_line(&self, line: impl AsRef<[u8]>, words: &[&str]) {
        let before = [GOOD, "\n", GOOD].concat();
        let bytes = [before.as_bytes(), line.as_ref(), b"\n", GOOD.as_bytes()].concat();
        let input = self.file("in.jsonl", bytes);
        let place = format!("in.jsonl, line 4 (byte {} of the file), at byte ", before.len());
        self.check(&[&input], &[], &[&[place.as_str()], words].concat());
    }
}

fn distinct_lines() -> Vec<u8> {
    let mut lines = Vec::new();
    for number in 0..30_000_u32 {
        let number = number.wrapping_mul(2_654_435_761);
        writeln!(lines, "{{\"text\":\"number {number}\"}}").unwrap();
    }
    lines
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn bad_lines_are_reported_with_their_position() {
    let refusal = Refusal::new();
    refusal
        .check_line("{\"text\":\"a", &["byte 10 of the line", "the end of the line", "truncated"]);
    refusal.check_line("not json", &["byte 0 of the line: expected an object, '{', found 'n'"]);
    refusal.check_line("[1]", &["expected an object, '{', found a list"]);
    refusal.check_line(
        "{\"body\":\"a\"}",
        &["expected the key 'text', found only 'body'", "--json-key"],
    );
    refusal.check_line("{\"text\":7}", &["byte 8 of the line: expected a string, found a number"]);
    refusal.check_line(b"{\"text\":\"a\0b\"}", &["byte 10 of", "control character 0x00"]);
    refusal.check_line(b"\0\0\0\0", &["byte 0 of the line: expected an object, '{', found '\\0'"]);
    refusal
        .check_line(b"{\"text\":\"a\xffb\"}", &["byte 10 of", "0xff, which is not UTF-8", "iconv"]);
    refusal.check_line(b"{\"text\":\"a\xe4\xb8", &["byte 10 of", "not UTF-8"]);
    refusal.check_line("{\"text\":\"\\ud83d\"}", &["byte 9 of", "half of a surrogate pair"]);
    refusal.check_line("{\"text\":\"a\"} {", &["one object"]);
}

/// Python silently drops all but the last; here that takes an option.
#[test]
fn duplicate_keys_are_refused_by_default() {
    let refusal = Refusal::new();
    let line = "{\"text\":\"first\",\"id\":1,\"id\":2,\"text\":\"Hello world\"}";
    refusal.check_line(
        line,
        &["byte 30 of the line: expected key 'text' once, found it again", "--last-of"],
    );
    let input = refusal.file("in.jsonl", line);
    let prefix = refusal.folder.path().join("p");
    let (input, prefix) = (input.to_str().unwrap(), prefix.to_str().unwrap());
    let last = ["--json-in", input, "--out", prefix, "--last-of-duplicate-keys"];
    let output = preprocess(&last).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let bin = fs::read(format!("{prefix}_text_document.bin")).unwrap();
    assert_eq!(bin, [0x88, 0x3c, 0xe3, 0x03]);
}

/// Blank lines between the elements of a list count as lines, wherever blocks end.
#[test]
fn errors_in_a_list_are_reported_with_their_position() {
    let refusal = Refusal::new();
    let list = format!("[\n{GOOD}\n\n,{GOOD},\n{GOOD} {GOOD}]\n");
    let input = refusal.file("in.json", &list);
    let byte = list.rfind('{').unwrap();
    let place = format!("in.json, line 8 (byte {byte} of the file)");
    for block_bytes in ["1", "20", "50", "1000"] {
        let words = [place.as_str(), "expected ',' or ']', found '{'"];
        refusal.check(&[&input], &["--block-bytes", block_bytes], &words);
    }
}

#[test]
fn the_first_bad_line_is_reported() {
    let refusal = Refusal::new();
    let good = GOOD.repeat(20_000);
    let first = refusal.file("a.jsonl", format!("{good}bad one\n{good}bad two\n"));
    let second = refusal.file("b.jsonl", "bad three\n");
    for workers in ["1", "2", "7"] {
        let words = ["a.jsonl, line 20001 (byte 320000 of the file)"];
        refusal.check(&[&first, &second], &["--workers", workers], &words);
    }
    let later = refusal.file("c.jsonl", good);
    refusal.check(&[&later, &second], &[], &["b.jsonl, line 1 (byte 0 of the file)"]);
}

#[test]
fn positions_in_compressed_inputs_are_of_the_decompressed_stream() {
    let refusal = Refusal::new();
    let json = format!("{}bad\n", GOOD.repeat(1000));
    let packed = zstd::encode_all(json.as_bytes(), 3).unwrap();
    let input = refusal.file("in.jsonl.zst", &packed);
    let words = ["line 1001 (byte 16000 of the decompressed stream)", "found 'b'"];
    refusal.check(&[&input], &[], &words);

    let good = zstd::encode_all(GOOD.repeat(100_000).as_bytes(), 3).unwrap();
    let input = refusal.file("cut.jsonl.zst", &good[..good.len() / 2]);
    refusal.check(&[&input], &[], &["cut.jsonl.zst", "truncated"]);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&distinct_lines()).unwrap();
    let whole = gzip.finish().unwrap();
    for len in [5, whole.len() / 2, whole.len() - 1] {
        let input = refusal.file("cut.jsonl.gz", &whole[..len]);
        let place = format!("at byte {len} of the file");
        refusal.check(&[&input], &[], &["cut.jsonl.gz after ", &place, "truncated"]);
    }
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 0x55;
    let input = refusal.file("flipped.jsonl.zst", &flipped);
    refusal.check(&[&input], &[], &["flipped.jsonl.zst"]);
    let input = refusal.file("tail.jsonl.zst", [&good[..], b"more"].concat());
    refusal.check(&[&input], &[], &["tail.jsonl.zst"]);
}

#[test]
fn inputs_are_checked_before_any_work() {
    let refusal = Refusal::new();
    // Had the work started, the message would name the bad line, not the file after it.
    let bad = refusal.file("bad.jsonl", "bad\n");
    let missing = refusal.folder.path().join("missing.jsonl");
    refusal.check(&[&bad, &missing], &[], &["missing.jsonl", "no such file"]);
    let folder = refusal.folder.path().join("folder");
    fs::create_dir(&folder).unwrap();
    refusal.check(
        &[&bad, &folder],
        &[],
        &["/folder: expected files that end in", "found a folder without files"],
    );
    let lz4 = refusal.file("a.jsonl", b"\x04\x22\x4d\x18");
    refusal.check(&[&bad, &lz4], &[], &["found lz4", "lz4cat"]);
    let nothing = refusal.file("nothing.gz", "");
    refusal.check(
        &[&bad, &nothing],
        &[],
        &["nothing.gz: expected gzip data (by file name), found an empty file"],
    );
    let misnamed = refusal.file("misnamed.gz", "{}");
    refusal.check(
        &[&bad, &misnamed],
        &[],
        &["misnamed.gz", "expected gzip data (by file name), found other data"],
    );
    let misnamed = refusal.file("misnamed.zst", "{}");
    refusal.check(
        &[&bad, &misnamed],
        &[],
        &["misnamed.zst", "expected Zstandard data (by file name), found other data"],
    );
}

#[test]
fn options_are_checked_before_any_work() {
    let refusal = Refusal::new();
    let bad = refusal.file("bad.jsonl", "bad\n");
    let check = |more: &[&str], words: &[&str]| refusal.check(&[&bad], more, words);
    check(&["--tokenizer", "gpt5"], &["--tokenizer: expected gpt2", "found 'gpt5'"]);
    check(&["--workers", "0"], &["--workers: expected at least 1", "found 0"]);
    check(&["--workers", "1025"], &["--workers: expected", "at most 1024, found 1025"]);
    check(&["--json-key", ""], &["--json-key"]);
    check(&["--json-key", "../x"], &["--json-key"]);
    check(&["--line-max", "2GiB"], &["--line-max: expected", "found 2 GiB"]);
    check(&["--vocab-file", "v.json"], &["--vocab-file: expected both", "found no --merge-file"]);
    check(&["--vocab-file", "no.json", "--merge-file", "no.txt"], &["no.json", "no such file"]);
    let taken = bad.to_str().unwrap();
    check(&["--report", taken], &["bad.jsonl", "already exists"]);
    let stdin = Path::new("-");
    refusal.check(
        &[stdin, stdin],
        &[],
        &["read -: expected each stream once, found the same input twice"],
    );
    refusal.check(&[&bad, &bad], &[], &["the same input twice", "--allow-repeats"]);
    // Messages of clap, which are longer than one line.
    for unknown in [vec!["--json-in", "x"], vec!["--json-in", "x", "--out", "y", "--shuffled"]] {
        let output = preprocess(&unknown).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains("Usage"), "{}", stderr(&output));
    }
}

#[test]
fn long_lines_are_refused() {
    let refusal = Refusal::new();
    let long = format!("{{\"text\":\"{}\"}}", "a".repeat(300_000));
    let limit = ["--line-max", "100KB"];
    let words = ["line 3 (byte 32 of the file)", "expected a line of at most 97.7 KiB"];
    let input = refusal.file("in.jsonl", format!("{GOOD}{GOOD}{long}\n{GOOD}"));
    refusal.check(&[&input], &limit, &words);
    let endless = refusal.file("endless.jsonl", format!("{GOOD}{GOOD}{}", "a".repeat(5_000_000)));
    refusal.check(&[&endless], &limit, &words);
}

/// An error of the system is reported once, with the name of the file.
#[test]
fn system_errors_are_reported_once() {
    let refusal = Refusal::new();
    let (input, folder) = (refusal.file("in.jsonl", GOOD), refusal.folder.path().to_str().unwrap());
    let vocab = ["--vocab-file", folder, "--merge-file", folder];
    refusal.check(&[&input], &vocab, &[folder, "Is a directory (os error 21)"]);
    let under_a_file = input.join("p");
    let outs =
        [(under_a_file.to_str().unwrap(), "Not a dir"), ("s3://b/p", "expected a path in a file")];
    for (out, expected) in outs {
        let arguments = ["--json-in", input.to_str().unwrap(), "--out", out];
        let message = stderr(&preprocess(&arguments).output().unwrap());
        assert_eq!(message.matches(expected).count(), 1, "{message}");
    }
    let closed = refusal.file("closed.jsonl", GOOD);
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    let [program, prefix] = ["preprocess", "p"].map(|name| refusal.folder.path().join(name));
    fs::copy(env!("CARGO_BIN_EXE_preprocess"), &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["--json-in", closed.to_str().unwrap(), "--out", prefix.to_str().unwrap()]);
    // Root may read all files, so as root the command runs as another user.
    let is_root = fs::read(&closed).is_ok();
    if is_root {
        command.uid(65534).gid(65534);
    }
    let output = match command.output() {
        Err(e) if is_root && matches!(e.kind(), PermissionDenied | InvalidInput) => {
            return skip(&format!("no other user can run a program here: {e}"));
        }
        output => output.unwrap(),
    };
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert_eq!(message.matches("Permission denied").count(), 1, "{message}");
    assert!(message.contains("closed.jsonl"), "{message}");
    assert!(!names(refusal.folder.path()).iter().any(|name| name.contains("p_text")));
}

#[test]
fn outputs_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let (input, prefix) = (folder.path().join("in.jsonl"), folder.path().join("p"));
    fs::write(&input, "bad\n").unwrap();
    for suffix in ["bin", "idx", "manifest.json"] {
        let taken = folder.path().join(format!("p_text_document.{suffix}"));
        fs::write(&taken, "precious").unwrap();
        let arguments = ["--json-in", input.to_str().unwrap(), "--out", prefix.to_str().unwrap()];
        let output = preprocess(&arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let message = stderr(&output);
        assert!(
            message.contains(&format!("p_text_document.{suffix}: already exists")),
            "{message}"
        );
        assert_eq!(fs::read_to_string(&taken).unwrap(), "precious");
        fs::remove_file(&taken).unwrap();
        assert_eq!(names(folder.path()), ["in.jsonl"]);
    }
}

/// A small file system for one test, if this process may mount one.
fn mount(options: &str) -> Option<Mount> {
    let mount = Mount::new(options);
    if let Err(e) = &mount {
        skip(&format!("cannot mount a tmpfs, which takes root: {e}"));
    }
    mount.ok()
}

/// Prints that a test was skipped, and adds a line to the list that FEEDLINE_SKIPPED names.
fn skip(reason: &str) {
    println!("SKIPPED: {reason}");
    if let Some(list) = std::env::var_os("FEEDLINE_SKIPPED") {
        let mut list = fs::OpenOptions::new().append(true).create(true).open(list).unwrap();
        writeln!(list, "preprocess: {reason}").unwrap();
    }
}

#[test]
fn a_full_disk_leaves_no_files() {
    let Some(disk) = mount("size=256k") else { return };
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    fs::write(&input, "{\"text\":\"a b c d e f g h\"}\n".repeat(100_000)).unwrap();
    let prefix = disk.path().join("p");
    let arguments = ["--json-in", input.to_str().unwrap(), "--out", prefix.to_str().unwrap()];
    let output = preprocess(&arguments).output().unwrap();
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("no space left"), "{message}");
    assert!(message.contains("p_text_document"), "{message}");
    assert_eq!(names(disk.path()), [""; 0], "leftover files");
}

/// Commits made before the disk was full are kept, and the run resumes when there is room.
#[test]
fn a_run_resumes_after_a_full_disk() {
    let Some(disk) = mount("size=16m") else { return };
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    let line = format!("{{\"text\":\"{}\"}}\n", "a b c d e f g h".repeat(40));
    fs::write(&input, line.repeat(60_000)).unwrap();
    let run = |prefix: &Path, more: &[&str]| {
        let mut arguments = vec!["--json-in", input.to_str().unwrap()];
        arguments.extend(["--out", prefix.to_str().unwrap(), "--commit-interval", "1ms"]);
        preprocess(&[&arguments, more].concat()).output().unwrap()
    };
    let prefix = disk.path().join("p");
    let full = run(&prefix, &[]);
    let message = stderr(&full);
    assert_eq!(full.status.code(), Some(2), "{message}");
    assert!(
        message.contains("no space left") && message.contains("--resume continues"),
        "{message}"
    );
    let still = run(&prefix, &["--resume"]);
    assert_eq!(still.status.code(), Some(2), "{}", stderr(&still));

    let mut remount = Command::new("mount");
    remount.args(["-o", "remount,size=200m"]).arg(disk.path());
    assert!(remount.status().unwrap().success());
    let done = run(&prefix, &["--resume"]);
    assert!(done.status.success(), "{}", stderr(&done));
    assert!(run(&folder.path().join("p"), &[]).status.success());
    for name in ["bin", "idx", "crc"].map(|end| format!("p_text_document.{end}")) {
        let read = |folder: &Path| fs::read(folder.join(&name)).unwrap();
        assert!(read(disk.path()) == read(folder.path()), "{name} differs");
    }
    assert_eq!(names(disk.path()).len(), 4, "leftover drafts");
}

#[test]
fn a_read_only_folder_is_refused_at_once() {
    let Some(disk) = mount("ro") else { return };
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.jsonl");
    fs::write(&input, "bad\n").unwrap();
    let prefix = disk.path().join("p");
    let arguments = ["--json-in", input.to_str().unwrap(), "--out", prefix.to_str().unwrap()];
    let output = preprocess(&arguments).output().unwrap();
    let message = stderr(&output).to_lowercase();
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("read-only"), "{message}");
}

#[test]
fn megatron_flags_standard_input_and_report() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let arguments = [
        "--input",
        "-",
        "--output-prefix",
        &at("p"),
        "--json-keys",
        "body",
        "--append-eod",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--log-interval",
        "1",
        "--report",
        &at("r.json"),
    ];
    let packed = zstd::encode_all(&b"{\"body\":\"Hello world\"}\n"[..], 1).unwrap();
    for (input, stored_bytes) in [(&b"{\"body\":\"Hello world\"}"[..], 22), (&packed, packed.len())]
    {
        let mut child = preprocess(&arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert!(stderr(&output).contains("1 documents, 3 tokens"), "{}", stderr(&output));
        let message = String::from_utf8(output.stdout).unwrap();
        assert!(message.contains("3.0 per document"), "{message}");
        assert!(message.contains("p_body_document.idx"), "{message}");
        let bin = fs::read(at("p_body_document.bin")).unwrap();
        assert_eq!(bin, [0x88, 0x3c, 0xe3, 0x03, 0x50, 0xc4]);
        let report = fs::read_to_string(at("r.json")).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["tokens"], 3);
        assert_eq!(report["text_bytes"], 11);
        assert_eq!(report["stored_bytes"], stored_bytes);
        assert!(report["tokens_per_s"].as_f64().unwrap() > 0.0);
        for name in names(folder.path()) {
            fs::remove_file(at(&name)).unwrap();
        }
    }
}

#[test]
fn quiet_prints_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (input, prefix) = (folder.path().join("in.jsonl"), folder.path().join("p"));
    fs::write(&input, GOOD).unwrap();
    let arguments = [
        "--json-in",
        input.to_str().unwrap(),
        "--out",
        prefix.to_str().unwrap(),
        "--quiet",
        "--log-interval",
        "1",
    ];
    let output = preprocess(&arguments).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0));
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
}

/// The lengths and CRC-64/NVME are of Hugging Face's `vocab.json` of GPT-2, 1,042,301 bytes, and
/// of OpenAI's `vocab.bpe`, 456,318 bytes.
#[test]
fn the_vocabulary_is_exported_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let export = || preprocess(&["--export-vocab", &at("")]).output().unwrap();
    let output = export();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let [vocab, merges] = ["vocab.json", "merges.txt"].map(|name| fs::read(at(name)).unwrap());
    assert_eq!((vocab.len(), merges.len()), (1_042_301, 456_318));
    assert_eq!(storage::crc64(&vocab), VOCAB_CRC64);
    assert_eq!(storage::crc64(&merges), MERGES_CRC64);
    let again = export();
    assert_eq!(again.status.code(), Some(2));
    assert!(stderr(&again).contains("already exists"), "{}", stderr(&again));

    let spec = |vocab_file, merge_file| preprocess::TokenizerSpec {
        kind: "gpt2".to_owned(),
        vocab_file,
        merge_file,
        ..Default::default()
    };
    let built_in = preprocess::open_tokenizer(&spec(None, None)).unwrap();
    let from_files = spec(Some(at("vocab.json")), Some(at("merges.txt")));
    let from_files = preprocess::open_tokenizer(&from_files).unwrap();
    assert_eq!(built_in.fingerprint(), from_files.fingerprint());
    assert_eq!(built_in.vocab_size(), from_files.vocab_size());
    assert_eq!(from_files.identifiers()["vocab_file"], at("vocab.json"));
}

const VOCAB_CRC64: u64 = 0xe4fb_c728_a178_2d6a;
const MERGES_CRC64: u64 = 0xc282_77e3_6d78_52f0;

/// "Hello world" is 15496 995 in GPT-2's vocabulary, and a newline is 198.
#[test]
fn texts_lists_folders_and_pipes_are_inputs() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(at("in")).unwrap();
    fs::write(at("in/a.json"), "[{\"text\": \"Hello world\"},\n{\"text\": \"\"}]").unwrap();
    fs::write(at("in/b.txt"), "Hello world<n>\r\n\nHello world").unwrap();
    let arguments = ["--json-in", &at("in"), "--out", &at("p"), "--txt-newline", "<n>"];
    let output = preprocess(&arguments).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let ids: Vec<u16> = fs::read(at("p_text_document.bin"))
        .unwrap()
        .chunks(2)
        .map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]))
        .collect();
    assert_eq!(ids, [15496, 995, 15496, 995, 198, 15496, 995]);

    // A pipe with a name, as process substitution of a shell makes.
    let script = "\"$0\" --json-in <(printf '{\"text\":\"Hello world\"}\\n') --out \"$1\"";
    let mut bash = Command::new("bash");
    bash.args(["-c", script, env!("CARGO_BIN_EXE_preprocess"), &at("q")]);
    let output = bash.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(fs::read(at("q_text_document.bin")).unwrap(), [0x88, 0x3c, 0xe3, 0x03]);
}
