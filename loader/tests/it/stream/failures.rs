//! Samples that cannot be read: the error is returned in order, and the loader can be dropped.

use std::sync::Arc;
use std::time::Duration;

use loader::Error;
use storage::testing::fault_store::{ReadFaultLayer, ReadFaults};
use storage::{Key, Storage};

use super::corpus::{Corpus, SAMPLES, digest_of, options, order, start, stream};

#[test]
fn stream_ends_at_the_first_unreadable_sample() {
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
        let faults = ReadFaults { broken: broken_from..u64::MAX, ..ReadFaults::default() };
        let store = ReadFaultLayer::new(corpus.store(), 1, faults);
        let store: Arc<dyn Storage> = Arc::new(store);
        let mut options = options();
        // With a gap, good samples would be in the same requests as broken ones.
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

/// One request in five hangs, several times as many as the initial queue depth, and the others are
/// still read.
#[test]
fn hung_requests_do_not_block_others() {
    let corpus = Corpus::new();
    let faulty = ReadFaultLayer::new(corpus.store(), 1, ReadFaults::default());
    let store: Arc<dyn Storage> = Arc::new(faulty.clone());
    let len_bytes = corpus.store().open(&Key::new("corpus.bin").unwrap()).unwrap().len_bytes();
    faulty.hang(len_bytes / 5 * 4..len_bytes);
    let mut options = options();
    (options.micro_batch, options.gap_bytes) = (1, Some(0));
    options.verify = false; // whole blocks of this small file would be few requests
    let mut loader = start(&store, options);
    for _ in 0..60_000 {
        if faulty.read_count() < 600 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert!(faulty.read_count() >= 600, "only {} reads were started", faulty.read_count());
    faulty.release();
    assert_eq!(digest_of(stream(&mut loader).iter().map(|(_, text)| text)), corpus.expected_digest);
}

/// Retries are counted by the error that caused them.
#[test]
fn retries_are_counted_by_cause() {
    let corpus = Corpus::new();
    // Four failures in a row would end a read, and which reads fail depends on the threads.
    let faults = ReadFaults { io_per_mille: 10, stale_per_mille: 5, ..ReadFaults::default() };
    let faulty = ReadFaultLayer::new(corpus.store(), 3, faults);
    let store: Arc<dyn Storage> = Arc::new(faulty.clone());
    let mut options = options();
    (options.gap_bytes, options.verify) = (Some(0), false); // as above
    let mut loader = start(&store, options);
    stream(&mut loader);
    let metrics = loader.metrics();
    let of = |cause| metrics.retries_by.get(cause).copied().unwrap_or(0);
    let (io, stale) = (of("EIO"), of("ESTALE"));
    assert!(io > stale && stale > 0, "{metrics:?}");
    assert_eq!(metrics.retries, io + stale, "{metrics:?}");
    assert_eq!(metrics.retries, faulty.failed_count(), "{metrics:?}");
    assert_eq!(metrics.failed, 0);
}

/// A file system that stops answering: the consumer receives an error, may call again, and can drop
/// the loader.
#[test]
fn frozen_store_times_out() {
    let corpus = Corpus::new();
    let faulty = ReadFaultLayer::new(corpus.store(), 1, ReadFaults::default());
    faulty.hang(0..u64::MAX);
    let store: Arc<dyn Storage> = Arc::new(faulty.clone());
    let mut options = options();
    // Long enough to open the file, also on a busy machine.
    options.timeout = Duration::from_secs(2);
    let mut loader = start(&store, options.clone());
    let error = loader.next_batch().unwrap_err();
    let named = matches!(error, Error::Late { .. } | Error::Storage(storage::Error::Stuck { .. }));
    assert!(named, "{error}");
    drop(loader);
    // A read that hangs for less than the timeout is only late.
    options.timeout = Duration::from_secs(60);
    let mut loader = start(&store, options);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            faulty.release();
        });
        assert_eq!(loader.next_batch().unwrap().unwrap().first_sample, 0);
    });
}
