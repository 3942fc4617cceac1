//! The batches of a loader against Megatron's own samples and against naive slicing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use indexed::{Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split};
use loader::{Batch, Error, GptBatches, GptLoaderOptions};
use storage::Key;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gpt_cache");

/// A small generator with a seed, so that a failing corpus can be generated again.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

fn config(seq_len: u64, num_samples: Option<u64>) -> GptIndexConfig {
    GptIndexConfig {
        dataset_path: "corpus".to_owned(),
        split: Some("949,50,1".to_owned()),
        seq_len,
        seed: 1234,
        num_samples,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    }
}

/// Documents of 0 to 60 tokens, some of them empty, numbered so that any two tokens differ.
fn corpus(folder: &std::path::Path, dtype: Dtype, seed: u64) -> Arc<IndexedDataset> {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    let key = Key::new("corpus").unwrap();
    let mut builder = Builder::create(&store, &key, dtype).unwrap();
    let mut random = Random(seed);
    let mut next = 0;
    for _ in 0..300 {
        let len = if random.below(10) == 0 { 0 } else { random.below(60) as u32 };
        let tokens: Vec<u32> = (next..next + len).collect();
        next += len;
        builder.add_sequence(&tokens).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    Arc::new(IndexedDataset::open(&store, &key).unwrap())
}

fn naive(dataset: &IndexedDataset, index: &GptIndex, sample: u64) -> Vec<i64> {
    let mut parts = Vec::new();
    index.parts(dataset, sample, &mut parts);
    let mut text = Vec::new();
    for part in parts {
        let sequence = dataset.read_sequence(part.sequence).unwrap();
        let start = part.token_offset as usize;
        text.extend(&sequence[start..start + part.token_count as usize]);
    }
    text
}

fn all(mut batches: GptBatches) -> Vec<Batch> {
    let mut out = Vec::new();
    while let Some(batch) = batches.next_batch().unwrap() {
        out.push(batch.clone());
        batches.recycle(batch);
    }
    assert_eq!(batches.next_batch().unwrap(), None, "a call after the end returns none");
    out
}

/// The rows of all batches: (sample, tokens, labels).
fn rows(batches: &[Batch]) -> Vec<(u64, Vec<i64>, Vec<i64>)> {
    let mut out = Vec::new();
    for batch in batches {
        for row in 0..batch.rows {
            let place = row * batch.seq_len..(row + 1) * batch.seq_len;
            let labels = batch.labels[place.clone()].to_vec();
            out.push((batch.first_sample + row as u64, batch.tokens[place].to_vec(), labels));
        }
    }
    out
}

#[test]
fn samples_equal_megatrons() {
    let manifest = std::fs::read_to_string(format!("{GOLDEN}/manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&manifest).unwrap();
    let run = &manifest["runs"]["one_epoch_none"];
    let store = storage::open_url(GOLDEN).unwrap();
    let dataset = IndexedDataset::open(&store, &Key::new("corpus_a").unwrap()).unwrap();
    let dataset = Arc::new(dataset);
    let seq_len = run["sequence_length"].as_u64().unwrap();
    for (which, nth) in [(Split::Train, 0), (Split::Valid, 1)] {
        let index = GptIndex::build(&dataset, which, &config(seq_len, None)).unwrap();
        let golden = &run["splits"][nth];
        assert_eq!(index.sample_count(), golden["len"].as_u64().unwrap());
        let options = GptLoaderOptions {
            seq_len: seq_len as usize,
            micro_batch: 3,
            samples_consumed: 0,
            samples_end: index.sample_count(),
            window_batches: 4,
        };
        let batches = all(GptBatches::start(dataset.clone(), Arc::new(index), options).unwrap());
        let rows = rows(&batches);
        let expect =
            |name: &str| -> Vec<i64> { serde_json::from_value(golden[name].clone()).unwrap() };
        for (row, expected) in [
            (rows.first().unwrap(), expect("first_sample_tokens")),
            (rows.last().unwrap(), expect("last_sample_tokens")),
        ] {
            assert_eq!(row.1, expected[..expected.len() - 1], "inputs of sample {}", row.0);
            assert_eq!(row.2, expected[1..], "labels of sample {}", row.0);
        }
    }
}

#[test]
fn every_window_dtype_and_start_gives_the_same_stream() {
    for (dtype, seed) in [(Dtype::U16, 1), (Dtype::I32, 2), (Dtype::I64, 3)] {
        let folder = tempfile::tempdir().unwrap();
        let dataset = corpus(folder.path(), dtype, seed);
        let index = GptIndex::build(&dataset, Split::Train, &config(16, Some(1500))).unwrap();
        let index = Arc::new(index);
        let expected: Vec<Vec<i64>> = (0..1500).map(|k| naive(&dataset, &index, k)).collect();
        let mut random = Random(seed);
        for window_batches in [1, 2, 7, 64] {
            let micro_batch = 1 + random.below(9) as usize;
            let samples_consumed = random.below(1500);
            let samples_end = 1500;
            let options = GptLoaderOptions {
                seq_len: 16,
                micro_batch,
                samples_consumed,
                samples_end,
                window_batches,
            };
            let loader = GptBatches::start(dataset.clone(), index.clone(), options).unwrap();
            let found = rows(&all(loader));
            assert_eq!(found.len() as u64, samples_end - samples_consumed, "{options:?}");
            for ((sample, tokens, labels), nth) in found.iter().zip(samples_consumed..) {
                let expected = &expected[nth as usize];
                assert_eq!(
                    (*sample, &tokens[..]),
                    (nth, &expected[..16]),
                    "{options:?}, {dtype:?}"
                );
                assert_eq!(labels[..], expected[1..], "{options:?}, {dtype:?}");
            }
        }
    }
}

#[test]
fn resumes_from_samples_consumed() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = corpus(folder.path(), Dtype::U16, 5);
    let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config(8, None)).unwrap());
    let start = |samples_consumed| {
        let options = GptLoaderOptions {
            seq_len: 8,
            micro_batch: 4,
            samples_consumed,
            samples_end: 100,
            window_batches: 3,
        };
        GptBatches::start(dataset.clone(), index.clone(), options).unwrap()
    };
    let whole = all(start(0));
    let mut first = start(0);
    let mut seen: Vec<Batch> = (0..7).map(|_| first.next_batch().unwrap().unwrap()).collect();
    assert_eq!(first.samples_consumed(), 28, "counts delivered samples, not those read ahead");
    seen.extend(all(start(first.samples_consumed())));
    assert_eq!(seen, whole);
}

#[test]
fn invalid_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = corpus(folder.path(), Dtype::U16, 6);
    let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config(8, None)).unwrap());
    let good = GptLoaderOptions {
        seq_len: 8,
        micro_batch: 4,
        samples_consumed: 0,
        samples_end: 10,
        window_batches: 3,
    };
    let start = |options| GptBatches::start(dataset.clone(), index.clone(), options);
    let samples_end = index.sample_count() + 1;
    let error = start(GptLoaderOptions { samples_end, ..good }).unwrap_err();
    assert!(matches!(error, Error::TooFewSamples { .. }), "{error}");
    for bad in [
        GptLoaderOptions { micro_batch: 0, ..good },
        GptLoaderOptions { seq_len: 0, ..good },
        GptLoaderOptions { window_batches: 0, ..good },
        GptLoaderOptions { samples_consumed: 11, ..good },
    ] {
        assert!(matches!(start(bad).unwrap_err(), Error::Option { .. }), "{bad:?} was accepted");
    }
    // An index for longer samples than the loader's options.
    let error = start(GptLoaderOptions { seq_len: 7, ..good }).unwrap().next_batch().unwrap_err();
    assert!(matches!(error, Error::SampleLength { found: 9, expected: 8, .. }), "{error}");
}

#[test]
fn truncated_file_is_named_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = corpus(folder.path(), Dtype::U16, 7);
    let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config(8, None)).unwrap());
    let bin = folder.path().join("corpus.bin");
    std::fs::OpenOptions::new().write(true).open(&bin).unwrap().set_len(64).unwrap();
    let samples_end = index.sample_count();
    let options = GptLoaderOptions {
        seq_len: 8,
        micro_batch: 4,
        samples_consumed: 0,
        samples_end,
        window_batches: 3,
    };
    let mut loader = GptBatches::start(dataset, index, options).unwrap();
    let error = loop {
        match loader.next_batch() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the loader ended without an error"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("corpus.bin"), "{error}");
    assert!(loader.next_batch().is_err(), "later calls fail too");
}

/// Dropping a loader whose queue is full ends its thread: this test would hang otherwise.
#[test]
fn loader_can_be_dropped_at_any_time() {
    let folder = tempfile::tempdir().unwrap();
    let dataset = corpus(folder.path(), Dtype::U16, 8);
    let index = Arc::new(GptIndex::build(&dataset, Split::Train, &config(8, None)).unwrap());
    for taken in [0, 1, 5] {
        let options = GptLoaderOptions {
            seq_len: 8,
            micro_batch: 1,
            samples_consumed: 0,
            samples_end: index.sample_count(),
            window_batches: 2,
        };
        let mut loader = GptBatches::start(dataset.clone(), index.clone(), options).unwrap();
        for _ in 0..taken {
            loader.next_batch().unwrap().unwrap();
        }
        drop(loader);
    }
    // On a busy machine a detached thread may end later.
    let until = Instant::now() + Duration::from_secs(60);
    while Arc::strong_count(&dataset) > 1 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(Arc::strong_count(&dataset), 1, "no thread holds the dataset");
}
