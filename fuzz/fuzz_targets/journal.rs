//! The journal of an interrupted run: for any content, resuming from it and committing the record
//! leaves a journal with the same record.

#![no_main]

use fuzz::{Store, key};
use libfuzzer_sys::fuzz_target;
use storage::testing::fault_store::{FaultPlan, FaultStore};

fuzz_target!(|lines: &str| {
    // Mutations rarely have correct checksums, so all lines get one here, except the last, which
    // may be truncated.
    let mut journal = String::new();
    let (complete, last) = lines.rsplit_once('\n').unwrap_or(("", lines));
    for line in complete.split('\n').filter(|_| !complete.is_empty()) {
        journal += &format!("{:016x} {line}\n", storage::crc64(line.as_bytes()));
    }
    journal += last;
    let store: Store = std::sync::Arc::new(FaultStore::new(1, FaultPlan::default()));
    let mut draft = store.create_resumable(&key("a.journal")).expect("an empty store");
    draft.write(journal.as_bytes()).expect("a disk without faults");
    draft.sync().expect("a disk without faults");
    drop(draft);
    let resume = || preprocess::fuzzing::resume_journal(&store, &key("a.journal"));
    let first = resume();
    let second = resume();
    match (first, second) {
        (Ok(first), Ok(second)) => assert_eq!(first, second),
        (Err(_), Err(_)) => {}
        (first, second) => panic!("{first:?}, then {second:?}"),
    }
});
