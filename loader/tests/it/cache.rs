//! The local cache: it returns the right bytes or none, whatever happens to its folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use loader::cache::{
    CacheOptions, LogOptions, NodeCache, OrderLog, StageOptions, StagedFiles, open,
};
use loader::{DataFile, PieceRef, Result, SampleCache, SampleOrder};
use storage::testing::fault_store;
use storage::{Key, Storage};

const SAMPLES: u64 = 600;

/// A small generator with a seed, so that a failure is reproducible.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

/// Samples of up to three pieces at random places of two files.
#[derive(Debug)]
struct Pieces {
    sources: [DataFile; 2],
    files: [Vec<u8>; 2],
}

impl Pieces {
    fn new(folder: &Path) -> Arc<Self> {
        let store = posix(folder);
        let mut random = Random(11);
        let lens = [150_000, 70_001];
        let files = lens.map(|len| (0..len).map(|_| random.below(256) as u8).collect::<Vec<u8>>());
        let keys = ["a.bin", "b.bin"].map(|name| Key::new(name).unwrap());
        for (key, bytes) in keys.iter().zip(&files) {
            let mut upload = store.create(key, 0).unwrap();
            upload.write(bytes).unwrap();
            upload.finish().unwrap();
        }
        let [a, b] = keys;
        let source = |key, len| DataFile::new(store.clone(), key, len);
        Arc::new(Pieces { sources: [source(a, lens[0]), source(b, lens[1])], files })
    }

    fn bytes(&self, sample: u64) -> Vec<u8> {
        let mut pieces = Vec::new();
        self.pieces(sample, &mut pieces).unwrap();
        let each = pieces.iter().map(|piece| {
            let start = piece.offset_bytes as usize;
            &self.files[piece.file as usize][start..start + piece.len_bytes as usize]
        });
        each.collect::<Vec<_>>().concat()
    }
}

impl SampleOrder for Pieces {
    fn sources(&self) -> &[DataFile] {
        &self.sources
    }

    fn sample_count(&self) -> u64 {
        SAMPLES
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        let mut random = Random(sample);
        for _ in 0..random.below(4) {
            let file = random.below(2) as u32;
            let len_bytes = random.below(3000);
            let offset_bytes = random.below(self.sources[file as usize].len_bytes - len_bytes + 1);
            into.push(PieceRef { file, offset_bytes, len_bytes });
        }
        Ok(())
    }

    fn name(&self) -> String {
        "pieces".to_owned()
    }
}

fn posix(folder: &Path) -> Arc<dyn Storage> {
    storage::open_url(folder.to_str().unwrap()).unwrap()
}

fn small() -> LogOptions {
    LogOptions { segment_bytes: 32 << 10, ..LogOptions::default() }
}

fn log(folder: &Path, order: &Pieces, options: LogOptions) -> OrderLog {
    OrderLog::open(&posix(folder), order, options).unwrap()
}

/// Fetches samples as a loader does: from the cache if it has them, else from the store. Checks the
/// bytes of all, and returns how many were cached.
fn fetch(cache: &dyn SampleCache, order: &Pieces, samples: std::ops::Range<u64>) -> u64 {
    let mut found = 0;
    for sample in samples {
        let expected = order.bytes(sample);
        let mut actual = vec![0xee; expected.len()];
        if cache.find(sample, &mut actual) {
            assert!(actual == expected, "sample {sample} differs");
            found += 1;
        } else {
            cache.keep(sample, &expected);
        }
    }
    found
}

/// Fetches, and waits for the disk after every few samples, so that none is dropped.
fn fill(log: &OrderLog, order: &Pieces, samples: std::ops::Range<u64>) {
    for start in samples.clone().step_by(8) {
        fetch(log, order, start..samples.end.min(start + 8));
        log.flush();
    }
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

#[test]
fn restart_finds_samples_read_since_the_checkpoint() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    let first = log(cache.path(), &order, small());
    fill(&first, &order, 0..400);
    assert_eq!(fetch(&first, &order, 0..400), 400, "also without a restart");
    first.checkpointed(200);
    first.flush();
    drop(first);
    let again = log(cache.path(), &order, small());
    assert_eq!(fetch(&again, &order, 200..400), 200);
    assert!(fetch(&again, &order, 0..200) < 50, "files from before the checkpoint are deleted");
    assert_eq!(fetch(&again, &order, 400..500), 0);
}

#[test]
fn another_order_finds_nothing() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    fill(&log(cache.path(), &order, small()), &order, 0..50);
    let other = log(cache.path(), &order, LogOptions { salt: 1, ..small() });
    assert_eq!(fetch(&other, &order, 0..50), 0);
    let same = log(cache.path(), &order, small());
    assert_eq!(fetch(&same, &order, 0..50), 50);
    let mut short = vec![0; order.bytes(7).len() + 1];
    assert!(!same.find(7, &mut short), "found with another length");
}

/// A flipped bit or a truncation anywhere in a file makes the affected samples misses, and returns
/// no wrong bytes.
#[test]
fn corrupt_samples_are_misses() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    fill(&log(cache.path(), &order, small()), &order, 0..12);
    let mut random = Random(5);
    for path in files(cache.path()) {
        let whole = std::fs::read(&path).unwrap();
        for nth in 0..120 {
            let mut bytes = whole.clone();
            let at = if nth < 60 { nth } else { random.below(bytes.len() as u64) as usize };
            if random.below(2) == 0 {
                bytes[at] ^= 1 << random.below(8);
            } else {
                bytes.truncate(at);
            }
            std::fs::write(&path, &bytes).unwrap();
            let log = log(cache.path(), &order, small());
            let mut found = 0;
            for sample in 0..12 {
                let expected = order.bytes(sample);
                let mut actual = vec![0; expected.len()];
                if log.find(sample, &mut actual) {
                    assert!(actual == expected, "byte {at} of {}", path.display());
                    found += 1;
                }
            }
            assert!(found < 12, "no check covers byte {at} of {}", path.display());
        }
        std::fs::write(&path, &whole).unwrap();
    }
    assert_eq!(fetch(&log(cache.path(), &order, small()), &order, 0..12), 12);
}

#[test]
fn folder_may_be_deleted_while_in_use() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    let log = log(cache.path(), &order, small());
    for round in 0..6 {
        fill(&log, &order, 0..100);
        for path in files(cache.path()).into_iter().skip(round % 2) {
            let _ = std::fs::remove_file(path); // the log may be faster
        }
        fetch(&log, &order, 0..100);
        let _ = std::fs::remove_dir_all(cache.path());
        fetch(&log, &order, 0..100);
        log.checkpointed(50);
        log.flush();
    }
    assert_eq!(fetch(&log, &order, 100..101), 0, "and continues");
}

#[test]
fn full_log_keeps_the_oldest_samples() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    let limit_bytes = 200 << 10;
    let log = log(cache.path(), &order, LogOptions { limit_bytes, ..small() });
    let on_disk =
        || -> u64 { files(cache.path()).iter().map(|path| path.metadata().unwrap().len()).sum() };
    fill(&log, &order, 0..SAMPLES / 2);
    assert!(log.bytes() <= limit_bytes, "{} bytes", log.bytes());
    assert_eq!(on_disk(), log.bytes());
    let kept = fetch(&log, &order, 0..20);
    assert_eq!(kept, 20, "a restart needs the oldest samples first");
    log.checkpointed(SAMPLES / 2);
    fill(&log, &order, SAMPLES / 2..SAMPLES);
    assert!(on_disk() <= limit_bytes);
    assert_eq!(fetch(&log, &order, SAMPLES / 2 + 8..SAMPLES / 2 + 28), 20, "there is room again");
}

/// A twentieth of the free space before the first file stays free, not of the space after each
/// file.
#[test]
fn log_leaves_a_twentieth_of_the_space_free() {
    const CAPACITY: u64 = 1 << 20;
    let data = tempfile::tempdir().unwrap();
    let order = Pieces::new(data.path());
    let faults = fault_store::FaultPlan { capacity_bytes: Some(CAPACITY), ..Default::default() };
    let disk: Arc<dyn Storage> = Arc::new(fault_store::FaultStore::new(7, faults));
    let options = LogOptions { segment_bytes: 8 << 10, ..LogOptions::default() };
    let log = OrderLog::open(&disk, order.as_ref(), options).unwrap();
    // Every sample repeatedly: three times the capacity of the disk.
    let mut kept = 0;
    while kept < 3 * CAPACITY {
        for sample in 0..SAMPLES {
            let bytes = order.bytes(sample);
            kept += bytes.len() as u64;
            log.keep(sample, &bytes);
            if sample % 16 == 0 {
                log.flush();
            }
        }
    }
    let free = disk.free_bytes().unwrap().unwrap();
    assert!(free >= CAPACITY / 20, "{free} bytes are free of {CAPACITY}");
    assert!(free <= CAPACITY / 10, "{free} bytes are free of {CAPACITY}");
}

/// Ranks that read for themselves write overlapping files: a file with the sample may start long
/// before it, and many files of other ranks after that.
#[test]
fn sample_is_found_in_an_earlier_overlapping_file() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    let keep = |samples: &mut dyn Iterator<Item = u64>| {
        let log = log(cache.path(), &order, LogOptions::default());
        samples.for_each(|sample| log.keep(sample, &order.bytes(sample)));
    };
    keep(&mut (0..SAMPLES).step_by(50));
    (0..20).for_each(|nth| keep(&mut (501 + 2 * nth..503 + 2 * nth)));
    let log = log(cache.path(), &order, LogOptions::default());
    for sample in [0, 450, 550, 501, 540] {
        assert_eq!(fetch(&log, &order, sample..sample + 1), 1, "sample {sample}");
    }
}

/// Jobs of one order share a folder without a lock: each finds the files of the other.
#[test]
fn jobs_share_a_folder() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    std::thread::scope(|scope| {
        for job in 0..3 {
            let (order, folder) = (&order, cache.path());
            scope.spawn(move || {
                let log = log(folder, order, small());
                fill(&log, order, job * 60..200 + job * 60);
                log.checkpointed(job * 20);
            });
        }
    });
    assert_eq!(fetch(&log(cache.path(), &order, small()), &order, 60..320), 260);
}

fn stage(folder: &Path, order: &Arc<Pieces>) -> StagedFiles {
    let options = StageOptions { block_bytes: 64 << 10, bytes_per_s: u64::MAX, salt: 0 };
    let order: Arc<dyn SampleOrder> = order.clone();
    StagedFiles::open(&posix(folder), &order, options).unwrap()
}

/// Waits until all blocks are copied. The timeout of the harness ends this if the stager stops.
fn wait_for(staged: &StagedFiles) {
    while staged.progress().0 < staged.progress().1 {
        std::thread::yield_now();
    }
}

#[test]
fn files_that_fit_are_copied_and_served() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    let staged = stage(cache.path(), &order);
    fetch(&staged, &order, 0..SAMPLES); // while they are copied: right or a miss
    wait_for(&staged);
    assert_eq!(staged.progress(), (5, 5));
    assert_eq!(fetch(&staged, &order, 0..SAMPLES), SAMPLES);
    drop(staged);
    // Copied blocks are not fetched again: the source files may even be deleted.
    std::fs::remove_file(data.path().join("a.bin")).unwrap();
    std::fs::remove_file(data.path().join("b.bin")).unwrap();
    let again = stage(cache.path(), &order);
    wait_for(&again);
    assert_eq!(fetch(&again, &order, 0..SAMPLES), SAMPLES);
}

#[test]
fn corrupt_block_is_not_served() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let order = Pieces::new(data.path());
    wait_for(&stage(cache.path(), &order));
    let mut random = Random(6);
    for path in files(cache.path()) {
        let whole = std::fs::read(&path).unwrap();
        for nth in 0..24 {
            let mut bytes = whole.clone();
            let at = if nth < 12 { nth * 8 } else { random.below(bytes.len() as u64) as usize };
            if random.below(2) == 0 {
                bytes[at] ^= 0x10;
            } else {
                bytes.truncate(at);
            }
            std::fs::write(&path, &bytes).unwrap();
            let staged = stage(cache.path(), &order);
            wait_for(&staged);
            let found = fetch(&staged, &order, 0..SAMPLES);
            assert!(found < SAMPLES, "no check covers byte {at} of {}", path.display());
        }
        std::fs::write(&path, &whole).unwrap();
    }
}

#[test]
fn limit_selects_files_or_log() {
    let [data, cache] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let pieces = Pieces::new(data.path());
    let order: Arc<dyn SampleOrder> = pieces.clone();
    let all = 150_000 + 70_001;
    for (limit_bytes, files_fit) in [(all, true), (all - 1, false)] {
        let options = CacheOptions { limit_bytes, salt: 3 };
        let cache = open(&posix(cache.path()), &order, options).unwrap();
        assert_eq!(matches!(cache, NodeCache::Files(_)), files_fit);
        fetch(cache.sample_cache().as_ref(), &pieces, 0..SAMPLES);
        cache.checkpointed(10);
    }
}
