//! A loader whose sample order fails or panics.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use loader::{
    DataFile, Error, Loader, LoaderOptions, PieceRef, RawAssemble, RawBatch, Result, SampleOrder,
};
use storage::Key;

const SAMPLE_BYTES: u64 = 16;
const SAMPLES: u64 = 4096;

/// Samples in the order of their file, one of which fails or panics.
#[derive(Debug)]
struct Troubled {
    source: [DataFile; 1],
    sample: u64,
    trouble: Trouble,
}

#[derive(Debug)]
enum Trouble {
    Panics,
    /// Fails so many more times, then never again.
    Fails(AtomicU64),
}

impl SampleOrder for Troubled {
    fn sources(&self) -> &[DataFile] {
        &self.source
    }

    fn sample_count(&self) -> u64 {
        SAMPLES
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        if sample == self.sample {
            match &self.trouble {
                Trouble::Panics => panic!("the order panics, as it should in this test"),
                Trouble::Fails(left) => {
                    if left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
                        let (dataset, found, expected) = (self.name(), 1, 0);
                        return Err(Error::SampleLength { dataset, sample, found, expected });
                    }
                }
            }
        }
        let (offset_bytes, len_bytes) = (sample * SAMPLE_BYTES, SAMPLE_BYTES);
        into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        "troubled".to_owned()
    }
}

/// The folder must live as long as the loader.
fn start(sample: u64, trouble: Trouble) -> (tempfile::TempDir, Loader<RawAssemble>) {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let key = Key::new("samples").unwrap();
    let bytes: Vec<u8> = (0..SAMPLES).flat_map(sample_bytes).collect();
    storage::write_all(store.as_ref(), &key, &bytes).unwrap();
    let source = [DataFile::new(store, key, SAMPLES * SAMPLE_BYTES)];
    let order = Arc::new(Troubled { source, sample, trouble });
    let mut options = LoaderOptions::new(1, 0..SAMPLES);
    options.timeout = Duration::from_secs(60);
    (folder, Loader::start(order, RawAssemble, options).unwrap())
}

fn sample_bytes(sample: u64) -> [u8; SAMPLE_BYTES as usize] {
    u128::from(sample).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn expected_batch(sample: u64) -> RawBatch {
    let mut batch = RawBatch::default();
    batch.begin(sample);
    batch.push(&sample_bytes(sample));
    batch
}

/// After a panic of a thread the consumer once waited for its timeout, and then received an error
/// that allowed another call.
#[test]
fn panic_is_reported_at_once() {
    let (_folder, mut loader) = start(100, Trouble::Panics);
    let mut next = 0;
    let error = loop {
        match loader.next_batch() {
            Ok(batch) => assert_eq!(batch.unwrap(), expected_batch(next)),
            Err(error) => break error,
        }
        next += 1;
    };
    assert!(next <= 100, "{next} samples were delivered");
    assert!(matches!(error, Error::ThreadPanicked), "{error}");
}

/// All samples before one that cannot be planned are delivered, wherever it is in its round.
#[test]
fn samples_before_a_failure_are_delivered() {
    for sample in [0, 1, 2, 6, 7, 100, 511, 512, SAMPLES - 1] {
        let (_folder, mut loader) = start(sample, Trouble::Fails(AtomicU64::new(u64::MAX)));
        for before in 0..sample {
            assert_eq!(
                loader.next_batch().unwrap(),
                Some(expected_batch(before)),
                "before {sample}"
            );
        }
        let error = loader.next_batch().unwrap_err();
        assert!(matches!(error, Error::SampleLength { .. }), "at {sample}: {error}");
        assert_eq!(loader.samples_consumed(), sample);
    }
}

/// After a transient failure, such as of a file that could not be opened for a moment, rounds once
/// had one batch for the rest of the run, so that no reads were coalesced any more.
#[test]
fn transient_failure_does_not_shrink_rounds() {
    for failures in [1, 3] {
        let (_folder, mut loader) = start(300, Trouble::Fails(AtomicU64::new(failures)));
        for sample in 0..SAMPLES {
            assert_eq!(
                loader.next_batch().unwrap(),
                Some(expected_batch(sample)),
                "{failures} failures"
            );
        }
        assert_eq!(loader.next_batch().unwrap(), None);
        let reads = loader.metrics().reads;
        assert!(reads < 100, "{reads} reads of adjacent samples after {failures} failures");
    }
}
