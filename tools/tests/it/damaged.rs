//! Datasets with a flipped bit, and the commands that make other datasets of them: none of these
//! writes checksums that match the damage.

use std::path::Path;
use std::process::Command;

use preprocess::{PreprocessOptions, Shard};

struct CommandOutput {
    code: Option<i32>,
    out: String,
    err: String,
}

fn feedline(args: &[&str]) -> CommandOutput {
    let output = Command::new(env!("CARGO_BIN_EXE_feedline")).args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    CommandOutput { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

/// Tokenizes documents of several lengths; returns the prefix.
fn tokens(folder: &Path, name: &str, change: impl FnOnce(&mut PreprocessOptions)) -> String {
    let jsonl = folder.join("in.jsonl");
    let line = |n: usize| format!("{{\"text\": \"{}\"}}\n", "a few words ".repeat(1 + n % 7));
    std::fs::write(&jsonl, (0..50).map(line).collect::<String>()).unwrap();
    let mut options = PreprocessOptions::new(vec![path(folder, "in.jsonl")], path(folder, name));
    change(&mut options);
    preprocess::run(&options, &mut |_| {}).unwrap();
    path(folder, &format!("{name}_text_document"))
}

/// Flips a bit of a file while `work` runs.
fn with_flip(file: &str, bit: usize, work: impl FnOnce(&str)) {
    let whole = std::fs::read(file).unwrap();
    let mut bytes = whole.clone();
    let bit = bit % (8 * bytes.len());
    bytes[bit / 8] ^= 1 << (bit % 8);
    std::fs::write(file, bytes).unwrap();
    work(&format!("{file}: bit {bit}"));
    std::fs::write(file, whole).unwrap();
}

/// The files of a command, by its output prefix.
fn output_files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.contains("made")).collect()
}

/// 104 flips, at positions that are spread over both files.
#[test]
fn every_flipped_bit_is_found_and_its_file_named() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path(), "a", |_| {});
    let other = tokens(folder.path(), "b", |_| {});
    let made = path(folder.path(), "made");
    let mut bit = 7;
    for _ in 0..13 {
        for suffix in [".bin", ".idx"] {
            for args in [
                vec!["split", &prefix, "--split", "8,1,1", "--out", &made],
                vec!["convert", &prefix, &made, "--to", "paddle"],
                vec!["materialize", &prefix, "--out", &made, "--seq-length", "8"],
                vec!["merge", "--verify", "--out", &made, "--input", &other, &prefix],
            ] {
                bit += 7919;
                with_flip(&format!("{prefix}{suffix}"), bit, |context| {
                    let output = feedline(&args);
                    assert_eq!(output.code, Some(2), "{args:?}, {context}: {}", output.out);
                    let name = format!("a_text_document{suffix}");
                    assert!(output.err.contains(&name), "{args:?}, {context}: {}", output.err);
                    assert_eq!(output_files(folder.path()), [""; 0], "{args:?}, {context}");
                });
            }
        }
    }
}

/// A merge that does not read the tokens copies their checksums: the damage is found in its output,
/// if not by the merge.
#[test]
fn merge_copies_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = tokens(folder.path(), "a", |_| {});
    let other = tokens(folder.path(), "b", |_| {});
    for nth in 0..10 {
        let made = path(folder.path(), &format!("made-{nth}"));
        let args = ["merge", "--out", &made, "--input", &other, &prefix];
        with_flip(&format!("{prefix}.idx"), 104_729 * nth, |context| {
            let output = feedline(&args);
            assert_eq!(output.code, Some(2), "{context}: {}", output.out);
            assert!(output.err.contains("a_text_document.idx"), "{context}: {}", output.err);
        });
        with_flip(&format!("{prefix}.bin"), 104_729 * nth, |context| {
            let output = feedline(&args);
            if output.code == Some(2) {
                // Where the kernel cannot copy, the bytes are read.
                assert!(output.err.contains("a_text_document.bin"), "{context}: {}", output.err);
                return;
            }
            assert_eq!(output.code, Some(0), "{context}: {}", output.err);
            assert!(output.out.contains("--verify"), "{context}: {}", output.out);
            let output = feedline(&["check", &made]);
            assert_eq!(output.code, Some(1), "{context}: {}", output.out);
            assert!((output.out + &output.err).contains(".bin"), "{context}");
        });
    }
}

/// Shards of one corpus, of which one was made with other settings.
#[test]
fn shards_of_other_settings_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let shard = |name: &str, index, append_eod| {
        tokens(folder.path(), name, |options| {
            options.shard = Some(Shard { index, count: 2 });
            options.append_eod = append_eod;
        });
        path(folder.path(), &format!("{name}_{index:05}-of-00002_text_document"))
    };
    let (first, second, other) = (shard("p", 0, true), shard("p", 1, true), shard("q", 1, false));
    let made = path(folder.path(), "made");
    let output = feedline(&["merge", "--out", &made, "--input", &first, &other]);
    assert_eq!(output.code, Some(2), "{}", output.out);
    assert!(output.err.contains("append_eod true, found false"), "{}", output.err);
    let output = feedline(&["merge", "--out", &made, "--input", &first, &second]);
    assert_eq!(output.code, Some(0), "{}", output.err);
}
