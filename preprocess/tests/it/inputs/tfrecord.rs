//! TFRecord files as inputs: files of another writer, and a resumed run.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use crate::resume::{files, signal, wait_until};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tfrecord").join(name)
}

fn texts() -> Vec<Value> {
    let manifest = fs::read(golden("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    manifest["texts"].as_array().unwrap().clone()
}

fn command(input: &Path, out: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_preprocess"));
    command.arg("--json-in").arg(input).arg("--out").arg(out.join("p")).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn run(input: &Path, out: &Path, more: &[&str]) -> Vec<(String, Vec<u8>)> {
    let output = command(input, out, more).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    files(out)
}

#[track_caller]
fn refused(output: &Output, expected: &str) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(expected), "{text}\nexpected {expected}");
}

#[test]
fn texts_match_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A list of one string is that string: in an example they are the same.
    let line = |values: &Value| match values.as_array().unwrap().as_slice() {
        [one] => json!({ "text": one }).to_string() + "\n",
        _ => json!({ "text": values }).to_string() + "\n",
    };
    let lines: String = texts().iter().map(line).collect();
    fs::write(at("a.jsonl"), &lines).unwrap();
    let records = fs::read(golden("text.tfrecord")).unwrap();
    fs::create_dir(at("folder")).unwrap();
    for (name, bytes) in [("1.tfrecord-00000-of-00002", &records[..]), ("vocab.txt.bak", b"x")] {
        fs::write(at("folder").join(name), bytes).unwrap();
    }
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&records).unwrap();
    fs::write(at("a.tfrecord.gz"), gzip.finish().unwrap()).unwrap();
    fs::write(at("unnamed"), &records).unwrap();
    let output = command(&golden("text.tfrecord"), &at("no"), &["--split-sentences"]).output();
    let expected = "text.tfrecord, line 2 (byte 57 of the file), at byte 12 of the line";
    refused(&output.unwrap(), expected);
    for more in [&[][..], &["--lists", "joined", "--append-eod"]] {
        let expected = run(&at("a.jsonl"), &at("expected"), more);
        assert_eq!(expected.iter().filter(|(name, _)| name.ends_with(".bin")).count(), 1);
        for input in [golden("text.tfrecord"), at("a.tfrecord.gz"), at("unnamed"), at("folder")] {
            let more = [more, &["--block-bytes", "60", "--workers", "2"]].concat();
            assert_eq!(run(&input, &at("out"), &more), expected, "{}", input.display());
            fs::remove_dir_all(at("out")).unwrap();
        }
        fs::remove_dir_all(at("expected")).unwrap();
    }
}

#[test]
fn token_ids_of_bert_are_read_with_the_null_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let null = |size: &'static str| ["--tokenizer-type", "NullTokenizer", "--vocab-size", size];
    let manifest = fs::read(golden("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let mut lines = String::new();
    for document in manifest["documents"].as_array().unwrap() {
        let words = |sentence: &Value| {
            let ids = sentence.as_array().unwrap().iter();
            ids.map(Value::to_string).collect::<Vec<_>>().join(" ")
        };
        let sentences: Vec<_> = document.as_array().unwrap().iter().map(words).collect();
        lines += &(json!({ "text": sentences }).to_string() + "\n");
    }
    let as_text = folder.path().join("a.jsonl");
    fs::write(&as_text, lines).unwrap();
    for more in [&[][..], &["--append-eod"]] {
        let more = [&null("30522")[..], more].concat();
        let expected = run(&as_text, &folder.path().join("expected"), &more);
        for name in ["bert.tfrecord", "unpacked.tfrecord"] {
            assert_eq!(run(&golden(name), &folder.path().join("out"), &more), expected, "{name}");
            fs::remove_dir_all(folder.path().join("out")).unwrap();
        }
        fs::remove_dir_all(folder.path().join("expected")).unwrap();
    }
    let small = command(&golden("bert.tfrecord"), folder.path(), &null("2000")).output().unwrap();
    refused(&small, "of the tokenizer, found id 2465 (hint: choose the tokenizer of the file)");
}

#[test]
fn invalid_records_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let records = fs::read(golden("text.tfrecord")).unwrap();
    let input = folder.path().join("a.tfrecord");
    let check = |bytes: &[u8], more: &[&str], expected: &str| {
        fs::write(&input, bytes).unwrap();
        refused(&command(&input, folder.path(), more).output().unwrap(), expected);
    };
    check(&records, &["--json-keys", "title"], "a feature 'title' of bytes, found");
    check(&records, &["--json-keys", "id"], "a feature 'id' of bytes, found");
    check(&records, &["--input-format", "jsonl"], "the format of --input-format, found TFRecord");
    check(&records[..records.len() - 1], &[], "expected a complete record, found end of file");
    let mut flipped = records.clone();
    *flipped.last_mut().unwrap() ^= 1;
    check(&flipped, &[], "masked CRC-32C");
    check(&flipped, &["--block-bytes", "60"], "masked CRC-32C");
    check(b"{\"text\": \"\"}\n", &[], "of the length");
    let bert = fs::read(golden("bert.tfrecord")).unwrap();
    check(&bert, &["--split-sentences"], "the token ids of BERT's create_pretraining_data.py");
}

/// A killed run resumes at a record, and writes the same files as one that was not killed.
#[test]
fn a_killed_run_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let records = fs::read(golden("text.tfrecord")).unwrap();
    fs::write(at("a.tfrecord"), records.repeat(20_000)).unwrap();
    let small = ["--block-bytes", "2000", "--commit-interval", "1ms", "--workers", "1"];
    let expected = run(&at("a.tfrecord"), &at("expected"), &[]);
    let mut killed = command(&at("a.tfrecord"), &at("out"), &small).spawn().unwrap();
    let journal = at("out").join(".p_text_document.journal.draft");
    wait_until(&mut killed, || {
        fs::read_to_string(&journal).is_ok_and(|text| text.matches('\n').count() >= 2)
    });
    signal(&killed, "STOP");
    assert!(killed.try_wait().unwrap().is_none(), "the run ended before it was stopped");
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert_eq!(run(&at("a.tfrecord"), &at("out"), &["--resume"]), expected);
}
