//! Files whose pages are in the page cache, in part, or not at all.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage::probe::cached_share;
use storage::{
    BufferPool, Completion, Error, Key, Object, RangeRead, ReadRequest, Reader, ReaderOptions,
    drop_cached, open_url, write_all,
};

const LEN: usize = 1 << 20;
const PAGE: usize = 4096;

/// Offsets and lengths: within a page, over several, and the end of the file.
const READS: [(u64, usize); 6] =
    [(0, 1), (5000, 300), (4090, 12_000), (8192, 4096), (300_001, 99_999), (LEN as u64 - 7, 7)];

const SKIPPED: &str = "SKIPPED: this file system is in memory, or the kernel is before Linux 6.5";

/// A file in a folder of its own, as a store reads it.
struct Stored {
    folder: tempfile::TempDir,
    object: Arc<dyn Object>,
    bytes: Vec<u8>,
    reader: Box<dyn Reader>,
    pool: Arc<BufferPool>,
}

impl Stored {
    /// With no page of the file in the page cache. `None` if that is not possible here.
    fn new(settings: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let store = open_url(&format!("file:{}?{settings}", folder.path().display())).unwrap();
        let bytes: Vec<u8> = (0..LEN as u32).map(|i| (i * 31 % 251) as u8).collect();
        let key = Key::new("a").unwrap();
        write_all(&*store, &key, &bytes).unwrap();
        let object = store.open(&key).unwrap();
        object.advise_random();
        let pool = BufferPool::new(4 << 20);
        let mut options = ReaderOptions::new(&pool);
        options.retry_pauses = [Duration::from_millis(1); 3];
        let reader = store.reader(&options).unwrap();
        let mut stored = Stored { folder, object, bytes, reader, pool };
        // The first read opens the file, on another thread.
        assert_eq!(stored.read(0, 1).bytes(), &stored.bytes[..1]);
        drop_cached(&*stored.object, 0, LEN);
        (stored.share() == Some(0.0)).then_some(stored)
    }

    fn share(&self) -> Option<f64> {
        cached_share(&*self.object)
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("a")
    }

    /// Reads pages through the cache, without read-ahead.
    fn warm(&self, pages: std::ops::Range<usize>) {
        for page in pages {
            let mut buf = [0; PAGE];
            let read = RangeRead { offset: (page * PAGE) as u64, buf: &mut buf };
            self.object.read_many(&mut [read]).unwrap();
        }
    }

    fn read(&mut self, offset: u64, len: usize) -> Completion {
        let (object, buf) = (Arc::clone(&self.object), self.pool.take(len).unwrap());
        self.reader.submit(ReadRequest { object, offset, len, buf, tag: offset, deadline: None });
        let (mut completions, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while completions.is_empty() && Instant::now() < until {
            self.reader.wait(until, &mut completions).unwrap();
        }
        completions.pop().expect("a read completes within a minute")
    }

    /// Reads, compares, and returns how many bytes were copied from the page cache.
    fn check(&mut self, offset: u64, len: usize) -> usize {
        let before = self.reader.counters();
        let completion = self.read(offset, len);
        completion.outcome.as_ref().unwrap();
        assert!(
            completion.bytes() == &self.bytes[offset as usize..][..len],
            "{len} bytes at {offset}"
        );
        let after = self.reader.counters();
        assert!(after.moved_bytes - before.moved_bytes >= len as u64, "{after:?}");
        (after.page_cache_bytes - before.page_cache_bytes) as usize
    }
}

fn writable(path: &Path) -> File {
    File::options().write(true).open(path).unwrap()
}

#[test]
fn cold_reads_leave_no_page_in_the_cache() {
    for settings in ["engine=auto", "engine=pread"] {
        let Some(mut stored) = Stored::new(settings) else { return eprintln!("{SKIPPED}") };
        for (offset, len) in READS {
            assert_eq!(stored.check(offset, len), 0, "{settings}: {len} bytes at {offset}");
        }
        assert_eq!(stored.share(), Some(0.0), "{settings}");
    }
}

#[test]
fn warm_reads_are_copied_from_the_cache() {
    for settings in ["engine=auto", "engine=pread", "direct=off", "direct=on"] {
        let Some(mut stored) = Stored::new(settings) else { return eprintln!("{SKIPPED}") };
        stored.warm(0..LEN / PAGE);
        assert_eq!(stored.share(), Some(1.0));
        for (offset, len) in READS {
            let expected = if settings == "direct=on" { 0 } else { len };
            assert_eq!(stored.check(offset, len), expected, "{settings}: {len} bytes at {offset}");
        }
    }
}

/// Each read comes from the cache completely or not at all, and missing pages are not added.
#[test]
fn partly_cached_files_keep_their_cached_share() {
    let Some(mut stored) = Stored::new("engine=auto") else { return eprintln!("{SKIPPED}") };
    stored.warm(10..20);
    let share = stored.share();
    let byte = |page: usize| (page * PAGE) as u64;
    for (offset, len, is_warm) in [
        (byte(10), 10 * PAGE, true),
        (byte(10) + 1, 10 * PAGE - 1, true),
        (byte(10) - 1, 2, false),
        (byte(19) + 100, PAGE - 100, true),
        (byte(19) + 100, PAGE, false),
        (byte(5), 20 * PAGE, false),
        (byte(30), PAGE, false),
    ] {
        let expected = if is_warm { len } else { 0 };
        assert_eq!(stored.check(offset, len), expected, "{len} bytes at {offset}");
        assert_eq!(stored.share(), share, "{len} bytes at {offset}");
    }
}

#[test]
fn a_cached_file_that_shrank_reports_both_lengths() {
    let Some(mut stored) = Stored::new("engine=auto") else { return eprintln!("{SKIPPED}") };
    stored.warm(0..LEN / PAGE);
    writable(&stored.path()).set_len(70_001).unwrap();
    for offset in [70_000, 80_000, 500_000] {
        let completion = stored.read(offset, 1000);
        let reports_both_lengths = matches!(
            completion.outcome,
            Err(Error::Changed { len_then: 1_048_576, len_now: Some(70_001), .. })
        );
        assert!(reports_both_lengths, "{completion:?}");
    }
    assert_eq!(stored.check(69_000, 1001), 1001);
}

/// Cached reads return bytes that were written to the file and are not yet on disk.
#[test]
fn a_cached_file_that_changed_returns_its_new_bytes() {
    let Some(mut stored) = Stored::new("engine=auto") else { return eprintln!("{SKIPPED}") };
    stored.warm(0..LEN / PAGE);
    writable(&stored.path()).write_all_at(&[7; 5000], 10_000).unwrap();
    stored.bytes[10_000..15_000].fill(7);
    assert_eq!(stored.check(9000, 9000), 9000);
}
