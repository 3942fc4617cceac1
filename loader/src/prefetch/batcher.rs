//! The thread that assembles batches: in order, whatever the order of the completions.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::order::rank_schedule::RankSchedule;
use crate::plan::round::{PrefetchRound, StoreReads};
use crate::plan::sample_cache::SampleCache;
use crate::prefetch::channels::LoaderChannels;
use crate::queue::{Queue, QueueEmpty};
use crate::{Assemble, Error, Result};

/// How often progress is logged.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// The queues between the batcher and the consumer.
#[derive(Debug)]
pub(crate) struct Counter<B> {
    /// Finished batches, in order.
    pub(crate) ready: Queue<Result<B>>,
    /// Batches to reuse.
    pub(crate) spent: Queue<B>,
}

#[derive(Debug)]
pub(crate) struct Batcher<A: Assemble> {
    pub(crate) assemble: A,
    pub(crate) schedule: RankSchedule,
    pub(crate) sample_cache: Option<Arc<dyn SampleCache>>,
    pub(crate) shared: Arc<LoaderChannels>,
    pub(crate) counter: Arc<Counter<A::Batch>>,
    /// Completed store reads of later rounds.
    #[expect(clippy::vec_box, reason = "the boxes are moved between queues as they are")]
    pub(crate) early: Vec<Box<StoreReads>>,
    pub(crate) scratch: Vec<u8>,
    pub(crate) log_at: Instant,
}

impl<A: Assemble> Batcher<A> {
    pub(crate) fn new(
        assemble: A,
        schedule: RankSchedule,
        sample_cache: Option<Arc<dyn SampleCache>>,
        shared: Arc<LoaderChannels>,
        counter: Arc<Counter<A::Batch>>,
    ) -> Self {
        let (early, scratch) = (Vec::new(), Vec::new());
        let log_at = Instant::now() + LOG_EVERY;
        Batcher { assemble, schedule, sample_cache, shared, counter, early, scratch, log_at }
    }

    /// Delivers round after round, until one fails or the queues are closed.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        while let Ok(mut round) = self.wait(&shared.rounds) {
            if !self.gather(&mut round) {
                return;
            }
            match self.deliver(&mut round) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    // The consumer may have dropped the loader.
                    let _ = self.counter.ready.push(Err(error));
                    return;
                }
            }
            round.release();
            shared.window.done(round.batch_count() as u64, round.memory_bytes());
            shared.free.push_now(round);
            if let Some(sample_cache) = &self.sample_cache {
                sample_cache.consumed(self.schedule.consumed(shared.consumed.load(Relaxed)));
            }
        }
    }

    /// Waits for all store reads of a round. False if the queues are closed.
    fn gather(&mut self, round: &mut PrefetchRound) -> bool {
        let mut missing = round.store_reads.iter().filter(|reads| reads.is_none()).count();
        while missing > 0 {
            let early = self.early.iter().position(|reads| reads.round == round.number);
            let reads = match early {
                Some(index) => self.early.swap_remove(index),
                None => match self.wait(&Arc::clone(&self.shared).done) {
                    Ok(reads) => reads,
                    Err(_) => return false,
                },
            };
            if reads.round == round.number {
                let store = reads.store;
                round.store_reads[store] = Some(reads);
                missing -= 1;
            } else {
                self.early.push(reads);
            }
        }
        true
    }

    /// Assembles the batches of a round. False if the queues are closed.
    fn deliver(&mut self, round: &mut PrefetchRound) -> Result<bool> {
        if let Some(error) = round.failure.take() {
            return Err(error);
        }
        let failed = round.store_reads.iter().flatten().any(|reads| !reads.failed.is_empty());
        for nth in 0..round.batch_count() {
            let (first_sample, rows) = round.batch(nth);
            if failed && let Some(error) = (0..rows).find_map(|row| round.failure(nth, row)) {
                return Err(Error::Storage(error));
            }
            let mut batch = self.counter.spent.try_pop().unwrap_or_default();
            self.assemble.begin(&mut batch, first_sample, rows);
            let mut bytes = 0;
            for row in 0..rows {
                round.verify_kept(nth, row)?;
                let sample = round.sample(nth, row, &mut self.scratch);
                self.assemble.set_row(&mut batch, row, &sample)?;
                bytes += sample.bytes.len() as u64;
                match &self.sample_cache {
                    Some(_) if round.was_cached(nth, row) => {
                        self.shared.meter.near_samples.fetch_add(1, Relaxed);
                    }
                    Some(sample_cache) => sample_cache.keep(sample.number, sample.bytes),
                    None => {}
                }
            }
            self.assemble.finish(&mut batch)?;
            self.shared.meter.delivered_bytes.fetch_add(bytes, Relaxed);
            if self.counter.ready.push(Ok(batch)).is_err() {
                return Ok(false);
            }
            self.log_progress();
        }
        Ok(true)
    }

    /// Takes the next item of a queue, and logs progress while there is none.
    fn wait<T>(&mut self, queue: &Queue<T>) -> std::result::Result<T, QueueEmpty> {
        loop {
            match queue.pop(Some(self.log_at)) {
                Err(QueueEmpty::Late) => self.log_progress(),
                outcome => return outcome,
            }
        }
    }

    fn log_progress(&mut self) {
        let now = Instant::now();
        if now >= self.log_at {
            log::info!("loader: {}", self.shared.metrics());
            self.log_at = now + LOG_EVERY;
        }
    }
}
