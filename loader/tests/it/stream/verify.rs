//! What is read is compared with the checksums of its blocks: damage is found wherever it is, read
//! again in case it came on the way, and named.

use std::sync::Arc;

use loader::Error;
use storage::testing::s3_server::{Fault, FaultRule, S3Server};
use storage::{Key, Storage};

use crate::stream::backends::copy;
use crate::stream::corpus::{Corpus, options, start, stream, sum};

const BLOCK: u64 = 4096;

fn flip(corpus: &Corpus, at: u64, bit: u64) {
    let path = std::path::Path::new(&corpus.path).join("corpus.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[at as usize] ^= 1 << bit;
    std::fs::write(&path, bytes).unwrap();
}

/// The whole stream, or its first error.
fn read(store: &Arc<dyn Storage>, verify: bool) -> Result<String, Error> {
    let mut options = options();
    options.verify = verify;
    let mut loader = start(store, options);
    let mut all = Vec::new();
    while let Some(batch) = loader.next_batch()? {
        crate::stream::corpus::rows(&batch, &mut all);
        loader.recycle(batch);
    }
    Ok(sum(all.iter().map(|(_, text)| text)))
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
        let (at, bit) = (dice(len), dice(8));
        flip(&corpus, at, bit);
        match read(&store, true) {
            Err(Error::Storage(storage::Error::Corrupt { object, offset, .. })) => {
                assert!(object.ends_with("corpus.bin"), "round {round}: {object}");
                assert_eq!(offset, at / BLOCK * BLOCK, "round {round}: byte {at}");
            }
            other => panic!("round {round}: byte {at} of {len}: {other:?}"),
        }
        if round == 0 {
            let sum = read(&store, false).unwrap();
            assert!(sum != corpus.due, "without verification nobody sees it");
        }
        flip(&corpus, at, bit);
    }
    assert_eq!(read(&store, true).unwrap(), corpus.due);
}

#[test]
fn a_byte_that_flips_on_its_way_is_read_again() {
    let corpus = Corpus::new();
    let server = S3Server::start().unwrap();
    let store = storage::open_url(&server.url("plain")).unwrap();
    copy("corpus", &corpus.store(), &store);
    let mut loader = start(&store, options());
    server.inject(FaultRule::nth(1, Fault::WrongByte).of("GET").to("corpus.bin"));
    let got = stream(&mut loader);
    assert_eq!(server.fault_count(), 1);
    assert_eq!(sum(got.iter().map(|(_, text)| text)), corpus.due);
    server.heal();
    // One that is wrong whenever it is read is not.
    server.inject(FaultRule::every(1, Fault::WrongByte).of("GET").to("corpus.bin"));
    let mut loader = start(&store, options());
    let error = loop {
        match loader.next_batch() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("all of it came"),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("corpus.bin, at byte"), "{error}");
}
