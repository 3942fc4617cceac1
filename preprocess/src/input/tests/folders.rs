//! Entries of a folder or a pattern that are not read: those that look like documents are refused.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;

use super::*;

fn refused(folder: &Path, wanted: &str, parts: &[&str]) {
    let message = names(folder, &[wanted]).unwrap_err();
    for part in parts {
        assert!(message.contains(part), "{wanted}: {message}");
    }
}

#[test]
fn endings_ignore_case() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "A.JSONL", "{}");
    write(&folder, "B.Json.GZ", gzip(b"[{}]"));
    write(&folder, "C.TXT", "text");
    write(&folder, "README.MD", "about");
    let inputs = find(&[folder.path().to_owned()], &InputOptions::default());
    let shapes: Vec<_> = inputs.iter().map(|input| format!("{:?}", input.shape)).collect();
    assert_eq!(inputs.len(), 3, "{inputs:?}");
    assert!(shapes[0] == "JsonLines" && shapes[1] == "JsonArray", "{shapes:?}");
    assert!(shapes[2].starts_with("Text"), "{shapes:?}");
}

#[test]
fn names_that_are_not_utf8_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "a.jsonl", "{}");
    let bad = folder.path().join(OsStr::from_bytes(b"b\xff.jsonl"));
    fs::write(&bad, "{}").unwrap();
    refused(folder.path(), "@", &["unreadable entries (1)", "name is not UTF-8"]);
    refused(folder.path(), "@/*.jsonl", &["not UTF-8"]);
    refused(folder.path(), "@/**/*.jsonl", &["not UTF-8"]);
    // Entries without documents are skipped.
    assert_eq!(names(folder.path(), &["@/a*"]).unwrap(), ["a.jsonl"]);
    fs::rename(&bad, folder.path().join(OsStr::from_bytes(b"b\xff.md"))).unwrap();
    assert_eq!(names(folder.path(), &["@"]).unwrap(), ["a.jsonl"]);
    let inner = folder.path().join(OsStr::from_bytes(b"x\xff"));
    fs::create_dir(&inner).unwrap();
    assert_eq!(names(folder.path(), &["@"]).unwrap(), ["a.jsonl"]);
    fs::write(inner.join("c.txt"), "text").unwrap();
    refused(folder.path(), "@", &["not UTF-8"]);
}

#[test]
fn links_are_followed_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    write(&folder, "a.jsonl", "{}");
    write(&folder, "x/b.jsonl", "{}");
    write(&elsewhere, "c.jsonl", "{}");
    let link = |name: &str, to: &Path| symlink(to, folder.path().join(name)).unwrap();
    let unlink = |name: &str| fs::remove_file(folder.path().join(name)).unwrap();
    link("l.jsonl", &elsewhere.path().join("c.jsonl"));
    let all = ["a.jsonl", "l.jsonl", "x/b.jsonl"];
    assert_eq!(names(folder.path(), &["@"]).unwrap(), all);
    // A link to a folder whose files are read anyway is skipped.
    link("latest", &folder.path().join("x"));
    assert_eq!(names(folder.path(), &["@"]).unwrap(), all);
    unlink("latest");
    link("more", elsewhere.path());
    refused(folder.path(), "@", &["more (link to a folder)", "follows links"]);
    refused(folder.path(), "@/**/*.jsonl", &["more (link to a folder)"]);
    assert_eq!(
        names(folder.path(), &["@/*"]).unwrap(),
        ["a.jsonl", "l.jsonl", "more/c.jsonl", "x/b.jsonl"]
    );
    fs::remove_file(elsewhere.path().join("c.jsonl")).unwrap();
    unlink("l.jsonl");
    assert_eq!(names(folder.path(), &["@"]).unwrap(), ["a.jsonl", "x/b.jsonl"]);
    link("gone.jsonl", &folder.path().join("none"));
    refused(folder.path(), "@", &["gone.jsonl (dangling link)"]);
    refused(folder.path(), "@/*.jsonl", &["gone.jsonl (dangling link)"]);
    unlink("gone.jsonl");
    link("loop.json", &folder.path().join("loop.json"));
    refused(folder.path(), "@", &["loop.json"]);
    unlink("loop.json");
    link("gone.md", &folder.path().join("none"));
    assert_eq!(names(folder.path(), &["@"]).unwrap(), ["a.jsonl", "x/b.jsonl"]);
    // A file that a pattern names need not exist in every folder.
    assert_eq!(names(folder.path(), &["@/*/b.jsonl"]).unwrap(), ["x/b.jsonl"]);
}

#[test]
fn pipes_and_other_compression_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "a.jsonl", "{}");
    let pipe = folder.path().join("p.jsonl");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    refused(folder.path(), "@", &["p.jsonl (pipe, device or socket)"]);
    refused(folder.path(), "@/*.jsonl", &["p.jsonl"]);
    refused(folder.path(), "@/**/*.jsonl", &["p.jsonl (pipe"]);
    fs::rename(&pipe, folder.path().join("control")).unwrap();
    assert_eq!(names(folder.path(), &["@"]).unwrap(), ["a.jsonl"]);
    write(&folder, "b.jsonl.lz4", "");
    write(&folder, "c.JSON.ZIP", "");
    refused(
        folder.path(),
        "@",
        &["unreadable entries (2): b.jsonl.lz4 (unsupported compression", "c.JSON.ZIP"],
    );
    write(&folder, "d\u{1b}[2J.jsonl.br", "");
    refused(folder.path(), "@", &["d\\u{1b}[2J.jsonl.br"]);
    for more in 0..9 {
        write(&folder, &format!("e{more}.txt.7z"), "");
    }
    refused(folder.path(), "@", &["unreadable entries (12)", "and 7 more"]);
}
