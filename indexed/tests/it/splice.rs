//! Merging, splitting and repairing pairs.

use std::ops::Range;
use std::sync::Arc;

use crate::common::{Dice, golden, key, read, temp_store};
use indexed::{Builder, DocumentRange, Dtype, Error, FormatRule, IndexedDataset, Repair, splice};
use storage::{Key, Storage};

fn part(store: &Arc<dyn Storage>, name: &str, documents: Option<Range<u64>>) -> DocumentRange {
    DocumentRange { store: Arc::clone(store), prefix: key(name), documents, bin_crc64: None }
}

/// A part with the checksum of its `.bin`, as from a manifest.
fn trusted(store: &Arc<dyn Storage>, name: &str) -> DocumentRange {
    let bin_crc64 = Some(storage::crc64(&read(store.as_ref(), &format!("{name}.bin"))));
    DocumentRange { bin_crc64, ..part(store, name, None) }
}

fn same_pair(a: (&dyn Storage, &str), b: (&dyn Storage, &str), what: &str) {
    for suffix in [".bin", ".idx"] {
        let [a, b] = [a, b].map(|(store, name)| read(store, &format!("{name}{suffix}")));
        assert_eq!(a, b, "{what}{suffix}");
    }
}

#[test]
fn merge_equals_megatrons_byte_for_byte() {
    let from = golden("idx");
    let (_guard, store) = temp_store();
    let names = ["docs_u16", "sentences_u16", "with_empty_doc_u16"];
    for (out, parts) in [
        ("read", names.map(|name| part(&from, name, None))),
        ("copied", names.map(|name| trusted(&from, name))),
    ] {
        let built = splice(&store, &key(out), &parts).unwrap();
        same_pair((store.as_ref(), out), (from.as_ref(), "merged_u16"), out);
        for file in [built.bin, built.idx] {
            file.verify(store.as_ref(), &Key::root()).unwrap();
        }
    }
    for name in ["multimodal_i32", "no_docs_u16", "dtype_float32", "docs_i32"] {
        splice(&store, &key(name), &[part(&from, name, None)]).unwrap();
        same_pair((store.as_ref(), name), (from.as_ref(), name), name);
    }
}

fn random_pair(store: &Arc<dyn Storage>, name: &str, rng: &mut Dice) -> u64 {
    let mut builder = Builder::create(store, &key(name), Dtype::U16).unwrap();
    let documents = rng.below(30);
    for _ in 0..documents {
        for _ in 0..rng.below(4) {
            let ids: Vec<u32> = (0..rng.below(50)).map(|_| rng.below(65_536) as u32).collect();
            builder.add_sequence(&ids).unwrap();
        }
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    documents
}

#[test]
fn split_and_merge_round_trips() {
    for seed in 0..30 {
        let (_guard, store) = temp_store();
        let mut rng = Dice(seed);
        let documents = random_pair(&store, "a", &mut rng);
        let mut cuts = [0, rng.below(documents + 1), rng.below(documents + 1), documents];
        cuts.sort_unstable();
        for (nth, cut) in cuts.windows(2).enumerate() {
            let of_a = part(&store, "a", Some(cut[0]..cut[1]));
            splice(&store, &key(&format!("cut{nth}")), &[of_a]).unwrap();
            let piece = IndexedDataset::open(&store, &key(&format!("cut{nth}"))).unwrap();
            assert_eq!(piece.document_count(), cut[1] - cut[0], "seed {seed}");
        }
        let parts = ["cut0", "cut1", "cut2"].map(|name| part(&store, name, None));
        splice(&store, &key("again"), &parts).unwrap();
        same_pair((store.as_ref(), "again"), (store.as_ref(), "a"), &format!("seed {seed}"));
    }
}

#[test]
fn incompatible_parts_are_refused_and_leave_no_files() {
    let (from, bad) = (golden("idx"), golden("bad"));
    let (_guard, store) = temp_store();
    let docs = || part(&from, "docs_u16", None);
    for (other, expected) in [
        (part(&from, "docs_i32", None), "found int32"),
        (part(&from, "multimodal_i32", None), "found int32 with modes"),
        (part(&from, "docs_u16", Some(2..9)), "a range within 0..3"),
        (part(&from, "absent", None), "no such file"),
        (part(&bad, "pointer_wrong", None), "pointer"),
        (part(&bad, "bin_cut", None), ".bin"),
        (part(&bad, "bin_long", None), ".bin"),
        (part(&bad, "no_document_ends", None), "repair"),
        (part(&bad, "document_falls", None), "document index"),
    ] {
        let error = splice(&store, &key("out"), &[docs(), other]).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}, expected {expected}");
        assert_eq!(store.list_names(&Key::root()).unwrap(), Vec::<String>::new());
    }
    splice(&store, &key("out"), &[docs()]).unwrap();
    let error = splice(&store, &key("out"), &[docs()]).unwrap_err();
    assert!(matches!(error, Error::Storage(storage::Error::Exists { .. })), "{error}");
}

#[test]
fn repair_makes_each_sequence_a_document_if_none_was_ended() {
    let from = golden("idx");
    let name = "cpm2_style_no_end_document_u16";
    let repair = Repair::examine(&from, &key(name)).unwrap();
    assert_eq!(repair.report().faults.len(), 1, "{:?}", repair.report());
    assert!(repair.each_sequence_is_a_document());
    let (_guard, store) = temp_store();
    let built = repair.write(&store, &key("a")).unwrap();
    let dataset = IndexedDataset::open(&store, &key("a")).unwrap();
    assert_eq!(built.sequences, dataset.document_count());
    assert_eq!(read(store.as_ref(), "a.bin"), read(from.as_ref(), &format!("{name}.bin")));
}

#[test]
fn repair_of_a_valid_pair_changes_nothing() {
    let from = golden("idx");
    let (_guard, store) = temp_store();
    for name in ["docs_u16", "sentences_u16", "with_empty_doc_u16", "no_docs_u16", "multimodal_i32"]
    {
        let repair = Repair::examine(&from, &key(name)).unwrap();
        assert_eq!(*repair.report(), indexed::RepairReport::default(), "{name}");
        repair.write(&store, &key(name)).unwrap();
        same_pair((store.as_ref(), name), (from.as_ref(), name), name);
    }
}

/// A file truncated at any byte is repaired to a dataset with the first documents of the original,
/// and no complete document is lost.
#[test]
fn repair_of_a_truncated_file_retains_complete_documents() {
    let (_guard, store) = temp_store();
    let mut builder = Builder::create(&store, &key("a"), Dtype::U16).unwrap();
    let documents: [&[&[u32]]; 4] = [&[&[1, 2], &[3]], &[], &[&[4, 5, 6]], &[&[7], &[8, 9]]];
    for document in documents {
        document.iter().for_each(|ids| builder.add_sequence(ids).unwrap());
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let (bin, idx) = (read(store.as_ref(), "a.bin"), read(store.as_ref(), "a.idx"));
    for len in 0..bin.len() {
        let (out, report) = repair_of(&bin[..len], &idx).unwrap();
        let tokens = len as u64 / 2;
        let expected = [(9, 4), (6, 3), (3, 2), (0, 0)].into_iter().find(|(end, _)| *end <= tokens);
        assert_eq!((out.token_count(), out.document_count()), expected.unwrap(), "cut to {len}");
        assert_eq!(report.bytes_lost, len as u64 - 2 * out.token_count(), "cut to {len}");
    }
    for len in 34..idx.len() {
        let (out, report) = repair_of(&bin, &idx[..len]).unwrap();
        let sequences = (len as u64 - 34).min(20) / 4;
        assert_eq!((out.sequence_count(), out.document_count()), (sequences, sequences), "{len}");
        assert!(!report.faults.is_empty());
    }
    for len in 0..34 {
        let error = repair_of(&bin, &idx[..len]).unwrap_err();
        assert!(
            matches!(error, Error::Malformed { fault: FormatRule::TooShort, .. }),
            "{len}: {error}"
        );
    }
    // For any changed byte of the index, the repair is refused or writes a valid dataset.
    for at in 0..idx.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bad = idx.clone();
            bad[at] ^= flip;
            let _ = repair_of(&bin, &bad);
        }
    }
}

fn repair_of(bin: &[u8], idx: &[u8]) -> indexed::Result<(IndexedDataset, indexed::RepairReport)> {
    use storage::testing::fault_store::{FaultPlan, FaultStore};
    let store: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
    storage::write_all(store.as_ref(), &key("a.bin"), bin).unwrap();
    storage::write_all(store.as_ref(), &key("a.idx"), idx).unwrap();
    let repair = Repair::examine(&store, &key("a"))?;
    let built = repair.write(&store, &key("b")).unwrap();
    let dataset = IndexedDataset::open(&store, &key("b"));
    // Types that Megatron does not support do not change.
    if matches!(dataset, Err(Error::Malformed { fault: FormatRule::Dtype, .. })) {
        return Err(dataset.unwrap_err());
    }
    let dataset = dataset.unwrap();
    assert_eq!(built.tokens, dataset.token_count());
    Ok((dataset, repair.report().clone()))
}
