//! Spilled bytes are read back unchanged, in any order, from memory or disk; errors of the disk are
//! reported with their location.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::Random;
use ckpt::offload::{Folder, Spill, SpillHandle, SpillOptions, SpillReport};
use ckpt::{Error, Result};
use storage::testing::fault_store::{
    FaultKind, FaultPlan, FaultStore, Mount, ReadFaultLayer, ReadFaults,
};
use storage::{Key, Storage};

/// Four buffers of one page.
const SMALL: SpillOptions = SpillOptions { extent_bytes: 4096, buffers: 4, threads: 2 };

/// Longest wait for the spill threads.
const PATIENCE: Duration = Duration::from_secs(60);

fn in_folder(folder: &Path) -> Folder {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    Folder { store, key: Key::root() }
}

fn on(store: Arc<dyn Storage>, options: SpillOptions) -> Result<Spill> {
    Spill::open(vec![Folder { store, key: Key::new("away").unwrap() }], options)
}

fn take(handle: SpillHandle, len: usize) -> Result<Vec<u8>> {
    let mut into = vec![0xee; len];
    handle.take(&mut into)?;
    Ok(into)
}

fn wait_until(spill: &Spill, what: &str, holds: impl Fn(&SpillReport) -> bool) {
    let started = Instant::now();
    while !holds(&spill.report()) {
        if started.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}: {what}, {:?}", spill.report());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Puts, announces, takes and drops in random order, and compares all bytes that are read back.
fn run_random_operations(spill: &Spill, seed: u64, rounds: usize) {
    let mut random = Random(seed);
    let mut handles: Vec<(SpillHandle, Vec<u8>)> = Vec::new();
    for _ in 0..rounds {
        match random.below(5) {
            0 | 1 if handles.len() < 40 => {
                let lens = [0, 1, 100, 4095, 4096, 4097, 8192, 30_000];
                let len = lens[random.below(8) as usize];
                let bytes = random.bytes(len);
                handles.push((spill.put(&bytes).unwrap(), bytes));
            }
            2 => handles.iter().rev().take(3).for_each(|(handle, _)| handle.expect()),
            3 if !handles.is_empty() => {
                let at = random.below(handles.len() as u64) as usize;
                drop(handles.swap_remove(at));
            }
            _ => {
                // Mostly the last one.
                let from = if random.below(3) == 0 { handles.len() as u64 } else { 2 };
                let back = random.below(from.max(1)) as usize;
                let Some(at) = handles.len().checked_sub(1 + back) else { continue };
                let (last, expected) = handles.remove(at);
                let found = take(last, expected.len()).unwrap();
                assert!(found == expected, "seed {seed}: {} bytes differ", expected.len());
            }
        }
    }
    for (handle, expected) in handles {
        assert!(take(handle, expected.len()).unwrap() == expected, "seed {seed}, at the end");
    }
}

#[test]
fn extents_round_trip_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let disks = ["a", "b", "c"].map(|name| in_folder(&folder.path().join(name)));
    let large = SpillOptions { extent_bytes: 12_000, buffers: 3, threads: 1 };
    for (folders, options) in [
        (&disks[..1], SMALL),
        (&disks[1..], SMALL),
        (&disks[..], large),
        (&disks[..1], SpillOptions { extent_bytes: 1, buffers: 0, threads: 0 }),
    ] {
        let spill = Spill::open(folders.to_vec(), options).unwrap();
        for seed in 0..20 {
            run_random_operations(&spill, seed, 200);
        }
        let report = spill.report();
        let buffers = options.buffers.max(2) as u64 * 12_288;
        assert!(report.memory_bytes <= buffers, "{report:?}");
        assert!(report.write_bytes > 0 && report.read_bytes + report.late_bytes > 0, "{report:?}");
        // At most forty of 30,000 bytes at once, and as much unused space.
        assert!(report.disk_bytes <= 8 << 20, "space is reused: {report:?}");
        drop(spill);
    }
    for name in ["a", "b", "c"] {
        assert_eq!(fs::read_dir(folder.path().join(name)).unwrap().count(), 0, "a name remains");
    }
}

/// A disk with short transfers and frequent interrupts.
#[test]
fn short_transfers_are_continued() {
    let faults =
        FaultPlan { short_per_mille: 200, interrupted_per_mille: 100, ..FaultPlan::default() };
    for seed in 0..10 {
        let spill = on(Arc::new(FaultStore::new(seed, faults.clone())), SMALL).unwrap();
        run_random_operations(&spill, seed, 200);
    }
}

/// Extents still in buffers are not read, and announced extents are prefetched as far as there are
/// buffers.
#[test]
fn announced_extents_are_prefetched() {
    let folder = tempfile::tempdir().unwrap();
    let options = SpillOptions { extent_bytes: 1 << 20, buffers: 8, threads: 2 };
    let spill = Spill::open(vec![in_folder(folder.path())], options).unwrap();
    let bytes = Random(3).bytes(1 << 20);
    let put = |count: usize| (0..count).map(|_| spill.put(&bytes).unwrap()).collect::<Vec<_>>();
    for handle in put(8).into_iter().rev() {
        assert!(take(handle, bytes.len()).unwrap() == bytes);
    }
    let few = spill.report();
    assert_eq!((few.read_bytes, few.late_bytes), (0, 0), "it was in memory");

    let mut many = put(40);
    wait_until(&spill, "all is written", |now| now.write_bytes >= few.write_bytes + (40 << 20));
    // The oldest are no longer in memory. Half of the buffers are for prefetch.
    many[..4].iter().rev().for_each(SpillHandle::expect);
    wait_until(&spill, "four are read", |now| now.read_bytes == 4 << 20);
    for handle in many.drain(..4).rev() {
        assert!(take(handle, bytes.len()).unwrap() == bytes);
    }
    let after = spill.report();
    assert_eq!(
        (after.read_bytes, after.late_bytes),
        (4 << 20, 0),
        "they were read once, by prefetch"
    );
    assert_eq!(after.memory_bytes, 8 << 20);
}

/// More extents are announced than there are buffers, and none is taken: `put` has priority.
#[test]
fn prefetch_does_not_block_put() {
    let folder = tempfile::tempdir().unwrap();
    let spill = Spill::open(vec![in_folder(folder.path())], SMALL).unwrap();
    let all: Vec<Vec<u8>> = (0..60).map(|seed| Random(seed).bytes(9000)).collect();
    let mut handles = Vec::new();
    for bytes in &all {
        handles.push(spill.put(bytes).unwrap());
        handles.iter().for_each(SpillHandle::expect);
    }
    for (handle, expected) in handles.into_iter().zip(&all) {
        assert!(take(handle, expected.len()).unwrap() == *expected);
    }
}

/// Dropped extents free their space, in memory and on the disk.
#[test]
fn dropped_extents_free_space() {
    let folder = tempfile::tempdir().unwrap();
    let spill = Spill::open(vec![in_folder(folder.path())], SMALL).unwrap();
    let bytes = Random(9).bytes(40_000);
    for round in 0..200 {
        let handles: Vec<SpillHandle> = (0..5).map(|_| spill.put(&bytes).unwrap()).collect();
        if round % 2 == 0 {
            handles.iter().for_each(SpillHandle::expect);
        }
    }
    assert!(spill.report().disk_bytes <= 1 << 20, "{:?}", spill.report());
    let error = spill.put(&bytes).unwrap().take(&mut [0; 7]).unwrap_err().to_string();
    assert!(error.contains("expected 40000 bytes, found a buffer of 7 bytes"), "{error}");
}

/// Puts twenty pages, and takes them in reverse order.
fn put_and_take(spill: &Spill) -> Result<()> {
    let pages: Vec<Vec<u8>> = (0..20).map(|seed| Random(seed).bytes(4096)).collect();
    let put = pages.iter().map(|page| spill.put(page));
    let handles = put.collect::<Result<Vec<_>>>()?;
    for (handle, expected) in handles.into_iter().zip(&pages).rev() {
        assert!(take(handle, expected.len())? == *expected, "other bytes without an error");
    }
    Ok(())
}

/// Each operation fails once, in each way: the error is returned once, and later calls fail.
#[test]
fn failing_operations_are_reported() {
    let count = {
        let store = FaultStore::new(1, FaultPlan::default());
        put_and_take(&on(Arc::new(store.clone()), SMALL).unwrap()).unwrap();
        store.op_count()
    };
    for how in [FaultKind::Io, FaultKind::NoSpace, FaultKind::Denied, FaultKind::DiskLost] {
        let mut failed = 0;
        for op in 0..count {
            let store = FaultStore::new(1, FaultPlan::default());
            store.fail_op(op, how);
            let Ok(spill) = on(Arc::new(store.clone()), SMALL) else {
                failed += 1;
                continue;
            };
            // How much is written before it is taken varies.
            let Err(error) = put_and_take(&spill) else { continue };
            failed += 1;
            let text = error.to_string();
            assert!(text.contains("sim:/away"), "{how:?} at {op}: {text}");
            let again = spill.put(&[1]).unwrap_err().to_string();
            // A lost disk may fail two requests at once.
            let is_same = again.contains(&text) || how == FaultKind::DiskLost;
            assert!(is_same, "{how:?} at {op}: {again}, after {text}");
        }
        assert!(failed * 2 > count, "{how:?}: {failed} of {count} failures were reported");
    }
}

#[test]
fn full_disk_is_reported() {
    let text_of = |spill: &Spill| {
        let mut handles = Vec::new();
        let error = loop {
            match spill.put(&[7; 4096]) {
                Ok(one) => handles.push(one),
                Err(error) => break error,
            }
            assert!(handles.len() < 10_000, "there is no such space");
        };
        let is_space = matches!(error, Error::Storage(storage::Error::NoSpace { .. }));
        assert!(is_space, "{error}");
        // The rest can be dropped, and returns the same error.
        assert!(handles.pop().unwrap().take(&mut [0; 4096]).is_err());
        error.to_string()
    };
    let Ok(disk) = Mount::new("size=3m") else {
        eprintln!("SKIPPED: mounting a small tmpfs needs root");
        return;
    };
    let spill = Spill::open(vec![in_folder(disk.path())], SMALL).unwrap();
    let text = text_of(&spill);
    let place = format!("an unnamed file in {}: no space left", disk.path().display());
    assert!(text.contains(&place) && text.contains("(need 4096 bytes, "), "{text}");
    drop(spill);
    // All space is freed.
    Spill::open(vec![in_folder(disk.path())], SMALL).unwrap();
    let small = Mount::new("size=512k").unwrap();
    let error = Spill::open(vec![in_folder(small.path())], SMALL).unwrap_err().to_string();
    assert!(error.contains("(need 1048576 bytes, "), "{error}");
}

/// A disk whose reads fail, for synchronous reads and for prefetches.
#[test]
fn failing_reads_are_reported() {
    let inner = Arc::new(FaultStore::new(2, FaultPlan::default()));
    let faults = ReadFaults { broken: 8192..12_288, ..ReadFaults::default() };
    let store = Arc::new(ReadFaultLayer::new(inner, 3, faults));
    for announces in [false, true] {
        let spill = on(Arc::clone(&store) as _, SMALL).unwrap();
        let handles: Vec<SpillHandle> = (0..30).map(|_| spill.put(&[5; 4096]).unwrap()).collect();
        if announces {
            handles.iter().rev().for_each(SpillHandle::expect);
        }
        let taken = handles.into_iter().rev().map(|handle| take(handle, 4096));
        let error = taken.collect::<Result<Vec<_>>>().unwrap_err().to_string();
        let expected = "cannot read 4096 bytes at byte 8192 of an unnamed file in sim:/away: ";
        assert!(error.starts_with(expected), "{error}");
        assert!(spill.put(&[5]).unwrap_err().to_string().contains(expected));
    }
}

/// The anonymous files of this process in a folder, each once.
fn anonymous_files(folder: &Path) -> Vec<fs::File> {
    let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let path = entry.ok()?.path();
        let name = fs::read_link(&path).ok()?;
        let ours = name.starts_with(folder) && name.to_str()?.ends_with("(deleted)");
        let file = ours.then(|| fs::File::options().read(true).write(true).open(path).unwrap())?;
        Some((file.metadata().unwrap().ino(), file))
    });
    open.collect::<BTreeMap<_, _>>().into_values().collect()
}

#[test]
fn flipped_bit_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    for (len, announces) in [(4096, false), (4096, true), (1 << 20, false), (1 << 20, true)] {
        let options = SpillOptions { extent_bytes: len, buffers: 2, threads: 1 };
        let spill = Spill::open(vec![in_folder(&root)], options).unwrap();
        let bytes = Random(4).bytes(len);
        let mut handles: Vec<SpillHandle> = (0..8).map(|_| spill.put(&bytes).unwrap()).collect();
        wait_until(&spill, "all is written", |now| now.write_bytes == 8 * len as u64);
        let files = anonymous_files(&root);
        assert!(!files.is_empty(), "an unnamed file in {}", root.display());
        for file in files {
            let mut byte = [0];
            file.read_exact_at(&mut byte, 100).unwrap();
            file.write_all_at(&[byte[0] ^ 16], 100).unwrap();
            file.sync_all().unwrap();
        }
        let first = handles.swap_remove(0);
        if announces {
            first.expect();
        }
        let error = take(first, len).unwrap_err();
        assert!(matches!(error, Error::Corrupt { offset: 0, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(root.to_str().unwrap()) && text.contains("found CRC-64"), "{text}");
    }
}
