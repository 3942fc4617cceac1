//! `feedline index build` and `feedline materialize` as a user runs them.

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
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(told.is_empty(), "a progress where none can be seen: {told}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// All files of a folder but the seals.
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

/// What Megatron's builder left for the same settings, by name and byte.
#[test]
fn the_caches_are_megatrons() {
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
        let due = files(&golden("gpt_cache").join(name));
        let (of, text) = due.iter().find(|(name, _)| name.ends_with("description.txt")).unwrap();
        fs::write(copy.path().join("tokenizer.txt"), text).unwrap();
        let seq_length = if name == "seed_7_seq_5" { "5" } else { "16" };
        let more = ["--seq-length", seq_length, "--tokenizer-from", "tokenizer.txt", "--json"];
        let args = [&["index", "build"], settings, &more, &["--data-cache-path", "cache"]].concat();
        // The second time they are found, and told the same.
        let told = [0, 1].map(|_| {
            let mut told = done(&feedline(copy.path(), &args));
            for order in told["orders"].as_array_mut().unwrap() {
                assert!(order["elapsed_s"].take().is_f64());
            }
            told
        });
        assert_eq!(told[0], told[1], "{name}");
        let got = files(&copy.path().join("cache"));
        assert!(got.keys().eq(due.keys()), "{name}, with the tokenizer of {of}: {:?}", got.keys());
        assert!(got == due, "{name}");
    }
}

#[test]
fn a_masked_cache_is_megatrons() {
    let copy = corpora("masked", &["sentences"]);
    let due = files(&golden("masked/cache_bert_nsp"));
    let (_, text) = due.iter().find(|(name, _)| name.ends_with("description.txt")).unwrap();
    fs::write(copy.path().join("tokenizer.txt"), text).unwrap();
    let args = "index build sentences --split 100,0,0 --samples 30 --seq-length 48 --masked bert \
                --tokenizer-from tokenizer.txt --data-cache-path cache --json";
    done(&feedline(copy.path(), &args.split_whitespace().collect::<Vec<_>>()));
    assert!(files(&copy.path().join("cache")) == due);
}

#[test]
fn what_cannot_be_is_refused() {
    let copy = corpora("gpt_cache", &["corpus_a", "corpus_b"]);
    for (args, due) in [
        ("30 corpus_a 70 corpus_b", "--samples: due with weights"),
        ("0 corpus_a 1 corpus_b --samples 9", "blend weights: got [0.0, 1.0]"),
        ("-1 corpus_a 1 corpus_b --samples 9", "unexpected argument"),
        ("nan corpus_a 1 corpus_b --samples 9", "blend weights: got [NaN, 1.0]"),
        ("3 corpus_a corpus_b corpus_b --samples 9", "some prefixes without a weight"),
        ("corpus_c", "corpus_c.idx"),
        ("corpus_a --samples 5,5,5 --split 949,50,1", "or ask for none of it: eval.every = 0"),
        ("corpus_a --train corpus_a corpus_b --samples 1", "cannot be used with"),
    ] {
        let args = format!("index build {args} --seq-length 16");
        let output = feedline(copy.path(), &args.split_whitespace().collect::<Vec<_>>());
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && told.contains(due), "{args}: {told}");
    }
}

#[test]
fn a_materialized_order_is_the_order() {
    let copy = corpora("gpt_cache", &["corpus_a"]);
    for (memory, samples) in [("1GiB", None), ("1B", Some(190)), ("200B", Some(50))] {
        let out = format!("out-{memory}");
        let mut args = vec!["materialize", "corpus_a", "--out", &out, "--seq-length"];
        args.extend(["16", "--memory", memory, "--json", "--data-cache-path", "cache"]);
        let count = samples.map(|count: u64| count.to_string());
        if let Some(count) = &count {
            args.extend(["--samples", count]);
        }
        let told = done(&feedline(copy.path(), &args));
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
        let due = samples.unwrap_or(index.sample_count());
        assert_eq!((written.sequence_count(), written.document_count()), (due, due));
        assert_eq!(told["samples"], due);
        let mut parts = Vec::new();
        for sample in 0..due {
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

/// A source that ends too soon leaves nothing of the output.
#[test]
fn a_failed_run_leaves_nothing() {
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
