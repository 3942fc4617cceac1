//! Files that must be refused, each with its error and the byte.

use crate::common;
use crate::common::{golden, key};
use indexed::{Error, FormatRule, IndexedDataset};

/// The three tables of `docs_u16`, from which the files were made: 3 sequences, 3 documents.
const LENGTHS: u64 = 34;
const POINTERS: u64 = LENGTHS + 12;
const DOCUMENTS: u64 = POINTERS + 24;
const END: u64 = DOCUMENTS + 32;

const CASES: [(&str, FormatRule, u64, &str); 35] = [
    (
        "empty_idx",
        FormatRule::TooShort,
        0,
        "expected a header of 34 bytes, found end of file at byte 0",
    ),
    ("header_cut", FormatRule::TooShort, 33, "found end of file at byte 33"),
    ("magic_cut", FormatRule::TooShort, 4, "found end of file at byte 4"),
    ("not_an_index", FormatRule::Magic, 0, r#"expected "MMIDIDX\x00\x00""#),
    ("tntidx", FormatRule::Magic, 0, r#"found "TNTIDX\x00\x00\x00""#),
    ("wrong_magic", FormatRule::Magic, 0, r#"found "MMIDIDX\x00X""#),
    ("wrong_version", FormatRule::Version, 9, "expected version 1, found version 2"),
    ("big_endian_version", FormatRule::Version, 9, "found version 72057594037927936"),
    ("dtype_0", FormatRule::Dtype, 17, "expected dtype code 1 to 8, found dtype code 0"),
    ("dtype_9", FormatRule::Dtype, 17, "hint: only PaddleNLP"),
    ("dtype_255", FormatRule::Dtype, 17, "found dtype code 255"),
    ("idx_cut", FormatRule::TooShort, END - 1, "expected 102 bytes"),
    ("idx_long", FormatRule::TooLong, END, "expected 102 bytes ... found a file of 103 bytes"),
    ("sequence_count_one_more", FormatRule::TooShort, END, "expected 114 bytes for 4 sequences"),
    ("sequence_count_huge", FormatRule::TooShort, END, "18446744073709551615 sequences"),
    ("sequence_count_wraps", FormatRule::TooShort, END, "4611686018427387904 sequences"),
    ("document_count_huge", FormatRule::TooShort, END, "a document index of 18446744073709551615"),
    ("document_count_wraps", FormatRule::TooShort, END, "a document index of 2305843009213693956"),
    ("document_count_0", FormatRule::DocumentStart, 26, "a document index of length 0"),
    ("length_negative", FormatRule::SequenceLength, LENGTHS + 4, "found length -2 of sequence 1"),
    (
        "length_min",
        FormatRule::SequenceLength,
        LENGTHS + 8,
        "found length -2147483648 of sequence 2",
    ),
    (
        "length_wrong",
        FormatRule::Pointer,
        POINTERS + 8,
        "expected pointer 4, ... found pointer 6 of sequence 1",
    ),
    (
        "pointer_first",
        FormatRule::Pointer,
        POINTERS,
        "expected pointer 0, ... found pointer 2 of sequence 0",
    ),
    (
        "pointer_wrong",
        FormatRule::Pointer,
        POINTERS + 16,
        "expected pointer 10, ... found pointer 12 of sequence 2",
    ),
    ("pointer_negative", FormatRule::Pointer, POINTERS + 8, "found pointer -6 of sequence 1"),
    (
        "document_start",
        FormatRule::DocumentStart,
        DOCUMENTS,
        "expected first document at sequence 0, found sequence 1",
    ),
    ("document_negative", FormatRule::DocumentStart, DOCUMENTS, "found sequence -1"),
    (
        "document_falls",
        FormatRule::DocumentOrder,
        DOCUMENTS + 16,
        "expected 3 or more, ... found 2 in entry 2 ",
    ),
    (
        "document_end_short",
        FormatRule::DocumentEnd,
        DOCUMENTS + 24,
        "ends with 3, ... found 2 in its last entry",
    ),
    (
        "document_end_past",
        FormatRule::DocumentEnd,
        DOCUMENTS + 24,
        "ends with 3, ... found 4 in its last entry",
    ),
    ("no_document_ends", FormatRule::NoDocumentEnds, DOCUMENTS, "hint: the writer never ended"),
    (
        "bin_cut",
        FormatRule::BinTooShort,
        11,
        "expected 12 bytes as in ... found end of file at byte 11",
    ),
    ("bin_empty", FormatRule::BinTooShort, 0, "hint: the .bin is truncated"),
    ("bin_long", FormatRule::BinTooLong, 12, "expected 12 bytes ... found a file of 14 bytes"),
    ("last_length_past_bin", FormatRule::BinTooShort, 12, "expected 14 bytes"),
];

#[test]
fn each_file_is_refused_with_its_error() {
    for (name, expected_fault, expected_offset, expected_text) in CASES {
        let error = IndexedDataset::open(&golden("bad"), &key(name)).unwrap_err();
        let text = error.to_string();
        let Error::Malformed { file, offset, fault, .. } = error else { panic!("{name}: {text}") };
        assert_eq!((fault, offset), (expected_fault, expected_offset), "{name}: {text}");
        let is_bin = matches!(fault, FormatRule::BinTooShort | FormatRule::BinTooLong);
        let expected_file = format!("bad/{name}.{}", if is_bin { "bin" } else { "idx" });
        assert!(file.ends_with(&expected_file), "{name}: {text}");
        assert!(text.contains(&expected_file), "{name}: {text}");
        let mut parts = expected_text.split(" ... ");
        assert!(parts.all(|part| text.contains(part)), "{name}: {text}");
    }
}

#[test]
fn every_file_of_the_folder_is_a_case() {
    let names = golden("bad").list_names(&storage::Key::root()).unwrap();
    let idx = names.iter().filter_map(|name| name.strip_suffix(".idx"));
    let mut expected: Vec<&str> = CASES.iter().map(|case| case.0).collect();
    expected.sort_unstable();
    assert!(idx.eq(expected));
}

#[test]
fn a_missing_file_is_named() {
    for (name, found) in [("absent", "neither"), ("only_idx", "the .idx alone")] {
        let (_guard, store) = common::temp_store();
        let idx = common::read(golden("idx").as_ref(), "docs_u16.idx");
        storage::write_all(store.as_ref(), &key("only_idx.idx"), &idx).unwrap();
        let error = IndexedDataset::open(&store, &key(name)).unwrap_err().to_string();
        let expected = format!("{name}.idx and .bin, found {found}");
        assert!(error.ends_with(&expected), "{error}");
    }
}

/// Any single changed byte of an index is an error, or the dataset can be read.
#[test]
fn a_changed_byte_is_refused_or_harmless() {
    let (idx, bin) = (
        common::read(golden("idx").as_ref(), "sentences_u16.idx"),
        common::read(golden("idx").as_ref(), "sentences_u16.bin"),
    );
    let (folder, store) = common::temp_store();
    // Without the store, which would sync a thousand times.
    let write = |name, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("a.bin", &bin);
    let mut opened = Vec::new();
    for place in 0..idx.len() {
        for bit in 0..8 {
            let mut bad = idx.clone();
            bad[place] ^= 1 << bit;
            write("a.idx", &bad);
            if let Ok(dataset) = IndexedDataset::open(&store, &key("a")) {
                dataset.check().unwrap();
                let sequences = (0..dataset.document_count()).flat_map(|d| dataset.document(d));
                sequences.for_each(|seq| drop(dataset.read_sequence(seq).unwrap()));
                opened.push((place, bit));
            }
        }
    }
    // Two bytes of one document index entry may move the end of a document between its neighbours,
    // which cannot be detected; nor can a signed type, code 3 for 8.
    let documents = idx.len() - 4 * 8;
    let may_open = |&(place, _): &(usize, u32)| place == 17 || place >= documents;
    assert!(opened.iter().all(may_open), "{opened:?}");
}
