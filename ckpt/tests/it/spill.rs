//! What leaves memory comes back as it went, in whatever order and from wherever it is then; and
//! what a disk does to it is told, with the place.

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

/// Four buffers of a page.
const SMALL: SpillOptions = SpillOptions { extent_bytes: 4096, buffers: 4, threads: 2 };

/// Longest that a test waits for threads to come somewhere.
const PATIENCE: Duration = Duration::from_secs(60);

fn in_folder(folder: &Path) -> Folder {
    let store = storage::open_url(folder.to_str().unwrap()).unwrap();
    Folder { store, key: Key::root() }
}

fn on(store: Arc<dyn Storage>, options: SpillOptions) -> Result<Spill> {
    Spill::open(vec![Folder { store, key: Key::new("away").unwrap() }], options)
}

fn take(away: SpillHandle, len: usize) -> Result<Vec<u8>> {
    let mut into = vec![0xee; len];
    away.take(&mut into)?;
    Ok(into)
}

fn wait_until(spill: &Spill, what: &str, holds: impl Fn(&SpillReport) -> bool) {
    let begun = Instant::now();
    while !holds(&spill.report()) {
        if begun.elapsed() > PATIENCE {
            panic!("waited for {PATIENCE:?}: {what}, {:?}", spill.report());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Puts, announces, takes and gives up, in an order of the seed, and compares all that comes back.
fn at_random(spill: &Spill, seed: u64, rounds: usize) {
    let mut random = Random(seed);
    let mut away: Vec<(SpillHandle, Vec<u8>)> = Vec::new();
    for _ in 0..rounds {
        match random.below(5) {
            0 | 1 if away.len() < 40 => {
                let lens = [0, 1, 100, 4095, 4096, 4097, 8192, 30_000];
                let len = lens[random.below(8) as usize];
                let bytes = random.bytes(len);
                away.push((spill.put(&bytes).unwrap(), bytes));
            }
            2 => away.iter().rev().take(3).for_each(|(away, _)| away.expect()),
            3 if !away.is_empty() => {
                let at = random.below(away.len() as u64) as usize;
                drop(away.swap_remove(at));
            }
            _ => {
                // Mostly the last.
                let from = if random.below(3) == 0 { away.len() as u64 } else { 2 };
                let back = random.below(from.max(1)) as usize;
                let Some(at) = away.len().checked_sub(1 + back) else { continue };
                let (last, due) = away.remove(at);
                let got = take(last, due.len()).unwrap();
                assert!(got == due, "seed {seed}: {} bytes are others", due.len());
            }
        }
    }
    for (away, due) in away {
        assert!(take(away, due.len()).unwrap() == due, "seed {seed}, at the end");
    }
}

#[test]
fn all_comes_back_in_any_order() {
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
            at_random(&spill, seed, 200);
        }
        let report = spill.report();
        let buffers = options.buffers.max(2) as u64 * 12_288;
        assert!(report.memory_bytes <= buffers, "{report:?}");
        assert!(report.write_bytes > 0 && report.read_bytes + report.late_bytes > 0, "{report:?}");
        // At most forty of 30,000 bytes at once, and as much again that lies idle.
        assert!(report.disk_bytes <= 8 << 20, "places are used again: {report:?}");
        drop(spill);
    }
    for name in ["a", "b", "c"] {
        assert_eq!(fs::read_dir(folder.path().join(name)).unwrap().count(), 0, "a name is left");
    }
}

/// A disk that moves less than it is asked to, and is interrupted all the time.
#[test]
fn short_transfers_are_gone_on_with() {
    let faults =
        FaultPlan { short_per_mille: 200, interrupted_per_mille: 100, ..FaultPlan::default() };
    for seed in 0..10 {
        let spill = on(Arc::new(FaultStore::new(seed, faults.clone())), SMALL).unwrap();
        at_random(&spill, seed, 200);
    }
}

/// What has room in the buffers is not read, and what is announced is read before it is needed, as
/// far as buffers go.
#[test]
fn what_is_announced_is_near() {
    let folder = tempfile::tempdir().unwrap();
    let options = SpillOptions { extent_bytes: 1 << 20, buffers: 8, threads: 2 };
    let spill = Spill::open(vec![in_folder(folder.path())], options).unwrap();
    let bytes = Random(3).bytes(1 << 20);
    let put = |count: usize| (0..count).map(|_| spill.put(&bytes).unwrap()).collect::<Vec<_>>();
    for away in put(8).into_iter().rev() {
        assert!(take(away, bytes.len()).unwrap() == bytes);
    }
    let few = spill.report();
    assert_eq!((few.read_bytes, few.late_bytes), (0, 0), "it was in memory");

    let mut many = put(40);
    wait_until(&spill, "all is written", |now| now.write_bytes >= few.write_bytes + (40 << 20));
    // The oldest are no more in memory. Half of the buffers are for them.
    many[..4].iter().rev().for_each(SpillHandle::expect);
    wait_until(&spill, "four are read", |now| now.read_bytes == 4 << 20);
    for away in many.drain(..4).rev() {
        assert!(take(away, bytes.len()).unwrap() == bytes);
    }
    let after = spill.report();
    assert_eq!((after.read_bytes, after.late_bytes), (4 << 20, 0), "they were read once, before");
    assert_eq!(after.memory_bytes, 8 << 20);
}

/// More is announced than there are buffers, and nothing of it taken: what is put goes before.
#[test]
fn what_is_announced_does_not_stop_what_is_put() {
    let folder = tempfile::tempdir().unwrap();
    let spill = Spill::open(vec![in_folder(folder.path())], SMALL).unwrap();
    let all: Vec<Vec<u8>> = (0..60).map(|seed| Random(seed).bytes(9000)).collect();
    let mut away = Vec::new();
    for bytes in &all {
        away.push(spill.put(bytes).unwrap());
        away.iter().for_each(SpillHandle::expect);
    }
    for (away, due) in away.into_iter().zip(&all) {
        assert!(take(away, due.len()).unwrap() == *due);
    }
}

/// What is given up makes room for others, wherever it was.
#[test]
fn what_is_given_up_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let spill = Spill::open(vec![in_folder(folder.path())], SMALL).unwrap();
    let bytes = Random(9).bytes(40_000);
    for round in 0..200 {
        let away: Vec<SpillHandle> = (0..5).map(|_| spill.put(&bytes).unwrap()).collect();
        if round % 2 == 0 {
            away.iter().for_each(SpillHandle::expect);
        }
    }
    assert!(spill.report().disk_bytes <= 1 << 20, "{:?}", spill.report());
    let error = spill.put(&bytes).unwrap().take(&mut [0; 7]).unwrap_err().to_string();
    assert!(error.contains("expected 40000 bytes, found a buffer of 7 bytes"), "{error}");
}

/// Puts twenty pages, and takes them back from the last on.
fn there_and_back(spill: &Spill) -> Result<()> {
    let pages: Vec<Vec<u8>> = (0..20).map(|seed| Random(seed).bytes(4096)).collect();
    let put = pages.iter().map(|page| spill.put(page));
    let away = put.collect::<Result<Vec<_>>>()?;
    for (away, due) in away.into_iter().zip(&pages).rev() {
        assert!(take(away, due.len())? == *due, "other bytes, and no error");
    }
    Ok(())
}

/// Each operation fails once, in each way: it is told, once by itself, and nothing goes on.
#[test]
fn failing_operations() {
    let count = {
        let store = FaultStore::new(1, FaultPlan::default());
        there_and_back(&on(Arc::new(store.clone()), SMALL).unwrap()).unwrap();
        store.op_count()
    };
    for how in [FaultKind::Io, FaultKind::NoSpace, FaultKind::Denied, FaultKind::Gone] {
        let mut failed = 0;
        for op in 0..count {
            let store = FaultStore::new(1, FaultPlan::default());
            store.fail_op(op, how);
            let Ok(spill) = on(Arc::new(store.clone()), SMALL) else {
                failed += 1;
                continue;
            };
            // How much is written before it is taken is a matter of chance.
            let Err(error) = there_and_back(&spill) else { continue };
            failed += 1;
            let text = error.to_string();
            assert!(text.contains("sim:/away"), "{how:?} at {op}: {text}");
            let again = spill.put(&[1]).unwrap_err().to_string();
            // A disk that is gone may fail two at once.
            let is_same = again.contains(&text) || how == FaultKind::Gone;
            assert!(is_same, "{how:?} at {op}: {again}, after {text}");
        }
        assert!(failed * 2 > count, "{how:?}: {failed} of {count} failures were told");
    }
}

#[test]
fn no_room() {
    let text_of = |spill: &Spill| {
        let mut away = Vec::new();
        let error = loop {
            match spill.put(&[7; 4096]) {
                Ok(one) => away.push(one),
                Err(error) => break error,
            }
            assert!(away.len() < 10_000, "there is no such space");
        };
        let is_space = matches!(error, Error::Storage(storage::Error::NoSpace { .. }));
        assert!(is_space, "{error}");
        // What is left of it can be dropped, and says the same.
        assert!(away.pop().unwrap().take(&mut [0; 4096]).is_err());
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
    // All of it is given back.
    Spill::open(vec![in_folder(disk.path())], SMALL).unwrap();
    let small = Mount::new("size=512k").unwrap();
    let error = Spill::open(vec![in_folder(small.path())], SMALL).unwrap_err().to_string();
    assert!(error.contains("(need 1048576 bytes, "), "{error}");
}

/// A disk that does not give back what it took: by those who need it, and by those who read ahead.
#[test]
fn reads_that_fail() {
    let inner = Arc::new(FaultStore::new(2, FaultPlan::default()));
    let faults = ReadFaults { broken: 8192..12_288, ..ReadFaults::default() };
    let store = Arc::new(ReadFaultLayer::new(inner, 3, faults));
    for announces in [false, true] {
        let spill = on(Arc::clone(&store) as _, SMALL).unwrap();
        let away: Vec<SpillHandle> = (0..30).map(|_| spill.put(&[5; 4096]).unwrap()).collect();
        if announces {
            away.iter().rev().for_each(SpillHandle::expect);
        }
        let taken = away.into_iter().rev().map(|away| take(away, 4096));
        let error = taken.collect::<Result<Vec<_>>>().unwrap_err().to_string();
        let due = "cannot read 4096 bytes at byte 8192 of an unnamed file in sim:/away: ";
        assert!(error.starts_with(due), "{error}");
        assert!(spill.put(&[5]).unwrap_err().to_string().contains(due));
    }
}

/// The files of this process in a folder that have no name, each once.
fn unnamed(folder: &Path) -> Vec<fs::File> {
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
fn a_turned_bit() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    for (len, announces) in [(4096, false), (4096, true), (1 << 20, false), (1 << 20, true)] {
        let options = SpillOptions { extent_bytes: len, buffers: 2, threads: 1 };
        let spill = Spill::open(vec![in_folder(&root)], options).unwrap();
        let bytes = Random(4).bytes(len);
        let mut away: Vec<SpillHandle> = (0..8).map(|_| spill.put(&bytes).unwrap()).collect();
        wait_until(&spill, "all is written", |now| now.write_bytes == 8 * len as u64);
        let files = unnamed(&root);
        assert!(!files.is_empty(), "an unnamed file in {}", root.display());
        for file in files {
            let mut byte = [0];
            file.read_exact_at(&mut byte, 100).unwrap();
            file.write_all_at(&[byte[0] ^ 16], 100).unwrap();
            file.sync_all().unwrap();
        }
        let first = away.swap_remove(0);
        if announces {
            first.expect();
        }
        let error = take(first, len).unwrap_err();
        assert!(matches!(error, Error::Corrupt { offset: 0, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(root.to_str().unwrap()) && text.contains("found CRC-64"), "{text}");
    }
}
