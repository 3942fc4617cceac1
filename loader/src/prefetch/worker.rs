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

/// How long to wait for completions while the depth allows more requests: new work is polled after
/// it. Doubled up to the second value while nothing completes.
const LOOK_AFTER: [Duration; 2] = [Duration::from_micros(250), Duration::from_millis(20)];

/// How often late requests are counted.
const LATE_LOOK: Duration = Duration::from_millis(5);

/// How long to wait if the depth is reached: only the end of the loader needs attention meanwhile.
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
    lots: Vec<Option<Box<StoreReads>>>,
    /// Those with extents not yet submitted, by deadline.
    queue: VecDeque<usize>,
    /// Extents that differed from their checksums, to be read once more.
    again: Vec<(usize, usize)>,
    /// The request of each tag.
    flights: Vec<InFlightRead>,
    free_tags: Vec<usize>,
    completions: Vec<Completion>,
    /// Requests that were late when they were last counted, and when that was.
    late: (usize, Instant),
}

#[derive(Clone, Copy, Debug)]
struct InFlightRead {
    lot: usize,
    extent: usize,
    /// `None` once it is complete.
    begun: Option<Instant>,
    is_kept: bool,
    /// Whether it differed from its checksums before.
    is_second: bool,
}

/// Serves store reads until the work queue is closed or the store has failed.
pub(crate) fn run(
    shared: Arc<LoaderChannels>,
    nth: usize,
    store: &dyn Storage,
    manner: &WorkerOptions,
    kept: Arc<BufferPool>,
) {
    let begun = BufferPool::try_new(manner.buffer_bytes).and_then(|pool| {
        let mut options = ReaderOptions::new(&pool);
        (options.depth, options.timeout) = (manner.depth, manner.timeout);
        options.retry_pauses = manner.retry_pauses;
        let reader = store.reader(&options)?;
        Ok((pool, reader))
    });
    let (pool, reader) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            if let Ok(lot) = shared.work[nth].pop(None) {
                fail(&shared, lot, error);
            }
            return;
        }
    };
    let depth = Depth::new(DEPTH_START, reader.depth_max(), manner.depth, Instant::now());
    let most = reader.depth_max();
    let (lots, queue, came) = (Vec::new(), VecDeque::new(), Vec::with_capacity(most));
    let late = (0, Instant::now());
    let (flights, free_tags) = (Vec::with_capacity(most), Vec::with_capacity(most));
    let mut worker = Worker {
        store: nth,
        shared,
        pool,
        kept,
        reader,
        depth,
        lots,
        queue,
        again: Vec::new(),
        flights,
        free_tags,
        completions: came,
        late,
    };
    if let Err(error) = worker.work() {
        // The oldest is waited for first, and the loader ends there.
        let oldest = worker.lots.iter_mut().filter_map(Option::take).min_by_key(|lot| lot.round);
        if let Some(lot) = oldest {
            fail(&worker.shared, lot, error);
        }
    }
}

/// Returns store reads that failed as a whole.
fn fail(shared: &LoaderChannels, mut lot: Box<StoreReads>, error: storage::Error) {
    lot.failed = (0..lot.extents.len()).collect();
    lot.failure.get_or_insert(error);
    shared.done.push_now(lot);
}

impl Worker {
    fn work(&mut self) -> storage::Result<()> {
        let mut look_after = LOOK_AFTER[0];
        loop {
            if !self.take_lots() {
                return Ok(());
            }
            self.submit();
            let now = Instant::now();
            let full = !self.queue.is_empty() || !self.again.is_empty();
            let wait = if full { WAIT } else { look_after };
            if !full {
                self.depth.starved();
            }
            if full && self.reader.in_flight() == 0 {
                // Abandoned requests hold all buffers, and free them when they complete.
                std::thread::sleep(look_after);
            }
            self.reader.wait(now + wait, &mut self.completions)?;
            look_after = if self.completions.is_empty() {
                (look_after * 2).min(LOOK_AFTER[1])
            } else {
                LOOK_AFTER[0]
            };
            self.finish();
        }
    }

    /// Takes the new store reads, and waits for some if there is nothing else to do. False at the
    /// end.
    fn take_lots(&mut self) -> bool {
        let work = &self.shared.work[self.store];
        if work.is_closed() {
            return false;
        }
        let none = self.queue.is_empty() && self.again.is_empty();
        let idle = none && self.reader.in_flight() == 0;
        let first = if idle { work.pop(None) } else { work.try_pop().ok_or(QueueEmpty::Late) };
        let more = || work.try_pop();
        for lot in first.ok().into_iter().chain(std::iter::from_fn(more)) {
            let place = self.lots.iter().position(Option::is_none).unwrap_or(self.lots.len());
            if place == self.lots.len() {
                self.lots.push(None);
            }
            self.lots[place] = Some(lot);
            self.queue.push_back(place);
        }
        true
    }

    /// Submits requests, the earliest deadline first, until the depth is reached or no buffer is
    /// free. Late requests do not count against the depth, up to the limit of the reader: if one
    /// request in fifty takes a second and the others half a millisecond, late ones would soon fill
    /// the depth.
    fn submit(&mut self) {
        let mut depth = self.depth.get();
        if self.reader.in_flight() >= depth {
            depth += self.late();
        }
        let depth = depth.min(self.reader.depth_max());
        while self.reader.in_flight() < depth {
            let again = self.again.last().copied();
            let first = again.map(|(place, _)| place).or_else(|| self.queue.front().copied());
            let Some(place) = first else { return };
            let lot =
                self.lots[place].as_mut().expect("store reads stay until all of them complete");
            let nth = again.map_or(lot.begun, |(_, nth)| nth);
            let extent = &lot.extents[nth];
            let len = extent.len_bytes as usize; // fits: at most Limits::extent_bytes_max
            // If no buffer is free to keep it in, the extent is copied: reading must not stop.
            let keep = lot.is_worth_keeping().then(|| self.kept.take(len)).flatten();
            let is_kept = keep.is_some();
            let Some(buf) = keep.or_else(|| self.pool.take(len)) else { return };
            let tag = self.free_tags.pop().unwrap_or(self.flights.len());
            let begun = Some(Instant::now());
            let is_second = again.is_some();
            let flight = InFlightRead { lot: place, extent: nth, begun, is_kept, is_second };
            match self.flights.get_mut(tag) {
                Some(slot) => *slot = flight,
                None => self.flights.push(flight),
            }
            let object = Arc::clone(&lot.file(extent.file).object);
            let (offset, due) = (extent.offset_bytes, lot.deadline);
            self.reader.submit(ReadRequest {
                object,
                offset,
                len,
                buf,
                tag: tag as u64,
                deadline: due,
            });
            if is_second {
                self.again.pop();
                continue;
            }
            lot.begun += 1;
            if lot.begun == lot.extents.len() {
                self.queue.pop_front();
            }
        }
    }

    /// How many of the requests in flight are late; counted every few milliseconds.
    fn late(&mut self) -> usize {
        let now = Instant::now();
        if now - self.late.1 >= LATE_LOOK {
            let after = self.depth.late_after().unwrap_or(Duration::MAX);
            let is_late =
                |flight: &&InFlightRead| flight.begun.is_some_and(|begun| now - begun > after);
            self.late = (self.flights.iter().filter(is_late).count(), now);
        }
        self.late.0
    }

    /// Scatters the completed extents, and returns the store reads that are complete.
    fn finish(&mut self) {
        let now = Instant::now();
        for came in self.completions.drain(..) {
            let tag = came.tag as usize; // fits: it was a usize
            let flight = &mut self.flights[tag];
            let InFlightRead { lot: place, extent, is_kept, is_second, .. } = *flight;
            let begun = flight.begun.take().expect("a request completes once");
            self.free_tags.push(tag);
            let lot =
                self.lots[place].as_mut().expect("store reads stay until all of them complete");
            self.shared.meter.read(now - begun);
            let verify = |()| match is_kept {
                true => Ok(()), // what is kept is verified where it is decoded
                false => lot.verify(extent, &came.buf[came.data.clone()]),
            };
            match came.outcome.map(verify) {
                // Memory or a network may have failed, and not the store.
                Ok(Err(error)) if !is_second => {
                    log::warn!("{error}; retrying the read");
                    let Extent { file, offset_bytes, .. } = lot.extents[extent];
                    drop_cached(&*lot.file(file).object, offset_bytes, came.buf.len());
                    self.again.push((place, extent));
                    continue;
                }
                Ok(Err(error)) => {
                    lot.failed.push(extent);
                    lot.failure.get_or_insert(error);
                }
                Ok(Ok(())) => {
                    match is_kept {
                        true => lot.keep(extent, came.buf, came.data),
                        false => lot.feed(extent, &came.buf[came.data]),
                    }
                    self.depth.came(lot.extents[extent].len_bytes, now - begun);
                }
                Err(error) => {
                    self.depth.failed();
                    lot.failed.push(extent);
                    lot.failure.get_or_insert(error);
                }
            }
            lot.left -= 1;
            if lot.left == 0 {
                self.shared.meter.wanted(lot.used_bytes());
                let lot = self.lots[place].take().expect("it was there just now");
                self.shared.done.push_now(lot);
            }
        }
        self.depth.turn(now);
        let (counters, in_flight) = (self.reader.counters(), self.reader.in_flight());
        self.shared.meter.store(self.store, counters, in_flight, self.depth.get());
    }
}
