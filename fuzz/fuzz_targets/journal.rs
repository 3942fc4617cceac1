//! The journal of an interrupted run: whatever it holds, a run that goes on from it and commits
//! what it found leaves one that says the same.

#![no_main]

use fuzz::{Store, key};
use libfuzzer_sys::fuzz_target;
use storage::testing::fault_store::{FaultPlan, FaultStore};

fuzz_target!(|lines: &str| {
    // A mutation hardly ever has the right sum, so all lines but the last, which may be torn, get
    // it here.
    let mut journal = String::new();
    let (whole, torn) = lines.rsplit_once('\n').unwrap_or(("", lines));
    for line in whole.split('\n').filter(|_| !whole.is_empty()) {
        journal += &format!("{:016x} {line}\n", storage::crc64(line.as_bytes()));
    }
    journal += torn;
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
