//! A TNTIDX: what is accepted is converted to a pair that is sound and has the same tokens.

#![no_main]

use fuzz::{FILE_BYTES_MAX, bytes_of, key, some_bytes, store_with};
use indexed::{Census, Format, IndexedDataset, ReadOptions, Source, WriteOptions, Writer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|idx: &[u8]| {
    // With the document index, and fairseq's own without it.
    for header in [56, 48] {
        let len = bin_bytes(idx, header).filter(|&bytes| bytes <= FILE_BYTES_MAX);
        let bin = some_bytes(len.unwrap_or(0));
        let store = store_with(&[("a.idx", idx), ("a.bin", &bin)]);
        convert(&store, &bin);
    }
});

fn convert(store: &fuzz::Store, bin: &[u8]) {
    let Ok(source) = Source::open(store, &key("a"), Format::Tntidx, &ReadOptions::default()) else {
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
    if dataset.dtype() == source.dtype() {
        assert!(bytes_of(store, "b.bin") == bin);
    }
}

/// What the last entry of the second table says of the `.bin`.
fn bin_bytes(idx: &[u8], header: u64) -> Option<u64> {
    let field = |at: u64| {
        let bytes = idx.get(usize::try_from(at).ok()?..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    };
    let (item_bytes, items) = (field(24)?, field(32)?);
    let table = items.checked_add(1)?.checked_mul(8)?;
    let last = items.checked_mul(8)?.checked_add(table)?.checked_add(header)?;
    field(last)?.checked_mul(item_bytes)
}
