//! The conformance suite of [`Reader`]s: [`run`] creates a store for each of a list of small
//! checks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::rng::Rng;
use crate::testing::conformance::ensure;
use crate::testing::conformance::{Outcome, bytes_of, key};
use crate::{
    Buffer, BufferPool, Completion, Error, Object, ReadRequest, Reader, ReaderOptions, Storage,
    write_all,
};

type Check = fn(&dyn Storage) -> Outcome;

const CHECKS: [(&str, Check); 5] = [
    ("reads at any offset and size equal the bytes in memory", equals_the_bytes_in_memory),
    ("an empty read completes; a read past the end fails with byte counts", edges),
    ("a wait ends at its deadline, or at once if nothing is in flight", wait_ends),
    ("objects that the caller drops after the submission are read", several_objects),
    ("a reader dropped with reads in flight returns its buffers", dropped),
];

/// Runs every check on a store of its own. `make` returns an empty store.
///
/// # Panics
/// With the name of the first check that fails, and the reason.
pub fn run(make: &dyn Fn() -> Arc<dyn Storage>) {
    for (name, check) in CHECKS {
        if let Err(e) = check(&*make()) {
            panic!("reader violates '{name}': {e}");
        }
    }
}

/// Long enough for any machine; only a failing check waits that long.
const TIMEOUT: Duration = Duration::from_secs(60);

fn deadline() -> Instant {
    Instant::now() + TIMEOUT
}

/// Submits one read and waits for it.
fn read_one(reader: &mut dyn Reader, request: ReadRequest) -> Result<Completion, Error> {
    let (mut completions, until) = (Vec::new(), deadline());
    reader.submit(request);
    while completions.is_empty() && Instant::now() < until {
        reader.wait(until, &mut completions)?;
    }
    Ok(completions.pop().expect("a read completes or fails within a minute"))
}

fn request(
    pool: &Arc<BufferPool>,
    object: &Arc<dyn Object>,
    offset: u64,
    len: usize,
) -> ReadRequest {
    let buf = pool.take(len).expect("the pool has room for the window of a test");
    ReadRequest { object: Arc::clone(object), offset, len, buf, tag: offset, deadline: None }
}

fn equals_the_bytes_in_memory(store: &dyn Storage) -> Outcome {
    let bytes = bytes_of(3_000_001, 21);
    write_all(store, &key("a")?, &bytes)?;
    let object = store.open(&key("a")?)?;
    let pool = BufferPool::new(32 << 20);
    for depth in [1, 3, 16] {
        let mut options = ReaderOptions::new(&pool);
        options.depth = Some(depth);
        let mut reader = store.reader(&options)?;
        let mut rng = Rng::new(depth as u64);
        let mut waiting = HashMap::new();
        let (mut completions, mut tag) = (Vec::new(), 0);
        while tag < 400 || !waiting.is_empty() {
            while tag < 400 && reader.in_flight() < reader.depth_max() {
                let len = 1 + rng.below(if tag % 8 == 0 { 1 << 20 } else { 9000 }) as usize;
                let offset = rng.below((bytes.len() - len + 1) as u64);
                // Also the last bytes of the file, where blocks reach past its end.
                let offset = if tag % 5 == 0 { (bytes.len() - len) as u64 } else { offset };
                reader.submit(ReadRequest { tag, ..request(&pool, &object, offset, len) });
                waiting.insert(tag, offset as usize..offset as usize + len);
                tag += 1;
            }
            reader.wait(deadline(), &mut completions)?;
            for one in completions.drain(..) {
                let range = waiting.remove(&one.tag).ok_or("expected a submitted tag")?;
                one.outcome.as_ref().map_err(ToString::to_string)?;
                ensure!(
                    one.bytes() == &bytes[range.clone()],
                    "expected the bytes {range:?}, found others"
                );
                ensure!(
                    one.moved_bytes >= range.len() as u64,
                    "expected at least {} moved bytes, found {}",
                    range.len(),
                    one.moved_bytes
                );
            }
        }
        let counters = reader.counters();
        ensure!(
            counters.reads == 400 && counters.failed == 0,
            "expected 400 reads without failure, found {counters:?}"
        );
        drop(reader);
        ensure!(
            pool.taken_bytes() == 0,
            "expected an empty pool, found {} bytes in use",
            pool.taken_bytes()
        );
    }
    Ok(())
}

fn edges(store: &dyn Storage) -> Outcome {
    write_all(store, &key("a")?, &bytes_of(5000, 22))?;
    write_all(store, &key("empty")?, &[])?;
    let pool = BufferPool::new(1 << 20);
    let mut reader = store.reader(&ReaderOptions::new(&pool))?;
    for name in ["a", "empty"] {
        let object = store.open(&key(name)?)?;
        let completion = read_one(&mut *reader, request(&pool, &object, object.len_bytes(), 0))?;
        ensure!(
            completion.outcome.is_ok() && completion.bytes().is_empty(),
            "expected no bytes of an empty read, found {completion:?}"
        );
        for (offset, len, available) in [(4999, 2, 1), (5000, 1, 0), (u64::MAX, 4000, 0)] {
            let available = if name == "a" { available } else { 0 };
            let completion = read_one(&mut *reader, request(&pool, &object, offset, len))?;
            let is_short = match completion.outcome {
                Err(Error::ShortRead { offset: at, found, expected, .. }) => {
                    (at, found, expected) == (offset, available, len as u64)
                }
                _ => false,
            };
            ensure!(
                is_short,
                "expected ShortRead for {len} bytes at {offset} of {name}, found {completion:?}"
            );
            ensure!(
                completion.bytes().is_empty() && !completion.buf.is_empty(),
                "expected the buffer with no bytes"
            );
        }
    }
    Ok(())
}

fn wait_ends(store: &dyn Storage) -> Outcome {
    let pool = BufferPool::new(1 << 20);
    let mut reader = store.reader(&ReaderOptions::new(&pool))?;
    let mut done = Vec::new();
    reader.wait(Instant::now() + Duration::from_secs(3600), &mut done)?;
    ensure!(done.is_empty(), "expected no completion, found {done:?}");
    write_all(store, &key("a")?, &bytes_of(9, 23))?;
    reader.submit(request(&pool, &store.open(&key("a")?)?, 1, 8));
    let past = Instant::now();
    while done.is_empty() {
        reader.wait(past, &mut done)?;
    }
    ensure!(done[0].bytes() == &bytes_of(9, 23)[1..], "expected the bytes as written");
    ensure!(reader.in_flight() == 0, "expected none in flight, found {}", reader.in_flight());
    Ok(())
}

fn several_objects(store: &dyn Storage) -> Outcome {
    let pool = BufferPool::new(8 << 20);
    let mut reader = store.reader(&ReaderOptions::new(&pool))?;
    let mut completions = Vec::new();
    let mut outstanding = 0..0;
    // More files than any reader keeps open, if it keeps few.
    for i in 0..100 {
        write_all(store, &key(&format!("f{i}"))?, &bytes_of(700 + i as usize, i))?;
    }
    for round in 0..3 {
        for i in 0..100 {
            while reader.in_flight() == reader.depth_max() {
                reader.wait(deadline(), &mut completions)?;
            }
            let object = store.open(&key(&format!("f{i}"))?)?;
            reader.submit(ReadRequest { tag: i, ..request(&pool, &object, round, 600) });
            outstanding.end += 1;
        }
        while reader.in_flight() > 0 {
            reader.wait(deadline(), &mut completions)?;
        }
        for one in completions.drain(..) {
            let bytes = bytes_of(700 + one.tag as usize, one.tag);
            let range = round as usize..round as usize + 600;
            ensure!(
                one.bytes() == &bytes[range],
                "expected the bytes of file {}, found {one:?}",
                one.tag
            );
            outstanding.start += 1;
        }
        ensure!(
            outstanding.is_empty(),
            "expected all reads to complete, {} did not",
            outstanding.end - outstanding.start
        );
    }
    Ok(())
}

fn dropped(store: &dyn Storage) -> Outcome {
    let bytes = bytes_of(1 << 20, 24);
    write_all(store, &key("a")?, &bytes)?;
    let object = store.open(&key("a")?)?;
    let pool = BufferPool::new(8 << 20);
    for in_flight in [1, 2, 4] {
        let mut options = ReaderOptions::new(&pool);
        options.depth = Some(4);
        let mut reader = store.reader(&options)?;
        for i in 0..in_flight {
            reader.submit(request(&pool, &object, i * 1000, 500_000));
        }
        if in_flight > 1 {
            reader.wait(Instant::now(), &mut Vec::new())?;
        }
        drop(reader);
        let until = deadline();
        while pool.taken_bytes() > 0 && Instant::now() < until {
            std::thread::yield_now();
        }
        ensure!(
            pool.taken_bytes() == 0,
            "expected an empty pool, found {} bytes in use",
            pool.taken_bytes()
        );
    }
    let empty = Buffer::empty();
    ensure!(empty.is_empty(), "expected an empty buffer, found {} bytes", empty.len());
    Ok(())
}
