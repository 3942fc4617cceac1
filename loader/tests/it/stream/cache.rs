//! The local cache: the same stream, with fewer reads from the store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use loader::cache::{self, CacheOptions, LogOptions, NodeCache, OrderLog};
use loader::{Ranks, SampleCache};
use storage::Storage;

use super::corpus::{Corpus, SAMPLES, digest_of, options, order, rows, start, stream};

/// A cache that has every other sample.
#[derive(Debug, Default)]
struct Half {
    kept: Mutex<HashMap<u64, Vec<u8>>>,
    reported: Mutex<Vec<u64>>,
}

impl SampleCache for Half {
    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        let kept = self.kept.lock().unwrap();
        let found = kept.get(&sample).filter(|bytes| bytes.len() == into.len());
        found.map(|bytes| into.copy_from_slice(bytes)).is_some()
    }

    fn keep(&self, sample: u64, bytes: &[u8]) {
        if sample.is_multiple_of(2) {
            self.kept.lock().unwrap().insert(sample, bytes.to_vec());
        }
    }

    fn consumed(&self, samples: u64) {
        self.reported.lock().unwrap().push(samples);
    }
}

#[test]
fn cached_samples_are_not_read_again() {
    let corpus = Corpus::new();
    let cache = Arc::new(Half::default());
    let mut options = options();
    options.sample_cache = Some(cache.clone());
    corpus.check("an empty cache", &corpus.store(), options.clone());
    assert_eq!(cache.kept.lock().unwrap().len() as u64, SAMPLES / 2);
    let mut loader = start(&corpus.store(), options);
    let found = stream(&mut loader);
    assert_eq!(digest_of(found.iter().map(|(_, text)| text)), corpus.expected_digest);
    assert_eq!(loader.metrics().near_samples, SAMPLES / 2);
    let reported = cache.reported.lock().unwrap();
    assert!(reported.iter().all(|&samples| samples <= SAMPLES), "{reported:?}");
    assert!(reported.iter().any(|&samples| samples > 0), "consumed samples were not reported");
}

fn disk(folder: &tempfile::TempDir) -> Arc<dyn Storage> {
    storage::open_url(folder.path().to_str().unwrap()).unwrap()
}

fn bin_bytes(corpus: &Corpus) -> u64 {
    std::fs::metadata(format!("{}/corpus.bin", corpus.path)).unwrap().len()
}

/// The cache of a run whose files do not fit: a log of its samples.
fn log(corpus: &Corpus, folder: &tempfile::TempDir) -> NodeCache {
    let limit = CacheOptions { limit_bytes: bin_bytes(corpus) - 1, salt: 5 };
    let cache = cache::open(&disk(folder), &order(&corpus.store()), limit).unwrap();
    assert!(matches!(cache, NodeCache::Log(_)));
    cache
}

#[test]
fn restart_reads_from_the_local_cache() {
    let (corpus, folder) = (Corpus::new(), tempfile::tempdir().unwrap());
    let mut first = Vec::new();
    // A run that ends before its first checkpoint. Its samples are written when it ends.
    let cache = log(&corpus, &folder);
    let mut options = options();
    options.sample_cache = Some(cache.sample_cache());
    options.samples.end = 400;
    let mut loader = start(&corpus.store(), options.clone());
    while loader.samples_consumed() < 400 {
        rows(&loader.next_batch().unwrap().unwrap(), &mut first);
    }
    assert_eq!(loader.metrics().near_samples, 0);
    (options.sample_cache, options.samples.end) = (None, SAMPLES);
    drop((loader, cache));

    // It restarts with cached samples, and continues with others.
    let cache = log(&corpus, &folder);
    options.sample_cache = Some(cache.sample_cache());
    let mut loader = start(&corpus.store(), options.clone());
    let all = stream(&mut loader);
    assert!(all[..400] == first[..], "another stream than before");
    assert_eq!(digest_of(all.iter().map(|(_, text)| text)), corpus.expected_digest);
    assert_eq!(loader.metrics().near_samples, 400);
    drop(loader);

    // No run restarts before a checkpoint: the samples for that are deleted.
    let NodeCache::Log(log) = &cache else { panic!("{cache:?}") };
    log.flush();
    let before = log.bytes();
    cache.checkpointed(400);
    log.flush();
    assert!(log.bytes() < before, "{before} bytes before and after");
    options.samples.end = 400;
    let mut loader = start(&corpus.store(), options);
    assert!(stream(&mut loader) == first, "another stream after the deletion");
    assert_eq!(loader.metrics().near_samples, 0);
}

/// Two ranks each cached their own samples; a single rank after them finds all of them.
#[test]
fn cache_serves_another_number_of_ranks() {
    let (corpus, folder) = (Corpus::new(), tempfile::tempdir().unwrap());
    let order = order(&corpus.store());
    let log = || -> Arc<dyn SampleCache> {
        let log = OrderLog::open(&disk(&folder), order.as_ref(), LogOptions::default());
        Arc::new(log.unwrap())
    };
    for rank in 0..2 {
        let mut options = options();
        (options.ranks, options.sample_cache) = (Ranks::one(rank, 2), Some(log()));
        stream(&mut start(&corpus.store(), options));
    }
    let mut options = options();
    options.sample_cache = Some(log());
    let mut loader = start(&corpus.store(), options);
    let all = stream(&mut loader);
    assert_eq!(digest_of(all.iter().map(|(_, text)| text)), corpus.expected_digest);
    let metrics = loader.metrics();
    assert_eq!((metrics.near_samples, metrics.reads), (SAMPLES, 0));
}

#[test]
fn files_that_fit_are_read_from_the_store_once() {
    let (corpus, folder) = (Corpus::new(), tempfile::tempdir().unwrap());
    let limit = CacheOptions { limit_bytes: bin_bytes(&corpus), salt: 5 };
    let cache = cache::open(&disk(&folder), &order(&corpus.store()), limit).unwrap();
    let NodeCache::Files(files) = &cache else { panic!("{cache:?}") };
    let mut options = options();
    options.sample_cache = Some(cache.sample_cache());
    corpus.check("while files are copied", &corpus.store(), options.clone());
    while files.progress().0 < files.progress().1 {
        std::thread::yield_now();
    }
    let mut loader = start(&corpus.store(), options);
    let all = stream(&mut loader);
    assert_eq!(digest_of(all.iter().map(|(_, text)| text)), corpus.expected_digest);
    let metrics = loader.metrics();
    assert_eq!((metrics.near_samples, metrics.reads), (SAMPLES, 0));
}
