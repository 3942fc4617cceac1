//! Files that must be refused, each with its own error that names the byte.

use crate::common;
use crate::common::{golden, key};
use indexed::{Error, FormatRule, IndexedDataset};

/// The three tables of `docs_u16`, from which the files were made: 3 sequences, 3 documents.
const LENGTHS: u64 = 34;
const POINTERS: u64 = LENGTHS + 12;
const DOCUMENTS: u64 = POINTERS + 24;
const END: u64 = DOCUMENTS + 32;

const CASES: [(&str, FormatRule, u64, &str); 35] = [
    ("empty_idx", FormatRule::TooShort, 0, "got a file of 0 bytes, due a header of 34 bytes"),
    ("header_cut", FormatRule::TooShort, 33, "got a file of 33 bytes"),
    ("magic_cut", FormatRule::TooShort, 4, "got a file of 4 bytes"),
    ("not_an_index", FormatRule::Magic, 0, r#"due "MMIDIDX\x00\x00""#),
    ("tntidx", FormatRule::Magic, 0, r#"got "TNTIDX\x00\x00\x00""#),
    ("wrong_magic", FormatRule::Magic, 0, r#"got "MMIDIDX\x00X""#),
    ("wrong_version", FormatRule::Version, 9, "got version 2, due version 1"),
    ("big_endian_version", FormatRule::Version, 9, "got version 72057594037927936"),
    ("dtype_0", FormatRule::Dtype, 17, "got dtype code 0, due 1 to 8"),
    ("dtype_9", FormatRule::Dtype, 17, "hint: PaddleNLP"),
    ("dtype_255", FormatRule::Dtype, 17, "got dtype code 255"),
    ("idx_cut", FormatRule::TooShort, END - 1, "due 102 bytes"),
    ("idx_long", FormatRule::TooLong, END, "got a file of 103 bytes, due 102 bytes"),
    ("sequence_count_one_more", FormatRule::TooShort, END, "due 114 bytes for 4 sequences"),
    ("sequence_count_huge", FormatRule::TooShort, END, "18446744073709551615 sequences"),
    ("sequence_count_wraps", FormatRule::TooShort, END, "4611686018427387904 sequences"),
    ("document_count_huge", FormatRule::TooShort, END, "a document index of 18446744073709551615"),
    ("document_count_wraps", FormatRule::TooShort, END, "a document index of 2305843009213693956"),
    ("document_count_0", FormatRule::DocumentStart, 26, "a document index of length 0"),
    ("length_negative", FormatRule::SequenceLength, LENGTHS + 4, "got length -2 of sequence 1"),
    ("length_min", FormatRule::SequenceLength, LENGTHS + 8, "got length -2147483648 of sequence 2"),
    ("length_wrong", FormatRule::Pointer, POINTERS + 8, "got pointer 6 of sequence 1, due 4"),
    ("pointer_first", FormatRule::Pointer, POINTERS, "got pointer 2 of sequence 0, due 0"),
    ("pointer_wrong", FormatRule::Pointer, POINTERS + 16, "got pointer 12 of sequence 2, due 10"),
    ("pointer_negative", FormatRule::Pointer, POINTERS + 8, "got pointer -6 of sequence 1"),
    (
        "document_start",
        FormatRule::DocumentStart,
        DOCUMENTS,
        "got first document at sequence 1, due 0",
    ),
    ("document_negative", FormatRule::DocumentStart, DOCUMENTS, "at sequence -1"),
    ("document_falls", FormatRule::DocumentOrder, DOCUMENTS + 16, "index 2, due 3 or more"),
    ("document_end_short", FormatRule::DocumentEnd, DOCUMENTS + 24, "ends with 2, due 3"),
    ("document_end_past", FormatRule::DocumentEnd, DOCUMENTS + 24, "ends with 4, due 3"),
    ("no_document_ends", FormatRule::NoDocumentEnds, DOCUMENTS, "hint: the writer never ended"),
    ("bin_cut", FormatRule::BinTooShort, 11, "got a file of 11 bytes, due 12 bytes, as "),
    ("bin_empty", FormatRule::BinTooShort, 0, "hint: the .bin was cut short"),
    ("bin_long", FormatRule::BinTooLong, 12, "got a file of 14 bytes, due 12 bytes"),
    ("last_length_past_bin", FormatRule::BinTooShort, 12, "due 14 bytes"),
];

#[test]
fn each_is_refused_by_its_own_error() {
    for (name, due_fault, due_offset, due_text) in CASES {
        let error = IndexedDataset::open(&golden("bad"), &key(name)).unwrap_err();
        let text = error.to_string();
        let Error::Malformed { file, offset, fault, .. } = error else { panic!("{name}: {text}") };
        assert_eq!((fault, offset), (due_fault, due_offset), "{name}: {text}");
        let is_bin = matches!(fault, FormatRule::BinTooShort | FormatRule::BinTooLong);
        let due_file = format!("bad/{name}.{}", if is_bin { "bin" } else { "idx" });
        assert!(file.ends_with(&due_file), "{name}: {text}");
        assert!(text.contains(&due_file), "{name}: {text}");
        assert!(text.contains(due_text), "{name}: {text}");
    }
}

#[test]
fn every_file_of_the_folder_is_a_case() {
    let names = golden("bad").list_names(&storage::Key::root()).unwrap();
    let idx = names.iter().filter_map(|name| name.strip_suffix(".idx"));
    let mut due: Vec<&str> = CASES.iter().map(|case| case.0).collect();
    due.sort_unstable();
    assert!(idx.eq(due));
}

#[test]
fn an_absent_file_is_named() {
    for (name, found) in [("absent", "neither"), ("only_idx", "the .idx alone")] {
        let (_guard, store) = common::temp_store();
        let idx = common::read(golden("idx").as_ref(), "docs_u16.idx");
        storage::write_all(store.as_ref(), &key("only_idx.idx"), &idx).unwrap();
        let error = IndexedDataset::open(&store, &key(name)).unwrap_err().to_string();
        let expected = format!("{name}.idx and .bin, found {found}");
        assert!(error.ends_with(&expected), "{error}");
    }
}

/// No single changed byte of an index may do worse than an error: what opens, reads.
#[test]
fn a_changed_byte_is_refused_or_harmless() {
    let (idx, bin) = (
        common::read(golden("idx").as_ref(), "sentences_u16.idx"),
        common::read(golden("idx").as_ref(), "sentences_u16.bin"),
    );
    let (folder, store) = common::temp_store();
    // Past the store, which would wait for the disk a thousand times.
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
    // Two bytes of one document index entry may move a document's end between its neighbours, and
    // no checker can know; nor that the tokens are signed, code 3 for 8.
    let documents = idx.len() - 4 * 8;
    let may_open = |&(place, _): &(usize, u32)| place == 17 || place >= documents;
    assert!(opened.iter().all(may_open), "{opened:?}");
}
