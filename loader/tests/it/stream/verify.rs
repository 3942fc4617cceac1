//! Reads are compared with the checksums of their blocks: corrupt blocks are read again, in case
//! the transfer corrupted them, and named.

use std::sync::Arc;

use indexed::Dtype;
use loader::batch::{GptAssemble, GptConfig};
use loader::{DataFile, Error, Loader, PieceRef, SampleOrder};
use storage::testing::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, Storage};

use crate::stream::backends::copy;
use crate::stream::corpus::{Corpus, SEQ_LEN, digest_of, open, options, order, rows};

const BLOCK: u64 = 512;

fn flip(corpus: &Corpus, at: u64, bit: u64) {
    let path = std::path::Path::new(&corpus.path).join("corpus.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at as usize] ^= 1 << bit;
    std::fs::write(&path, bytes).unwrap();
}

/// The tokens of a file in its order.
#[derive(Debug)]
struct InOrder([DataFile; 1]);

impl SampleOrder for InOrder {
    fn sources(&self) -> &[DataFile] {
        &self.0
    }

    fn sample_count(&self) -> u64 {
        (self.0[0].len_bytes / 2 - 1) / SEQ_LEN as u64
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> loader::Result<()> {
        let seq_bytes = 2 * SEQ_LEN as u64;
        let (offset_bytes, len_bytes) = (sample * seq_bytes, seq_bytes + 2);
        into.push(PieceRef { file: 0, offset_bytes, len_bytes });
        Ok(())
    }

    fn name(&self) -> String {
        "a file in its order".to_owned()
    }
}

/// In the order of the file, with batches so large that read buffers are kept and verified when
/// their bytes are decoded; or shuffled, with small ones whose bytes are verified and copied when
/// they arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Order {
    OfFile,
    Shuffled,
}

/// The whole stream as a checksum, or its first error.
fn read(store: &Arc<dyn Storage>, which: Order, verify: bool) -> Result<String, Error> {
    let (order, mut options) = match which {
        Order::Shuffled => (order(store), options()),
        Order::OfFile => {
            let bin = DataFile::bin_of(&open(store).0).unwrap();
            let order: Arc<dyn SampleOrder> = Arc::new(InOrder([bin]));
            let (mut options, count) = (options(), order.sample_count());
            (options.micro_batch, options.samples) = (256, 0..count);
            (order, options)
        }
    };
    options.verify = verify;
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap();
    let mut loader = Loader::start(order, assemble, options)?;
    let mut all = Vec::new();
    while let Some(batch) = loader.next_batch()? {
        rows(&batch, &mut all);
        loader.recycle(batch);
    }
    Ok(digest_of(all.iter().map(|(_, text)| text)))
}

#[test]
fn every_flipped_bit_ends_the_stream_and_is_named() {
    let corpus = Corpus::new();
    let store = corpus.store();
    let len = store.open(&Key::new("corpus.bin").unwrap()).unwrap().len_bytes();
    let mut state = 5_u64;
    let mut dice = |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    for round in 0..100 {
        let which = if round % 2 == 0 { Order::Shuffled } else { Order::OfFile };
        // In the order of the file the last tokens are less than a sample.
        let end = if which == Order::OfFile { len - 2 * SEQ_LEN as u64 } else { len };
        let (at, bit) = (dice(end), dice(8));
        flip(&corpus, at, bit);
        match read(&store, which, true) {
            Err(Error::Storage(storage::Error::Corrupt { object, offset, .. })) => {
                assert!(object.ends_with("corpus.bin"), "round {round}: {object}");
                assert_eq!(offset, at / BLOCK * BLOCK, "round {round}: byte {at}");
            }
            other => panic!("round {round}: byte {at} of {len}: {other:?}"),
        }
        if round == 0 {
            let digest = read(&store, which, false).unwrap();
            assert!(digest != corpus.expected_digest, "the flipped bit changes the stream");
        }
        flip(&corpus, at, bit);
    }
    assert_eq!(read(&store, Order::Shuffled, true).unwrap(), corpus.expected_digest);
}

#[test]
fn transient_corruption_is_read_again() {
    let corpus = Corpus::new();
    let server = S3Server::start().unwrap();
    let store = storage::open_url(&server.url("plain")).unwrap();
    copy("corpus", &corpus.store(), &store);
    for (nth, which) in [Order::Shuffled, Order::OfFile].into_iter().enumerate() {
        let whole = read(&store, which, false).unwrap();
        server.inject(FaultRule::nth(1, Fault::WrongByte).of("GET").to("corpus.bin"));
        assert_eq!(read(&store, which, true).unwrap(), whole, "{which:?}");
        assert_eq!(server.fault_count(), nth as u64 + 1, "{which:?}");
        server.heal();
    }
    // A byte that is wrong in every read is an error.
    server.inject(FaultRule::every(1, Fault::WrongByte).of("GET").to("corpus.bin"));
    for which in [Order::Shuffled, Order::OfFile] {
        let error = read(&store, which, true).unwrap_err().to_string();
        assert!(
            error.contains("corpus.bin: expected") && error.contains("at byte"),
            "{which:?}: {error}"
        );
    }
}
