//! Runs the command `feedline` as a user does, and checks its output and exit codes.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use ckpt::{Blob, Checkpoints, Dtype, Group, TensorData};
use serde_json::{Value, json};
use storage::Key;

struct CommandOutput {
    code: i32,
    out: String,
    err: String,
}

fn feedline(verb: &str, name: &str, more: &[&str]) -> CommandOutput {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    let output = command.arg(verb).arg(name).args(more).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    CommandOutput {
        code: output.status.code().expect("it exits, no signal ends it"),
        out: text(output.stdout),
        err: text(output.stderr),
    }
}

/// Tokenizes three documents; returns the prefix.
fn tokens(folder: &Path) -> String {
    let jsonl = folder.join("in.jsonl");
    let lines = ["Hello world", "", "春風又綠江南岸"];
    let lines: Vec<String> = lines.iter().map(|text| json!({ "text": text }).to_string()).collect();
    std::fs::write(&jsonl, lines.join("\n")).unwrap();
    let out = folder.join("out").to_str().unwrap().to_owned();
    let mut options =
        preprocess::PreprocessOptions::new(vec![jsonl.to_str().unwrap().to_owned()], &out);
    options.append_eod = true;
    preprocess::run(&options, &mut |_| {}).unwrap();
    format!("{out}_text_document")
}

/// Saves two steps of two tensors; returns the folder.
fn checkpoints(folder: &Path) -> String {
    let folder = folder.join("ckpt").to_str().unwrap().to_owned();
    let store = storage::open_url(&folder).unwrap();
    let checkpoints = Checkpoints::open(Arc::clone(&store), Key::root());
    let bytes: Vec<u8> = (0..24_u8).collect();
    for step in [10, 20] {
        let tensor = |name, group, shape| TensorData {
            name,
            group,
            dtype: Dtype::F32,
            shape,
            bytes: &bytes,
        };
        let tensors = [
            tensor("wte.weight", Group::Model, &[2, 3]),
            tensor("wte.weight", Group::ExpAvg, &[2, 3]),
        ];
        let blobs = [Blob { name: "config.toml", bytes: b"[run]" }];
        checkpoints.save(step, &tensors, &blobs, json!({ "samples_consumed": step * 8 })).unwrap();
    }
    folder
}

fn flip(path: &str, place: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[place] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn token_files_are_inspected() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path());
    for name in [prefix.clone(), format!("{prefix}.bin"), format!("{prefix}.idx")] {
        let output = feedline("inspect", &name, &[]);
        assert_eq!(output.code, 0, "{}", output.err);
        assert!(output.out.contains("documents            3"), "{}", output.out);
        assert!(output.out.contains("\"Hello world<|endoftext|>\""), "{}", output.out);
    }
    let value: Value =
        serde_json::from_str(&feedline("inspect", &prefix, &["--json"]).out).unwrap();
    assert_eq!((&value["kind"], &value["documents"]), (&json!("tokens"), &json!(3)));
    assert_eq!(value["first_ids"], json!([15496, 995, 50256]));
    assert_eq!(value["manifest"]["tokenizer"]["vocab_size"], 50257);
}

#[test]
fn damaged_token_files_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path());
    let output = feedline("check", &prefix, &[]);
    assert_eq!((output.code, output.out.starts_with("complete")), (0, true), "{}", output.out);

    flip(&format!("{prefix}.bin"), 1);
    let output = feedline("check", &prefix, &["--json"]);
    let value: Value = serde_json::from_str(&output.out).unwrap();
    assert_eq!((output.code, &value["checked"][0]["ok"]), (1, &json!(false)), "{}", output.out);
    flip(&format!("{prefix}.bin"), 1);
    assert_eq!(feedline("check", &prefix, &[]).code, 0, "intact again");

    let bin = std::fs::read(format!("{prefix}.bin")).unwrap();
    std::fs::write(format!("{prefix}.bin"), &bin[..bin.len() - 2]).unwrap();
    let output = feedline("check", &prefix, &[]);
    assert_eq!(output.code, 1, "{}", output.out);
    assert!(output.out.contains("DAMAGED") && output.out.contains(".bin"), "{}", output.out);
    assert_eq!(feedline("inspect", &prefix, &[]).code, 2, "and it cannot be opened");
}

#[test]
fn checkpoints_are_inspected_and_damage_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let root = checkpoints(folder.path());
    let output = feedline("inspect", &root, &[]);
    assert_eq!(output.code, 0, "{}", output.err);
    for expected in ["10", "20", "complete", "exp_avg", "samples_consumed  160"] {
        assert!(output.out.contains(expected), "no {expected:?} in:\n{}", output.out);
    }
    let output = feedline("check", &root, &[]);
    assert_eq!((output.code, output.out.matches("complete").count()), (0, 2), "{}", output.out);

    let newest = format!("{root}/step-000000000020");
    let one = feedline("inspect", &newest, &["--json"]);
    let value: Value = serde_json::from_str(&one.out).unwrap();
    assert_eq!((&value["kind"], &value["step"]), (&json!("checkpoint"), &json!(20)), "{}", one.err);

    let shard = format!("{newest}/model-00001-of-00001.safetensors");
    let len = std::fs::metadata(&shard).unwrap().len() as usize;
    flip(&shard, len - 1);
    assert_eq!(feedline("check", &newest, &[]).code, 1);
    let output = feedline("check", &root, &[]);
    assert_eq!(output.code, 1, "{}", output.out);
    assert!(output.out.contains("DAMAGED") && output.out.contains("model-00001"), "{}", output.out);

    // A step that lost a file is reported as faulty, and the step before it is the newest.
    std::fs::remove_file(&shard).unwrap();
    let value = feedline("inspect", &root, &["--json"]);
    let value: Value = serde_json::from_str(&value.out).unwrap();
    assert_eq!(value["newest"]["step"], 10);
    assert!(value["steps"][1]["fault"].is_string(), "{value}");
}

#[test]
fn missing_targets_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    for name in [folder.path().join("nothing"), empty, "/".into()] {
        for verb in ["inspect", "check"] {
            let output = feedline(verb, name.to_str().unwrap(), &[]);
            assert_eq!((output.code, output.out.as_str()), (2, ""), "{name:?}");
            assert!(output.err.starts_with("error: "), "{}", output.err);
        }
    }
}

/// An endpoint without a scheme, one with a secret, and files without certificates.
#[test]
fn variables_of_aws_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("notes.txt");
    std::fs::write(&text, "-----BEGIN CERTIFICATE-----\nno base64 !\n-----END CERTIFICATE-----\n")
        .unwrap();
    let (text, absent) = (text.to_str().unwrap(), folder.path().join("absent.pem"));
    // Nothing listens there.
    let (plain, own) = ("s3://b/a?tries=1", "s3://b/a?tries=1&endpoint=https://127.0.0.1:1");
    for (url, name, value, expected) in [
        (plain, "AWS_ENDPOINT_URL_S3", "h:80", "expected http:// or https://, found 'h:80'"),
        (plain, "AWS_ENDPOINT_URL", "https://key:guessed@h", "must not contain credentials"),
        (own, "AWS_CA_BUNDLE", text, "expected a file with certificates in ca= or AWS_CA_BUNDLE"),
        (own, "AWS_CA_BUNDLE", absent.to_str().unwrap(), "absent.pem"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        command.args(["inspect", url]);
        for other in ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"] {
            command.env_remove(other);
        }
        let output = command.env(name, value).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {err}");
        assert!(err.contains(expected) && !err.contains("guessed"), "{name}: {err}");
    }
}
