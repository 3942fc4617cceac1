//! Every store of this crate passes the conformance suite.

#![expect(clippy::print_stderr, reason = "a skipped test is reported")]

use std::path::Path;
use std::sync::Arc;

use storage::testing::conformance;
use storage::testing::fault_store::{FaultPlan, FaultStore};
use storage::{Storage, open_url};

/// Runs the suite with a fresh folder below `base` for each check, and deletes them afterwards.
fn check(base: &Path, options: &str) {
    let folder = tempfile::tempdir_in(base).unwrap();
    let count = std::cell::Cell::new(0);
    both(&|| {
        count.set(count.get() + 1);
        let root = folder.path().join(format!("not yet there/{}", count.get()));
        open_url(&format!("file:{}?{options}", root.display())).unwrap()
    });
}

/// Runs the suites of the store and of its reader.
fn both(make: &dyn Fn() -> Arc<dyn Storage>) {
    conformance::run(make);
    storage::testing::reader_conformance::run(make);
}

fn ring_works() -> bool {
    let works = open_url("file:/tmp?engine=ring");
    if let Err(e) = &works {
        eprintln!("SKIPPED: {e}");
    }
    works.is_ok()
}

#[test]
fn ring() {
    if ring_works() {
        check(&std::env::temp_dir(), "engine=ring");
    }
}

#[test]
fn ring_buffered() {
    if ring_works() {
        check(&std::env::temp_dir(), "engine=ring&direct=off");
    }
}

#[test]
fn pread() {
    check(&std::env::temp_dir(), "engine=pread&direct=on");
}

#[test]
fn pread_buffered() {
    check(&std::env::temp_dir(), "engine=pread&direct=off");
}

#[test]
fn tmpfs() {
    let shm = Path::new("/dev/shm");
    if tempfile::tempfile_in(shm).is_err() {
        eprintln!("SKIPPED: {} cannot be written to", shm.display());
        return;
    }
    // A container often has 64 MiB; the checks of one store write half of this.
    const NEED_BYTES: u64 = 512 << 20;
    let free = open_url("file:/dev/shm").unwrap().free_bytes().unwrap();
    if free.is_some_and(|free| free < NEED_BYTES) {
        eprintln!("SKIPPED: {} has less than {} MiB free", shm.display(), NEED_BYTES >> 20);
        return;
    }
    check(shm, "engine=auto");
    check(shm, "engine=pread&direct=on");
    if ring_works() {
        check(shm, "engine=ring&direct=on");
    }
}

#[test]
fn sim() {
    both(&|| Arc::new(FaultStore::new(1, FaultPlan::default())));
}

/// Short transfers and interruptions change nothing.
#[test]
fn sim_with_faults() {
    let faults =
        FaultPlan { short_per_mille: 200, interrupted_per_mille: 100, ..FaultPlan::default() };
    both(&|| Arc::new(FaultStore::new(2, faults.clone())));
}
