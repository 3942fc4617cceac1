//! Long commands show their progress if standard error is a terminal, and print nothing otherwise.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use indexed::{Builder, Dtype};
use storage::{Key, open_url};

/// Reports a skipped test, also in the file that the test report reads.
#[expect(clippy::print_stdout, reason = "a skipped test must be seen")]
fn skip(why: &str) {
    use std::io::Write as _;
    println!("SKIPPED: {why}");
    if let Some(list) = std::env::var_os("FEEDLINE_SKIPPED") {
        let mut list = fs::OpenOptions::new().append(true).create(true).open(list).unwrap();
        writeln!(list, "tools: {why}").unwrap();
    }
}

/// A dataset, a damaged one, and one of nanoGPT.
fn data(folder: &Path) {
    let store = open_url(folder.to_str().unwrap()).unwrap();
    let mut builder = Builder::create(&store, &Key::new("a").unwrap(), Dtype::U16).unwrap();
    for document in 0..50_u32 {
        builder.add_sequence(&[document; 300]).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let bin = fs::read(folder.join("a.bin")).unwrap();
    fs::write(folder.join("short.bin"), &bin[..bin.len() - 9]).unwrap();
    fs::copy(folder.join("a.idx"), folder.join("short.idx")).unwrap();
    fs::write(folder.join("nano.bin"), &bin).unwrap();
}

/// Commands, and the start of their progress line.
const VERBS: [(&str, &str); 9] = [
    ("merge --input a a --out m", "merge [----"),
    ("split a --split 60,30,10 --out s", "split [----"),
    ("convert nano.bin c", "convert [----"),
    ("repair short -o r", "repair [----"),
    ("check a", "check [----"),
    ("inspect nano.bin", "inspect [----"),
    ("samples a --seq-length 16", "samples [----"),
    ("index build a --seq-length 16 --data-cache-path i", "order 1, train of a: 0 B"),
    ("materialize a --seq-length 16 --out x", "materialize [----"),
];

#[test]
fn terminal_shows_a_bar() {
    // script(1) gives the command a terminal, and records its output.
    let script = |command: &str, kept: &str| {
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", command, kept]).env("SHELL", "/bin/sh");
        script.stdin(Stdio::null()).stdout(Stdio::null());
        script
    };
    let tried = script("true", "/dev/null").stderr(Stdio::null()).status();
    if !tried.is_ok_and(|status| status.success()) {
        return skip("the bars: there is no script(1) that makes a terminal");
    }
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    for (verb, expected) in VERBS {
        let command = format!("{} {verb} --json > told", env!("CARGO_BIN_EXE_feedline"));
        let status = script(&command, "shown").current_dir(folder.path()).status().unwrap();
        let shown =
            String::from_utf8_lossy(&fs::read(folder.path().join("shown")).unwrap()).into_owned();
        assert!(status.success() && shown.contains(expected), "{verb}: {shown}");
        // The bar is removed at the end.
        let last = shown.rsplit('\r').find(|part| part.starts_with("\x1b[K")).unwrap();
        assert_eq!(last.lines().next(), Some("\x1b[K"), "{verb}: {shown}");
        let report = fs::read(folder.path().join("told")).unwrap();
        assert!(serde_json::from_slice::<serde_json::Value>(&report).is_ok(), "{verb}");
    }
}

#[test]
fn nothing_is_shown_without_a_terminal() {
    let folder = tempfile::tempdir().unwrap();
    data(folder.path());
    for (verb, _) in VERBS {
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        let command = command.args(verb.split(' ')).current_dir(folder.path());
        let Output { status, stderr, .. } = command.output().unwrap();
        assert!(status.success() && stderr.is_empty(), "{verb}: {status}");
    }
}
