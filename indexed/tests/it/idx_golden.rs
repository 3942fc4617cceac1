//! Every `.bin`/`.idx` pair of Megatron's writer, read and written again.

use crate::common;
use crate::common::{golden, key, manifest, read, temp_store};
use indexed::{Builder, Dtype, Error, FormatRule, IndexedDataset};
use serde_json::Value;

/// Megatron refuses this file too.
const NO_DOCUMENT_ENDS: &str = "cpm2_style_no_end_document_u16";

fn documents(entry: &Value) -> Vec<Vec<Vec<i64>>> {
    let inner = |value: &Value| value.as_array().unwrap().iter().map(common::numbers).collect();
    entry["documents"].as_array().unwrap().iter().map(inner).collect()
}

/// The whole dataset, read with the reader.
fn contents(dataset: &IndexedDataset) -> Vec<Vec<Vec<i64>>> {
    let item_bytes = dataset.dtype().item_bytes() as usize;
    let sequence = |seq: u64| {
        if dataset.dtype().is_integer() {
            return dataset.read_sequence(seq).unwrap();
        }
        assert!(matches!(dataset.read_sequence(seq), Err(Error::NotTokens { .. })));
        let mut bytes = vec![0; dataset.sequence_len(seq) as usize * item_bytes];
        let offset = dataset.sequence_offset_bytes(seq);
        dataset.bin().read_many(&mut [storage::RangeRead { offset, buf: &mut bytes }]).unwrap();
        let float = |item: &[u8]| match item.len() {
            4 => f64::from(f32::from_le_bytes(item.try_into().unwrap())),
            _ => f64::from_le_bytes(item.try_into().unwrap()),
        };
        bytes.chunks(item_bytes).map(|item| float(item) as i64).collect()
    };
    let document = |d: u64| dataset.document(d).map(sequence).collect();
    (0..dataset.document_count()).map(document).collect()
}

#[test]
fn reads_megatrons_files() {
    for (name, entry) in manifest("idx", "manifest.json").as_object().unwrap() {
        if name == NO_DOCUMENT_ENDS {
            continue;
        }
        let dataset = IndexedDataset::open(&golden("idx"), &key(name)).unwrap();
        assert_eq!(dataset.dtype().to_string(), entry["dtype"].as_str().unwrap(), "{name}");
        let expected: Vec<Vec<Vec<i64>>> = match entry.get("merge_of") {
            None => documents(entry),
            Some(merged) => {
                let all = manifest("idx", "manifest.json");
                let of = |part: &Value| documents(&all[part.as_str().unwrap()]);
                merged.as_array().unwrap().iter().flat_map(of).collect()
            }
        };
        assert_eq!(contents(&dataset), expected, "{name}");
        let modes: Vec<i8> =
            (0..dataset.sequence_count()).filter_map(|seq| dataset.sequence_mode(seq)).collect();
        let expected_modes: Vec<i8> = entry["modes"]
            .as_array()
            .map(|rows| rows.iter().flat_map(common::numbers::<i8>).collect())
            .unwrap_or_default();
        assert_eq!(modes, expected_modes, "{name}");
        assert_eq!(dataset.has_modes(), !expected_modes.is_empty(), "{name}");
    }
}

#[test]
fn writes_the_same_bytes() {
    let (_guard, store) = temp_store();
    for (name, entry) in manifest("idx", "manifest.json").as_object().unwrap() {
        if entry.get("documents").is_none() {
            continue;
        }
        let dtype = (1..=8)
            .filter_map(Dtype::from_code)
            .find(|dtype| dtype.to_string() == entry["dtype"].as_str().unwrap())
            .unwrap();
        let modes = entry["modes"].as_array();
        let begin = if modes.is_some() { Builder::create_multimodal } else { Builder::create };
        let mut builder = begin(&store, &key(name), dtype).unwrap();
        for (d, document) in documents(entry).iter().enumerate() {
            for (s, sequence) in document.iter().enumerate() {
                if let Some(modes) = modes {
                    let mode = modes[d][s].as_i64().unwrap() as i8;
                    let ids: Vec<u32> = sequence.iter().map(|&id| id as u32).collect();
                    builder.add_sequence_with_mode(&ids, mode).unwrap();
                } else if sequence.iter().any(|&id| id < 0) {
                    let bytes: Vec<u8> =
                        sequence.iter().flat_map(|&id| (id as i32).to_le_bytes()).collect();
                    builder.add_encoded(&bytes, &[sequence.len() as u32]).unwrap();
                } else {
                    let ids: Vec<u32> = sequence.iter().map(|&id| id as u32).collect();
                    builder.add_sequence(&ids).unwrap();
                }
            }
            builder.end_document().unwrap();
        }
        builder.finish().unwrap();
        assert_same_pair(&store, name);
    }
}

#[test]
fn merges_to_the_same_bytes() {
    let (_guard, store) = temp_store();
    let all = manifest("idx", "manifest.json");
    let name = "merged_u16";
    let mut builder = Builder::create(&store, &key(name), Dtype::U16).unwrap();
    for part in all[name]["merge_of"].as_array().unwrap() {
        let part = IndexedDataset::open(&golden("idx"), &key(part.as_str().unwrap())).unwrap();
        builder.add_dataset(&part).unwrap();
    }
    let built = builder.finish().unwrap();
    assert_same_pair(&store, name);
    let dataset = IndexedDataset::open(&store, &key(name)).unwrap();
    let report = dataset.check().unwrap();
    assert_eq!((report.bin_crc64, report.idx_crc64), (built.bin.crc64, built.idx.crc64));
    assert_eq!((report.bin_bytes, report.idx_bytes), (built.bin.bytes, built.idx.bytes));
    assert_eq!((report.sequences, built.sequences), (11, 11));
    assert_eq!((report.documents, report.documents_empty, built.documents), (9, 1, 9));
    assert_eq!((report.tokens, built.tokens), (22, 22));
    assert_eq!((report.sequence_len_max, report.sequences_empty), (4, 0));
    assert_eq!(report.token_range, Some((1, 65535)));
}

#[test]
fn merges_of_multimodal_sets_keep_their_modes() {
    let (_guard, store) = temp_store();
    let golden = golden("idx");
    let multimodal = IndexedDataset::open(&golden, &key("multimodal_i32")).unwrap();
    let mut builder =
        Builder::create_multimodal(&store, &key("multimodal_i32"), Dtype::I32).unwrap();
    builder.add_dataset(&multimodal).unwrap();
    builder.finish().unwrap();
    assert_same_pair(&store, "multimodal_i32");
}

#[test]
fn refuses_to_merge_incompatible_datasets() {
    let (_guard, store) = temp_store();
    let open = |name| IndexedDataset::open(&golden("idx"), &key(name)).unwrap();
    for (name, dtype) in [("docs_i32", Dtype::U16), ("multimodal_i32", Dtype::I32)] {
        let mut builder = Builder::create(&store, &key(name), dtype).unwrap();
        let error = builder.add_dataset(&open(name)).unwrap_err();
        assert!(matches!(error, Error::CannotMerge { .. }), "{error}");
    }
    assert_eq!(store.list(&storage::Key::root()).unwrap(), []);
}

#[test]
fn documents_that_were_never_ended_are_refused_with_a_hint() {
    let error = IndexedDataset::open(&golden("idx"), &key(NO_DOCUMENT_ENDS)).unwrap_err();
    assert!(matches!(
        error,
        Error::Malformed { fault: FormatRule::NoDocumentEnds, offset: 58, .. }
    ));
    assert!(error.to_string().contains("hint: "), "{error}");
    let (_guard, store) = temp_store();
    let mut builder = Builder::create(&store, &key("a"), Dtype::U16).unwrap();
    builder.add_sequence(&[1]).unwrap();
    let error = builder.finish().unwrap_err();
    assert!(matches!(error, Error::UnendedDocument { sequences: 1, .. }), "{error}");
    assert_eq!(store.list(&storage::Key::root()).unwrap(), []);
}

#[test]
fn ids_that_do_not_fit_are_refused() {
    let (_guard, store) = temp_store();
    for (dtype, good) in [(Dtype::U16, 65_535), (Dtype::I16, 32_767), (Dtype::I32, i32::MAX as u32)]
    {
        let mut builder = Builder::create(&store, &key("a"), dtype).unwrap();
        builder.add_sequence(&[good]).unwrap();
        let error = builder.add_sequence(&[0, good + 1]).unwrap_err();
        assert!(matches!(error, Error::TokenTooBig { token, .. } if token == good + 1), "{error}");
    }
}

fn assert_same_pair(store: &std::sync::Arc<dyn storage::Storage>, name: &str) {
    for suffix in [".bin", ".idx"] {
        let file = format!("{name}{suffix}");
        let expected = read(golden("idx").as_ref(), &file);
        assert_eq!(read(store.as_ref(), &file), expected, "{file}");
    }
}
