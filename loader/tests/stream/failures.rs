//! What cannot be read: an error in its turn, and no trap.

use std::sync::Arc;
use std::time::Duration;

use loader::Error;
use storage::Storage;
use storage::sim::{FaultyStore, ReadFaults};

use crate::corpus::{Corpus, SAMPLES, options, order, start};

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
        let faults = ReadFaults { broken: broken_from..u64::MAX, ..ReadFaults::default() };
        let store = FaultyStore::new(corpus.store(), 1, faults);
        let store: Arc<dyn Storage> = Arc::new(store);
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
    let faulty = FaultyStore::new(corpus.store(), 1, ReadFaults::default());
    faulty.hang(0..u64::MAX);
    let store: Arc<dyn Storage> = Arc::new(faulty.clone());
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
            faulty.release();
        });
        assert_eq!(loader.next_batch().unwrap().unwrap().first_sample, 0);
    });
}
