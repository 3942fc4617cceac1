//! A builder with drafts that is interrupted at any point and resumed writes the same bytes.

use std::sync::Arc;

use indexed::{Builder, BuilderMark, Dtype};
use storage::testing::fault_store::{FaultKind, FaultPlan, FaultStore};
use storage::{Key, Storage, read_all};

/// Documents of one sequence, of several, and of none.
fn document(number: u32) -> Vec<Vec<u32>> {
    let len = |sequence: u32| (number * 7 + sequence * 3) % 11 * 300;
    (0..number % 4).map(|sequence| (0..len(sequence)).map(|id| id % 60_000).collect()).collect()
}

fn add(builder: &mut Builder, documents: std::ops::Range<u32>) {
    for number in documents {
        for sequence in document(number) {
            builder.add_sequence(&sequence).unwrap();
        }
        builder.end_document().unwrap();
    }
}

fn files(store: &dyn Storage, prefix: &Key) -> [Vec<u8>; 3] {
    [".bin", ".idx", ".crc"]
        .map(|suffix| read_all(store, &prefix.with_suffix(suffix).unwrap()).unwrap())
}

fn expected(prefix: &Key) -> [Vec<u8>; 3] {
    let sim = FaultStore::new(1, FaultPlan::default());
    let store: Arc<dyn Storage> = Arc::new(sim);
    let mut builder = Builder::create(&store, prefix, Dtype::U16).unwrap();
    add(&mut builder, 0..60);
    builder.finish().unwrap();
    assert_eq!(store.list_names(&Key::root()).unwrap(), ["a.bin", "a.crc", "a.idx"]);
    files(&*store, prefix)
}

#[test]
fn a_resume_after_any_crash_gives_the_same_bytes() {
    let prefix = Key::new("a").unwrap();
    let expected_files = expected(&prefix);
    let sim = FaultStore::new(1, FaultPlan::default());
    let store: Arc<dyn Storage> = Arc::new(sim.clone());
    let mut builder = Builder::create_draft(&store, &prefix, Dtype::U16).unwrap();
    // As in the journal of a writer: the number of operations, and the sync point after them.
    let mut marks: Vec<(usize, u32, BuilderMark)> = Vec::new();
    for (from, to) in [(0, 20), (20, 21), (21, 40), (40, 60)] {
        add(&mut builder, from..to);
        let mark = builder.sync().unwrap();
        marks.push((sim.op_count(), to, mark));
    }
    builder.finish().unwrap();
    assert_eq!(files(&*store, &prefix), expected_files);
    for ops in marks[0].0..=sim.op_count() {
        for seed in 0..5 {
            let after: Arc<dyn Storage> = Arc::new(sim.crash_at(ops, seed));
            let (_, documents, mark) = marks.iter().rfind(|(at, ..)| *at <= ops).unwrap();
            let mark = serde_json::from_str(&serde_json::to_string(mark).unwrap()).unwrap();
            let mut builder = Builder::resume(&after, &prefix, Dtype::U16, &mark)
                .unwrap_or_else(|error| panic!("{ops} operations, seed {seed}: {error}"));
            add(&mut builder, *documents..60);
            let built = builder.finish().unwrap();
            assert_eq!(files(&*after, &prefix), expected_files, "{ops} operations, seed {seed}");
            for file in built.files() {
                file.verify(&*after, &Key::root()).unwrap();
            }
            Builder::discard_drafts(&*after, &prefix).unwrap();
            assert_eq!(after.list_names(&Key::root()).unwrap(), ["a.bin", "a.crc", "a.idx"]);
        }
    }
}

/// The bytes before the interruption are read again for their checksums, which detects damage.
#[test]
fn a_draft_damaged_before_the_resume_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    let prefix = Key::new("a").unwrap();
    let mut builder = Builder::create_draft(&store, &prefix, Dtype::U16).unwrap();
    add(&mut builder, 0..20);
    let mark = builder.sync().unwrap();
    drop(builder);
    let mut names = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let draft = names.find(|path| path.to_str().unwrap().contains("a.bin")).unwrap();
    let mut bytes = std::fs::read(&draft).unwrap();
    bytes[1000] ^= 4;
    std::fs::write(&draft, bytes).unwrap();
    let mut builder = Builder::resume(&store, &prefix, Dtype::U16, &mark).unwrap();
    add(&mut builder, 20..60);
    let error = builder.finish().unwrap_err().to_string();
    assert!(error.contains("a.bin") && error.contains("was corrupted"), "{error}");
    assert!(store.open(&prefix.with_suffix(".idx").unwrap()).is_err());
}

/// Synced data survives every failure in `finish`: the `.bin` too, if the `.idx` fails.
#[test]
fn a_failed_finish_can_be_resumed() {
    let prefix = Key::new("a").unwrap();
    let expected_files = expected(&prefix);
    let begin = |sim: &FaultStore| {
        let store: Arc<dyn Storage> = Arc::new(sim.clone());
        let mut builder = Builder::create_draft(&store, &prefix, Dtype::U16).unwrap();
        add(&mut builder, 0..60);
        let mark = builder.sync().unwrap();
        (store, builder, mark)
    };
    let sim = FaultStore::new(1, FaultPlan::default());
    let (_, builder, _) = begin(&sim);
    let first = sim.op_count();
    builder.finish().unwrap();
    for op in first..sim.op_count() {
        for how in [FaultKind::Io, FaultKind::NoSpace, FaultKind::Denied] {
            let sim = FaultStore::new(1, FaultPlan::default());
            let (store, builder, mark) = begin(&sim);
            sim.fail_op(op, how);
            if builder.finish().is_ok() {
                continue;
            }
            let builder = Builder::resume(&store, &prefix, Dtype::U16, &mark)
                .unwrap_or_else(|error| panic!("{how:?} at operation {op}: {error}"));
            builder.finish().unwrap();
            assert_eq!(files(&*store, &prefix), expected_files, "{how:?} at operation {op}");
        }
    }
}

/// CPM-2's writers end no document. Other tests compare its files with goldens; this one checks the
/// shape.
#[test]
fn sequences_may_be_in_no_document() {
    let prefix = Key::new("a").unwrap();
    let store: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
    let mut builder = Builder::create(&store, &prefix, Dtype::U16).unwrap();
    builder.add_sequence(&[1, 2]).unwrap();
    builder.add_sequence(&[3]).unwrap();
    builder.finish_without_documents().unwrap();
    let [_, idx, _] = files(&*store, &prefix);
    assert_eq!(idx.len(), 34 + 12 * 2 + 8);
    assert_eq!(idx[26..34], 1_u64.to_le_bytes());
    assert_eq!(idx[34 + 24..], 0_u64.to_le_bytes());
}
