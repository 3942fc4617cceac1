//! `feedline` on token files of every format, as a user runs it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::path::Path;
use std::process::Command;

use serde_json::Value;

struct Said {
    code: i32,
    out: String,
    err: String,
}

fn feedline(args: &[&str]) -> Said {
    let output = Command::new(env!("CARGO_BIN_EXE_feedline")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("it exits, no signal ends it");
    Said { code, out: text(output.stdout), err: text(output.stderr) }
}

/// What a run that must succeed printed with `--json`.
fn json(args: &[&str]) -> Value {
    let said = feedline(&[args, &["--json"]].concat());
    assert_eq!(said.code, 0, "{args:?}: {}{}", said.out, said.err);
    serde_json::from_str(&said.out).unwrap()
}

fn golden(name: &str) -> String {
    format!("{}/../tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(name).unwrap()
}

#[test]
fn formats_are_converted_there_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let pair = path(folder.path(), "pair");
    let told = json(&["convert", &golden("legacy/tntidx_i32"), &pair, "--dtype", "uint16"]);
    assert_eq!((&told["from"], &told["documents"]), (&"tntidx".into(), &2.into()), "{told}");
    assert_eq!(feedline(&["check", &pair]).code, 0, "it has a manifest that agrees");

    let paddle = path(folder.path(), "p");
    json(&["convert", &format!("{pair}.bin"), &paddle, "--to", "paddle"]);
    for suffix in ["_ids.npy", "_idx.npz"] {
        let due = read(&golden(&format!("legacy/paddle{suffix}")));
        assert_eq!(read(&format!("{paddle}{suffix}")), due, "{suffix}");
    }
    let back = path(folder.path(), "back");
    json(&["convert", &format!("{paddle}_idx.npz"), &back]);
    for suffix in [".bin", ".idx"] {
        assert_eq!(read(&format!("{back}{suffix}")), read(&format!("{pair}{suffix}")), "{suffix}");
    }
    let again = feedline(&["convert", &paddle, &back]);
    assert_eq!(again.code, 2, "{}", again.out);
    assert!(again.err.contains("exists already"), "{}", again.err);
}

#[test]
fn what_cannot_be_converted_says_why_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = path(folder.path(), "out");
    let context = golden("cpm2/demo_document_context");
    for (args, due) in [
        (vec!["convert", &context, &out], "feedline repair"),
        (vec!["convert", "/nowhere/x", &out], "/nowhere/x"),
        (vec!["convert", &context, &out, "--to", "dolma"], "a format that is written"),
        (vec!["convert", &context, &out, "--to", "numpy"], "due one of mmididx"),
        (vec!["convert", &context, &out, "--from", "paddle"], "_ids.npz"),
    ] {
        let said = feedline(&args);
        assert_eq!(said.code, 2, "{args:?}: {}", said.out);
        assert!(said.err.contains(due), "{args:?}: {}", said.err);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
