//! The documents that `clean` keeps and drops, compared with an independent script in Python.

use std::path::PathBuf;
use std::process::{Command, Output};

use preprocess::clean::{CleanOptions, NearOptions, clean};
use serde_json::json;

/// Any Python: this use of the script needs no packages.
fn python() -> Command {
    let named = std::env::var_os("FEEDLINE_PYTHON").map(PathBuf::from);
    Command::new(named.unwrap_or_else(|| PathBuf::from("python3")))
}

/// Sentences in which a few words change, and some duplicates.
fn corpus() -> String {
    let mut lines = String::new();
    for nth in 0_u32..400 {
        let (kind, change) = (nth * 7919 % 61, nth * 31 % 5);
        let words = (0..80).map(|word| match word {
            7 | 30 | 63 => format!("w{}", word * change),
            _ => format!("{}春{}", word * kind, word + kind),
        });
        let text = words.collect::<Vec<_>>().join(" ");
        lines += &json!({ "text": text, "nth": nth }).to_string();
        lines += "\n";
    }
    lines
}

fn check(folder: &std::path::Path) -> Option<Output> {
    let script = tests::root().join("tests/readers/openwebtext_clean.py");
    let files = ["in.jsonl", "out.jsonl", "dropped.jsonl"].map(|name| folder.join(name));
    let output = python().arg(script).args(files).output();
    if output.is_err() {
        tests::skip("clean", "no python3");
    }
    output.ok()
}

#[test]
fn python_finds_the_same_duplicates() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("in.jsonl"), corpus()).unwrap();
    let mut options = CleanOptions::new(vec![path("in.jsonl")], path("out"));
    (options.exact, options.near) = (true, Some(NearOptions::default()));
    options.dropped = Some(path("dropped.jsonl"));
    let report = clean(&options, &mut |_| {}).unwrap();
    assert_eq!(report.dropped.len(), 2, "both kinds of duplicates: {:?}", report.dropped);
    let Some(output) = check(folder.path()) else { return };
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("400 documents") && said.contains("0 faults"), "{said}");

    // The checker must detect a lost line.
    let kept = std::fs::read_to_string(path("out.jsonl")).unwrap();
    let (_, rest) = kept.split_once('\n').unwrap();
    std::fs::write(path("out.jsonl"), rest).unwrap();
    assert_eq!(check(folder.path()).unwrap().status.code(), Some(1));
}
