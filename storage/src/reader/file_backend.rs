//! Reads of files: from the page cache where it has the bytes, and otherwise by the best method
//! that their mount allows. Copies from the cache are made at once, by the calling thread. Calls
//! that may block, such as opening a file and querying its file system, run on the worker threads
//! with the first read of the file: the thread that owns the reader waits in `wait` and nowhere
//! else.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use std::{io, thread};

use crate::api::settings::IoSettings;
use crate::fs::mount::ReadMethod;
use crate::io::transfer::Transfer;
use crate::io::uring_batch::{self, BatchError, SubmitMode};
use crate::reader::in_flight::{BackendCompletion, BackendRead, ReadBackend};
use crate::reader::open_file::{CacheQuery, OpenFile, is_cached, is_refusal};
use crate::reader::uring_backend::{FILES_MAX, RingOutcome, UringBackend};
use crate::reader::worker_pool::{PoolTask, WorkerPool};
use crate::sys::aligned_buffer::{ALIGN_BYTES, AlignedBuffer};
use crate::{BufferPool, Object};

/// Timeout of the first read through a ring on a mount, after which the mount is read by threads.
/// With some versions of some clients that read never returns.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval at which each is polled while a ring and threads both have reads.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The read backend of a store of files.
#[derive(Debug)]
pub(crate) struct FileBackend {
    settings: IoSettings,
    slots_max: usize,
    pool: Arc<BufferPool>,
    ring: Option<UringBackend>,
    /// Whether a ring cannot be created.
    ring_unavailable: bool,
    threads: WorkerPool<FileRequest>,
    in_threads: usize,
    files: OpenFiles,
    ring_outcomes: Vec<RingOutcome>,
    done: Vec<FileCompletion>,
    query: CacheQuery,
    /// Reads that were copied from the page cache, until the next `wait`.
    cached: Vec<BackendCompletion>,
    page_cache_bytes: u64,
}

impl FileBackend {
    pub(crate) fn new(settings: IoSettings, slots_max: usize, pool: &Arc<BufferPool>) -> Self {
        FileBackend {
            settings,
            slots_max,
            pool: Arc::clone(pool),
            ring: None,
            ring_unavailable: false,
            threads: WorkerPool::new(slots_max),
            in_threads: 0,
            files: OpenFiles::default(),
            ring_outcomes: Vec::with_capacity(slots_max),
            done: Vec::with_capacity(slots_max),
            query: is_cached,
            cached: Vec::with_capacity(slots_max),
            page_cache_bytes: 0,
        }
    }

    fn push_to_threads(&mut self, request: BackendRead, work: FileTask) {
        self.in_threads += 1;
        self.threads.push(FileRequest { request, work, settings: self.settings });
    }

    /// Starts a read of an open file.
    fn send(&mut self, request: BackendRead, number: u32, file: Arc<OpenFile>) {
        let request = match file.read_cached(request, self.query) {
            Ok(done) => {
                self.page_cache_bytes += done.moved_bytes;
                return self.cached.push(done);
            }
            Err(request) => request,
        };
        let method = file.method(self.settings);
        if method.is_ring() && self.has_ring() {
            let ring = self.ring.as_mut().expect("checked above");
            return ring.start(request, file, number, method);
        }
        self.push_to_threads(request, FileTask::Read(file));
    }

    /// Creates the ring for the first read that uses it.
    fn has_ring(&mut self) -> bool {
        if self.ring.is_none() && !self.ring_unavailable {
            match UringBackend::new(self.slots_max, &self.pool) {
                Ok(ring) => self.ring = Some(ring),
                Err(why) => {
                    static LOGGED: AtomicBool = AtomicBool::new(false);
                    self.ring_unavailable = true;
                    if !LOGGED.swap(true, Ordering::Relaxed) {
                        log::warn!("io_uring is not available; reads use threads: {why}");
                    }
                }
            }
        }
        self.ring.is_some()
    }

    /// Sorts the outcomes of the ring: completions, and reads for the threads.
    fn collect_ring(&mut self, done: &mut Vec<BackendCompletion>) {
        let mut ring_outcomes = std::mem::take(&mut self.ring_outcomes);
        for one in ring_outcomes.drain(..) {
            match one {
                RingOutcome::Done(one) => done.push(one),
                RingOutcome::Refused(request, file) => {
                    self.push_to_threads(request, FileTask::Read(file));
                }
                // A thread checks whether the file was truncated or the read failed.
                RingOutcome::Failed(request, file, cause) => {
                    self.push_to_threads(request, FileTask::Explain(file, cause));
                }
            }
        }
        self.ring_outcomes = ring_outcomes;
    }

    /// Takes the completions of the threads, and starts the reads that waited for a file to open.
    fn collect_threads(&mut self, done: &mut Vec<BackendCompletion>) {
        let mut completions = std::mem::take(&mut self.done);
        for FileCompletion { done: one, object, opened } in completions.drain(..) {
            self.in_threads -= 1;
            done.push(one);
            let Some((object, opened)) = object.zip(opened) else { continue };
            match opened {
                Opened::File(file) => {
                    for (request, number, file) in self.files.opened(&object, &file) {
                        self.send(request, number, file);
                    }
                }
                Opened::Failed => {
                    for request in self.files.failed(&object) {
                        // Each read opens the file itself, and gets its own error.
                        self.push_to_threads(request, FileTask::Open);
                    }
                }
            }
        }
        self.done = completions;
    }
}

impl ReadBackend for FileBackend {
    fn submit(&mut self, request: BackendRead) {
        if request.object.file().is_none() {
            return self.push_to_threads(request, FileTask::Object);
        }
        if request.attempt > 0 {
            let known = self.files.get(&request.object).map(Arc::clone);
            return self.push_to_threads(request, FileTask::Reopen(known));
        }
        match self.files.find(request) {
            FileLookup::Open(request, number, file) => self.send(request, number, file),
            FileLookup::New(request) => self.push_to_threads(request, FileTask::Open),
            FileLookup::Waits => {}
        }
    }

    fn wait(&mut self, until: Instant, done: &mut Vec<BackendCompletion>) {
        let before = done.len();
        done.append(&mut self.cached);
        // If completions are ready, the ring and the threads are only polled.
        let until = if done.len() > before { Instant::now() } else { until };
        loop {
            let in_ring = self.ring.as_ref().map_or(0, UringBackend::in_flight);
            let now = Instant::now();
            if in_ring == 0 && self.in_threads == 0 {
                if done.len() > before {
                    return;
                }
                // Every request in flight waits for a retry.
                return thread::sleep(until.saturating_duration_since(now));
            }
            let poll_until = if in_ring > 0 && self.in_threads > 0 {
                until.min(now + POLL_INTERVAL)
            } else {
                until
            };
            if in_ring > 0
                && let Some(ring) = &mut self.ring
            {
                let wake = if self.in_threads > 0 { now } else { until };
                ring.wait(wake, &mut self.ring_outcomes);
            }
            if self.in_threads > 0 {
                let wake = if self.ring_outcomes.is_empty() { poll_until } else { now };
                self.threads.wait(wake, &mut self.done);
            }
            self.collect_ring(done);
            self.collect_threads(done);
            if done.len() > before || now >= until {
                return;
            }
        }
    }

    fn describe(&self, object: &Arc<dyn Object>, offset: u64) -> (String, String) {
        match self.files.get(object) {
            Some(file) => {
                let kind = &file.mount.file_system;
                (format!("{kind}, {}", file.method(self.settings)), file.layout.placement(offset))
            }
            None => ("open in progress".to_owned(), String::new()),
        }
    }

    fn page_cache_bytes(&self) -> u64 {
        self.page_cache_bytes
    }
}

/// The files that a reader has open, by their objects.
#[derive(Debug, Default)]
struct OpenFiles {
    numbers: HashMap<usize, u32>,
    entries: Vec<FileSlot>,
    clock: u64,
}

#[derive(Debug)]
struct FileSlot {
    /// Kept alive, so that no other object has its address.
    object: Arc<dyn Object>,
    file: Option<Arc<OpenFile>>,
    /// A thread is opening it.
    opening: bool,
    /// Reads that wait until it is open.
    waiting: Vec<BackendRead>,
    used: u64,
}

enum FileLookup {
    Open(BackendRead, u32, Arc<OpenFile>),
    /// The first read of a file, which opens it.
    New(BackendRead),
    /// The read is queued until the file is open.
    Waits,
}

fn address(object: &Arc<dyn Object>) -> usize {
    Arc::as_ptr(object).cast::<()>().addr()
}

impl OpenFiles {
    fn find(&mut self, request: BackendRead) -> FileLookup {
        self.clock += 1;
        if let Some(&number) = self.numbers.get(&address(&request.object)) {
            let entry = &mut self.entries[number as usize];
            entry.used = self.clock;
            return match &entry.file {
                Some(file) => FileLookup::Open(request, number, Arc::clone(file)),
                None if !std::mem::replace(&mut entry.opening, true) => FileLookup::New(request),
                None => {
                    entry.waiting.push(request);
                    FileLookup::Waits
                }
            };
        }
        let (object, used) = (Arc::clone(&request.object), self.clock);
        let entry = FileSlot { object, file: None, opening: true, waiting: Vec::new(), used };
        if let Some(number) = self.free_number() {
            self.numbers.insert(address(&entry.object), number);
            match self.entries.get_mut(number as usize) {
                Some(old) => *old = entry,
                None => self.entries.push(entry),
            }
        }
        FileLookup::New(request)
    }

    /// A free number; if there is none, closes the least recently used file.
    fn free_number(&mut self) -> Option<u32> {
        if self.entries.len() < FILES_MAX {
            return Some(self.entries.len() as u32); // fits: below FILES_MAX
        }
        let idle = |entry: &&FileSlot| {
            !entry.opening
                && entry.waiting.is_empty()
                && entry.file.as_ref().is_none_or(|file| Arc::strong_count(file) == 1)
        };
        let oldest = self.entries.iter().filter(idle).min_by_key(|entry| entry.used)?;
        self.numbers.remove(&address(&oldest.object))
    }

    fn opened(
        &mut self,
        object: &Arc<dyn Object>,
        file: &Arc<OpenFile>,
    ) -> Vec<(BackendRead, u32, Arc<OpenFile>)> {
        let Some(&number) = self.numbers.get(&address(object)) else { return Vec::new() };
        let entry = &mut self.entries[number as usize];
        (entry.file, entry.opening) = (Some(Arc::clone(file)), false);
        let waiting = std::mem::take(&mut entry.waiting);
        waiting.into_iter().map(|request| (request, number, Arc::clone(file))).collect()
    }

    /// The file could not be opened; returns the reads that waited for it.
    fn failed(&mut self, object: &Arc<dyn Object>) -> Vec<BackendRead> {
        let Some(&number) = self.numbers.get(&address(object)) else { return Vec::new() };
        let entry = &mut self.entries[number as usize];
        entry.opening = false;
        std::mem::take(&mut entry.waiting)
    }

    fn get(&self, object: &Arc<dyn Object>) -> Option<&Arc<OpenFile>> {
        let number = self.numbers.get(&address(object))?;
        self.entries[*number as usize].file.as_ref()
    }
}

/// A read for a thread, and how to do it.
#[derive(Debug)]
struct FileRequest {
    request: BackendRead,
    work: FileTask,
    settings: IoSettings,
}

#[derive(Debug)]
enum FileTask {
    /// Read by [`Object::read_many`].
    Object,
    /// Open the file, and probe the read methods of its mount.
    Open,
    /// Reopen it after an error, if it is still the same file.
    Reopen(Option<Arc<OpenFile>>),
    Read(Arc<OpenFile>),
    /// Determine the error behind a failure in the ring.
    Explain(Arc<OpenFile>, crate::io::transfer::TransferErrorKind),
}

#[derive(Debug)]
struct FileCompletion {
    done: BackendCompletion,
    /// The object that was opened.
    object: Option<Arc<dyn Object>>,
    opened: Option<Opened>,
}

#[derive(Debug)]
enum Opened {
    File(Arc<OpenFile>),
    Failed,
}

impl PoolTask for FileRequest {
    type Out = FileCompletion;

    fn run(self) -> FileCompletion {
        let FileRequest { request, work, settings } = self;
        let object = Arc::clone(&request.object);
        let opened = match work {
            FileTask::Object => return FileCompletion::of(request.read()),
            FileTask::Read(file) => return FileCompletion::of(file.read(request, settings)),
            FileTask::Explain(file, cause) => {
                let error = file.error(&request, cause);
                return FileCompletion::of(request.failed(error));
            }
            FileTask::Open => match object.file() {
                Some(file) => OpenFile::open(&object, file, settings),
                None => return FileCompletion::of(request.read()),
            },
            FileTask::Reopen(known) => OpenFile::reopen(&object, known.as_deref(), settings),
        };
        let (done, opened) = match opened {
            Ok(file) => {
                let done = file.read(request, settings);
                probe(&file, settings);
                (done, Opened::File(Arc::new(file)))
            }
            Err(error) => (request.failed(error), Opened::Failed),
        };
        FileCompletion { done, object: Some(object), opened: Some(opened) }
    }

    fn fail(self, e: io::Error) -> FileCompletion {
        let object = Some(Arc::clone(&self.request.object));
        FileCompletion { done: self.request.fail(e), object, opened: Some(Opened::Failed) }
    }
}

impl FileCompletion {
    fn of(done: BackendCompletion) -> Self {
        FileCompletion { done, object: None, opened: None }
    }
}

/// Once per mount: reads a block of the file through a ring, on a thread that may get stuck, and
/// drops the read methods that do not work. Logs how the mount is read.
fn probe(file: &OpenFile, settings: IoSettings) {
    file.mount.probed.get_or_init(|| {
        let mut method = file.method(settings);
        while method.is_ring()
            && let Err(why) = try_ring(file, method)
        {
            file.mount.refuse(method, &why);
            method = file.method(settings);
        }
        let (kind, description) = (&file.mount.file_system, &file.mount.description);
        log::info!(
            "{kind} {description}: reads use {method}, aligned to {} bytes",
            file.align(method)
        );
    });
}

fn try_ring(file: &OpenFile, method: ReadMethod) -> Result<(), String> {
    let start = if file.mount.inline { SubmitMode::Inline } else { SubmitMode::Punted };
    // Running out of descriptors is no property of the mount.
    let Ok(own) = file.file(method).try_clone() else { return Ok(()) };
    let (sender, receiver) = mpsc::sync_channel(1);
    let read = move || {
        let mut block = AlignedBuffer::take();
        // The file may be shorter than a block; this only probes whether it can be read.
        let piece = Transfer::read(0, &mut block[..ALIGN_BYTES]).direct(ALIGN_BYTES, 0);
        let outcome = match uring_batch::transfer(&own, &mut [piece], start) {
            Err(BatchError::Refused(why)) => Err(why),
            Err(BatchError::Failed(failure)) => match &failure.cause {
                crate::io::transfer::TransferErrorKind::Io(e) if is_refusal(e, method) => {
                    Err(e.to_string())
                }
                _ => Ok(()), // an I/O error is no refusal
            },
            Err(BatchError::Busy) | Ok(()) => Ok(()),
        };
        let _ = sender.send(outcome);
    };
    let builder = thread::Builder::new().name("read".to_owned());
    builder.spawn(read).map_err(|e| e.to_string())?;
    receiver.recv_timeout(PROBE_TIMEOUT).unwrap_or_else(|_| {
        Err(format!("no completion of a test read within {} s", PROBE_TIMEOUT.as_secs()))
    })
}

/// The queue depth limit for a kind of file system. The loader finds the best depth up to it;
/// beyond it nothing is gained even if many reads are late.
pub(crate) fn default_depth(file_system: &str) -> usize {
    match file_system {
        // Eight requests for each of 32 servers.
        "lustre" => 256,
        "tmpfs" | "ramfs" => 4,
        "overlay" | "fuse.ceph-fuse" | "fuse.ceph" => 32,
        // A FUSE daemon often serves one request at a time, and is slower with more.
        kind if kind.starts_with("fuse") => 4,
        // An SSD, or a network with latency: 64 random reads of 8 KiB at once gave 59.7 thousand
        // reads a second, 16 gave 48.2 and 128 gave 51.6. But if one in fifty of 4,600 reads a
        // second is a second late, 92 are late at any time.
        _ => 128,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::fs::mount::Mount;
    use crate::sys::syscalls;
    use crate::{Key, ReadRequest, ReaderOptions, open_url, write_all};

    /// How often a test was queried instead of the kernel.
    static QUERIES: AtomicU32 = AtomicU32::new(0);

    /// As a kernel before Linux 6.5, or for a file of another user.
    fn refuse(_: &File, _: u64, _: usize) -> io::Result<bool> {
        QUERIES.fetch_add(1, Ordering::Relaxed);
        Err(io::Error::from_raw_os_error(libc::ENOSYS))
    }

    /// The pages are evicted after the query.
    fn evict(file: &File, offset: u64, len: usize) -> io::Result<bool> {
        syscalls::advise_done(file, offset, len);
        Ok(true)
    }

    #[test]
    fn reads_bypass_the_cache_if_the_query_fails_or_pages_are_evicted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [9; 10_000]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let store = open_url(&folder.path().display().to_string()).unwrap();
        let object = store.open(&Key::new("a").unwrap()).unwrap();
        for query in [refuse, evict] {
            let pool = BufferPool::new(1 << 20);
            let mut backend = FileBackend::new(IoSettings::default(), 4, &pool);
            backend.query = query;
            for slot in 0..4 {
                let (object, buf) = (Arc::clone(&object), pool.take(3000).unwrap());
                let (offset, len) = (u64::from(slot) * 1000, 3000);
                let request =
                    BackendRead { slot, object, offset, len, buf, deadline: None, attempt: 0 };
                backend.submit(request);
                let (mut done, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
                backend.wait(until, &mut done);
                let [BackendCompletion { buf, data, outcome, .. }] = &done[..] else {
                    panic!("one read, found {done:?}")
                };
                outcome.as_ref().unwrap();
                assert_eq!(buf[data.clone()], [9; 3000]);
            }
            // A file system in memory evicts no pages.
            let is_refused = QUERIES.load(Ordering::Relaxed) == 1;
            assert!(is_refused, "one query for a file");
            if backend.page_cache_bytes() > 0 {
                return eprintln!("SKIPPED: pages are not evicted on this file system");
            }
        }
    }

    /// A tmpfs does not support `RWF_DONTCACHE`. Many such reads in flight at once are refused one
    /// by one, and that once disabled the ring for the mount.
    #[test]
    fn a_refused_flag_does_not_disable_the_ring() {
        let Ok(folder) = tempfile::tempdir_in("/dev/shm") else {
            return eprintln!("SKIPPED: no memory file system at /dev/shm");
        };
        if let Err(why) = uring_batch::probe() {
            return eprintln!("SKIPPED: io_uring does not work here: {why}");
        }
        let url = format!("file:{}?engine=ring&direct=off", folder.path().display());
        let (store, key) = (open_url(&url).unwrap(), Key::new("a").unwrap());
        write_all(&*store, &key, &[7; 1 << 16]).unwrap();
        let object = store.open(&key).unwrap();
        let pool = BufferPool::new(1 << 20);
        let mut options = ReaderOptions::new(&pool);
        options.depth = Some(16);
        let mut reader = store.reader(&options).unwrap();
        // The first read is done by the thread that opens the file.
        for count in [1, 16] {
            for tag in 0..count {
                let (object, buf) = (Arc::clone(&object), pool.take(100).unwrap());
                reader.submit(ReadRequest {
                    object,
                    offset: tag * 9,
                    len: 100,
                    buf,
                    tag,
                    deadline: None,
                });
            }
            let (mut completions, until) = (Vec::new(), Instant::now() + Duration::from_secs(60));
            while reader.in_flight() > 0 && Instant::now() < until {
                reader.wait(until, &mut completions).unwrap();
            }
            assert!(completions.iter().all(|one| one.bytes() == [7; 100]), "{completions:?}");
        }
        let file = File::open(object.display()).unwrap();
        assert!(!Mount::of(&file).unwrap().is_refused(ReadMethod::RingCached));
    }
}
