//! An `.idx` of Megatron: accepted if and only if a simple reader of the format accepts it, and
//! written again to the same bytes from either reader.

#![no_main]

use fuzz::{FILE_BYTES_MAX, bytes_of, key, some_bytes, store_with};
use indexed::{Format, IndexedDataset, ReadOptions, TokenSource, WriteOptions, Writer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|idx: &[u8]| {
    let expected = bin_bytes(idx).filter(|&bytes| bytes <= FILE_BYTES_MAX);
    let bin = some_bytes(expected.unwrap_or(12));
    let store = store_with(&[("a.idx", idx), ("a.bin", &bin)]);
    let opened = IndexedDataset::open(&store, &key("a"));
    assert_eq!(opened.is_ok(), expected.is_some(), "{opened:?}");
    let streamed = TokenSource::open(&store, &key("a"), Format::Mmididx, &ReadOptions::default());
    let Ok(dataset) = opened else {
        // The streaming reader may accept it: it knows more types and keeps fewer columns.
        if let Ok(source) = streamed {
            let _ = indexed::Census::take(&source, None);
        }
        return;
    };
    let report = dataset.check().expect("a valid pair");
    assert_eq!((report.bin_bytes, report.idx_bytes), (bin.len() as u64, idx.len() as u64));
    for document in 0..dataset.document_count() {
        for seq in dataset.document(document) {
            let tokens = dataset.read_sequence(seq).map(|tokens| tokens.len());
            assert!(tokens.is_err() || tokens.unwrap() == dataset.sequence_len(seq) as usize);
        }
    }
    // Floating-point elements are a valid pair, and no ids.
    let source = match streamed {
        Err(_) if !dataset.dtype().is_integer() => return,
        streamed => streamed.expect("accepted by the other reader"),
    };
    let (to, options) = (key("b"), WriteOptions::default());
    let written = Writer::create(&store, &to, Format::Mmididx, &source, &options);
    let mut writer = written.expect("a type of Megatron's");
    source.read_into(&mut writer).expect("a valid pair");
    writer.finish().expect("room in memory");
    // DeepSpeed's type code of uint16 becomes Megatron's.
    let mut expected = idx.to_vec();
    expected[17] = dataset.dtype().code();
    assert!(bytes_of(&store, "b.idx") == expected && bytes_of(&store, "b.bin") == bin);
});

/// The length that the `.bin` must have; `None` if this is no valid `.idx`.
fn bin_bytes(idx: &[u8]) -> Option<u64> {
    let mut rest = idx.strip_prefix(b"MMIDIDX\0\0\x01\0\0\0\0\0\0\0")?;
    match take::<1>(&mut rest)? {
        [1 | 2] => tables_end(rest, 1),
        [3 | 8] => tables_end(rest, 2),
        [4 | 7] => tables_end(rest, 4),
        [5] => tables_end(rest, 8),
        [6] => tables_end(rest, 8).or_else(|| tables_end(rest, 2)), // or DeepSpeed's uint16
        _ => None,
    }
}

/// The end of the last sequence, if the tables are valid for elements of this many bytes.
fn tables_end(mut rest: &[u8], item_bytes: u64) -> Option<u64> {
    let sequences = u64::from_le_bytes(take(&mut rest)?);
    let documents = u64::from_le_bytes(take(&mut rest)?);
    let (mut lengths, mut sum) = (Vec::new(), 0_u64);
    for _ in 0..sequences {
        lengths.push(u64::try_from(i32::from_le_bytes(take(&mut rest)?)).ok()?);
    }
    for len in lengths {
        if u64::from_le_bytes(take(&mut rest)?) != sum {
            return None;
        }
        sum = sum.checked_add(len * item_bytes)?;
    }
    let mut last = None;
    for _ in 0..documents {
        let entry = i64::from_le_bytes(take(&mut rest)?);
        if last.map_or(entry != 0, |last| entry < last) {
            return None;
        }
        last = Some(entry);
    }
    let has_modes = rest.len() as u64 == sequences;
    (last == Some(sequences as i64) && (rest.is_empty() || has_modes)).then_some(sum)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (field, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*field)
}
