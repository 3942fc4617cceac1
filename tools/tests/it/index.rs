//! Runs `feedline index build` and `feedline materialize` as a user does.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use indexed::{GptIndex, GptIndexConfig, IndexedDataset, Split};
use serde_json::Value;
use storage::Key;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

fn feedline(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_feedline")).current_dir(folder).args(args).output().unwrap()
}

fn done(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.is_empty(), "progress without a terminal: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// All files of a folder, except the seals.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = entries.map(|path| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())
    });
    named.filter(|(name, _)| !name.ends_with("feedline.json")).collect()
}

fn corpora(folder: &str, names: &[&str]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for name in names {
        for suffix in ["bin", "idx"] {
            let file = format!("{name}.{suffix}");
            fs::copy(golden(folder).join(&file), copy.path().join(&file)).unwrap();
        }
    }
    copy
}

/// The files that Megatron's builder writes for the same settings, by name and byte.
#[test]
fn index_files_equal_megatrons() {
    let runs: [(&str, &[&str]); 7] = [
        ("one_epoch_none", &["corpus_a", "--split", "949,50,1"]),
        ("multi_epoch_sep", &["corpus_a", "--split", "90,8,2", "--samples", "190,9,2"]),
        ("multi_epoch_nosep", &["corpus_a", "--split", "90,8,2", "--samples", "220,11,2"]),
        (
            "no_extra_token",
            &["corpus_a", "--split", "90,8,2", "--samples", "120,9,2", "--no-extra-token"],
        ),
        (
            "blend_weighted",
            &["30", "corpus_a", "70", "corpus_b", "--split", "90,10,0", "--samples", "200,20,0"],
        ),
        ("blend_exhaustive", &["corpus_a", "corpus_b", "--split", "90,10,0"]),
        (
            "seed_7_seq_5",
            &["corpus_a", "--split", "90,6,4", "--samples", "400,20,5", "--seed", "7"],
        ),
    ];
    for (name, settings) in runs {
        let copy = corpora("gpt_cache", &["corpus_a", "corpus_b"]);
        let expected = files(&golden("gpt_cache").join(name));
        let (of, text) =
            expected.iter().find(|(name, _)| name.ends_with("description.txt")).unwrap();
        fs::write(copy.path().join("tokenizer.txt"), text).unwrap();
        let seq_length = if name == "seed_7_seq_5" { "5" } else { "16" };
        let more = ["--seq-length", seq_length, "--tokenizer-from", "tokenizer.txt", "--json"];
        let args = [&["index", "build"], settings, &more, &["--data-cache-path", "cache"]].concat();
        // The second run finds them, and reports the same.
        let report = [0, 1].map(|_| {
            let mut report = done(&feedline(copy.path(), &args));
            for order in report["orders"].as_array_mut().unwrap() {
                assert!(order["elapsed_s"].take().is_f64());
            }
            report
        });
        assert_eq!(report[0], report[1], "{name}");
        let found = files(&copy.path().join("cache"));
        assert!(
            found.keys().eq(expected.keys()),
            "{name}, with the tokenizer of {of}: {:?}",
            found.keys()
        );
        assert!(found == expected, "{name}");
    }
}

/// A part of which no samples are asked may have no documents.
#[test]
fn no_samples_of_an_empty_part_are_an_order() {
    for (data, orders) in [
        ("corpus_a", 3),
        // The orders of two datasets and of their blend.
        ("30 corpus_a 70 corpus_b", 9),
        // Without a blend of two parts without samples.
        ("corpus_a corpus_b", 8),
    ] {
        let copy = corpora("gpt_cache", &["corpus_a", "corpus_b"]);
        let args = format!(
            "index build {data} --seq-length 16 --split 969,30,1 --samples 100,10,0 \
             --data-cache-path cache --json"
        );
        let args: Vec<&str> = args.split_whitespace().collect();
        let report = [0, 1].map(|_| done(&feedline(copy.path(), &args)));
        for report in report {
            let of_test: Vec<&Value> = report["orders"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|order| order["part"] == "test")
                .collect();
            assert!(of_test.iter().all(|order| order["samples"] == 0), "{report}");
            assert_eq!(report["orders"].as_array().unwrap().len(), orders, "{report}");
        }
    }
}

#[test]
fn masked_index_files_equal_megatrons() {
    let copy = corpora("masked", &["sentences"]);
    let expected = files(&golden("masked/cache_bert_nsp"));
    let (_, text) = expected.iter().find(|(name, _)| name.ends_with("description.txt")).unwrap();
    fs::write(copy.path().join("tokenizer.txt"), text).unwrap();
    let args = "index build sentences --split 100,0,0 --samples 30 --seq-length 48 --masked bert \
                --tokenizer-from tokenizer.txt --data-cache-path cache --json";
    done(&feedline(copy.path(), &args.split_whitespace().collect::<Vec<_>>()));
    assert!(files(&copy.path().join("cache")) == expected);
}

#[test]
fn invalid_settings_are_refused() {
    let copy = corpora("gpt_cache", &["corpus_a", "corpus_b"]);
    for (args, expected) in [
        ("30 corpus_a 70 corpus_b", "cannot blend by weights: expected --samples"),
        (
            "0 corpus_a 1 corpus_b --samples 9",
            "weights: expected finite numbers above 0, one for each dataset, found [0.0, 1.0]",
        ),
        ("-1 corpus_a 1 corpus_b --samples 9", "unexpected argument"),
        ("nan corpus_a 1 corpus_b --samples 9", "one for each dataset, found [NaN, 1.0]"),
        ("3 corpus_a corpus_b corpus_b --samples 9", "expected a weight for each prefix"),
        ("corpus_c", "corpus_c.idx"),
        ("corpus_a --samples 5,5,5 --split 949,50,1", "or ask for none of it: eval.every = 0"),
        ("corpus_a --train corpus_a corpus_b --samples 1", "cannot be used with"),
    ] {
        let args = format!("index build {args} --seq-length 16");
        let output = feedline(copy.path(), &args.split_whitespace().collect::<Vec<_>>());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && stderr.contains(expected), "{args}: {stderr}");
    }
}

#[test]
fn materialized_samples_are_in_the_order() {
    let copy = corpora("gpt_cache", &["corpus_a"]);
    for (memory, samples) in [("1GiB", None), ("1B", Some(190)), ("200B", Some(50))] {
        let out = format!("out-{memory}");
        let mut args = vec!["materialize", "corpus_a", "--out", &out, "--seq-length"];
        args.extend(["16", "--memory", memory, "--json", "--data-cache-path", "cache"]);
        let count = samples.map(|count: u64| count.to_string());
        if let Some(count) = &count {
            args.extend(["--samples", count]);
        }
        let report = done(&feedline(copy.path(), &args));
        let store = storage::open_url(copy.path().to_str().unwrap()).unwrap();
        let open = |name: &str| IndexedDataset::open(&store, &Key::new(name).unwrap()).unwrap();
        let (source, written) = (open("corpus_a"), open(&out));
        let config = GptIndexConfig {
            dataset_path: String::new(),
            split: Some("1".to_owned()),
            seq_len: 16,
            seed: 1234,
            num_samples: samples,
            add_extra_token: true,
            drop_last_partial_valid: true,
            tokenizer: Value::Null,
        };
        let index = GptIndex::build(&source, Split::Train, &config).unwrap();
        let expected = samples.unwrap_or(index.sample_count());
        assert_eq!((written.sequence_count(), written.document_count()), (expected, expected));
        assert_eq!(report["samples"], expected);
        let mut parts = Vec::new();
        for sample in 0..expected {
            index.parts(&source, sample, &mut parts);
            let of = |part: &indexed::TokenSpan| {
                let (from, count) = (part.token_offset as usize, part.token_count as usize);
                source.read_sequence(part.sequence).unwrap()[from..from + count].to_vec()
            };
            let tokens: Vec<i64> = parts.iter().flat_map(of).collect();
            assert_eq!(written.read_sequence(sample).unwrap(), tokens, "{memory}: {sample}");
        }
        let manifest = Key::new(format!("{out}.manifest.json")).unwrap();
        let manifest = storage::Manifest::read(store.as_ref(), &manifest).unwrap();
        assert_eq!(manifest.meta["materialized"]["order"]["random_seed"], 1234);
        manifest.verify(store.as_ref(), &Key::root()).unwrap();
        // Nothing is overwritten.
        assert_eq!(feedline(copy.path(), &args).status.code(), Some(2));
    }
    assert_eq!(feedline(copy.path(), &["materialize", "corpus_a"]).status.code(), Some(2));
}

/// A truncated source leaves no output.
#[test]
fn failed_run_leaves_no_output() {
    let copy = corpora("gpt_cache", &["corpus_a"]);
    let bin = copy.path().join("corpus_a.bin");
    let args = "materialize corpus_a --out out --seq-length 16 --data-cache-path cache";
    let args: Vec<_> = args.split_whitespace().collect();
    let file = fs::File::options().write(true).open(&bin).unwrap();
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    assert_eq!(feedline(copy.path(), &args).status.code(), Some(2));
    let names = fs::read_dir(copy.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_str().unwrap().contains("out")));
}
