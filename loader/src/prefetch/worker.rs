//! The thread of one store: keeps its requests in flight, and scatters the bytes of completed ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage::{BufferPool, Completion, ReadRequest, Reader, ReaderOptions, Storage, drop_cached};

use crate::plan::round::{Extent, StoreReads};
use crate::prefetch::channels::LoaderChannels;
use crate::prefetch::depth::Depth;
use crate::queue::QueueEmpty;

/// Where the search for the best depth starts, unless the backend's limit is lower.
const DEPTH_START: usize = 32;

/// How long to wait for completions, while the depth allows more requests, before polling for new
/// work. Doubled up to the second value while nothing completes.
const POLL_AFTER: [Duration; 2] = [Duration::from_micros(250), Duration::from_millis(20)];

/// How often late requests are counted.
const COUNT_LATE_EVERY: Duration = Duration::from_millis(5);

/// How long to wait if the depth is reached: only the end of the loader must be noticed meanwhile.
const WAIT: Duration = Duration::from_millis(100);

/// Settings of a worker.
#[derive(Clone, Debug)]
pub(crate) struct WorkerOptions {
    pub(crate) depth: Option<usize>,
    pub(crate) timeout: Duration,
    pub(crate) retry_pauses: [Duration; 3],
    /// Bytes of the buffers of all requests in flight.
    pub(crate) buffer_bytes: usize,
}

#[derive(Debug)]
struct Worker {
    store: usize,
    shared: Arc<LoaderChannels>,
    pool: Arc<BufferPool>,
    /// For buffers that keep their bytes until those are in a batch; shared by all stores.
    kept: Arc<BufferPool>,
    reader: Box<dyn Reader>,
    depth: Depth,
    /// Store reads in progress, in no order.
    store_reads: Vec<Option<Box<StoreReads>>>,
    /// Those with extents not yet submitted, by deadline.
    queue: VecDeque<usize>,
    /// Extents that differed from their checksums, to be read again.
    again: Vec<(usize, usize)>,
    /// The request of each tag.
    requests: Vec<InFlightRead>,
    free_tags: Vec<usize>,
    completions: Vec<Completion>,
    /// Requests that were late when they were last counted, and when that was.
    late: (usize, Instant),
}

#[derive(Clone, Copy, Debug)]
struct InFlightRead {
    /// Index into [`Worker::store_reads`].
    reads: usize,
    extent: usize,
    /// `None` once it is complete.
    submitted_at: Option<Instant>,
    is_kept: bool,
    /// Whether it differed from its checksums before.
    is_second: bool,
}

/// Serves store reads until the work queue is closed or the store has failed.
pub(crate) fn run(
    shared: Arc<LoaderChannels>,
    nth: usize,
    store: &dyn Storage,
    settings: &WorkerOptions,
    kept: Arc<BufferPool>,
) {
    let started = BufferPool::try_new(settings.buffer_bytes).and_then(|pool| {
        let mut options = ReaderOptions::new(&pool);
        (options.depth, options.timeout) = (settings.depth, settings.timeout);
        options.retry_pauses = settings.retry_pauses;
        let reader = store.reader(&options)?;
        Ok((pool, reader))
    });
    let (pool, reader) = match started {
        Ok(started) => started,
        Err(error) => {
            if let Ok(reads) = shared.work[nth].pop(None) {
                fail(&shared, reads, error);
            }
            return;
        }
    };
    let depth = Depth::new(DEPTH_START, reader.depth_max(), settings.depth, Instant::now());
    let most = reader.depth_max();
    let (store_reads, queue, completions) = (Vec::new(), VecDeque::new(), Vec::with_capacity(most));
    let late = (0, Instant::now());
    let (requests, free_tags) = (Vec::with_capacity(most), Vec::with_capacity(most));
    let mut worker = Worker {
        store: nth,
        shared,
        pool,
        kept,
        reader,
        depth,
        store_reads,
        queue,
        again: Vec::new(),
        requests,
        free_tags,
        completions,
        late,
    };
    if let Err(error) = worker.work() {
        // The batcher waits for the oldest first, and the loader ends with its error.
        let oldest =
            worker.store_reads.iter_mut().filter_map(Option::take).min_by_key(|reads| reads.round);
        if let Some(reads) = oldest {
            fail(&worker.shared, reads, error);
        }
    }
}

/// Returns store reads that failed as a whole.
fn fail(shared: &LoaderChannels, mut reads: Box<StoreReads>, error: storage::Error) {
    reads.failed = (0..reads.extents.len()).collect();
    reads.failure.get_or_insert(error);
    shared.done.push_now(reads);
}

impl Worker {
    fn work(&mut self) -> storage::Result<()> {
        let mut poll_after = POLL_AFTER[0];
        loop {
            if !self.take_store_reads() {
                return Ok(());
            }
            self.submit();
            let now = Instant::now();
            let full = !self.queue.is_empty() || !self.again.is_empty();
            let wait = if full { WAIT } else { poll_after };
            if !full {
                self.depth.starved();
            }
            if full && self.reader.in_flight() == 0 {
                // Abandoned requests hold all buffers, and free them when they complete.
                std::thread::sleep(poll_after);
            }
            self.reader.wait(now + wait, &mut self.completions)?;
            poll_after = if self.completions.is_empty() {
                (poll_after * 2).min(POLL_AFTER[1])
            } else {
                POLL_AFTER[0]
            };
            self.finish();
        }
    }

    /// Takes new store reads, and waits for some if there is nothing else to do. False once the
    /// work queue is closed.
    fn take_store_reads(&mut self) -> bool {
        let work = &self.shared.work[self.store];
        if work.is_closed() {
            return false;
        }
        let none = self.queue.is_empty() && self.again.is_empty();
        let idle = none && self.reader.in_flight() == 0;
        let first = if idle { work.pop(None) } else { work.try_pop().ok_or(QueueEmpty::Late) };
        let more = || work.try_pop();
        for reads in first.ok().into_iter().chain(std::iter::from_fn(more)) {
            let index =
                self.store_reads.iter().position(Option::is_none).unwrap_or(self.store_reads.len());
            if index == self.store_reads.len() {
                self.store_reads.push(None);
            }
            self.store_reads[index] = Some(reads);
            self.queue.push_back(index);
        }
        true
    }

    /// Submits requests, the earliest deadline first, until the depth is reached or no buffer is
    /// free. Late requests do not count against the depth, up to the limit of the reader: if one
    /// request in fifty takes a second and the others half a millisecond, late requests would soon
    /// use up the depth.
    fn submit(&mut self) {
        let mut depth = self.depth.get();
        if self.reader.in_flight() >= depth {
            depth += self.late_count();
        }
        let depth = depth.min(self.reader.depth_max());
        while self.reader.in_flight() < depth {
            let again = self.again.last().copied();
            let first = again.map(|(index, _)| index).or_else(|| self.queue.front().copied());
            let Some(index) = first else { return };
            let reads = self.store_reads[index]
                .as_mut()
                .expect("store reads stay until all of them complete");
            let nth = again.map_or(reads.submitted, |(_, nth)| nth);
            let extent = &reads.extents[nth];
            let len = extent.len_bytes as usize; // fits: at most Limits::extent_bytes_max
            // If no buffer is free to keep it in, the extent is copied: reading must not stop.
            let keep = reads.is_worth_keeping().then(|| self.kept.take(len)).flatten();
            let is_kept = keep.is_some();
            let Some(buf) = keep.or_else(|| self.pool.take(len)) else { return };
            let tag = self.free_tags.pop().unwrap_or(self.requests.len());
            let submitted_at = Some(Instant::now());
            let is_second = again.is_some();
            let request =
                InFlightRead { reads: index, extent: nth, submitted_at, is_kept, is_second };
            match self.requests.get_mut(tag) {
                Some(slot) => *slot = request,
                None => self.requests.push(request),
            }
            let object = Arc::clone(&reads.file(extent.file).object);
            let (offset, deadline) = (extent.offset_bytes, reads.deadline);
            self.reader.submit(ReadRequest { object, offset, len, buf, tag: tag as u64, deadline });
            if is_second {
                self.again.pop();
                continue;
            }
            reads.submitted += 1;
            if reads.submitted == reads.extents.len() {
                self.queue.pop_front();
            }
        }
    }

    /// How many of the requests in flight are late; counted every few milliseconds.
    fn late_count(&mut self) -> usize {
        let now = Instant::now();
        if now - self.late.1 >= COUNT_LATE_EVERY {
            let after = self.depth.late_after().unwrap_or(Duration::MAX);
            let is_late =
                |request: &&InFlightRead| request.submitted_at.is_some_and(|at| now - at > after);
            self.late = (self.requests.iter().filter(is_late).count(), now);
        }
        self.late.0
    }

    /// Scatters the completed extents, and returns the store reads that are complete.
    fn finish(&mut self) {
        let now = Instant::now();
        for completion in self.completions.drain(..) {
            let tag = completion.tag as usize; // fits: it was a usize
            let request = &mut self.requests[tag];
            let InFlightRead { reads: index, extent, is_kept, is_second, .. } = *request;
            let submitted_at = request.submitted_at.take().expect("a request completes once");
            self.free_tags.push(tag);
            let reads = self.store_reads[index]
                .as_mut()
                .expect("store reads stay until all of them complete");
            self.shared.meter.read(now - submitted_at);
            let verify = |()| match is_kept {
                true => Ok(()), // the batcher verifies kept extents just before it decodes them
                false => reads.verify(extent, &completion.buf[completion.data.clone()]),
            };
            match completion.outcome.map(verify) {
                // Memory or a network may have failed, and not the store.
                Ok(Err(error)) if !is_second => {
                    log::warn!("{error}; retrying the read");
                    let Extent { file, offset_bytes, .. } = reads.extents[extent];
                    drop_cached(&*reads.file(file).object, offset_bytes, completion.buf.len());
                    self.again.push((index, extent));
                    continue;
                }
                Ok(Err(error)) => {
                    reads.failed.push(extent);
                    reads.failure.get_or_insert(error);
                }
                Ok(Ok(())) => {
                    match is_kept {
                        true => reads.keep(extent, completion.buf, completion.data),
                        false => reads.scatter(extent, &completion.buf[completion.data]),
                    }
                    self.depth.completed(reads.extents[extent].len_bytes, now - submitted_at);
                }
                Err(error) => {
                    self.depth.failed();
                    reads.failed.push(extent);
                    reads.failure.get_or_insert(error);
                }
            }
            reads.pending -= 1;
            if reads.pending == 0 {
                self.shared.meter.wanted(reads.used_bytes());
                let reads = self.store_reads[index].take().expect("present above");
                self.shared.done.push_now(reads);
            }
        }
        self.depth.update(now);
        let (counters, in_flight) = (self.reader.counters(), self.reader.in_flight());
        self.shared.meter.store(self.store, counters, in_flight, self.depth.get());
    }
}
