//! Runs `feedline tokenizer train` as a user does.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

const TEXT: &str = "the quick brown fox jumps over the lazy dog, and the dog sleeps over the fox";

fn train(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.current_dir(folder).args(["tokenizer", "train"]);
    command.args(arguments.split_whitespace()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn every_option_is_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let line = json!({ "body": TEXT }).to_string() + "\n";
    fs::write(folder.path().join("in.jsonl"), line.repeat(9)).unwrap();
    let options = "in.jsonl --json-key body --format jsonl --sample 1MiB --seed 3 --type bpe \
        --vocab-size 375 --special-tokens <pad>,<mask> --character-coverage 1 --split-digits \
        --workers 2 --json --out made/here";
    let output = train(folder.path(), options);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["vocab_size"], &report["documents"]), (&json!(375), &json!(9)));
    assert_eq!(report["text_bytes"], json!(9 * TEXT.len()));
    assert!(report["bytes_per_token"].as_f64().unwrap() > 1.0, "{report}");
    for output in report["outputs"].as_array().unwrap() {
        let file = folder.path().join(output["name"].as_str().unwrap());
        assert_eq!(fs::metadata(file).unwrap().len(), output["bytes"].as_u64().unwrap());
    }
    let file = fs::read(folder.path().join("made/here/tokenizer.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    assert_eq!(file["added_tokens"][4]["content"], "<mask>");

    let again = train(folder.path(), options);
    assert_eq!(again.status.code(), Some(2));
    let error = text(&again.stderr);
    assert!(error.contains("expected an empty or absent folder"), "{error}");
}

#[test]
fn nothing_is_written_if_it_cannot_be_trained() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("in.txt"), TEXT).unwrap();
    for (arguments, expected) in [
        ("in.txt --type unigram --vocab-size 9000 --out o", "found 9000"),
        ("in.txt --type unigram --vocab-size 9000 --lowercase --out o", "--type wordpiece"),
        ("absent --type bpe --vocab-size 9000 --out o", "absent"),
        ("in.txt --type ngram --vocab-size 9000 --out o", "byte-bpe"),
    ] {
        let output = train(folder.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments}");
        let error = text(&output.stderr);
        assert!(error.contains(expected), "{arguments}: {error}");
        assert!(!folder.path().join("o").exists(), "{arguments}");
    }
}
