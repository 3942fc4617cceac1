//! Block checksums: their format, and that every reader finds every flipped bit.

use std::sync::Arc;

use crate::common::{Dice, key, read, temp_store};
use indexed::{
    BlockChecksums, Builder, Census, DocumentRange, Dtype, Error, Format, IndexedDataset,
    ReadOptions, TokenSource, splice, write_checksums,
};
use storage::{RangeRead, Storage};

const BLOCK: usize = 512;

/// CRC-32C bit by bit, as RFC 3720 defines it.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for &byte in bytes {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (if crc & 1 == 1 { 0x82f6_3b78 } else { 0 });
        }
    }
    !crc
}

fn sums(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks(BLOCK).flat_map(|block| crc32c(block).to_le_bytes()).collect()
}

/// The file as defined by `FORMAT.md`, for a `.bin` whose segments start at `starts`.
fn layout(bin: &[u8], idx: &[u8], starts: &[usize]) -> Vec<u8> {
    let ends = starts.iter().skip(1).copied().chain([bin.len()]);
    let segments = starts.iter().zip(ends).map(|(&start, end)| &bin[start..end]);
    let mut file: Vec<u8> = segments.flat_map(sums).collect();
    file.extend(sums(idx));
    let crc64 = storage::crc64(&file);
    let mut tail: Vec<u8> = starts.iter().flat_map(|&at| (at as u64).to_le_bytes()).collect();
    tail.extend(b"FLBLKCRC");
    tail.extend(1_u32.to_le_bytes());
    tail.extend(512_u32.to_le_bytes());
    for field in [bin.len(), idx.len(), starts.len()] {
        tail.extend((field as u64).to_le_bytes());
    }
    tail.extend(crc64.to_le_bytes());
    let crc64 = storage::crc64(&tail);
    tail.extend(crc64.to_le_bytes());
    file.extend(tail);
    file
}

/// Documents of up to three sequences, with `tokens` tokens in total.
fn pair(store: &Arc<dyn Storage>, name: &str, mut tokens: u64, rng: &mut Dice) {
    let mut builder = Builder::create(store, &key(name), Dtype::U16).unwrap();
    while tokens > 0 {
        for _ in 0..rng.below(4) {
            let len = (1 + rng.below(900)).min(tokens);
            let ids: Vec<u32> = (0..len).map(|_| rng.below(60_000) as u32).collect();
            builder.add_sequence(&ids).unwrap();
            tokens -= len;
        }
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
}

fn part(store: &Arc<dyn Storage>, name: &str, trusted: bool) -> DocumentRange {
    let bin = read(store.as_ref(), &format!("{name}.bin"));
    let bin_crc64 = trusted.then(|| storage::crc64(&bin));
    DocumentRange { store: Arc::clone(store), prefix: key(name), documents: None, bin_crc64 }
}

/// Reads every sequence separately.
fn read_all(store: &Arc<dyn Storage>, name: &str) -> indexed::Result<()> {
    let dataset = IndexedDataset::open(store, &key(name))?;
    for sequence in 0..dataset.sequence_count() {
        dataset.read_sequence(sequence)?;
    }
    Ok(())
}

fn place(error: &Error) -> (String, u64) {
    match error {
        Error::Storage(storage::Error::Corrupt { object, offset, .. })
        | Error::Malformed { file: object, offset, .. } => (object.clone(), *offset),
        other => panic!("{other}"),
    }
}

#[test]
fn the_crc_file_matches_its_format() {
    let (_guard, store) = temp_store();
    for tokens in [0, 1, 255, 256, 257, 600_000] {
        let name = format!("of_{tokens}");
        pair(&store, &name, tokens, &mut Dice(tokens + 1));
        let [bin, idx, crc] =
            [".bin", ".idx", ".crc"].map(|end| read(store.as_ref(), &format!("{name}{end}")));
        let starts: &[usize] = if tokens == 0 { &[] } else { &[0] };
        assert_eq!(crc, layout(&bin, &idx, starts), "{tokens} tokens");
        read_all(&store, &name).unwrap();
    }
    // A merge copies the checksums of its parts, whether tokens are copied or read; empty parts are
    // no segment.
    let names = ["of_257", "of_0", "of_1", "of_600000", "of_256", "of_0"];
    for trusted in [true, false] {
        let out = format!("merged_{trusted}");
        let parts = names.map(|name| part(&store, name, trusted));
        splice(&store, &key(&out), &parts).unwrap();
        let [bin, idx, crc] =
            [".bin", ".idx", ".crc"].map(|end| read(store.as_ref(), &format!("{out}{end}")));
        let starts = [0, 514, 516, 1_200_516];
        assert_eq!(crc, layout(&bin, &idx, &starts), "{out}");
        read_all(&store, &out).unwrap();
    }
    // A merge of merges.
    let parts = ["of_1", "merged_true", "merged_false"].map(|name| part(&store, name, true));
    splice(&store, &key("twice"), &parts).unwrap();
    read_all(&store, "twice").unwrap();
}

#[test]
fn every_flipped_bit_is_reported_at_its_offset() {
    let (guard, store) = temp_store();
    let mut rng = Dice(7);
    pair(&store, "one", 300_000, &mut rng);
    pair(&store, "two", 12_345, &mut rng);
    let parts = ["two", "one", "two"].map(|name| part(&store, name, true));
    splice(&store, &key("a"), &parts).unwrap();
    let mut found = 0;
    for round in 0..100 {
        let name = if round % 2 == 0 { "a.bin" } else { "a.idx" };
        let path = guard.path().join(name);
        let good = std::fs::read(&path).unwrap();
        let (at, bit) = (rng.below(good.len() as u64), rng.below(8));
        let mut bad = good.clone();
        bad[at as usize] ^= 1 << bit;
        std::fs::write(&path, &bad).unwrap();
        let errors = [
            read_all(&store, "a").unwrap_err(),
            // The readers of convert and check.
            (TokenSource::open(&store, &key("a"), Format::Mmididx, &ReadOptions::default()))
                .and_then(|source| Census::take(&source, None))
                .unwrap_err(),
            splice(&store, &key("copy"), &[part(&store, "a", false)]).unwrap_err(),
        ];
        for error in &errors {
            let (file, offset) = place(error);
            // A rule of the format may report an entry that depends on the wrong one.
            let rule = matches!(error, Error::Malformed { .. });
            assert!(rule || file.ends_with(name), "round {round}: {error}");
            let near = offset <= at && at < offset + BLOCK as u64;
            assert!(rule || near, "round {round}: byte {at}: {error}");
            found += usize::from(near);
        }
        std::fs::write(&path, &good).unwrap();
    }
    assert!(found >= 150, "all of the .bin: {found}");
    assert!(!store.list_names(&storage::Key::root()).unwrap().contains(&"copy.bin".to_owned()));
    read_all(&store, "a").unwrap();
}

#[test]
fn reads_of_any_range_are_verified() {
    let (guard, store) = temp_store();
    let mut rng = Dice(3);
    pair(&store, "a", 20_000, &mut rng);
    let bin = read(store.as_ref(), "a.bin");
    let dataset = IndexedDataset::open(&store, &key("a")).unwrap();
    for _ in 0..200 {
        let ranges: Vec<_> = (0..rng.below(5))
            .map(|_| {
                let start = rng.below(bin.len() as u64) as usize;
                let len = rng.below(3 * BLOCK as u64) as usize;
                start..(start + len).min(bin.len())
            })
            .collect();
        let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|it| vec![0; it.len()]).collect();
        let mut reads: Vec<_> = (ranges.iter().zip(&mut buffers))
            .map(|(range, buf)| RangeRead { offset: range.start as u64, buf })
            .collect();
        dataset.bin().read_many(&mut reads).unwrap();
        for (range, buffer) in ranges.iter().zip(&buffers) {
            assert_eq!(buffer, &bin[range.clone()], "{range:?}");
        }
    }
    let beyond = &mut [RangeRead { offset: bin.len() as u64 - 1, buf: &mut [0; 2] }];
    assert!(matches!(dataset.bin().read_many(beyond), Err(storage::Error::ShortRead { .. })));
    drop(guard);
}

/// Checksums that are added to a dataset of another program cover its current bytes.
#[test]
fn checksums_added_later_are_the_same() {
    let (guard, store) = temp_store();
    pair(&store, "a", 50_000, &mut Dice(5));
    let path = guard.path().join("a.crc");
    let before = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(BlockChecksums::open(store.as_ref(), &key("a")).unwrap().is_none());
    read_all(&store, "a").unwrap();
    for file in write_checksums(&store, &key("a")).unwrap() {
        file.verify(store.as_ref(), &storage::Key::root()).unwrap();
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    let again = write_checksums(&store, &key("a")).unwrap_err();
    assert!(matches!(again, Error::Storage(storage::Error::Exists { .. })), "{again}");
}

/// With a `.crc` that is damaged, truncated or of other files, good data is refused, and the
/// message names the `.crc`.
#[test]
fn damaged_checksum_files_are_refused() {
    let (guard, store) = temp_store();
    pair(&store, "a", 50_000, &mut Dice(5));
    pair(&store, "b", 50_001, &mut Dice(6));
    let path = guard.path().join("a.crc");
    let good = std::fs::read(&path).unwrap();
    let mut rng = Dice(9);
    for round in 0..100 {
        let mut bad = good.clone();
        match round % 3 {
            0 => bad[rng.below(good.len() as u64) as usize] ^= 1 << rng.below(8),
            1 => bad.truncate(rng.below(good.len() as u64) as usize),
            _ => bad.extend(vec![0; 1 + rng.below(99) as usize]),
        }
        std::fs::write(&path, &bad).unwrap();
        let error = read_all(&store, "a").unwrap_err().to_string();
        assert!(error.contains("a.crc"), "round {round}: {error}");
    }
    // Complete, but with another block size.
    let mut other = good.clone();
    let footer = other.len() - 56;
    other[footer + 12..footer + 16].copy_from_slice(&8192_u32.to_le_bytes());
    let crc64 = storage::crc64(&other[footer - 8..footer + 48]);
    other[footer + 48..].copy_from_slice(&crc64.to_le_bytes());
    std::fs::write(&path, &other).unwrap();
    let error = read_all(&store, "a").unwrap_err().to_string();
    assert!(error.contains("blocks of 8192 bytes"), "{error}");
    std::fs::copy(guard.path().join("b.crc"), &path).unwrap();
    let error = read_all(&store, "a").unwrap_err().to_string();
    assert!(error.contains("a.crc") && error.contains("hint: delete "), "{error}");
    std::fs::write(&path, &good).unwrap();
    let checksums = BlockChecksums::open(store.as_ref(), &key("a")).unwrap().unwrap();
    checksums.verify_self().unwrap();
}
