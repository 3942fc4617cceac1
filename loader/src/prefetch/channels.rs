//! State shared by the threads of a loader: the queues between them, the window and the counters.
//!
//! A [`PrefetchRound`] circulates: `planner` plans it, the `worker` of each store fills its
//! [`StoreReads`], `batcher` assembles batches from it and returns it to `planner` with its memory.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::metrics::{Meter, Metrics};
use crate::plan::round::{PrefetchRound, StoreReads};
use crate::prefetch::files::Opening;
use crate::prefetch::window::{PrefetchWindow, WindowLimits};
use crate::queue::Queue;

/// More rounds than the largest window has: the queues do not grow.
const ROUNDS_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct LoaderChannels {
    pub(crate) window: PrefetchWindow,
    pub(crate) meter: Meter,
    pub(crate) opening: Opening,
    /// Batches that have been consumed.
    pub(crate) consumed: AtomicU64,
    /// Rounds without their store reads, in order.
    pub(crate) rounds: Queue<Box<PrefetchRound>>,
    /// Store reads for the worker of each store.
    pub(crate) work: Vec<Queue<Box<StoreReads>>>,
    /// Completed store reads, in any order.
    pub(crate) done: Queue<Box<StoreReads>>,
    /// Rounds to reuse.
    pub(crate) free: Queue<Box<PrefetchRound>>,
}

impl LoaderChannels {
    pub(crate) fn new(stores: usize, bounds: WindowLimits) -> Self {
        LoaderChannels {
            window: PrefetchWindow::new(bounds),
            meter: Meter::new(stores),
            opening: Opening::default(),
            consumed: AtomicU64::new(0),
            rounds: Queue::new(ROUNDS_MAX),
            work: (0..stores).map(|_| Queue::new(ROUNDS_MAX)).collect(),
            done: Queue::new(ROUNDS_MAX * stores),
            free: Queue::new(ROUNDS_MAX),
        }
    }

    /// Ends every wait, so that the threads end.
    pub(crate) fn close(&self) {
        self.window.close();
        self.rounds.close();
        self.work.iter().for_each(Queue::close);
        self.done.close();
        self.free.close();
    }

    pub(crate) fn metrics(&self) -> Metrics {
        let (ahead_bytes, rate) = self.window.status();
        self.meter.snapshot(ahead_bytes, rate)
    }

    /// What the next batch is waiting for, as far as is known.
    pub(crate) fn stall_reason(&self) -> String {
        if let Some((what, age)) = self.opening.current() {
            return format!("opening {what} for {:.0} s", age.as_secs_f64());
        }
        if let Some(read) = storage::StuckReads::describe() {
            return format!("oldest read: {read}");
        }
        let Metrics { in_flight, reads, .. } = self.metrics();
        let consumed = self.consumed.load(Relaxed);
        format!("{in_flight} reads in flight, {reads} completed, {consumed} batches consumed")
    }
}
