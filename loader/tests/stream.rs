//! The stream of samples: equal to Megatron's, and the same whatever carries it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod support;

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use indexed::{
    BlendIndex, BlendWeights, Builder, Dtype, GptIndex, GptIndexConfig, IndexedDataset, Split,
    blend_sizes, normalize_weights,
};
use loader::batch::{GptAssemble, GptConfig};
use loader::{Batch, BlendOrder, Error, GptOrder, Loader, LoaderOptions, Near, Order, Ranks};
use sha2::{Digest, Sha256};
use storage::{Key, Storage, sim};
use support::{Trouble, Troubled};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gpt_cache");
const SEQ_LEN: usize = 64;
const SAMPLES: u64 = 1200;

fn config(seq_len: u64, seed: u32, split: &str, num_samples: Option<u64>) -> GptIndexConfig {
    GptIndexConfig {
        dataset_path: "corpus".to_owned(),
        split: Some(split.to_owned()),
        seq_len,
        seed,
        num_samples,
        add_extra_token: true,
        drop_last_partial_valid: true,
        tokenizer: serde_json::json!({}),
    }
}

/// Each batch as its first sample and its tokens and labels, row after row.
fn rows(batch: &Batch, into: &mut Vec<(u64, Vec<i64>)>) {
    for row in 0..batch.rows {
        let place = row * batch.seq_len..(row + 1) * batch.seq_len;
        let text = [&batch.tokens[place.clone()], &batch.labels[place]].concat();
        into.push((batch.first_sample + row as u64, text));
    }
}

fn stream(loader: &mut Loader<GptAssemble>) -> Vec<(u64, Vec<i64>)> {
    let mut all = Vec::new();
    while let Some(batch) = loader.next_batch().unwrap() {
        rows(&batch, &mut all);
        loader.recycle(batch);
    }
    all
}

/// As `tests/readers/megatron_stream.py` sums it up.
fn sum<'a>(texts: impl Iterator<Item = &'a Vec<i64>>) -> String {
    let mut digest = Sha256::new();
    for text in texts {
        text.iter().for_each(|token| digest.update(token.to_le_bytes()));
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

struct Corpus {
    _folder: tempfile::TempDir,
    path: String,
    due: String,
}

impl Corpus {
    /// Documents of 0 to 200 tokens, and the sum of their samples as they are read one by one.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap().to_owned();
        let store = storage::open_url(&path).unwrap();
        build(&store);
        let (dataset, index) = open(&store);
        let mut all = Vec::new();
        for sample in 0..SAMPLES {
            let mut parts = Vec::new();
            index.parts(&dataset, sample, &mut parts);
            let mut text = Vec::new();
            for part in parts {
                let from = part.token_offset as usize;
                let sequence = dataset.read_sequence(part.sequence).unwrap();
                text.extend(&sequence[from..from + part.token_count as usize]);
            }
            all.push([&text[..SEQ_LEN], &text[1..]].concat());
        }
        Corpus { _folder: folder, path, due: sum(all.iter()) }
    }

    fn store(&self) -> Arc<dyn Storage> {
        storage::open_url(&self.path).unwrap()
    }

    fn check(&self, what: &str, store: &Arc<dyn Storage>, options: LoaderOptions) {
        let mut loader = start(store, options);
        let got = stream(&mut loader);
        assert!(got.iter().map(|(sample, _)| *sample).eq(0..SAMPLES), "{what}: numbers");
        assert_eq!(sum(got.iter().map(|(_, text)| text)), self.due, "{what}");
        assert_eq!(loader.metrics().samples, SAMPLES, "{what}");
    }
}

fn build(store: &Arc<dyn Storage>) {
    let mut builder = Builder::create(store, &Key::new("corpus").unwrap(), Dtype::U16).unwrap();
    let mut state = 11_u64;
    for _ in 0..600 {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let len = (state >> 33) % 200;
        let tokens: Vec<u32> = (0..len).map(|at| ((state >> 20) + at * 7) as u16 as u32).collect();
        builder.add_sequence(&tokens).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

fn open(store: &Arc<dyn Storage>) -> (Arc<IndexedDataset>, Arc<GptIndex>) {
    let dataset = IndexedDataset::open(store, &Key::new("corpus").unwrap()).unwrap();
    let config = config(SEQ_LEN as u64, 5, "1,0,0", Some(SAMPLES));
    let index = GptIndex::build(&dataset, Split::Train, &config).unwrap();
    (Arc::new(dataset), Arc::new(index))
}

fn order(store: &Arc<dyn Storage>) -> Arc<dyn Order> {
    let (dataset, index) = open(store);
    Arc::new(GptOrder::new(dataset, index, SEQ_LEN).unwrap())
}

fn start(store: &Arc<dyn Storage>, options: LoaderOptions) -> Loader<GptAssemble> {
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap();
    Loader::start(order(store), assemble, options).unwrap()
}

fn options() -> LoaderOptions {
    let mut options = LoaderOptions::new(4, 0..SAMPLES);
    options.retry_pauses = [Duration::from_millis(1); 3];
    options
}

#[test]
fn is_that_of_megatron() {
    let read = |name: &str| -> serde_json::Value {
        let text = std::fs::read_to_string(Path::new(GOLDEN).join(name)).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let (runs, streams) = (read("manifest.json"), read("streams.json"));
    let store = storage::open_url(GOLDEN).unwrap();
    for (name, due) in streams.as_object().unwrap() {
        let run = &runs["runs"][name];
        let seq_len = run["sequence_length"].as_u64().unwrap();
        let size = run["sizes"][0].as_u64();
        let open = |prefix: &serde_json::Value| {
            let key = Key::new(prefix.as_str().unwrap()).unwrap();
            Arc::new(IndexedDataset::open(&store, &key).unwrap())
        };
        let datasets: Vec<_> = run["blend"][0].as_array().unwrap().iter().map(open).collect();
        let dtypes = datasets.iter().map(|dataset| dataset.dtype()).collect();
        let order = |dataset: &Arc<IndexedDataset>, size: Option<u64>| -> Arc<dyn Order> {
            let seed = run["random_seed"].as_u64().unwrap() as u32;
            let config = config(seq_len, seed, run["split"].as_str().unwrap(), size);
            let index = GptIndex::build(dataset, Split::Train, &config).unwrap();
            let order = GptOrder::new(dataset.clone(), Arc::new(index), seq_len as usize);
            Arc::new(order.unwrap())
        };
        let order: Arc<dyn Order> = if datasets.len() == 1 {
            order(&datasets[0], size)
        } else if let Some(weights) = run["blend"][1].as_array() {
            let weights: Vec<f64> = weights.iter().map(|w| w.as_f64().unwrap()).collect();
            let weights = normalize_weights(&weights).unwrap();
            let (sizes, size) = blend_sizes(&weights, size.unwrap());
            let orders = datasets.iter().zip(sizes).map(|(set, size)| order(set, Some(size)));
            let blend = BlendIndex::build(&BlendWeights::Weighted { weights, size }).unwrap();
            Arc::new(BlendOrder::new(orders.collect(), Arc::new(blend)))
        } else {
            let orders: Vec<_> = datasets.iter().map(|set| order(set, None)).collect();
            let sizes = orders.iter().map(|order| order.sample_count()).collect();
            let blend = BlendIndex::build(&BlendWeights::Exhaustive { sizes }).unwrap();
            Arc::new(BlendOrder::new(orders, Arc::new(blend)))
        };
        assert_eq!(Some(order.sample_count()), due["samples"].as_u64(), "{name}");
        let options = LoaderOptions::new(3, 0..order.sample_count());
        let assemble = GptAssemble::new(GptConfig::new(seq_len as usize), dtypes).unwrap();
        let got = stream(&mut Loader::start(order, assemble, options).unwrap());
        assert_eq!(sum(got.iter().map(|(_, text)| text)), due["sha256"], "{name}");
    }
}

#[test]
fn is_the_same_by_every_engine_depth_and_window() {
    let corpus = Corpus::new();
    let urls = [
        ("", ""),
        ("file:", "?engine=pread"),
        ("file:", "?engine=pread&direct=off"),
        ("file:", "?engine=auto&direct=off"),
        ("file:", "?direct=on"),
    ];
    for (scheme, wishes) in urls {
        let store = storage::open_url(&format!("{scheme}{}{wishes}", corpus.path)).unwrap();
        for (depth, gap, window_bytes) in
            [(None, None, 512 << 20), (Some(1), Some(0), 1), (Some(7), Some(50_000), 20_000)]
        {
            let mut options = options();
            (options.depth, options.gap_bytes) = (depth, gap);
            options.window_bytes = window_bytes;
            let what = format!("{wishes} {depth:?} {gap:?} {window_bytes}");
            corpus.check(&what, &store, options);
        }
    }
}

#[test]
fn is_the_same_through_short_interrupted_failing_and_late_reads() {
    let corpus = Corpus::new();
    let faults =
        sim::Faults { short_per_mille: 200, interrupted_per_mille: 100, ..Default::default() };
    let simulated: Arc<dyn Storage> = Arc::new(sim::SimStore::new(3, faults));
    build(&simulated);
    corpus.check("a simulated disk", &simulated, options());
    for depth in [None, Some(1), Some(3)] {
        let trouble = Trouble {
            fail_per_mille: 20,
            late_per_mille: 20,
            late: Duration::from_millis(20),
            ..Default::default()
        };
        let (store, trouble) = Troubled::around(&corpus.store(), trouble);
        let mut options = options();
        (options.depth, options.gap_bytes) = (depth, Some(0));
        options.window_bytes = 100_000;
        corpus.check("trouble", &store, options);
        assert!(trouble.failed.load(SeqCst) > 0, "nothing failed: the test tries nothing");
    }
}

#[test]
fn goes_on_wherever_it_was_left() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let mut all = Vec::new();
    let mut consumed = 0;
    // Each time another number of batches of another size.
    for nth in 0..20 {
        let mut options = options();
        (options.micro_batch, options.samples.start) = (1 + nth % 7, consumed);
        let mut loader = start(&store, options);
        for _ in 0..nth {
            rows(&loader.next_batch().unwrap().unwrap(), &mut all);
        }
        consumed = loader.samples_consumed();
    }
    let mut options = options();
    options.samples.start = consumed;
    all.extend(stream(&mut start(&store, options)));
    assert!(all.iter().map(|(sample, _)| *sample).eq(0..SAMPLES));
    assert_eq!(sum(all.iter().map(|(_, text)| text)), corpus.due);
}

#[test]
fn is_the_same_over_all_ranks() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let mut all = Vec::new();
    let mut consumed = 0;
    // The number of ranks changes on the way, and nothing is read twice or left out.
    for (of, batches) in [(1, 5), (2, 9), (3, 7), (8, 4), (2, u64::MAX)] {
        let ranks = (0..of).map(|rank| {
            let mut options = options();
            (options.samples.start, options.ranks) = (consumed, Ranks::one(rank, of));
            start(&store, options)
        });
        let mut ranks: Vec<_> = ranks.collect();
        'steps: for _ in 0..batches {
            for rank in &mut ranks {
                let Some(batch) = rank.next_batch().unwrap() else { break 'steps };
                rows(&batch, &mut all);
            }
        }
        assert!(ranks.iter().all(|r| r.samples_consumed() == ranks[0].samples_consumed()));
        consumed = ranks[0].samples_consumed();
    }
    assert_eq!(sum(all.iter().map(|(_, text)| text)), corpus.due);
}

#[test]
fn ends_with_the_first_sample_that_cannot_be_read() {
    let corpus = Corpus::new();
    let order = order(&corpus.store());
    let broken_from = 60_000;
    let mut pieces = Vec::new();
    let broken = |sample: &u64| {
        pieces.clear();
        order.pieces(*sample, &mut pieces).unwrap();
        pieces.iter().any(|piece| piece.offset_bytes + piece.len_bytes > broken_from)
    };
    let first = (0..SAMPLES).find(broken).unwrap();
    for window_bytes in [1, 512 << 20] {
        let trouble = Trouble { broken_from: Some(broken_from), ..Default::default() };
        let (store, _trouble) = Troubled::around(&corpus.store(), trouble);
        let mut options = options();
        // With a gap, what is good would be read along with what is not.
        (options.micro_batch, options.gap_bytes) = (1, Some(0));
        options.window_bytes = window_bytes;
        let mut loader = start(&store, options);
        for sample in 0..first {
            assert_eq!(loader.next_batch().unwrap().unwrap().first_sample, sample);
        }
        let error = loader.next_batch().unwrap_err().to_string();
        assert!(error.contains("corpus.bin"), "{error}");
        let again = loader.next_batch().unwrap_err();
        assert!(matches!(again, Error::Ended { .. }), "{again}");
        assert_eq!(loader.samples_consumed(), first);
    }
}

/// A file system that stops answering: the consumer is told, may ask again, and can leave.
#[test]
fn a_frozen_store_is_an_error_and_no_trap() {
    let corpus = Corpus::new();
    let trouble = Trouble { frozen: true.into(), ..Default::default() };
    let (store, trouble) = Troubled::around(&corpus.store(), trouble);
    let mut options = options();
    options.timeout = Duration::from_millis(100);
    let mut loader = start(&store, options.clone());
    let error = loader.next_batch().unwrap_err();
    let named = matches!(error, Error::Late { .. } | Error::Storage(storage::Error::Stuck { .. }));
    assert!(named, "{error}");
    drop(loader);
    // One that hangs for less than the time-out only comes late.
    options.timeout = Duration::from_secs(60);
    let mut loader = start(&store, options);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            trouble.lift();
        });
        assert_eq!(loader.next_batch().unwrap().unwrap().first_sample, 0);
    });
}

/// A cache that has every other sample.
#[derive(Debug, Default)]
struct Half(Mutex<HashMap<u64, Vec<u8>>>);

impl Near for Half {
    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        let kept = self.0.lock().unwrap();
        let found = kept.get(&sample).filter(|bytes| bytes.len() == into.len());
        found.map(|bytes| into.copy_from_slice(bytes)).is_some()
    }

    fn keep(&self, sample: u64, bytes: &[u8]) {
        if sample.is_multiple_of(2) {
            self.0.lock().unwrap().insert(sample, bytes.to_vec());
        }
    }

    fn consumed(&self, _samples: u64) {}
}

#[test]
fn what_is_near_is_not_read_again() {
    let corpus = Corpus::new();
    let near = Arc::new(Half::default());
    let mut options = options();
    options.near = Some(near.clone());
    corpus.check("an empty cache", &corpus.store(), options.clone());
    assert_eq!(near.0.lock().unwrap().len() as u64, SAMPLES / 2);
    let mut loader = start(&corpus.store(), options);
    let got = stream(&mut loader);
    assert_eq!(sum(got.iter().map(|(_, text)| text)), corpus.due);
    assert_eq!(loader.metrics().near_samples, SAMPLES / 2);
}
