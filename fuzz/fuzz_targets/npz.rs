//! An `.npz` of Paddle, a ZIP archive: the index beside an array of ids, and all in one. What is
//! accepted is converted to a pair that is sound.

#![no_main]

use fuzz::{key, store_with};
use indexed::{Census, Format, IndexedDataset, ReadOptions, Source, WriteOptions, Writer};
use libfuzzer_sys::fuzz_target;

/// The array that the index of the seeds belongs to.
const IDS: &[u8] = include_bytes!("../../tests/golden/legacy/paddle_ids.npy");

fuzz_target!(|file: &[u8]| {
    convert(&store_with(&[("a_ids.npy", IDS), ("a_idx.npz", file)]));
    convert(&store_with(&[("a_ids.npz", file)]));
});

fn convert(store: &fuzz::Store) {
    let Ok(source) = Source::open(store, &key("a"), Format::Paddle, &ReadOptions::default()) else {
        return;
    };
    let Ok(census) = Census::take(&source, None) else { return };
    let (to, options) = (key("b"), WriteOptions::default());
    let Ok(mut writer) = Writer::create(store, &to, Format::Mmididx, &source, &options) else {
        return;
    };
    // Types that Megatron has not are narrowed, which not every token can be.
    if source.read_into(&mut writer).is_err() {
        return;
    }
    writer.finish().expect("room in memory");
    let dataset = IndexedDataset::open(store, &to).expect("what we wrote");
    assert_eq!(dataset.sequence_count(), census.sequences);
    assert_eq!(dataset.document_count(), census.documents);
    assert_eq!(dataset.token_count(), census.tokens);
}
