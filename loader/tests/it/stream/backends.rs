//! The stream is the same for every backend, its settings, and every transient fault.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use indexed::{
    BlendIndex, BlendWeights, GptIndex, IndexedDataset, Split, blend_sizes, normalize_weights,
};
use loader::batch::{GptAssemble, GptConfig};
use loader::{BlendOrder, GptOrder, Loader, LoaderOptions, SampleOrder};
use serde_json::Value;
use storage::probe::cached_share;
use storage::s3_server::{Fault, FaultRule, S3Server};
use storage::testing::fault_store;
use storage::{Key, Storage, drop_cached};

use super::corpus::{Corpus, config, digest_of, options, start, stream};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/gpt_cache");

/// Queue depth, largest gap of unneeded bytes, and bytes to read ahead.
const WAYS: [(Option<usize>, Option<u64>, u64); 4] = [
    (None, None, 512 << 20),
    (Some(1), Some(0), 1),
    (Some(4), Some(50_000), 20_000),
    (Some(64), Some(0), 512 << 20),
];

#[test]
fn stream_equals_megatrons() {
    let read = |name: &str| -> Value {
        let text = std::fs::read_to_string(Path::new(GOLDEN).join(name)).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let (runs, streams) = (read("manifest.json"), read("streams.json"));
    let local = storage::open_url(GOLDEN).unwrap();
    let server = S3Server::start().unwrap();
    let remote = storage::open_url(&server.url("golden")).unwrap();
    for name in ["corpus_a", "corpus_b"] {
        copy(name, &local, &remote);
    }
    for store in [local, remote] {
        check_golden(&store, &runs["runs"], &streams);
    }
}

fn check_golden(store: &Arc<dyn Storage>, runs: &Value, streams: &Value) {
    for (name, expected) in streams.as_object().unwrap() {
        let run = &runs[name];
        let seq_len = run["sequence_length"].as_u64().unwrap();
        let size = run["sizes"][0].as_u64();
        let open = |prefix: &Value| {
            let key = Key::new(prefix.as_str().unwrap()).unwrap();
            Arc::new(IndexedDataset::open(store, &key).unwrap())
        };
        let datasets: Vec<_> = run["blend"][0].as_array().unwrap().iter().map(open).collect();
        let dtypes = datasets.iter().map(|dataset| dataset.dtype()).collect();
        let order = |dataset: &Arc<IndexedDataset>, size: Option<u64>| -> Arc<dyn SampleOrder> {
            let seed = run["random_seed"].as_u64().unwrap() as u32;
            let config = config(seq_len, seed, run["split"].as_str().unwrap(), size);
            let index = GptIndex::build(dataset, Split::Train, &config).unwrap();
            let order = GptOrder::new(dataset.clone(), Arc::new(index), seq_len as usize);
            Arc::new(order.unwrap())
        };
        let order: Arc<dyn SampleOrder> = if datasets.len() == 1 {
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
        assert_eq!(Some(order.sample_count()), expected["samples"].as_u64(), "{name}");
        let options = LoaderOptions::new(3, 0..order.sample_count());
        let assemble = GptAssemble::new(GptConfig::new(seq_len as usize), dtypes).unwrap();
        let found = stream(&mut Loader::start(order, assemble, options).unwrap());
        assert_eq!(digest_of(found.iter().map(|(_, text)| text)), expected["sha256"], "{name}");
    }
}

#[test]
fn stream_is_independent_of_engine_depth_and_window() {
    let corpus = Corpus::new();
    let settings =
        ["", "?engine=pread", "?engine=pread&direct=off", "?engine=auto&direct=off", "?direct=on"];
    for settings in settings {
        let scheme = if settings.is_empty() { "" } else { "file:" };
        let store = storage::open_url(&format!("{scheme}{}{settings}", corpus.path)).unwrap();
        for (depth, gap, window_bytes) in WAYS {
            let mut options = options();
            (options.depth, options.gap_bytes) = (depth, gap);
            options.window_bytes = window_bytes;
            let what = format!("{settings} {depth:?} {gap:?} {window_bytes}");
            corpus.check(&what, &store, options);
        }
    }
}

#[test]
fn warm_corpus_is_read_from_the_page_cache_and_cold_one_stays_uncached() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let bin = store.open(&Key::new("corpus.bin").unwrap()).unwrap();
    let drop_all = || drop_cached(&*bin, 0, bin.len_bytes() as usize);
    drop_all();
    if cached_share(&*bin) != Some(0.0) {
        return eprintln!("SKIPPED: the page cache of this file system cannot be controlled");
    }
    for is_warm in [false, true] {
        let read_all = || std::fs::read(Path::new(&corpus.path).join("corpus.bin")).unwrap();
        drop(is_warm.then(read_all));
        let mut loader = start(&store, options());
        let found = stream(&mut loader);
        assert_eq!(
            digest_of(found.iter().map(|(_, text)| text)),
            corpus.expected_digest,
            "warm: {is_warm}"
        );
        let (copied, moved) = {
            let metrics = loader.metrics();
            (metrics.page_cache_bytes, metrics.moved_bytes)
        };
        match is_warm {
            // The first read of a file is direct: the thread that opens the file makes it.
            true => assert!(copied > moved / 2 && copied < moved, "{copied} of {moved}"),
            false => assert_eq!((copied, cached_share(&*bin)), (0, Some(0.0))),
        }
    }
}

#[test]
fn stream_survives_short_interrupted_failing_and_late_reads() {
    let corpus = Corpus::new();
    let short = fault_store::FaultPlan {
        short_per_mille: 200,
        interrupted_per_mille: 100,
        ..Default::default()
    };
    let simulated: Arc<dyn Storage> = Arc::new(fault_store::FaultStore::new(3, short));
    copy("corpus", &corpus.store(), &simulated);
    let late = Duration::from_millis(20);
    for (depth, _, window_bytes) in WAYS {
        let mut options = options();
        // Many small reads: some of them fail.
        (options.depth, options.gap_bytes) = (depth, Some(0));
        options.window_bytes = window_bytes.min(100_000);
        corpus.check("a simulated disk", &simulated, options.clone());
        for inner in [&simulated, &corpus.store()] {
            let faults = fault_store::ReadFaults {
                // Four failures in a row would end a read, and which reads fail depends on the
                // threads.
                io_per_mille: 6,
                stale_per_mille: 3,
                late_per_mille: 5,
                late,
                ..Default::default()
            };
            let faulty = fault_store::ReadFaultLayer::new(inner.clone(), 9, faults);
            let store: Arc<dyn Storage> = Arc::new(faulty.clone());
            corpus.check(&format!("faults at depth {depth:?}"), &store, options.clone());
            assert!(faulty.failed_count() > 0, "nothing failed, so the test covers nothing");
        }
    }
}

#[test]
fn stream_survives_s3_faults() {
    let corpus = Corpus::new();
    let server = S3Server::start().unwrap();
    let store = storage::open_url(&server.url("plain")).unwrap();
    copy("corpus", &corpus.store(), &store);
    for (depth, gap, window_bytes) in WAYS {
        let mut options = options();
        (options.depth, options.gap_bytes) = (depth, gap);
        options.window_bytes = window_bytes;
        corpus.check(&format!("s3 {depth:?} {gap:?}"), &store, options);
    }
    let store = storage::open_url(&(server.url("plain") + "&stall=1s")).unwrap();
    for depth in [1, 4, 64] {
        let seed = depth as u64;
        for (share, fault) in [
            (10, Fault::SlowDown),
            (10, Fault::InternalError),
            (10, Fault::Truncate),
            (10, Fault::Reset),
            (10, Fault::WrongRange),
            (4, Fault::StallInBody),
            (4, Fault::Delay(Duration::from_millis(50))),
        ] {
            server.inject(FaultRule::per_mille(share, seed, fault).of("GET").to("corpus.bin"));
        }
        let before = server.fault_count();
        let mut options = options();
        (options.depth, options.gap_bytes) = (Some(depth), Some(0));
        options.verify = false; // whole blocks of this small file would be few requests
        corpus.check(&format!("a failing s3 {depth}"), &store, options);
        assert!(server.fault_count() > before + 5, "too few faults to test anything");
        server.heal();
    }
}

/// Copies a dataset to another store.
pub fn copy(name: &str, from: &Arc<dyn Storage>, to: &Arc<dyn Storage>) {
    for name in [".bin", ".crc", ".idx"].map(|end| Key::new(format!("{name}{end}")).unwrap()) {
        let bytes = match storage::read_all(from.as_ref(), &name) {
            // Megatron writes no checksums.
            Err(storage::Error::NotFound { .. }) if name.name().ends_with(".crc") => continue,
            other => other.unwrap(),
        };
        storage::write_all(to.as_ref(), &name, &bytes).unwrap();
    }
}
