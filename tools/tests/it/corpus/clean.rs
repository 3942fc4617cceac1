//! Runs `feedline clean` as a user does, and checks its files, output and exit codes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};
use storage::testing::fault_store::Mount;

fn clean(folder: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.current_dir(folder).arg("clean").args(["--json-in", "in.jsonl"]);
    command.args(more).output().unwrap()
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

fn folder_with(texts: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<String> = texts.iter().map(|text| json!({ "text": text }).to_string()).collect();
    fs::write(folder.path().join("in.jsonl"), lines.join("\n")).unwrap();
    folder
}

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

const LONG: &str = "the quick brown fox jumps over the lazy dog, again and again and once more";

#[test]
fn every_option_is_accepted() {
    let more = format!("{LONG}, and more");
    let texts_in = [LONG, &more, LONG, "short", "=======--------", "春眠不覺曉，處處聞啼鳥。"];
    let folder = folder_with(&texts_in);
    fs::write(folder.path().join("list"), "example.com\n").unwrap();
    let options = "--out o.jsonl --exact-dedup --near-dedup --fold --jaccard 0.6 --measure union \
        --shingle 4 --shingle-unit char --bands 25 --rows 4 --two-passes --scratch . \
        --min-chars 6 --max-chars 1000 --min-tokens 2 --tokenizer gpt2 --min-letters 0.5 \
        --max-replacement 0.1 --max-one-char 0.5 --max-repeated-lines 0.5 --min-script latin=0.5 \
        --reject javascript=256 --blacklist-urls list --url-key link --fix-spaces \
        --split 1,0,0 --seed 7 --dropped d.jsonl --report r.json --workers 2 --line-max 1MiB";
    let output = clean(folder.path(), &options.split_whitespace().collect::<Vec<_>>());
    let (out, err) = texts(&output);
    assert!(output.status.success(), "{err}");
    for expected in ["  1 (16.67 %)", "exact-duplicate", "near-duplicate", "o_train.jsonl"] {
        assert!(out.contains(expected), "no {expected:?} in:\n{out}");
    }
    let expected = ["d.jsonl", "in.jsonl", "list", "o_train.jsonl", "r.json"];
    assert_eq!(names(folder.path()), expected);
    let kept = fs::read_to_string(folder.path().join("o_train.jsonl")).unwrap();
    assert_eq!(kept, json!({ "text": LONG }).to_string() + "\n");
    let causes: Vec<Value> = fs::read_to_string(folder.path().join("d.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["cause"].clone())
        .collect();
    assert_eq!(causes, ["near-duplicate", "exact-duplicate", "few-chars", "few-letters", "script"]);
    let report = fs::read_to_string(folder.path().join("r.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!((&report["documents"], &report["kept"]), (&json!(6), &json!(1)));
    assert_eq!(report["dropped"]["script"]["examples"][0]["line"], 6);

    let output = clean(folder.path(), &["--out", "again.jsonl", "--min-chars", "6", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["documents"], &report["kept"]), (&json!(6), &json!(5)));
}

#[test]
fn refusals_name_what_was_expected() {
    let folder = folder_with(&["a"]);
    let check = |more: &str, words: &[&str]| {
        let output = clean(folder.path(), &more.split_whitespace().collect::<Vec<_>>());
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{err}");
        for word in words {
            assert!(err.contains(word), "no {word:?} in: {err}");
        }
        assert_eq!(names(folder.path()), ["in.jsonl"]);
    };
    check("", &["--out"]);
    check("--out o --jaccard 0.5", &["--near-dedup"]);
    check("--out o --near-dedup --jaccard 1.5", &["--jaccard: expected a fraction", "found 1.5"]);
    check("--out o --split 1,2", &["three weights, such as 949,50,1"]);
    check(
        "--out o --min-script klingon=0.5",
        &["--min-script: expected a Unicode script", "found 'klingon'"],
    );
    check("--out o --json-key body", &["in.jsonl, line 1", "only 'text'", "the key 'body'"]);
    check("--out o --blacklist-urls none", &["none: no such file"]);
    check("--out o --report in.jsonl", &["in.jsonl: already exists"]);
}

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

#[test]
fn full_disk_leaves_no_files() {
    let disk = match Mount::new("size=256k") {
        Ok(disk) => disk,
        Err(e) => return skip(&format!("a tmpfs could not be mounted, which takes root: {e}")),
    };
    let full = disk.path().to_str().unwrap();
    let lines: Vec<String> = (0..150_000).map(|nth| format!("{nth} {}", nth * 7919)).collect();
    let folder = folder_with(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let to_disk = format!("{full}/o");
    for (arguments, words) in [
        (vec!["--out", &to_disk], ["no space left", "o.jsonl"]),
        (vec!["--out", "o", "--near-dedup", "--scratch", full], ["no space left", "--scratch"]),
        (vec!["--out", "o", "--dropped", &to_disk, "--min-chars", "99"], ["no space left", "/o"]),
    ] {
        let output = clean(folder.path(), &arguments);
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(words.iter().all(|word| err.contains(word)), "{err}");
        assert_eq!(names(folder.path()), ["in.jsonl"]);
        assert_eq!(names(disk.path()), [""; 0], "files remain");
    }
}
