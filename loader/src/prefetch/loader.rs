use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use storage::{BufferPool, Storage};

use crate::metrics::Metrics;
use crate::order::rank_schedule::{RankSchedule, Ranks};
use crate::plan::round::Limits;
use crate::plan::sample_cache::SampleCache;
use crate::prefetch::batcher::{Batcher, Counter};
use crate::prefetch::channels::LoaderChannels;
use crate::prefetch::planner::Planner;
use crate::prefetch::window::WindowLimits;
use crate::prefetch::worker::{self, WorkerOptions};
use crate::queue::{Queue, QueueEmpty};
use crate::{Assemble, Error, Result, SampleOrder};

/// Options of a [`Loader`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoaderOptions {
    /// Rows in a micro-batch of one rank. Minimum: 1.
    pub micro_batch: usize,
    /// The samples to deliver, over all ranks. The first is the state in a checkpoint.
    pub samples: Range<u64>,
    /// The ranks to serve. Default: [`Ranks::ALONE`].
    pub ranks: Ranks,
    /// The time to read ahead: how long the consumer could continue without further reads. Default:
    /// 60 s.
    pub window: Duration,
    /// The most memory for samples read ahead. Default: 512 MiB, ten minutes of a 1B model on eight
    /// GPUs. If the ranks of a node each run a loader, each has a share of it.
    pub window_bytes: u64,
    /// The fewest batches to read ahead, whatever the window. Default: 2. Minimum: 1.
    pub batches_min: u64,
    /// Queue depth of each store. Default: tuned at run time.
    pub depth: Option<usize>,
    /// The largest gap of unneeded bytes to read in order to save one request. Default: depends on
    /// the store.
    pub gap_bytes: Option<u64>,
    /// Timeout of a batch, a request or the opening of a file. Default: 300 s, half of the timeout
    /// after which collective operations end a run and blame the network.
    pub timeout: Duration,
    /// Pauses before each retry of a failed read. Default: 1, 8 and 24 s, which outlasts the
    /// restart of a server.
    pub retry_pauses: [Duration; 3],
    /// A cache of samples on this node. Default: none.
    pub sample_cache: Option<Arc<dyn SampleCache>>,
    /// Whether to compare the bytes read with the checksums of their blocks, where the dataset has
    /// a `.crc`. Complete blocks of 4 KiB are read then. Default: yes.
    pub verify: bool,
}

impl LoaderOptions {
    /// The defaults, for these samples.
    #[must_use]
    pub fn new(micro_batch: usize, samples: Range<u64>) -> Self {
        LoaderOptions {
            micro_batch,
            samples,
            ranks: Ranks::ALONE,
            window: Duration::from_secs(60),
            window_bytes: 512 << 20,
            batches_min: 2,
            depth: None,
            gap_bytes: None,
            timeout: Duration::from_secs(300),
            retry_pauses: [1, 8, 24].map(Duration::from_secs),
            sample_cache: None,
            verify: true,
        }
    }
}

/// Names and counts, as [`Storage::metrics`] returns them.
type Counted = Vec<(String, u64)>;

/// Batches in the order of their samples, read ahead of their use.
///
/// The sequence is a pure function of the order and of the samples consumed: a loader started there
/// returns the same batches as one that has read up to there, with any number of ranks, on any
/// store, in whatever order reads complete. Dropping it ends its threads, and never blocks on a
/// read.
#[derive(Debug)]
pub struct Loader<A: Assemble> {
    schedule: RankSchedule,
    shared: Arc<LoaderChannels>,
    counter: Arc<Counter<A::Batch>>,
    threads: Threads,
    timeout: Duration,
    started: Instant,
    batches: u64,
    /// When the consumer first asked for the next batch.
    asked: Option<Instant>,
    failed: Option<String>,
    /// The stores, and their counters at the start.
    stores: Vec<(Arc<dyn Storage>, Counted)>,
}

/// Assembled batches that wait for the consumer: two, while a third is being assembled. All others
/// stay encoded as they were read, a tenth of the size.
const READY_MAX: usize = 2;

/// Address space for samples kept in their read buffers: twice the usual window. In a larger window
/// some samples are copied instead, a little slower.
const KEPT_BYTES_MAX: u64 = 1 << 30;

impl<A: Assemble> Loader<A> {
    /// Starts reading at `options.samples.start`.
    ///
    /// # Errors
    /// [`Error::Option`] for one out of its range, [`Error::TooFewSamples`] if the order ends too
    /// soon, [`Error::Storage`] if no threads can be started.
    pub fn start(order: Arc<dyn SampleOrder>, assemble: A, options: LoaderOptions) -> Result<Self> {
        check(order.as_ref(), &options)?;
        let schedule =
            RankSchedule::new(options.samples.clone(), options.micro_batch, options.ranks)?;
        let (stores, store_of) = stores_of(order.as_ref());
        let bounds = WindowLimits {
            time: options.window,
            bytes: options.window_bytes,
            batches_min: options.batches_min,
        };
        let shared = Arc::new(LoaderChannels::new(stores.len(), bounds));
        let (ready, spent) = (Queue::new(READY_MAX), Queue::new(2 * READY_MAX + 64));
        let counter = Arc::new(Counter { ready, spent });
        let limits: Vec<_> = stores.iter().map(|store| limits(store.as_ref(), &options)).collect();
        let counted = |store: &Arc<dyn Storage>| (Arc::clone(store), store.metrics());
        let mut loader = Loader {
            schedule: schedule.clone(),
            shared: Arc::clone(&shared),
            counter: Arc::clone(&counter),
            threads: Threads::default(),
            timeout: options.timeout,
            started: Instant::now(),
            batches: 0,
            asked: None,
            failed: None,
            stores: stores.iter().map(counted).collect(),
        };
        // fits: a GiB
        let kept = options.window_bytes.min(KEPT_BYTES_MAX / 9 * 8) as usize;
        let kept = BufferPool::try_new(kept + kept / 8)?; // with free space for fragmentation
        let threads = &mut loader.threads;
        for (nth, store) in stores.into_iter().enumerate() {
            let settings = worker_options(&options, &limits[nth], limits.len() as u64);
            let (shared, kept) = (Arc::clone(&shared), Arc::clone(&kept));
            let run = move || worker::run(shared, nth, store.as_ref(), &settings, kept);
            threads.start("loader-read", &counter, run)?;
        }
        let LoaderOptions { sample_cache, timeout, verify, .. } = options;
        let batcher_counter = Arc::clone(&counter);
        let batcher = Batcher::new(
            assemble,
            schedule.clone(),
            sample_cache.clone(),
            Arc::clone(&shared),
            batcher_counter,
        );
        threads.start("loader-batch", &counter, move || batcher.run())?;
        let planner =
            Planner { order, schedule, sample_cache, store_of, limits, timeout, verify, shared };
        threads.start("loader-plan", &counter, move || planner.run())?;
        Ok(loader)
    }

    /// The next batch in order, or `None` after the last. Waits for it up to
    /// [`LoaderOptions::timeout`].
    ///
    /// # Errors
    /// The error of the first sample that cannot be delivered, which ends the loader.
    /// [`Error::Late`] after the timeout: the call may be repeated.
    pub fn next_batch(&mut self) -> Result<Option<A::Batch>> {
        loop {
            if let Poll::Ready(batch) = self.poll_batch(self.timeout)? {
                return Ok(batch);
            }
        }
    }

    /// As [`Loader::next_batch`], but waits no longer than `wait`, so that a caller can handle
    /// signals between calls. `Pending` if there is no batch yet.
    ///
    /// # Errors
    /// As [`Loader::next_batch`]; the timeout counts from the first call that found no batch.
    pub fn poll_batch(&mut self, wait: Duration) -> Result<Poll<Option<A::Batch>>> {
        if let Some(first) = &self.failed {
            return Err(Error::Ended { first: first.clone() });
        }
        if self.batches == self.schedule.batch_count() {
            return Ok(Poll::Ready(None));
        }
        let now = Instant::now();
        let asked = *self.asked.get_or_insert(now);
        let popped = self.counter.ready.pop(Some((asked + self.timeout).min(now + wait)));
        let now = Instant::now();
        let waited = now - asked;
        if matches!(popped, Err(QueueEmpty::Late)) && waited < self.timeout {
            return Ok(Poll::Pending);
        }
        self.asked = None;
        match popped {
            Ok(Ok(batch)) => {
                self.count(now, waited);
                Ok(Poll::Ready(Some(batch)))
            }
            Ok(Err(error)) => {
                self.failed = Some(error.to_string());
                Err(error)
            }
            Err(QueueEmpty::Late) => Err(Error::Late {
                sample: self.schedule.batch(self.batches).start,
                waited,
                reason: self.shared.stall_reason(),
            }),
            Err(QueueEmpty::Closed) => Err(Error::ThreadPanicked),
        }
    }

    /// Returns a batch's memory for reuse. After the first window nothing is allocated. Memory of
    /// more batches than a window has is freed.
    pub fn recycle(&self, batch: A::Batch) {
        self.counter.spent.push_if_room(batch);
    }

    /// A handle that returns batches from another owner; it may outlive the loader.
    #[must_use]
    pub fn recycler(&self) -> Recycler<A::Batch> {
        Recycler(Arc::clone(&self.counter))
    }

    /// Samples consumed so far by all ranks together, including those before the start: the whole
    /// state to save.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.schedule.consumed(self.batches)
    }

    /// Metrics since the start.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let mut metrics = self.shared.metrics();
        self.stores.iter().for_each(|(store, before)| metrics.add_store(&store.metrics(), before));
        metrics
    }

    fn count(&mut self, now: Instant, waited: Duration) {
        if self.batches == 0 {
            self.shared.meter.first_batch(now - self.started);
        }
        let samples = self.schedule.batch(self.batches);
        self.batches += 1;
        self.shared.consumed.store(self.batches, Relaxed);
        self.shared.meter.consumed(samples.end - samples.start, waited);
        self.shared.window.consumed(now, waited);
    }
}

impl<A: Assemble> Drop for Loader<A> {
    fn drop(&mut self) {
        self.shared.close();
        self.counter.ready.close();
        self.counter.spent.close();
        self.threads.end();
    }
}

/// Returns the memory of batches to their [`Loader`] from another owner, such as a garbage
/// collector.
#[derive(Debug)]
pub struct Recycler<B>(Arc<Counter<B>>);

impl<B> Recycler<B> {
    /// As [`Loader::recycle`]. After the end of the loader the memory is freed.
    pub fn recycle(&self, batch: B) {
        self.0.spent.push_if_room(batch);
    }
}

impl<B> Clone for Recycler<B> {
    fn clone(&self) -> Self {
        Recycler(Arc::clone(&self.0))
    }
}

fn check(order: &dyn SampleOrder, options: &LoaderOptions) -> Result<()> {
    let bad = |name, found, expected| Err(Error::Option { name, found, expected });
    let Range { start, end } = options.samples;
    if start > end {
        return bad("samples.start", start, "at most samples.end");
    }
    if options.batches_min == 0 {
        return bad("batches_min", 0, "at least 1");
    }
    if options.depth == Some(0) {
        return bad("depth", 0, "at least 1");
    }
    let found = order.sample_count();
    if end > found {
        return Err(Error::TooFewSamples { dataset: order.name(), expected: end, found });
    }
    Ok(())
}

/// The stores of an order, and which of them reads each of its files. Datasets that were opened one
/// by one have a store each; stores of one reader group share a reader.
pub(crate) fn stores_of(order: &dyn SampleOrder) -> (Vec<Arc<dyn Storage>>, Vec<usize>) {
    let mut known: Vec<(&Arc<dyn Storage>, usize)> = Vec::new();
    let mut stores: Vec<Arc<dyn Storage>> = Vec::new();
    let mut groups: HashMap<String, usize> = HashMap::new();
    let mut store_of = Vec::with_capacity(order.sources().len());
    for source in order.sources() {
        let same = |(store, _): &&(&Arc<dyn Storage>, usize)| Arc::ptr_eq(store, &source.store);
        if let Some((_, nth)) = known.iter().find(same) {
            store_of.push(*nth);
            continue;
        }
        let next = stores.len();
        let group = source.store.reader_group();
        let nth = group.map_or(next, |group| *groups.entry(group).or_insert(next));
        if nth == next {
            stores.push(Arc::clone(&source.store));
        }
        known.push((&source.store, nth));
        store_of.push(nth);
    }
    (stores, store_of)
}

fn limits(store: &dyn Storage, options: &LoaderOptions) -> Limits {
    let defaults = Limits::of(store.profile());
    Limits { gap_bytes: options.gap_bytes.unwrap_or(defaults.gap_bytes), ..defaults }
}

/// Buffers for this many of the longest requests at once, or for a store's share of a quarter of
/// the window, but for at least four requests.
const LONGEST_IN_FLIGHT: u64 = 64;

fn worker_options(options: &LoaderOptions, limits: &Limits, stores: u64) -> WorkerOptions {
    let longest = limits.extent_bytes_max + 4096;
    let bytes =
        (longest * LONGEST_IN_FLIGHT).min(options.window_bytes / 4 / stores).max(longest * 4);
    let buffer_bytes = bytes as usize; // fits: 64 bits
    let &LoaderOptions { depth, timeout, retry_pauses, .. } = options;
    WorkerOptions { depth, timeout, retry_pauses, buffer_bytes }
}

/// How long a dropped loader waits for its threads: one that has not ended by then is stuck in the
/// kernel, and is detached.
const END_WAIT: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Threads {
    handles: Vec<JoinHandle<()>>,
    ended: Arc<Queue<()>>,
}

impl Default for Threads {
    fn default() -> Self {
        Threads { handles: Vec::new(), ended: Arc::new(Queue::new(usize::MAX >> 1)) }
    }
}

impl Threads {
    fn start<B: Send + 'static>(
        &mut self,
        name: &str,
        counter: &Arc<Counter<B>>,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let end = ThreadEnd { ended: Arc::clone(&self.ended), counter: Arc::clone(counter) };
        let run = move || {
            let _end = end;
            run();
        };
        let handle = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let handle =
            handle.map_err(|e| storage::Error::from_io("start", "a thread for the loader", e))?;
        self.handles.push(handle);
        Ok(())
    }

    /// Waits for all threads, up to [`END_WAIT`].
    fn end(&mut self) {
        let until = Instant::now() + END_WAIT;
        let ended = self.handles.iter().take_while(|_| self.ended.pop(Some(until)).is_ok()).count();
        if ended < self.handles.len() {
            log::warn!("loader: a thread is stuck in a read; it stays until the process exits");
            return;
        }
        for handle in self.handles.drain(..) {
            // A panic was reported on stderr, and `ThreadEnd` closed the queue of batches.
            let _ = handle.join();
        }
    }
}

/// Reports that a thread has ended. After a panic the consumer gets an error too, because no more
/// batches will arrive.
struct ThreadEnd<B> {
    ended: Arc<Queue<()>>,
    counter: Arc<Counter<B>>,
}

impl<B> Drop for ThreadEnd<B> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.counter.ready.close();
        }
        self.ended.push_now(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A blend of a hundred datasets that were opened one by one has a hundred stores. Each of them
    /// once took a quarter of the window.
    #[test]
    fn stores_share_the_memory_of_requests() {
        let options = LoaderOptions::new(1, 0..1);
        let limits = Limits { gap_bytes: 0, extent_bytes_max: 8 << 20 };
        let bytes = |stores| worker_options(&options, &limits, stores).buffer_bytes as u64 * stores;
        let four = 4 * (limits.extent_bytes_max + 4096);
        for stores in [1, 2, 3, 100] {
            assert!(bytes(stores) <= (options.window_bytes / 4).max(stores * four), "{stores}");
        }
    }
}
