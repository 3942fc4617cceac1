//! The demo corpus compared with Hugging Face's GPT-2 tokenizer, document by document.

mod folder;
mod rule;

use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn preprocess(args: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_preprocess")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn no_document_differs() {
    let python = std::env::var_os("FEEDLINE_PYTHON").map(PathBuf::from);
    let python = python.unwrap_or_else(|| Path::new(ROOT).join(".venv/bin/python"));
    if !python.exists() {
        eprintln!("SKIPPED no_document_differs: no {}; `make test` installs it", python.display());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (jsonl, vocab) = (folder.path().join("corpus.jsonl"), folder.path().join("vocab"));
    let packed = std::fs::read(format!("{ROOT}/demo/data/corpus.jsonl.zst")).unwrap();
    std::fs::write(&jsonl, zstd::decode_all(&packed[..]).unwrap()).unwrap();
    let prefix = folder.path().join("out");
    preprocess(&["--json-in", text(&jsonl), "--out", text(&prefix), "--append-eod"]);
    preprocess(&["--export-vocab", text(&vocab)]);
    let compare = |jsonl: &Path| {
        let script = format!("{ROOT}/tests/readers/hf_tokenize.py");
        let prefix = format!("{}_text_document", text(&prefix));
        let arguments = [&script, text(jsonl), &prefix, text(&vocab), "--append-eod"];
        Command::new(&python).args(arguments).output().unwrap()
    };
    let output = compare(&jsonl);
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{report}{}", String::from_utf8_lossy(&output.stderr));
    assert!(report.contains("0 documents differ"), "{report}");

    // The comparison itself must be able to fail.
    let changed = std::fs::read_to_string(&jsonl).unwrap().replacen("Rust", "Dust", 1);
    std::fs::write(&jsonl, changed).unwrap();
    assert!(!compare(&jsonl).status.success(), "a changed word was not detected");
}
