//! The thread that plans reads: round after round, as far as the window allows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::order::rank_schedule::RankSchedule;
use crate::plan::round::{Limits, PlanContext, PrefetchRound, ReadFile, RoundCapacity};
use crate::plan::sample_cache::SampleCache;
use crate::prefetch::channels::LoaderChannels;
use crate::prefetch::files::DataFiles;
use crate::prefetch::window::WindowBudget;
use crate::{Result, SampleOrder};

/// Rounds that fill the window: each can be late by as much without delaying the next.
const ROUNDS_IN_WINDOW: u64 = 16;

/// A larger round would find few more reads to coalesce, and complete later as a whole.
const ROUND_BYTES_MAX: u64 = 8 << 20;

/// The limit for very short samples.
const ROUND_SAMPLES_MAX: u64 = 4096;

#[derive(Debug)]
pub(crate) struct Planner {
    pub(crate) order: Arc<dyn SampleOrder>,
    pub(crate) schedule: RankSchedule,
    pub(crate) sample_cache: Option<Arc<dyn SampleCache>>,
    pub(crate) store_of: Vec<usize>,
    pub(crate) limits: Vec<Limits>,
    /// Timeout for the opening of a file.
    pub(crate) timeout: Duration,
    /// Whether to verify blocks that have checksums.
    pub(crate) verify: bool,
    pub(crate) shared: Arc<LoaderChannels>,
}

impl Planner {
    /// Plans until all batches are planned, the order fails, or the queues are closed.
    pub(crate) fn run(self) {
        let mut files = DataFiles::new(self.order.sources().len());
        let mut sizes = RoundCapacity::default();
        let (mut first, mut number) = (0, 0);
        // The first round is one batch, so that it is ready at once; each next is twice as long.
        let mut batches_max = 1;
        // The end of a round that could not be planned: the failing batch is before it.
        let mut failed_end: u64 = 0;
        while first < self.schedule.batch_count() {
            // The first batch is read alone, so that it is ready soon.
            let together = if number == 0 { 0 } else { self.together(first) };
            let Some(room) = self.shared.window.wait_for_room(together) else { return };
            let failed_batches = failed_end.saturating_sub(first);
            let count = match failed_batches {
                0 => {
                    self.round_batches(&room, batches_max).min(self.schedule.batch_count() - first)
                }
                _ => (failed_batches / 2).max(1),
            };
            let mut round = self.shared.free.try_pop().unwrap_or_default();
            round.number = number;
            round.reserve(&sizes);
            match self.plan(&mut round, first..first + count, &mut files) {
                Ok(()) => {}
                // The batches before the failing one must still be delivered: bisection finds it.
                // An error that does not recur is ignored.
                Err(_) if count > 1 => {
                    failed_end = first + count;
                    self.shared.free.push_now(round);
                    continue;
                }
                Err(error) => {
                    round.failure = Some(error);
                    self.shared.rounds.push_now(round);
                    return;
                }
            }
            round.measure(&mut sizes);
            self.dispatch(round);
            (first, number, batches_max) = (first + count, number + 1, count * 2);
        }
    }

    fn round_batches(&self, room: &WindowBudget, batches_max: u64) -> u64 {
        let bytes = (room.bytes / ROUNDS_IN_WINDOW).min(ROUND_BYTES_MAX);
        let by_bytes = bytes / room.batch_bytes.max(1);
        let by_samples = ROUND_SAMPLES_MAX / self.schedule.rows_max().max(1);
        by_bytes.min(by_samples).min(batches_max).max(room.together).max(1)
    }

    /// Batches from `first` on that are best read together.
    fn together(&self, first: u64) -> u64 {
        let samples = self.schedule.batch(first);
        if samples.is_empty() {
            return 0;
        }
        let until = self.order.together_until(samples.start);
        let is_within = |nth: u64| self.schedule.batch(nth).start < until;
        let (mut low, mut high) = (first, self.schedule.batch_count());
        while low < high {
            let middle = low.midpoint(high);
            (low, high) = if is_within(middle) { (middle + 1, high) } else { (low, middle) };
        }
        low - first
    }

    fn plan(
        &self,
        round: &mut PrefetchRound,
        batches: std::ops::Range<u64>,
        files: &mut DataFiles,
    ) -> Result<()> {
        let context = PlanContext {
            order: self.order.as_ref(),
            store_of: &self.store_of,
            limits: &self.limits,
            sample_cache: self.sample_cache.as_deref(),
            verify: self.verify,
        };
        round.fill(&context, batches.map(|nth| self.schedule.batch(nth)))?;
        for reads in round.store_reads.iter_mut().flatten() {
            let mut read_files = std::mem::take(&mut reads.read_files);
            for file in reads.files() {
                let (sources, opening) = (self.order.sources(), &self.shared.opening);
                let object = files.get(sources, file, round.number, opening, self.timeout)?;
                let checksums = context.checksums(file).cloned();
                read_files.push(ReadFile { number: file, object, checksums });
            }
            reads.read_files = read_files;
        }
        Ok(())
    }

    /// Sends the store reads to the workers, and the rest of the round to the batcher.
    fn dispatch(&self, mut round: Box<PrefetchRound>) {
        self.shared.window.planned(round.batch_count() as u64, round.memory_bytes());
        let deadline = self.shared.window.next_deadline(Instant::now());
        for (reads, work) in round.store_reads.iter_mut().zip(&self.shared.work) {
            if let Some(mut reads) = reads.take_if(|reads| reads.pending > 0) {
                reads.deadline = deadline;
                work.push_now(reads);
            }
        }
        self.shared.rounds.push_now(round);
    }
}
