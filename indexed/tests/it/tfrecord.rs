//! TFRecord files of BERT: files of other writers, and files that must be refused.

use std::io::Write as _;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use serde_json::Value;
use storage::Storage;
use storage::testing::fault_store::{ReadFaultLayer, ReadFaults};

use crate::common::{golden, key, manifest, numbers, read, temp_store};
use crate::formats::{Documents, collect, read_any};
use indexed::{Dtype, Error, Format, FormatRule, ReadOptions, TokenSource, WriteOptions, Writer};

/// The CRC-32C by its definition, one bit at a time.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| (crc >> 1) ^ (0x82f6_3b78 & 0_u32.wrapping_sub(crc & 1));
    let byte = |crc: u32, &byte: &u8| (0..8).fold(crc ^ u32::from(byte), |crc, _| step(crc));
    !bytes.iter().fold(!0, byte)
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    let crc = crc32c(bytes);
    crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// A record with this data.
fn record(data: &[u8]) -> Vec<u8> {
    let len = (data.len() as u64).to_le_bytes();
    [&len[..], &masked(&len), data, &masked(data)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// A field with these bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2][..], &varint(bytes.len() as u64), bytes].concat()
}

/// The lists of an example, which a test may change.
#[derive(Clone)]
struct Lists {
    ints: Vec<(&'static str, Vec<i64>)>,
    weights: Vec<f32>,
}

/// `[CLS] 7 8 [SEP] 9 [SEP]`, with 8 masked; 1 is `[CLS]`, 2 is `[SEP]`, 3 is `[MASK]`.
fn lists() -> Lists {
    let ints = vec![
        ("input_ids", vec![1, 7, 3, 2, 9, 2, 0]),
        ("input_mask", vec![1, 1, 1, 1, 1, 1, 0]),
        ("segment_ids", vec![0, 0, 0, 0, 1, 1, 0]),
        ("masked_lm_positions", vec![2, 0]),
        ("masked_lm_ids", vec![8, 0]),
        ("next_sentence_labels", vec![0]),
    ];
    Lists { ints, weights: vec![1.0, 0.0] }
}

impl Lists {
    fn with(mut self, name: &str, values: &[i64]) -> Self {
        let list = self.ints.iter_mut().find(|(of, _)| *of == name).unwrap();
        list.1 = values.to_vec();
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.ints.retain(|(of, _)| *of != name);
        self
    }

    fn example(&self) -> Vec<u8> {
        let entry = |name: &str, feature: &[u8]| {
            field(1, &[field(1, name.as_bytes()), field(2, feature)].concat())
        };
        let mut features = Vec::new();
        for (name, values) in &self.ints {
            let packed: Vec<u8> = values.iter().flat_map(|&id| varint(id as u64)).collect();
            features.extend(entry(name, &field(3, &field(1, &packed))));
        }
        let weights: Vec<u8> =
            self.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        features.extend(entry("masked_lm_weights", &field(2, &field(1, &weights))));
        field(1, &features)
    }

    fn record(&self) -> Vec<u8> {
        record(&self.example())
    }
}

/// Reads a file with these bytes.
fn read_file(bytes: &[u8]) -> indexed::Result<Documents> {
    let (_guard, store) = temp_store();
    storage::write_all(&*store, &key("a.tfrecord"), bytes).unwrap();
    let options = ReadOptions::default();
    collect(&TokenSource::open(&store, &key("a.tfrecord"), Format::TfRecord, &options)?)
}

#[track_caller]
fn refused(bytes: &[u8], expected: &str) {
    let error = read_file(bytes).unwrap_err();
    assert!(matches!(error, Error::Malformed { fault: FormatRule::Record, .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("a.tfrecord: expected ") && text.contains(expected),
        "{text}\nexpected {expected}"
    );
}

fn documents(manifest: &Value) -> Documents {
    let list = |value: &Value| value.as_array().unwrap().clone();
    let document = |value: &Value| list(value).iter().map(numbers).collect();
    list(&manifest["documents"]).iter().map(document).collect()
}

#[test]
fn files_of_two_other_writers_are_read() {
    assert_eq!(crc32c(b"123456789"), 0xe306_9283, "the check value of the CRC catalogue");
    let store = golden("tfrecord");
    let expected = documents(&manifest("tfrecord", "manifest.json"));
    assert_eq!((expected.len(), expected[0].len(), expected[1].len()), (7, 2, 1));
    for name in ["bert.tfrecord", "unpacked.tfrecord"] {
        let (format, prefix) = Format::detect(&store, &key(name)).unwrap().unwrap();
        assert_eq!((format, &prefix), (Format::TfRecord, &key(name)));
        let source = TokenSource::open(&store, &prefix, format, &ReadOptions::default()).unwrap();
        assert_eq!(collect(&source).unwrap(), expected, "{name}");
        assert_eq!((source.dtype(), source.token_count()), (Dtype::I32, None));
    }
    assert_eq!(read_file(&lists().record()).unwrap(), [[vec![7, 8], vec![9]]]);
    assert_eq!(read_file(b"").unwrap(), Documents::new());
}

#[test]
fn compressed_files_and_parts_are_read() {
    let bytes = read(&*golden("tfrecord"), "unpacked.tfrecord");
    let expected = documents(&manifest("tfrecord", "manifest.json"));
    let (_guard, store) = temp_store();
    let put = |name: &str, bytes: &[u8]| storage::write_all(&*store, &key(name), bytes).unwrap();
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&bytes).unwrap();
    let gzip = gzip.finish().unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::fast());
    zlib.write_all(&bytes).unwrap();
    put("a.tfrecord.gz", &gzip);
    put("b.tfrecord", &zlib.finish().unwrap());
    put("plain", &bytes);
    let read = |name: &str| read_any(&store, name, &ReadOptions::default());
    for name in ["a.tfrecord.gz", "b.tfrecord", "plain"] {
        assert_eq!(read(name).unwrap(), expected, "{name}");
    }
    put("cut.tfrecord.gz", &gzip[..gzip.len() - 9]);
    assert!(read("cut.tfrecord.gz").unwrap_err().to_string().contains("a complete"));

    let first = lists().record();
    put("p.tfrecord-00000-of-00002", &first);
    let error = read("p.tfrecord").unwrap_err().to_string();
    assert!(error.contains("found none of the name p.tfrecord-00001-of-00002"), "{error}");
    put("p.tfrecord-00001-of-00002", &bytes);
    put("folder/2.tfrecord", &bytes);
    put("folder/1.tfrecord", &first);
    put("folder/vocab.txt", b"other");
    let all = [vec![vec![vec![7, 8], vec![9]]], expected].concat();
    for name in ["p.tfrecord", "folder"] {
        assert_eq!(read(name).unwrap(), all, "{name}");
    }
}

#[test]
fn tfrecord_converts_to_a_pair() {
    let store = golden("tfrecord");
    let (_guard, here) = temp_store();
    let source =
        TokenSource::open(&store, &key("bert.tfrecord"), Format::TfRecord, &ReadOptions::default());
    let (source, options) = (source.unwrap(), WriteOptions { dtype: Some(Dtype::U16) });
    let mut writer =
        Writer::create(&here, &key("pair"), Format::Mmididx, &source, &options).unwrap();
    source.read_into(&mut writer).unwrap();
    let report = writer.finish().unwrap();
    assert_eq!((report.documents, report.sequences, report.tokens), (7, 10, 81));
    let expected = documents(&manifest("tfrecord", "manifest.json"));
    assert_eq!(read_any(&here, "pair", &ReadOptions::default()).unwrap(), expected);
    let unwritten = Writer::create(&here, &key("x"), Format::TfRecord, &source, &options);
    assert!(matches!(unwritten, Err(Error::BadSetting { .. })));
}

#[test]
fn damaged_records_are_refused() {
    let good = lists().record();
    let flipped = |at: usize| {
        let mut bytes = [&good[..], &good].concat();
        bytes[good.len() + at] ^= 1;
        bytes
    };
    let second = good.len();
    let length = format!("of the length, found 0x{}", hex(&good[8..12]));
    refused(&flipped(0), &format!("{length} in record 1 at byte {}", second + 8));
    refused(&flipped(11), &format!("in record 1 at byte {}", second + 8));
    refused(&flipped(20), &format!("in record 1 at byte {}", second * 2 - 4));
    refused(&flipped(second - 1), "of the data");
    for len in 1..second {
        if len < 12 {
            let bytes = [&good[..], &good[..len]].concat();
            refused(
                &bytes,
                &format!(
                    "a complete record, found end of file in record 1 at byte {}",
                    second + len
                ),
            );
        } else {
            refused(&good[..len], "found end of file in record 0");
        }
    }
    // A wrong length with a valid checksum causes no allocation.
    for len in [(64 << 20) + 1, 1 << 60, u64::MAX] {
        let header = len.to_le_bytes();
        let bytes = [&header[..], &masked(&header), &[0; 100]].concat();
        refused(&bytes, &format!("a record of at most 67108864 bytes, found {len} bytes"));
    }
    refused(b"{\"text\": \"no records\"}\n", "a length and its masked CRC-32C");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn contradicting_features_are_refused() {
    let with = |name: &str, values: &[i64]| lists().with(name, values).record();
    let check =
        |bytes: &[u8], expected: &str| refused(bytes, &format!("{expected} in record 0 at byte "));
    check(&lists().without("input_mask").record(), "masked_lm_weights");
    refused(&lists().without("input_ids").record(), "a feature 'input_ids' of integers");
    check(
        &with("input_mask", &[1, 1]),
        "7 values of input_mask, as many as input_ids, found 2 values",
    );
    check(&with("segment_ids", &[0; 8]), "found 8 values");
    check(&with("masked_lm_ids", &[8]), "found 1 values");
    check(&with("input_mask", &[1, 1, 1, 0, 1, 1, 0]), "found other values in input_mask");
    check(&with("segment_ids", &[0, 0, 0, 0, 1, 0, 0]), "found other values in segment_ids");
    check(&with("segment_ids", &[0; 7]), "found segments of 6 and 0 tokens");
    check(&with("segment_ids", &[0, 0, 1, 1, 1, 1, 0]), "found segments of 2 and 4 tokens");
    check(&with("input_mask", &[0; 7]), "found segments of 0 and 0 tokens");
    check(&with("masked_lm_positions", &[6, 0]), "found 6 in masked_lm_positions");
    check(&with("masked_lm_positions", &[-1, 0]), "found -1 in masked_lm_positions");
    check(&with("masked_lm_ids", &[1 << 31, 0]), "found id 2147483648 in masked_lm_ids");
    check(&with("input_ids", &[1, -7, 3, 2, 9, 2, 0]), "found id -7 in input_ids");
    check(&with("input_ids", &[1, 7, 3, 4, 9, 2, 0]), "found ids [1, 4, 2] at the ends of A and B");
    check(&with("input_ids", &[2, 7, 3, 2, 9, 2, 0]), "found ids [2, 2, 2] at the ends of A and B");
    check(&with("next_sentence_labels", &[2]), "found next_sentence_labels [2]");
    check(&with("next_sentence_labels", &[]), "found next_sentence_labels []");
    let weights = |weights: &[f32]| Lists { weights: weights.to_vec(), ..lists() }.record();
    check(&weights(&[1.0]), "found 1 values");
    check(&weights(&[-1.0, 0.0]), "found masked_lm_weights of -1");
    check(&weights(&[f32::NAN, 0.0]), "found masked_lm_weights of NaN");
    // The first record determines the ids of `[CLS]` and `[SEP]`.
    let other = with("input_ids", &[5, 7, 3, 2, 9, 2, 0]);
    refused(
        &[lists().record(), other].concat(),
        "[CLS] 1, [SEP] 2 and [SEP] 2, two ids, found ids [5",
    );
    // A label of 1: two documents.
    let random_next = with("next_sentence_labels", &[1]);
    assert_eq!(read_file(&random_next).unwrap(), [[vec![7, 8]], [vec![9]]]);
}

/// Messages that are truncated or changed anywhere give an error or other ids, never a panic.
#[test]
fn malformed_messages_are_refused() {
    refused(&record(b"no message"), "in record 0");
    refused(&record(b""), "a feature 'input_ids' of integers, found no features");
    refused(&record(&field(1, &field(1, &[0x0b]))), "wire type 0, 1, 2 or 5 of tf.Example");
    let list = field(3, &field(1, &[0xff; 11]));
    let entry = [field(1, b"input_ids"), field(2, &list)].concat();
    refused(&record(&field(1, &field(1, &entry))), "found more than 10 bytes");
    let bytes = [field(1, b"input_ids"), field(2, &field(1, &field(1, b"x")))].concat();
    refused(&record(&field(1, &field(1, &bytes))), "found a list of another type");
    let many = field(3, &field(1, &vec![0; (1 << 20) + 1]));
    let entry = [field(1, b"input_ids"), field(2, &many)].concat();
    refused(&record(&field(1, &field(1, &entry))), "a list of at most 1048576 numbers");
    let example = lists().example();
    for len in 0..example.len() {
        assert!(read_file(&record(&example[..len])).is_err(), "cut to {len} bytes");
    }
    let mut accepted = 0;
    for at in 0..example.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bad = example.clone();
            bad[at] ^= flip;
            accepted += u32::from(read_file(&record(&bad)).is_ok());
        }
    }
    assert!(accepted > 0, "another id of the text is another text");
}

/// An error of the store is not reported as a malformed file.
#[test]
fn store_errors_are_not_reported_as_malformed() {
    let (_guard, store) = temp_store();
    storage::write_all(&*store, &key("a.tfrecord"), &lists().record()).unwrap();
    for at in [0, 200] {
        let faults = ReadFaults { broken: at..at + 1, ..ReadFaults::default() };
        let faulty: Arc<dyn Storage> = Arc::new(ReadFaultLayer::new(Arc::clone(&store), 1, faults));
        let error = read_any(&faulty, "a.tfrecord", &ReadOptions::default()).unwrap_err();
        assert!(matches!(error, Error::Storage(_)), "{error}");
    }
}
