//! Files that have the name of a token file: read by their header, or refused by name.

use std::sync::Arc;

use indexed::{
    Dtype, Error, Format, FormatRule, IndexedDataset, ReadOptions, Repair, Result, TokenSource,
};
use storage::Storage;
use storage::testing::fault_store::{FaultPlan, FaultStore};

use crate::common::key;
use crate::formats::{Documents, collect, read_any};

/// Ids of a GPT-2 text, ended by 50,256.
const IDS: [u32; 7] = [50_256, 11, 12, 13, 50_256, 21, 22];
/// Ids that need 32 bits.
const WIDE: [u32; 4] = [128_000, 11, 100_257, 50_000];

fn store() -> Arc<dyn Storage> {
    Arc::new(FaultStore::new(1, FaultPlan::default()))
}

fn put(store: &Arc<dyn Storage>, name: &str, bytes: &[u8]) {
    storage::write_all(store.as_ref(), &key(name), bytes).unwrap();
}

/// Tokens of this many bytes.
fn bytes_of(ids: &[u32], item_bytes: usize) -> Vec<u8> {
    ids.iter().flat_map(|&id| u64::from(id).to_le_bytes()[..item_bytes].to_vec()).collect()
}

fn with_dtype(dtype: Dtype) -> ReadOptions {
    ReadOptions { dtype: Some(dtype), ..ReadOptions::default() }
}

/// One document of all ids.
fn one(ids: &[u32]) -> Documents {
    vec![vec![ids.iter().map(|&id| id.into()).collect()]]
}

/// 256 numbers, of which the first are given.
fn numbers(first: &[u32]) -> Vec<u8> {
    let mut bytes = bytes_of(first, 4);
    bytes.resize(1024, 0);
    bytes
}

fn litpkds(code: u8, ids: &[u32], item_bytes: usize) -> Vec<u8> {
    let count = (ids.len() as u64).to_le_bytes();
    [b"LITPKDS", &1_u64.to_le_bytes()[..], &[code], &count, &bytes_of(ids, item_bytes)].concat()
}

/// The array of numpy with this type.
fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    let header = format!("{text:117}\n");
    [b"\x93NUMPY\x01\0\x76\0", header.as_bytes(), data].concat()
}

fn read_bin(bytes: &[u8], options: &ReadOptions) -> Result<Documents> {
    let store = store();
    put(&store, "train.bin", bytes);
    read_any(&store, "train.bin", options)
}

#[test]
fn headers_of_llm_c_automodel_lit_gpt_and_numpy_give_type_and_count() {
    let count = IDS.len() as u32;
    for (bytes, dtype) in [
        ([numbers(&[20_240_520, 1, count]), bytes_of(&IDS, 2)].concat(), Dtype::U16),
        ([numbers(&[20_240_801, 7, count]), bytes_of(&IDS, 4)].concat(), Dtype::U32),
        ([numbers(&[278_895_051, 1, count, 2]), bytes_of(&IDS, 2)].concat(), Dtype::U16),
        ([numbers(&[278_895_051, 1, count, 4]), bytes_of(&IDS, 4)].concat(), Dtype::U32),
        (litpkds(8, &IDS, 2), Dtype::U16),
        (litpkds(4, &IDS, 4), Dtype::I32),
        (npy("<u2", "7,", &bytes_of(&IDS, 2)), Dtype::U16),
        (npy("<i8", "7,", &bytes_of(&IDS, 8)), Dtype::I64),
    ] {
        assert_eq!(read_bin(&bytes, &ReadOptions::default()).unwrap(), one(&IDS), "{dtype}");
        assert_eq!(read_bin(&bytes, &with_dtype(dtype)).unwrap(), one(&IDS), "{dtype}");
        // Another type than the recorded one is never what the caller means.
        let error = read_bin(&bytes, &with_dtype(Dtype::U8)).unwrap_err();
        assert!(matches!(error, Error::BadSetting { name: "--source-dtype", .. }), "{error}");
        let eod = ReadOptions { eod: Some(50_256), ..ReadOptions::default() };
        assert_eq!(read_bin(&bytes, &eod).unwrap().len(), 3, "{dtype}");
        // Cut anywhere after its magic, or longer, it contradicts its count.
        for len in 8..bytes.len() {
            assert!(read_bin(&bytes[..len], &ReadOptions::default()).is_err(), "cut to {len}");
        }
        let longer = read_bin(&[&bytes[..], &[0; 8]].concat(), &ReadOptions::default());
        assert!(matches!(longer, Err(Error::Malformed { .. })), "{longer:?}");
    }
}

#[test]
fn unknown_versions_and_types_of_a_header_are_refused() {
    let tokens = bytes_of(&IDS, 4);
    for (header, at, expected) in [
        (numbers(&[20_240_520, 7, 14]), 4, "version 1"),
        (numbers(&[20_240_801, 1, 7]), 4, "version 7"),
        (numbers(&[278_895_051, 2, 7, 4]), 4, "version 1"),
        (numbers(&[278_895_051, 1, 7, 0]), 12, "2 or 4 bytes per token"),
        (numbers(&[278_895_051, 1, 7, 8]), 12, "2 or 4 bytes per token"),
        (litpkds(9, &[], 4), 15, "type code 1 to 8"),
    ] {
        match read_bin(&[header, tokens.clone()].concat(), &ReadOptions::default()) {
            Err(Error::Malformed { fault: FormatRule::Header, offset, expected: text, .. }) => {
                assert_eq!(offset, at, "{text}");
                assert!(text.contains(expected), "{text}");
            }
            other => panic!("{expected}: {other:?}"),
        }
    }
    for (bytes, expected) in [(litpkds(6, &IDS, 4), "float32"), (litpkds(7, &IDS, 8), "float64")] {
        let error = read_bin(&bytes, &ReadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::NotTokens { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    let float = read_bin(&npy("<f4", "7,", &tokens), &ReadOptions::default()).unwrap_err();
    assert!(float.to_string().contains("expected integers"), "{float}");
}

/// A list of n places, as litdata and MosaicML's streaming start their files.
fn chunk(items: &[&[u8]]) -> Vec<u8> {
    let mut place = 8 + 4 * items.len() as u32;
    let mut bytes = bytes_of(&[items.len() as u32, place], 4);
    for item in items {
        place += item.len() as u32;
        bytes.extend(place.to_le_bytes());
    }
    [bytes, items.concat()].concat()
}

/// The first member of a ZIP archive, without the rest.
fn member(name: &str) -> Vec<u8> {
    let mut bytes = b"PK\x03\x04".to_vec();
    bytes.resize(26, 0);
    bytes.extend((name.len() as u32).to_le_bytes());
    [&bytes, name.as_bytes(), &[7; 40]].concat()
}

#[test]
fn files_of_another_kind_are_refused_by_name() {
    let gzip = {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut gz, &bytes_of(&IDS, 2)).unwrap();
        gz.finish().unwrap()
    };
    let safetensors = [&12_u64.to_le_bytes()[..], b"{\"a\":[1,23]}", &[1; 9]].concat();
    let pickle = [&b"\x80\x04\x95\x08\0\0\0\0\0\0\0"[..], b"]\x94(K\x01K\x02e."].concat();
    for (bytes, expected) in [
        (gzip, "gzip"),
        (b"\x28\xb5\x2f\xfd\x04\0\x11\x22".to_vec(), "zstd"),
        (b"BZh91AY&SY\x01\x02".to_vec(), "bzip2"),
        (b"\xfd7zXZ\0\0\x04".to_vec(), "xz"),
        (member("archive/data.pkl"), "torch.save"),
        (member("ids.npy"), ".npz"),
        (member("a.txt"), "ZIP"),
        (b"PAR1\x15\x04\x15\x10".to_vec(), "Parquet"),
        (b"ARROW1\0\0\xff\xff\xff\xff".to_vec(), "Arrow"),
        (safetensors, "safetensors"),
        (pickle, "pickle"),
        (b"MMIDIDX\0\0\x01\0\0\0\0".to_vec(), "MMIDIDX index"),
        (b"version https://git-lfs.github.com/spec/v1\n".to_vec(), "Git LFS"),
        (b"{\"text\": \"one line\"}\n".to_vec(), "text"),
        (numbers(&[20_240_326, 3, 1024]), "a model of llm.c"),
        (numbers(&[20_240_522, 1, 5]), "an evaluation set of llm.c"),
        (chunk(&[b"one", b"two!"]), "litdata"),
    ] {
        // Naming a type does not turn a compressed file into tokens.
        for options in [ReadOptions::default(), with_dtype(Dtype::U16), with_dtype(Dtype::U32)] {
            match read_bin(&bytes, &options) {
                Err(Error::OtherKind { found, .. }) => {
                    assert!(found.contains(expected), "{found}, expected {expected}");
                }
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
}

#[test]
fn tokens_that_look_wider_than_16_bits_need_a_type() {
    let unknown = [numbers(&[0x1234_5678, 1, 4]), bytes_of(&IDS, 2)].concat();
    let floats: Vec<u8> = IDS.iter().flat_map(|&id| (id as f32).to_le_bytes()).collect();
    let long: Vec<u32> = (0..70_000).map(|n| n * 7 % 50_257).collect();
    for (bytes, dtype, expected) in [
        (bytes_of(&IDS, 4), Dtype::U32, "32-bit tokens"),
        (bytes_of(&WIDE, 4), Dtype::I32, "32-bit tokens"),
        (bytes_of(&long, 4), Dtype::U32, "32-bit tokens"),
        (bytes_of(&IDS, 8), Dtype::I64, "64-bit tokens"),
        (floats, Dtype::U16, "32-bit floating-point"),
        (unknown, Dtype::U16, "unknown header"),
    ] {
        match read_bin(&bytes, &ReadOptions::default()) {
            Err(Error::OtherKind { found, hint, .. }) => {
                assert!(found.contains(expected), "{found}");
                assert!(hint.contains("--source-dtype"), "{hint}");
            }
            other => panic!("{expected}: {other:?}"),
        }
        let tokens = bytes.len() / dtype.item_bytes() as usize;
        let found = read_bin(&bytes, &with_dtype(dtype)).unwrap();
        assert_eq!(found[0][0].len(), tokens, "{expected}");
    }
    assert_eq!(read_bin(&bytes_of(&WIDE, 4), &with_dtype(Dtype::U32)).unwrap(), one(&WIDE));
    // The nearest 16-bit files.
    for ids in [&IDS[..], &long[..], &[5, 6], &[]] {
        let found = read_bin(&bytes_of(ids, 2), &ReadOptions::default()).unwrap();
        assert_eq!(found.concat().concat().len(), ids.len());
    }
    // Zeros at one end alone, as padding, are tokens.
    let padded = [&[0; 200_000][..], &long].concat();
    assert!(read_bin(&bytes_of(&padded, 2), &ReadOptions::default()).is_ok());
}

#[test]
fn datatrove_metadata_give_width_and_count() {
    let read = |ds: &[u8], index: Option<&[u64]>, metadata: Option<&str>, options: &ReadOptions| {
        let store = store();
        put(&store, "x.ds", ds);
        if let Some(ends) = index {
            let ends: Vec<u8> = ends.iter().flat_map(|end| end.to_le_bytes()).collect();
            put(&store, "x.ds.index", &ends);
        }
        if let Some(text) = metadata {
            put(&store, "x.ds.metadata", text.as_bytes());
        }
        read_any(&store, "x.ds", options)
    };
    let (none, wide) = (ReadOptions::default(), bytes_of(&WIDE, 4));
    let narrow = bytes_of(&IDS, 2);
    let some = "some/tokenizer|4\n4\n4 T";
    assert_eq!(read(&wide, None, Some(some), &none).unwrap(), one(&WIDE));
    assert_eq!(
        read(&wide, None, Some("Unknown Tokenizer|4|4\n4\n4 T"), &none).unwrap(),
        one(&WIDE)
    );
    assert_eq!(read(&narrow, None, Some("gpt2|2\n7\n7 T"), &none).unwrap(), one(&IDS));
    // Older versions wrote no width; it follows from the count.
    assert_eq!(read(&wide, None, Some("gpt2\n4\n4 T"), &none).unwrap(), one(&WIDE));
    assert_eq!(read(&wide, Some(&[1, 4]), Some(some), &none).unwrap().len(), 2);
    assert_eq!(read(&wide, None, None, &with_dtype(Dtype::U32)).unwrap(), one(&WIDE));
    let eod = ReadOptions { eod: Some(11), ..ReadOptions::default() };
    assert_eq!(read(&wide, None, Some(some), &eod).unwrap().len(), 2);
    // With neither, not even 16-bit tokens are certain.
    for ds in [&wide, &narrow] {
        let error = read(ds, None, None, &none).unwrap_err();
        assert!(matches!(error, Error::OtherKind { .. }), "{error}");
        assert!(error.to_string().contains("--source-dtype"), "{error}");
    }
    for (index, metadata) in [
        (None, "gpt2|4\n5\n5 T"),
        (None, "gpt2|2\n4\n4 T"),
        (None, "gpt2|3\n4\n4 T"),
        (None, "gpt2|4"),
        (None, "gpt2|4\n-4\n"),
        (Some(&[1, 4][..]), "gpt2|2\n8\n8 T"),
        (Some(&[1, 4][..]), "gpt2|4\n3\n3 T"),
        (Some(&[1, 8][..]), "gpt2|4\n4\n4 T"),
    ] {
        let error = read(&wide, index, Some(metadata), &none).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{metadata:?}: {error}");
    }
    let error = read(&wide, None, Some(some), &with_dtype(Dtype::U16)).unwrap_err();
    assert!(matches!(error, Error::BadSetting { .. }), "{error}");
}

#[test]
fn a_raw_npy_without_its_table_needs_a_type() {
    let store = store();
    put(&store, "part-000.npy", &bytes_of(&IDS, 2));
    put(&store, "wide.npy", &bytes_of(&WIDE, 4));
    for name in ["part-000.npy", "wide.npy"] {
        let error = read_any(&store, name, &ReadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::OtherKind { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("--source-dtype") && text.contains(name), "{text}");
    }
    let options = ReadOptions { eod: Some(50_256), ..with_dtype(Dtype::U16) };
    assert_eq!(read_any(&store, "part-000.npy", &options).unwrap().len(), 3);
    let found = read_any(&store, "wide.npy", &with_dtype(Dtype::U32)).unwrap();
    assert_eq!(found, one(&WIDE));
}

const LENGTHS: [usize; 3] = [4, 2, 3];

/// A pair of three documents with this type code, as Megatron's and DeepSpeed's writers lay it out.
fn put_pair(store: &Arc<dyn Storage>, code: u8, item_bytes: usize) {
    let mut idx = [&b"MMIDIDX\0\0"[..], &1_u64.to_le_bytes(), &[code]].concat();
    idx.extend([3_u64, 4].iter().flat_map(|count| count.to_le_bytes()));
    idx.extend(LENGTHS.iter().flat_map(|&len| (len as u32).to_le_bytes()));
    let starts = [0, 4, 6].map(|start| (start * item_bytes) as u64);
    idx.extend(starts.iter().chain(&[0, 1, 2, 3]).flat_map(|entry| entry.to_le_bytes()));
    put(store, "a.idx", &idx);
    put(store, "a.bin", &bytes_of(&[11, 12, 13, 14, 21, 22, 31, 32, 33], item_bytes));
}

fn expected_documents() -> Documents {
    vec![vec![vec![11, 12, 13, 14]], vec![vec![21, 22]], vec![vec![31, 32, 33]]]
}

/// What both readers of a pair make of a type code and the bytes of an element.
fn check_pair(code: u8, item_bytes: usize, asked: Option<Dtype>, expected: Option<Dtype>) {
    let (store, case) = (store(), format!("code {code}, {item_bytes} bytes, {asked:?}"));
    put_pair(&store, code, item_bytes);
    let options = ReadOptions { dtype: asked, ..ReadOptions::default() };
    let source = TokenSource::open(&store, &key("a"), Format::Mmididx, &options);
    match (source, expected) {
        (Ok(source), Some(expected)) => {
            assert_eq!(source.dtype(), expected, "{case}");
            assert_eq!(collect(&source).unwrap(), expected_documents(), "{case}");
        }
        (
            Err(Error::OtherKind { .. } | Error::NotTokens { .. } | Error::BadSetting { .. }),
            None,
        ) => {}
        (other, _) => panic!("{case}: {other:?}"),
    }
    let is_megatron = expected.is_some_and(Dtype::is_megatron) && asked.is_none();
    for opened in [
        IndexedDataset::open_tokens(&store, &key("a")),
        IndexedDataset::open_ready(&store, &key("a")),
    ] {
        match opened {
            Ok(dataset) if is_megatron => {
                assert_eq!(Some(dataset.dtype()), expected, "{case}");
                assert_eq!(dataset.read_sequence(1).unwrap(), [21, 22], "{case}");
            }
            Err(Error::OtherKind { .. } | Error::NotTokens { .. }) if !is_megatron => {}
            other => assert!(asked.is_some() && other.is_ok(), "{case}: {other:?}"),
        }
    }
}

#[test]
fn type_codes_of_deepspeed_are_told_by_the_bytes_of_an_element() {
    check_pair(6, 2, None, Some(Dtype::U16)); // DeepSpeed's uint16
    check_pair(6, 8, None, None); // float64
    check_pair(7, 4, None, None); // float32, or DeepSpeed's uint32
    check_pair(7, 4, Some(Dtype::U32), Some(Dtype::U32));
    check_pair(8, 2, None, Some(Dtype::U16)); // Megatron's uint16
    check_pair(8, 8, None, Some(Dtype::U64)); // DeepSpeed's uint64
    check_pair(4, 4, None, Some(Dtype::I32));
    check_pair(4, 4, Some(Dtype::U32), None); // the index records another type
    let store = store();
    put_pair(&store, 7, 4);
    let error = IndexedDataset::open_tokens(&store, &key("a")).unwrap_err().to_string();
    assert!(error.contains("DeepSpeed") && error.contains("--source-dtype uint32"), "{error}");
}

/// With the wrong type, a repair would drop all documents but the first.
#[test]
fn a_pair_of_deepspeed_is_not_repaired_as_floats() {
    let store = store();
    put_pair(&store, 6, 2);
    let repair = Repair::examine(&store, &key("a")).unwrap();
    assert_eq!(repair.report().faults, Vec::<String>::new());
}

/// TNTIDX records the bytes of an element.
#[test]
fn type_codes_of_deepspeeds_older_index_are_told_too() {
    for (code, item_bytes, asked, expected) in [
        (6, 2, None, Some(Dtype::U16)),
        (7, 4, None, None),
        (7, 4, Some(Dtype::U32), Some(Dtype::U32)),
        (8, 8, None, Some(Dtype::U64)),
        (7, 8, None, None),
        (6, 4, None, None),
    ] {
        let store = store();
        let counts = [1, code, item_bytes as u64, 3, 3, 4];
        let tables = [0, 1, 2, 3, 0, 4, 6, 9, 4, 2, 3, 0, 1, 2, 3];
        let entries = counts.iter().chain(&tables).flat_map(|entry| entry.to_le_bytes());
        put(&store, "a.idx", &[b"TNTIDX\0\0".to_vec(), entries.collect()].concat());
        let ids = [11, 12, 13, 14, 21, 22, 31, 32, 33];
        put(&store, "a.bin", &bytes_of(&ids, item_bytes));
        let options = ReadOptions { dtype: asked, ..ReadOptions::default() };
        let source = TokenSource::open(&store, &key("a"), Format::Tntidx, &options);
        assert_eq!(source.as_ref().ok().map(TokenSource::dtype), expected, "{code}: {source:?}");
        if let Ok(source) = source {
            assert_eq!(collect(&source).unwrap(), expected_documents());
        }
    }
}

#[test]
fn a_bin_alone_is_no_dataset_and_the_error_names_the_way() {
    let store = store();
    put(&store, "train.bin", &bytes_of(&IDS, 2));
    for name in ["train", "train.bin"] {
        let error = IndexedDataset::open(&store, &key(name)).unwrap_err().to_string();
        assert!(error.contains("feedline convert") && error.contains("llm.c"), "{error}");
    }
    let error = IndexedDataset::open(&store, &key("valid")).unwrap_err().to_string();
    assert!(!error.contains("feedline convert"), "{error}");
}
