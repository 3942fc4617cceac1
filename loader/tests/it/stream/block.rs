//! Long requests: extents that are kept, extents that are copied because memory is short, and
//! samples that are cut between two requests all return the bytes of the file.

use std::sync::Arc;

use indexed::{BlockShuffle, Builder, Dtype, IndexedDataset, Split, TokenStream};
use loader::batch::{GptAssemble, GptConfig};
use loader::{BlockOrder, FileOrder, Loader, SampleOrder};
use storage::s3_server::S3Server;
use storage::{Key, Storage};

use super::corpus::{SEQ_LEN, options, stream};

/// Two megabytes: some sixteen blocks.
const TOKENS: u32 = 1 << 20;
/// A block is 130 KiB: long enough to be kept.
const BLOCK_SAMPLES: u64 = 1024;

fn open(store: &Arc<dyn Storage>) -> Arc<IndexedDataset> {
    Arc::new(IndexedDataset::open(store, &Key::new("corpus").unwrap()).unwrap())
}

/// A token is a function of its position.
fn token(at: u64) -> i64 {
    i64::from((at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 49) as u16)
}

/// Documents of a sample each, as `feedline materialize` writes them.
fn build(store: &Arc<dyn Storage>) {
    let mut builder = Builder::create(store, &Key::new("corpus").unwrap(), Dtype::U16).unwrap();
    let tokens: Vec<u32> = (0..TOKENS).map(|at| token(at.into()) as u32).collect();
    for sample in tokens.chunks(SEQ_LEN + 1) {
        builder.add_sequence(sample).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

fn check(what: &str, order: &Arc<dyn SampleOrder>, window_bytes: u64) {
    let mut options = options();
    options.samples.end = order.sample_count();
    options.window_bytes = window_bytes;
    let assemble = GptAssemble::new(GptConfig::new(SEQ_LEN), vec![Dtype::U16]).unwrap();
    let found = stream(&mut Loader::start(Arc::clone(order), assemble, options).unwrap());
    assert_eq!(found.len() as u64, order.sample_count(), "{what}");
    let mut pieces = Vec::new();
    for (sample, text) in found {
        pieces.clear();
        order.pieces(sample, &mut pieces).unwrap();
        let first = pieces[0].offset_bytes / 2;
        let len = pieces[0].len_bytes / 2;
        // A sample that is short is padded with 0, its labels too.
        let at = |nth: u64| if nth < len { token(first + nth) } else { 0 };
        let inputs = (0..SEQ_LEN as u64).map(at);
        let labels = (1..=SEQ_LEN as u64).map(at);
        assert!(text.into_iter().eq(inputs.chain(labels)), "{what}: sample {sample}");
    }
}

#[test]
fn kept_and_copied_extents_equal_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3Server::start().unwrap();
    for url in [folder.path().to_str().unwrap(), &server.url("long")] {
        let store = storage::open_url(url).unwrap();
        build(&store);
        let dataset = open(&store);
        let stream = TokenStream::new(&dataset, Split::Train, Some("1"), SEQ_LEN as u64, true);
        let stream = stream.unwrap();
        let shuffle = BlockShuffle::new(stream.sample_count(), BLOCK_SAMPLES, 3, 5).unwrap();
        let block: Arc<dyn SampleOrder> =
            Arc::new(BlockOrder::new(&dataset, stream, &shuffle, 2).unwrap());
        let file: Arc<dyn SampleOrder> = Arc::new(FileOrder::new(dataset, SEQ_LEN).unwrap());
        // All extents are kept; one or two are kept and the others copied; none is kept.
        for window_bytes in [512 << 20, 600 << 10, 64 << 10] {
            check(&format!("{url}: blocks, {window_bytes}"), &block, window_bytes);
            check(&format!("{url}: in order, {window_bytes}"), &file, window_bytes);
        }
    }
}
