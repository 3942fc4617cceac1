//! Metrics of a loader.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use storage::{ByteSize, RETRY_CAUSES, ReaderCounters};

use crate::histogram::Histogram;

/// Longer waits for a batch are stalls: a step of the fastest models takes some 50 ms.
const STALL: Duration = Duration::from_millis(1);

/// Counts since the loader was started. Times are those of the consumer's waits for a batch
/// (`wait_`) and of requests since their submission (`read_`).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Metrics {
    /// Batches consumed.
    pub batches: u64,
    /// Samples consumed.
    pub samples: u64,
    /// Bytes of the samples assembled into batches.
    pub delivered_bytes: u64,
    /// Bytes read from the stores, with alignment and retries.
    pub moved_bytes: u64,
    /// Of these, bytes copied from the page cache.
    pub page_cache_bytes: u64,
    /// `moved_bytes` over the bytes of the samples not found in the cache: 1.0 is optimal.
    pub moved_per_wanted: f64,
    /// Requests completed.
    pub reads: u64,
    /// Requests whose first transfer was short.
    pub short_reads: u64,
    /// Retries after an error.
    pub retries: u64,
    /// Retries by error: its `errno(3)`, or the cause of a remote store, such as `slow_down`.
    pub retries_by: BTreeMap<String, u64>,
    /// Hedged requests: second copies of late requests.
    pub hedges: u64,
    /// Hedged requests that completed first.
    pub hedges_won: u64,
    /// Requests that timed out as stuck.
    pub stuck: u64,
    /// Requests that failed after all retries.
    pub failed: u64,
    /// Requests in flight now.
    pub in_flight: u64,
    /// Queue depth, over all stores.
    pub depth: u64,
    /// Median time of a request.
    pub read_p50_us: u64,
    /// The 99th percentile.
    pub read_p99_us: u64,
    /// The longest.
    pub read_max_us: u64,
    /// Median wait. The first batch, for which nothing could be read ahead, does not count.
    pub wait_p50_us: u64,
    /// The 99th percentile.
    pub wait_p99_us: u64,
    /// The longest.
    pub wait_max_us: u64,
    /// How long the first batch took from the start of the loader.
    pub first_batch_us: u64,
    /// Waits of more than a millisecond.
    pub stalls: u64,
    /// Their total time.
    pub stalled_us: u64,
    /// Bytes read ahead, or being read.
    pub ahead_bytes: u64,
    /// Batches per second that the consumer takes while it does not wait; 0 while unknown.
    pub batches_per_s: f64,
    /// Samples found in the cache.
    pub near_samples: u64,
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} samples, {} delivered, read amplification {:.2}; {} reads, p50 {} us, p99 {} us, \
             {} of {} in flight; {} prefetched; waits p50 {} us, p99 {} us, max {} us; {} stalls, \
             {} ms in total",
            self.samples,
            ByteSize(self.delivered_bytes),
            self.moved_per_wanted,
            self.reads,
            self.read_p50_us,
            self.read_p99_us,
            self.in_flight,
            self.depth,
            ByteSize(self.ahead_bytes),
            self.wait_p50_us,
            self.wait_p99_us,
            self.wait_max_us,
            self.stalls,
            self.stalled_us / 1000
        )?;
        let rare = [
            (self.near_samples, "samples from the local cache"),
            (self.retries, "retries"),
            (self.hedges, "hedges"),
            (self.short_reads, "short reads"),
            (self.stuck, "stuck reads"),
            (self.failed, "failed reads"),
        ];
        let mut rare = rare.iter().filter(|(count, _)| *count > 0);
        rare.try_for_each(|(count, what)| write!(f, ", {count} {what}"))
    }
}

impl Metrics {
    /// Adds a store's own counters, less their values in `before`.
    pub(crate) fn add_store(&mut self, counted: &[(String, u64)], before: &[(String, u64)]) {
        for (name, count) in counted {
            let was = before.iter().find(|(of, _)| of == name).map_or(0, |(_, count)| *count);
            let count = count.saturating_sub(was);
            match name.as_str() {
                "hedges_sent" => self.hedges += count,
                "hedges_won" => self.hedges_won += count,
                name => {
                    if let Some(cause) = name.strip_prefix("retries_") {
                        self.retries += count;
                        self.add_retries(cause, count);
                    }
                }
            }
        }
    }

    fn add_retries(&mut self, cause: &str, count: u64) {
        if count > 0 {
            *self.retries_by.entry(cause.to_owned()).or_default() += count;
        }
    }
}

/// The counters of a loader's threads.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub(crate) delivered_bytes: AtomicU64,
    wanted_bytes: AtomicU64,
    pub(crate) near_samples: AtomicU64,
    batches: AtomicU64,
    samples: AtomicU64,
    stalls: AtomicU64,
    stalled_us: AtomicU64,
    first_batch_us: AtomicU64,
    waits: Histogram,
    reads: Histogram,
    stores: Vec<StoreMeter>,
}

#[derive(Debug, Default)]
struct StoreMeter {
    counters: Mutex<ReaderCounters>,
    in_flight: AtomicUsize,
    depth: AtomicUsize,
}

impl Meter {
    pub(crate) fn new(stores: usize) -> Self {
        let stores = (0..stores).map(|_| StoreMeter::default()).collect();
        Meter { stores, ..Meter::default() }
    }

    /// Counts a consumed batch of `samples` samples, after a wait.
    pub(crate) fn consumed(&self, samples: u64, waited: Duration) {
        self.samples.fetch_add(samples, Relaxed);
        if self.batches.fetch_add(1, Relaxed) == 0 {
            return;
        }
        self.waits.add(waited);
        if waited > STALL {
            self.stalls.fetch_add(1, Relaxed);
            self.stalled_us.fetch_add(us(waited), Relaxed);
        }
    }

    pub(crate) fn first_batch(&self, after: Duration) {
        self.first_batch_us.store(us(after), Relaxed);
    }

    pub(crate) fn read(&self, took: Duration) {
        self.reads.add(took);
    }

    /// Counts the bytes of completed store reads.
    pub(crate) fn wanted(&self, bytes: u64) {
        self.wanted_bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn store(
        &self,
        store: usize,
        counters: ReaderCounters,
        in_flight: usize,
        depth: usize,
    ) {
        let meter = &self.stores[store];
        *meter.counters.lock().unwrap_or_else(PoisonError::into_inner) = counters;
        meter.in_flight.store(in_flight, Relaxed);
        meter.depth.store(depth, Relaxed);
    }

    /// The metrics so far.
    pub(crate) fn snapshot(&self, ahead_bytes: u64, batches_per_s: Option<f64>) -> Metrics {
        let mut metrics = Metrics {
            batches: self.batches.load(Relaxed),
            samples: self.samples.load(Relaxed),
            delivered_bytes: self.delivered_bytes.load(Relaxed),
            read_p50_us: self.reads.quantile_us(0.5),
            read_p99_us: self.reads.quantile_us(0.99),
            read_max_us: self.reads.max_us(),
            wait_p50_us: self.waits.quantile_us(0.5),
            wait_p99_us: self.waits.quantile_us(0.99),
            wait_max_us: self.waits.max_us(),
            first_batch_us: self.first_batch_us.load(Relaxed),
            stalls: self.stalls.load(Relaxed),
            stalled_us: self.stalled_us.load(Relaxed),
            ahead_bytes,
            batches_per_s: batches_per_s.unwrap_or(0.0),
            near_samples: self.near_samples.load(Relaxed),
            ..Metrics::default()
        };
        for store in &self.stores {
            let counters = *store.counters.lock().unwrap_or_else(PoisonError::into_inner);
            metrics.moved_bytes += counters.moved_bytes;
            metrics.page_cache_bytes += counters.page_cache_bytes;
            metrics.reads += counters.reads;
            metrics.short_reads += counters.short_reads;
            metrics.retries += counters.retries;
            for (cause, &count) in RETRY_CAUSES.iter().zip(&counters.retries_by) {
                metrics.add_retries(cause, count);
            }
            metrics.stuck += counters.stuck;
            metrics.failed += counters.failed;
            metrics.in_flight += store.in_flight.load(Relaxed) as u64;
            metrics.depth += store.depth.load(Relaxed) as u64;
        }
        let wanted = self.wanted_bytes.load(Relaxed);
        if wanted > 0 {
            metrics.moved_per_wanted = metrics.moved_bytes as f64 / wanted as f64;
        }
        metrics
    }
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
