//! Reads that fail, get stuck, or find a changed file.

use std::sync::Arc;
use std::time::{Duration, Instant};

use storage::testing::fault_store::{FaultPlan, FaultStore, ReadFaultLayer, ReadFaults};
use storage::{
    BufferPool, Completion, Error, Key, Object, ReadRequest, Reader, ReaderOptions, Storage,
    open_url, write_all,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Bytes that depend on their offset.
fn bytes_of(len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|i| (i * 0x9e37_79b9).to_le_bytes()).collect()
}

fn request(
    pool: &Arc<BufferPool>,
    object: &Arc<dyn Object>,
    offset: u64,
    len: usize,
) -> ReadRequest {
    let buf = pool.take(len).unwrap();
    ReadRequest { object: Arc::clone(object), offset, len, buf, tag: offset, deadline: None }
}

/// Waits for `count` completions, or for a minute.
fn reap(reader: &mut dyn Reader, count: usize) -> Vec<Completion> {
    let (mut completions, until) = (Vec::new(), Instant::now() + TIMEOUT);
    while completions.len() < count && Instant::now() < until {
        reader.wait(until, &mut completions).unwrap();
    }
    completions
}

fn options(pool: &Arc<BufferPool>) -> ReaderOptions {
    let mut options = ReaderOptions::new(pool);
    options.retry_pauses = [Duration::from_millis(1); 3];
    options
}

fn faulty(faults: ReadFaults, len: usize) -> (ReadFaultLayer, Arc<dyn Object>) {
    let inner = FaultStore::new(5, FaultPlan { short_per_mille: 100, ..FaultPlan::default() });
    let key = Key::new("a").unwrap();
    write_all(&inner, &key, &bytes_of(len)).unwrap();
    let store = ReadFaultLayer::new(Arc::new(inner), 6, faults);
    let object = store.open(&key).unwrap();
    (store, object)
}

#[test]
fn transient_errors_are_retried() {
    let late = Duration::from_millis(20);
    let faults = ReadFaults {
        // Four errors in a row would fail a read, and which read fails depends on the threads.
        io_per_mille: 10,
        stale_per_mille: 10,
        late_per_mille: 20,
        late,
        ..ReadFaults::default()
    };
    let (store, object) = faulty(faults, 1 << 20);
    let pool = BufferPool::new(1 << 20);
    let mut reader = store.reader(&options(&pool)).unwrap();
    let bytes = bytes_of(1 << 20);
    for round in 0..100 {
        (0..16).for_each(|i| reader.submit(request(&pool, &object, (round * 16 + i) * 600, 700)));
        for completion in reap(&mut *reader, 16) {
            completion.outcome.as_ref().unwrap();
            assert!(
                completion.bytes() == &bytes[completion.tag as usize..][..700],
                "at {}",
                completion.tag
            );
        }
    }
    let counters = reader.counters();
    assert_eq!((counters.reads, counters.failed), (1600, 0));
    assert!(counters.retries > 10 && store.read_count() == 1600 + counters.retries);
}

#[test]
fn a_read_fails_after_three_retries() {
    let faults = ReadFaults { io_per_mille: 1000, ..ReadFaults::default() };
    let (store, object) = faulty(faults, 4096);
    let pool = BufferPool::new(1 << 20);
    let mut reader = store.reader(&options(&pool)).unwrap();
    reader.submit(request(&pool, &object, 8, 16));
    let completion = reap(&mut *reader, 1).pop().unwrap();
    assert!(
        matches!(&completion.outcome, Err(Error::Io { source, .. })
        if source.raw_os_error() == Some(5)),
        "{completion:?}"
    );
    assert!(!completion.buf.is_empty() && completion.bytes().is_empty());
    assert_eq!((store.read_count(), reader.counters().retries), (4, 3));
}

#[test]
fn a_stuck_read_times_out_and_later_returns_its_buffer() {
    let (store, object) = faulty(ReadFaults::default(), 1 << 16);
    let pool = BufferPool::new(1 << 20);
    let mut options = options(&pool);
    // Long enough that the other reads complete before it on a busy machine.
    options.timeout = Duration::from_secs(3);
    options.warn_after = [20, 40, 60].map(Duration::from_millis);
    let mut reader = store.reader(&options).unwrap();
    store.hang(1000..1001);
    for offset in [0, 500, 990, 2000] {
        reader.submit(request(&pool, &object, offset, 100));
    }
    let completions = reap(&mut *reader, 4);
    assert_eq!(completions.iter().filter(|one| one.outcome.is_ok()).count(), 3);
    let stuck = completions.iter().find(|one| one.tag == 990).unwrap();
    let Err(error @ Error::Stuck { offset: 990, .. }) = &stuck.outcome else { panic!("{stuck:?}") };
    assert!(
        error.to_string().contains("cannot read sim:/a at byte 990: no completion for"),
        "{error}"
    );
    assert!(stuck.buf.is_empty(), "the abandoned request keeps its buffer");
    assert_eq!((reader.in_flight(), reader.counters().stuck), (0, 1));
    assert!(pool.taken_bytes() > 0);

    // Other reads continue, and the buffer of the late read is returned without a completion.
    reader.submit(request(&pool, &object, 3000, 100));
    assert!(reap(&mut *reader, 1)[0].outcome.is_ok());
    drop(completions);
    store.release();
    let until = Instant::now() + TIMEOUT;
    while pool.taken_bytes() > 0 && Instant::now() < until {
        reader.submit(request(&pool, &object, 0, 1));
        assert_eq!(reap(&mut *reader, 1)[0].tag, 0);
    }
    assert_eq!(pool.taken_bytes(), 0);
}

#[test]
fn too_many_stuck_reads_fail_the_reader() {
    let (store, object) = faulty(ReadFaults::default(), 1 << 16);
    let pool = BufferPool::new(1 << 20);
    let mut options = options(&pool);
    (options.timeout, options.orphans_max) = (Duration::from_millis(20), 2);
    let mut reader = store.reader(&options).unwrap();
    store.hang(0..1 << 16);
    (0..3).for_each(|i| reader.submit(request(&pool, &object, i * 100, 10)));
    let (mut completions, until) = (Vec::new(), Instant::now() + TIMEOUT);
    let outcome = loop {
        let outcome = reader.wait(until, &mut completions);
        if outcome.is_err() || Instant::now() > until {
            break outcome;
        }
    };
    assert!(matches!(outcome, Err(Error::Stuck { .. })), "{outcome:?}");
    assert_eq!(completions.len(), 2);
    drop(reader); // does not wait for the stuck reads
    store.release();
}

/// With each read method: if a file is truncated after it was opened, the error has both lengths.
#[test]
fn a_file_that_shrank_reports_both_lengths() {
    for url_options in ["engine=auto", "engine=pread&direct=on", "engine=pread&direct=off"] {
        let folder = tempfile::tempdir().unwrap();
        let store = open_url(&format!("file:{}?{url_options}", folder.path().display())).unwrap();
        let key = Key::new("a").unwrap();
        write_all(&*store, &key, &bytes_of(1 << 20)).unwrap();
        let object = store.open(&key).unwrap();
        let pool = BufferPool::new(4 << 20);
        let mut reader = store.reader(&options(&pool)).unwrap();
        reader.submit(request(&pool, &object, 8, 16));
        assert!(reap(&mut *reader, 1)[0].outcome.is_ok());

        let file = std::fs::File::options().write(true).open(folder.path().join("a")).unwrap();
        file.set_len(70_001).unwrap();
        for offset in [70_000, 80_000, 500_000] {
            reader.submit(request(&pool, &object, offset, 1000));
            let completion = reap(&mut *reader, 1).pop().unwrap();
            let reports_both_lengths = matches!(completion.outcome, Err(Error::Changed {
                offset: o, len_then: 1_048_576, len_now: Some(70_001), .. }) if o == offset);
            assert!(reports_both_lengths, "{url_options}: {completion:?}");
        }
        reader.submit(request(&pool, &object, 69_000, 1001));
        assert!(reap(&mut *reader, 1)[0].outcome.is_ok(), "{url_options}");
    }
}
