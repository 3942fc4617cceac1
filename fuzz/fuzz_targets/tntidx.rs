//! A TNTIDX: if it is accepted, it converts to a valid pair with the same tokens.

#![no_main]

use fuzz::{FILE_BYTES_MAX, bytes_of, converted, some_bytes, store_with};
use indexed::Format;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|idx: &[u8]| {
    // With the document index, and without it as fairseq writes it.
    for header in [56, 48] {
        let len = bin_bytes(idx, header).filter(|&bytes| bytes <= FILE_BYTES_MAX);
        let bin = some_bytes(len.unwrap_or(0));
        let store = store_with(&[("a.idx", idx), ("a.bin", &bin)]);
        if let Some((source, dataset)) = converted(&store, Format::Tntidx)
            && dataset.dtype() == source.dtype()
        {
            assert!(bytes_of(&store, "b.bin") == bin);
        }
    }
});

/// The length of the `.bin` by the last entry of the second table.
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
