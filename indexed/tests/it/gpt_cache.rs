//! Cache folders of Megatron's GPTDataset and BlendedDataset, compared by name and byte.

use crate::common;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Once};

use crate::common::{failing, golden, key, manifest, numbers};
use indexed::{
    BlendConfig, BlendIndex, BlendWeights, Error, GptIndex, GptIndexConfig, IndexedDataset, Split,
    TokenSpan, blend_sizes, normalize_weights,
};
use serde_json::{Value, json};
use storage::{Key, Storage};

type Files = BTreeMap<String, Vec<u8>>;

fn runs() -> Value {
    manifest("gpt_cache", "manifest.json")["runs"].take()
}

fn corpus(name: &str) -> IndexedDataset {
    IndexedDataset::open(&golden("gpt_cache"), &key(name)).unwrap()
}

/// All files except the seals, which Megatron does not write.
fn files_of(store: &dyn Storage, folder: &Key) -> Files {
    let mut entries = store.list(folder).unwrap();
    entries.retain(|entry| !entry.key.name().ends_with("feedline.json"));
    let file = |key: &Key| (key.name().to_owned(), storage::read_all(store, key).unwrap());
    entries.iter().map(|entry| file(&entry.key)).collect()
}

fn config(run: &Value, dataset: &str, num_samples: Option<u64>) -> GptIndexConfig {
    let is_not = |name: &str| run["extra"][name] == "False";
    GptIndexConfig {
        dataset_path: dataset.to_owned(),
        split: run["split"].as_str().map(str::to_owned),
        seq_len: run["sequence_length"].as_u64().unwrap(),
        seed: run["random_seed"].as_u64().unwrap() as u32,
        num_samples,
        add_extra_token: !is_not("add_extra_token_to_sequence"),
        drop_last_partial_valid: !is_not("drop_last_partial_validation_sequence"),
        tokenizer: json!({
            "class": "example.Tokenizer",
            "tokenizer_path": "/tok/gpt2",
            "use_fast": "True",
        }),
    }
}

/// Repeats a run for one part: `None` if the run did not have that part.
fn replay(run: &Value, which: Split, store: &dyn Storage) -> Option<Built> {
    let part = which as usize;
    let expected = &run["splits"][part];
    if expected.is_null() {
        return None;
    }
    let names: Vec<&str> =
        run["blend"][0].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let samples = run["sizes"][part].as_u64();
    let build = |name: &str, config: &GptIndexConfig| {
        GptIndex::load_or_build(&corpus(name), which, config, store, &Key::root()).unwrap()
    };
    if expected["class"] == "GPTDataset" {
        let config = config(run, names[0], samples);
        return Some(Built::Gpt(build(names[0], &config)));
    }
    let weights = run["blend"][1].as_array().map(|weights| {
        let weights: Vec<f64> = weights.iter().map(|weight| weight.as_f64().unwrap()).collect();
        normalize_weights(&weights).unwrap()
    });
    let (each, size) = match &weights {
        Some(weights) => blend_sizes(weights, samples.unwrap()),
        None => (Vec::new(), 0),
    };
    let configs: Vec<GptIndexConfig> = (0..names.len())
        .map(|i| config(run, names[i], weights.as_ref().map(|_| each[i])))
        .collect();
    let sizes = names.iter().zip(&configs).map(|(name, config)| build(name, config).sample_count());
    let sizes: Vec<u64> = sizes.collect();
    let config = BlendConfig {
        datasets: configs.iter().map(|config| config.description(which).unwrap()).collect(),
        which,
        available: sizes.clone(),
        weights: match weights {
            Some(weights) => BlendWeights::Weighted { weights, size },
            None => BlendWeights::Exhaustive { sizes },
        },
    };
    Some(Built::Blend(BlendIndex::load_or_build(&config, store, &Key::root()).unwrap()))
}

enum Built {
    Gpt(GptIndex),
    Blend(BlendIndex),
}

/// The tokens of a sample, through its parts.
fn tokens(index: &GptIndex, dataset: &IndexedDataset, sample: u64) -> Vec<i64> {
    let mut parts = Vec::new();
    index.parts(dataset, sample, &mut parts);
    let cut = |part: &TokenSpan| {
        let (from, count) = (part.token_offset as usize, part.token_count as usize);
        dataset.read_sequence(part.sequence).unwrap()[from..from + count].to_vec()
    };
    parts.iter().flat_map(cut).collect()
}

#[test]
fn cache_folders_equal_megatrons() {
    for (name, run) in runs().as_object().unwrap() {
        let (_guard, store) = common::temp_store();
        for which in Split::ALL {
            let expected = &run["splits"][which as usize];
            match replay(run, which, store.as_ref()) {
                None => assert!(expected.is_null(), "{name} {which}"),
                Some(Built::Gpt(index)) => {
                    assert_eq!(
                        index.sample_count(),
                        expected["len"].as_u64().unwrap(),
                        "{name} {which}"
                    );
                }
                Some(Built::Blend(index)) => {
                    assert_eq!(
                        index.sample_count(),
                        expected["len"].as_u64().unwrap(),
                        "{name} {which}"
                    );
                }
            }
        }
        let expected = files_of(golden("gpt_cache").as_ref(), &key(name));
        let found = files_of(store.as_ref(), &Key::root());
        assert!(found.keys().eq(expected.keys()), "{name}: {:?}", found.keys());
        for (file, bytes) in &found {
            assert!(*bytes == expected[file], "{name}/{file}");
        }
    }
}

#[test]
fn megatrons_caches_are_used_without_a_rebuild() {
    for (name, run) in runs().as_object().unwrap() {
        let folder = golden(&format!("gpt_cache/{name}"));
        let (store, calls) = failing(&folder, 0..usize::MAX);
        for which in Split::ALL {
            let Some(Built::Gpt(index)) = replay(run, which, store.as_ref()) else { continue };
            let expected = &run["splits"][which as usize];
            if expected["len"] == 0 {
                continue;
            }
            let dataset = corpus(run["blend"][0][0].as_str().unwrap());
            let (first, last) = (0, index.sample_count() - 1);
            // Megatron pads samples with 0.
            let padded = |sample| {
                let mut tokens = tokens(&index, &dataset, sample);
                let len = expected["first_sample_tokens"].as_array().unwrap().len();
                assert!(tokens.len() == len || which == Split::Valid);
                tokens.resize(len.max(tokens.len()), 0);
                tokens
            };
            let expected_tokens = |at: &str| numbers::<i64>(&expected[at]);
            assert_eq!(
                tokens(&index, &dataset, first),
                expected_tokens("first_sample_tokens"),
                "{name} {which}"
            );
            let (last, expected_last) = (padded(last), expected_tokens("last_sample_tokens"));
            assert_eq!(last[..expected_last.len()], expected_last, "{name} {which}");
            let mut parts = Vec::new();
            index.parts(&dataset, first, &mut parts);
            let documents: Vec<i64> = parts.iter().map(|part| part.sequence as i64).collect();
            assert_eq!(documents, expected_tokens("first_sample_docs"), "{name} {which}");
        }
        let calls = calls.lock().unwrap();
        // Only seals would be written.
        assert!(calls.iter().all(|call| call.ends_with("feedline.json")), "{name}: {calls:?}");
    }
}

/// Damages of a cache, each with a part of the expected warning.
type Harm = (&'static str, fn(&mut Files), &'static str);

const DAMAGES: [Harm; 14] = [
    ("a short array", |files| cut(files, "sample_index.npy", 1), "found end of file"),
    (
        "an array truncated to its header",
        |files| cut(files, "document_index.npy", 400),
        "found end of file",
    ),
    ("an empty array", |files| cut(files, "shuffle_index.npy", usize::MAX), "the magic"),
    ("a missing array", |files| drop(remove(files, "shuffle_index.npy")), "missing "),
    ("a missing description", |files| drop(remove(files, "description.txt")), "missing "),
    ("another description", |files| *at(files, "description.txt", 40) ^= 1, "description.txt"),
    ("an array of another type", |files| *at(files, "shuffle_index.npy", 22) = b'i', "<i4"),
    ("a document twice", |files| double(files, "document_index.npy"), "expected a permutation"),
    ("a sample twice", |files| double(files, "shuffle_index.npy"), "expected a permutation"),
    ("a document outside", |files| *at(files, "document_index.npy", 129) = 1, "numbers in 0..45"),
    ("a sample outside", |files| *at(files, "shuffle_index.npy", 131) = 1, "numbers in 0..207"),
    ("zeros", |files| zero_tail(files, "shuffle_index.npy"), "expected a permutation"),
    ("another row", |files| *at(files, "sample_index.npy", 128 + 8 * 50) ^= 1, "row 50"),
    ("documents moved", |files| swap(files, "document_index.npy"), "row "),
];

#[test]
fn damaged_caches_are_rebuilt_with_a_warning() {
    let runs = runs();
    let run = &runs["multi_epoch_sep"];
    let folder = key("multi_epoch_sep");
    let mut good = files_of(golden("gpt_cache").as_ref(), &folder);
    good.retain(|name, _| name.contains("-train-"));
    for (damage, apply, expected_warning) in DAMAGES {
        let mut files = good.clone();
        apply(&mut files);
        assert!(files != good, "{damage}");
        let (guard, store) = store_with_logged_warnings();
        for (name, bytes) in &files {
            storage::write_all(store.as_ref(), &key(name), bytes).unwrap();
        }
        replay(run, Split::Train, store.as_ref());
        assert!(files_of(store.as_ref(), &Key::root()) == good, "{damage}");
        let warnings = warnings_of(&guard);
        assert_eq!(warnings.len(), 1, "{damage}: {warnings:?}");
        assert!(warnings[0].contains(expected_warning), "{damage}: {warnings:?}");
    }
}

fn remove(files: &mut Files, name: &str) -> Vec<u8> {
    let name = files.keys().find(|file| file.ends_with(name)).unwrap().clone();
    files.remove(&name).unwrap()
}

fn bytes_of<'a>(files: &'a mut Files, name: &str) -> &'a mut Vec<u8> {
    files.iter_mut().find(|(file, _)| file.ends_with(name)).unwrap().1
}

fn at<'a>(files: &'a mut Files, name: &str, place: usize) -> &'a mut u8 {
    &mut bytes_of(files, name)[place]
}

fn cut(files: &mut Files, name: &str, bytes: usize) {
    let file = bytes_of(files, name);
    file.truncate(file.len().saturating_sub(bytes));
}

fn double(files: &mut Files, name: &str) {
    bytes_of(files, name).copy_within(128..132, 132);
}

fn zero_tail(files: &mut Files, name: &str) {
    let file = bytes_of(files, name);
    let from = file.len() - 64;
    file[from..].fill(0);
}

/// Swaps two documents of different lengths.
fn swap(files: &mut Files, name: &str) {
    let file = bytes_of(files, name);
    let lengths = numbers::<u32>(&manifest("gpt_cache", "manifest.json")["lengths"]["corpus_a"]);
    let document = |place: usize| file[128 + 4 * place];
    let other = (1..).find(|&i| lengths[document(i) as usize] != lengths[document(0) as usize]);
    file.swap(128, 128 + 4 * other.unwrap());
}

/// The names do not depend on the extra token. Even if it changes no count, rows may differ, and a
/// cache of the other setting must not be used.
#[test]
fn a_cache_with_another_extra_token_setting_is_rebuilt() {
    let runs = runs();
    let mut rebuilt = 0;
    for seq_len in [1, 2, 3, 7, 16] {
        for which in Split::ALL {
            let (guard, store) = store_with_logged_warnings();
            let with =
                GptIndexConfig { seq_len, ..config(&runs["multi_epoch_sep"], "corpus_a", Some(9)) };
            let without = GptIndexConfig { add_extra_token: false, ..with.clone() };
            let (dataset, root) = (corpus("corpus_a"), Key::root());
            for config in [&without, &with, &without] {
                let index = GptIndex::load_or_build(&dataset, which, config, store.as_ref(), &root)
                    .unwrap();
                let fresh = GptIndex::build(&dataset, which, config).unwrap();
                assert_eq!(index.sample_index().file(), fresh.sample_index().file());
                let len = seq_len as usize + usize::from(config.add_extra_token);
                for sample in 0..index.sample_count() {
                    assert_eq!(tokens(&index, &dataset, sample).len(), len);
                }
            }
            rebuilt += warnings_of(&guard).len();
        }
    }
    assert!(rebuilt >= 20, "{rebuilt} of 30 differed");
}

/// Nor do they depend on the data: a corpus that has grown, or has other lengths, is another
/// corpus.
#[test]
fn a_cache_of_other_data_is_rebuilt() {
    let runs = runs();
    let (guard, store) = store_with_logged_warnings();
    let config = config(&runs["multi_epoch_sep"], "the same path", Some(9));
    for (count, name) in ["corpus_a", "corpus_b", "corpus_a"].into_iter().enumerate() {
        let dataset = corpus(name);
        let index =
            GptIndex::load_or_build(&dataset, Split::Train, &config, store.as_ref(), &Key::root())
                .unwrap();
        let fresh = GptIndex::build(&dataset, Split::Train, &config).unwrap();
        assert_eq!(index.document_index().file(), fresh.document_index().file());
        assert_eq!(warnings_of(&guard).len(), count);
    }
}

#[test]
fn a_cache_that_cannot_be_written_is_a_warning() {
    let runs = runs();
    for fail_from in 0..12 {
        let (guard, store) = store_with_logged_warnings();
        let (failing, _) = failing(&store, fail_from..usize::MAX);
        let built = replay(&runs["multi_epoch_sep"], Split::Train, failing.as_ref());
        let Some(Built::Gpt(index)) = built else { panic!("no index") };
        assert_eq!(index.sample_count(), 207);
        let warnings = warnings_of(&guard);
        assert!(warnings.iter().any(|text| text.contains("not saved")), "{warnings:?}");
        let names = store.list_names(&Key::root()).unwrap();
        assert!(names.iter().all(|name| !name.ends_with("description.txt")), "{names:?}");
        // The next run completes it.
        replay(&runs["multi_epoch_sep"], Split::Train, store.as_ref());
        assert_eq!(files_of(store.as_ref(), &Key::root()).len(), 4);
    }
}

#[test]
fn two_concurrent_builders_leave_one_cache() {
    let (_guard, store) = common::temp_store();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| replay(&runs()["multi_epoch_sep"], Split::Train, store.as_ref()));
        }
    });
    replay(&runs()["multi_epoch_sep"], Split::Train, store.as_ref());
    let mut expected = files_of(golden("gpt_cache").as_ref(), &key("multi_epoch_sep"));
    expected.retain(|name, _| name.contains("-train-"));
    assert!(files_of(store.as_ref(), &Key::root()) == expected);
}

/// The loop of Megatron over epochs does not terminate here.
#[test]
fn samples_of_a_part_without_tokens_are_an_error() {
    let runs = runs();
    let dataset = corpus("corpus_a");
    let config = GptIndexConfig {
        split: Some("949,50,1".to_owned()),
        ..config(&runs["one_epoch_none"], "corpus_a", Some(5))
    };
    let error = GptIndex::build(&dataset, Split::Test, &config).unwrap_err();
    let Error::NoTokens { sequences: 0, sequences_all: 50, samples: 5, .. } = &error else {
        panic!("{error}")
    };
    assert!(error.to_string().contains("hint: "), "{error}");
    // One epoch of an empty part is empty, as in Megatron.
    let config = GptIndexConfig { num_samples: None, ..config };
    assert_eq!(GptIndex::build(&dataset, Split::Test, &config).unwrap().sample_count(), 0);
}

#[test]
fn bad_settings_are_refused_by_name() {
    let runs = runs();
    let good = config(&runs["one_epoch_none"], "corpus_a", Some(5));
    let refused = |which, config: GptIndexConfig| {
        GptIndex::build(&corpus("corpus_a"), which, &config).unwrap_err().to_string()
    };
    let check = |found: String, expected: &str| assert!(found.contains(expected), "{found}");
    check(
        refused(Split::Train, GptIndexConfig { seq_len: 0, ..good.clone() }),
        "seq_len: expected 1 to 2147483647, found 0",
    );
    check(refused(Split::Train, GptIndexConfig { seq_len: 1 << 31, ..good.clone() }), "seq_len");
    let split = |split: &str| GptIndexConfig { split: Some(split.to_owned()), ..good.clone() };
    check(refused(Split::Train, split("a,b")), "found 'a,b'");
    check(
        refused(Split::Valid, split("1,0,1")),
        "valid part: expected a share above 0 in split '1,0,1', found 0",
    );
    let many = GptIndexConfig { num_samples: Some(u64::MAX), ..good.clone() };
    check(refused(Split::Train, many), "epochs, found ");
    let many = GptIndexConfig { num_samples: Some(1 << 61), seq_len: 1, ..good };
    check(refused(Split::Train, many), "epochs, found ");
}

/// A store, with a logger that records warnings.
fn store_with_logged_warnings() -> (tempfile::TempDir, Arc<dyn Storage>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&WARNINGS).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
    common::temp_store()
}

/// Every recorded warning that names a folder.
fn warnings_of(folder: &tempfile::TempDir) -> Vec<String> {
    let folder = folder.path().to_str().unwrap();
    let all = WARNINGS.0.lock().unwrap();
    all.iter().filter(|text| text.contains(folder)).cloned().collect()
}

static WARNINGS: Warnings = Warnings(Mutex::new(Vec::new()));

struct Warnings(Mutex<Vec<String>>);

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() == log::Level::Warn
    }

    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            self.0.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}
