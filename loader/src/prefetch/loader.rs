use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
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

/// How a [`Loader`] is to go about it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoaderOptions {
    /// Rows a micro-batch of one rank. Minimum: 1.
    pub micro_batch: usize,
    /// The samples to deliver, over all ranks. The first is what a checkpoint remembers.
    pub samples: Range<u64>,
    /// The ranks that are served. Default: [`Ranks::ALONE`].
    pub ranks: Ranks,
    /// How long the consumer could go on if nothing came any more. Default: 60 s.
    pub window: Duration,
    /// The most memory for that. Default: 512 MiB, ten minutes of a 1B model on eight GPUs. Ranks
    /// of a node that read for themselves have a share of it each.
    pub window_bytes: u64,
    /// Batches that are read ahead whatever the window says. Default: 2. Minimum: 1.
    pub batches_min: u64,
    /// Requests in flight at each store. Default: found by trying.
    pub depth: Option<usize>,
    /// Bytes that are read along for the sake of one request less. Default: what the store likes.
    pub gap_bytes: Option<u64>,
    /// How long a batch, a request or a file to open is waited for before that is an error.
    /// Default: 300 s, half of what collective operations wait before they end a run and blame the
    /// network.
    pub timeout: Duration,
    /// Pauses before a read that failed is made again. Default: 1, 8 and 24 s, which outlasts the
    /// restart of a server.
    pub retry_pauses: [Duration; 3],
    /// A cache of samples on this node. Default: none.
    pub near: Option<Arc<dyn SampleCache>>,
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
            near: None,
        }
    }
}

/// Names and counts, as [`Storage::metrics`] gives them.
type Counted = Vec<(String, u64)>;

/// Batches in the order of their samples, read ahead of their use.
///
/// The sequence is a pure function of the order and of the samples consumed: a loader that is
/// started there gives the same batches as one that came by there, with any number of ranks, on any
/// store, in whatever order reads complete. Dropping it ends its threads, and never waits for a
/// read.
#[derive(Debug)]
pub struct Loader<A: Assemble> {
    course: RankSchedule,
    shared: Arc<LoaderChannels>,
    counter: Arc<Counter<A::Batch>>,
    threads: Threads,
    timeout: Duration,
    started: Instant,
    batches: u64,
    failed: Option<String>,
    /// The stores, and what they had counted before.
    stores: Vec<(Arc<dyn Storage>, Counted)>,
}

/// Finished batches that wait for the consumer: one to take, one to take next, while the third is
/// being made. The bytes of all others stay as they were read, a tenth of the size.
const READY_MAX: usize = 2;

/// Addresses for what is not copied: twice the usual window. In a larger one some is, which is as
/// right, and a little slower.
const KEPT_BYTES_MAX: u64 = 1 << 30;

impl<A: Assemble> Loader<A> {
    /// Starts reading at `options.samples.start`.
    ///
    /// # Errors
    /// [`Error::Option`] for one out of its range, [`Error::TooFewSamples`] if the order ends too
    /// soon, [`Error::Storage`] if there are no threads.
    pub fn start(order: Arc<dyn SampleOrder>, assemble: A, options: LoaderOptions) -> Result<Self> {
        check(order.as_ref(), &options)?;
        let course =
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
            course: course.clone(),
            shared: Arc::clone(&shared),
            counter: Arc::clone(&counter),
            threads: Threads::default(),
            timeout: options.timeout,
            started: Instant::now(),
            batches: 0,
            failed: None,
            stores: stores.iter().map(counted).collect(),
        };
        // fits: a GiB
        let kept = options.window_bytes.min(KEPT_BYTES_MAX / 9 * 8) as usize;
        let kept = BufferPool::new(kept + kept / 8); // with free places between
        let threads = &mut loader.threads;
        for (nth, store) in stores.into_iter().enumerate() {
            let manner = manner(&options, &limits[nth], limits.len() as u64);
            let (shared, kept) = (Arc::clone(&shared), Arc::clone(&kept));
            let run = move || worker::run(shared, nth, store.as_ref(), &manner, kept);
            threads.start("loader-read", &counter, run)?;
        }
        let LoaderOptions { near, timeout, .. } = options;
        let made_into = Arc::clone(&counter);
        let batcher =
            Batcher::new(assemble, course.clone(), near.clone(), Arc::clone(&shared), made_into);
        threads.start("loader-batch", &counter, move || batcher.run())?;
        let planner = Planner { order, course, near, store_of, limits, timeout, shared };
        threads.start("loader-plan", &counter, move || planner.run())?;
        Ok(loader)
    }

    /// The next batch in order, or `None` after the last. Waits for it as long as
    /// [`LoaderOptions::timeout`] says.
    ///
    /// # Errors
    /// What went wrong with the first sample that cannot be delivered: the loader is then at its
    /// end. [`Error::Late`] if nothing came in time: it may be asked again.
    pub fn next_batch(&mut self) -> Result<Option<A::Batch>> {
        if let Some(first) = &self.failed {
            return Err(Error::Ended { first: first.clone() });
        }
        if self.batches == self.course.batch_count() {
            return Ok(None);
        }
        let asked = Instant::now();
        let came = self.counter.ready.pop(Some(asked + self.timeout));
        let now = Instant::now();
        match came {
            Ok(Ok(batch)) => {
                self.count(now, now - asked);
                Ok(Some(batch))
            }
            Ok(Err(error)) => {
                self.failed = Some(error.to_string());
                Err(error)
            }
            Err(QueueEmpty::Late) => Err(Error::Late {
                sample: self.course.batch(self.batches).start,
                waited: now - asked,
                story: self.shared.story(),
            }),
            Err(QueueEmpty::Closed) => Err(Error::Gone),
        }
    }

    /// Gives a batch's memory back, to be filled again. After the first window nothing is
    /// allocated.
    pub fn recycle(&self, batch: A::Batch) {
        self.counter.spent.push_now(batch);
    }

    /// Samples that all ranks together have consumed by now, those before the start counted in: all
    /// that there is to remember.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.course.consumed(self.batches)
    }

    /// What was done since the start.
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
        let samples = self.course.batch(self.batches);
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
/// by one have a store each; those that read alike have one reader.
fn stores_of(order: &dyn SampleOrder) -> (Vec<Arc<dyn Storage>>, Vec<usize>) {
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
    let likes = Limits::of(store.profile());
    Limits { gap_bytes: options.gap_bytes.unwrap_or(likes.gap_bytes), ..likes }
}

/// Buffers for so many of the longest requests at once, or a store's share of a quarter of the
/// window, but four requests at least.
const LONGEST_IN_FLIGHT: u64 = 64;

fn manner(options: &LoaderOptions, limits: &Limits, stores: u64) -> WorkerOptions {
    let longest = limits.extent_bytes_max + 4096;
    let bytes =
        (longest * LONGEST_IN_FLIGHT).min(options.window_bytes / 4 / stores).max(longest * 4);
    let buffer_bytes = bytes as usize; // fits: 64 bits
    let &LoaderOptions { depth, timeout, retry_pauses, .. } = options;
    WorkerOptions { depth, timeout, retry_pauses, buffer_bytes }
}

/// How long the end of a loader waits for its threads: one that does not end by then is held by the
/// system, and is left to it.
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
            handle.map_err(|e| storage::Error::from_io("start a thread for", "the loader", e))?;
        self.handles.push(handle);
        Ok(())
    }

    /// Waits for all of them, but not for long.
    fn end(&mut self) {
        let until = Instant::now() + END_WAIT;
        let ended = self.handles.iter().take_while(|_| self.ended.pop(Some(until)).is_ok()).count();
        if ended < self.handles.len() {
            log::warn!("loader: a read is stuck, and its thread with it; both are left behind");
            return;
        }
        for handle in self.handles.drain(..) {
            // A panic has been told on stderr, and the consumer has had no more batches.
            let _ = handle.join();
        }
    }
}

/// Tells that a thread has ended. After a panic the consumer is told too: what it waits for will
/// not come.
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

    /// A blend of a hundred datasets that were opened one by one has a hundred stores, and each
    /// once had a quarter of the window for itself.
    #[test]
    fn stores_share_the_memory_of_requests() {
        let options = LoaderOptions::new(1, 0..1);
        let limits = Limits { gap_bytes: 0, extent_bytes_max: 8 << 20 };
        let bytes = |stores| manner(&options, &limits, stores).buffer_bytes as u64 * stores;
        let four = 4 * (limits.extent_bytes_max + 4096);
        for stores in [1, 2, 3, 100] {
            assert!(bytes(stores) <= (options.window_bytes / 4).max(stores * four), "{stores}");
        }
    }
}
