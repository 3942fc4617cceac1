//! A store as it would be on other hardware: a model of latencies, rates, servers, stalls and
//! failures over a real store that has the bytes.
//!
//! A [`StoreModel`] is a few figures in a TOML file; four are built in. A [`Simulation`] is a
//! cluster of that kind as one client sees it: all stores that it wraps share its servers, its link
//! and its random numbers. Code above a wrapped store runs unchanged. Each request gets the time at
//! which the model completes it, and waits until then; the latency of the n-th request of a kind
//! depends only on seed, kind and n, whichever thread submits it.
//!
//! A simulation shows what follows from its figures, and nothing about a cluster that was not
//! measured. So the profile of a wrapped store says that it is simulated, and every report has
//! [`Simulation::label`]. A simulation cannot be faster than the real store below: [`SimCounters`]
//! count operations that completed later than in the model.
//!
//! `model` parses the file, `queues` computes completion times, `layer` wraps a store.

mod layer;
mod model;
mod queues;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::base::rng::Rng;
use crate::{Error, Result, Storage};
pub(crate) use layer::MARK;
pub use model::StoreModel;
use model::{Errno, Op};
use queues::QueueModel;

/// A cluster as one client sees it, shared by all stores that it wraps.
#[derive(Debug)]
pub struct Simulation {
    model: StoreModel,
    seed: u64,
    clock: Clock,
    state: Mutex<SimulationState>,
}

#[derive(Debug)]
enum Clock {
    /// Real time since then; a wait sleeps.
    Real(Instant),
    /// Virtual time: a wait advances the clock instead of sleeping.
    Counted,
}

#[derive(Debug)]
struct SimulationState {
    queues: QueueModel,
    /// Time of a counted clock, in nanoseconds.
    now: u64,
    /// Requests so far, by [`Op`].
    request_counts: [u64; 4],
    counters: SimCounters,
}

/// Counters of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SimCounters {
    /// Requests that read.
    pub reads: u64,
    /// Requests that wrote.
    pub writes: u64,
    /// Requests that made data durable.
    pub commits: u64,
    /// Metadata requests.
    pub metas: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Requests that stalled.
    pub stalls: u64,
    /// Requests that the model failed.
    pub failures: u64,
    /// Operations that the real store completed later than the model: if there are many, the result
    /// measures the real store.
    pub late_ops: u64,
    /// Their total delay.
    pub late_us: u64,
}

/// When the model completes an operation, and whether it fails.
#[derive(Clone, Copy, Debug)]
#[must_use]
struct SimulatedCompletion {
    done: u64,
    failure: Option<Errno>,
}

impl SimulatedCompletion {
    /// Completes when both do, and fails if either does.
    fn and(self, other: Self) -> Self {
        SimulatedCompletion {
            done: self.done.max(other.done),
            failure: self.failure.or(other.failure),
        }
    }
}

impl Simulation {
    /// A cluster in real time.
    #[must_use]
    pub fn new(model: StoreModel, seed: u64) -> Arc<Self> {
        Self::with_clock(model, seed, Clock::Real(Instant::now()))
    }

    /// A cluster in virtual time, without waiting. It is exact for a caller that makes one call at
    /// a time; the reads of one call are in flight together.
    #[must_use]
    pub fn counted(model: StoreModel, seed: u64) -> Arc<Self> {
        Self::with_clock(model, seed, Clock::Counted)
    }

    fn with_clock(model: StoreModel, seed: u64, clock: Clock) -> Arc<Self> {
        let queues = QueueModel::new(&model);
        let state = SimulationState {
            queues,
            now: 0,
            request_counts: [0; 4],
            counters: SimCounters::default(),
        };
        Arc::new(Simulation { model, seed, clock, state: Mutex::new(state) })
    }

    /// A store with the bytes of `inner` and the timing of the cluster.
    #[must_use]
    pub fn wrap(self: &Arc<Self>, inner: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Arc::new(layer::SimulationLayer::new(inner, Arc::clone(self)))
    }

    /// The label of every report, such as `simulated: lustre`.
    #[must_use]
    pub fn label(&self) -> String {
        format!("simulated: {}", self.model.name)
    }

    /// The assumptions of the model in one line.
    #[must_use]
    pub fn about(&self) -> String {
        let StoreModel { latency_us, servers, client, .. } = &self.model;
        let ms = |us: f64| us / 1e3;
        let stripes = if servers.stripes == 0 { servers.count } else { servers.stripes };
        format!(
            "{}, not measured: reads {} ms (p99 {} ms), writes {} ms, metadata requests {} ms; \
             files on {stripes} of {} servers with {} MB/s each, client link {} MB/s; seed {}",
            self.label(),
            ms(latency_us.read[0]),
            ms(latency_us.read[1]),
            ms(latency_us.write[0]),
            ms(latency_us.meta[0]),
            servers.count,
            servers.mb_per_s,
            client.mb_per_s,
            self.seed
        )
    }

    /// The time of its clock since its start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Duration::from_nanos(self.elapsed_ns())
    }

    /// Its counters so far.
    #[must_use]
    pub fn counters(&self) -> SimCounters {
        self.state().counters
    }

    fn state(&self) -> MutexGuard<'_, SimulationState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self, state: &SimulationState) -> u64 {
        match self.clock {
            // fits: 584 years
            Clock::Real(started) => started.elapsed().as_nanos() as u64,
            Clock::Counted => state.now,
        }
    }

    fn elapsed_ns(&self) -> u64 {
        self.now(&self.state())
    }

    /// Models the transfer of a range of a file.
    fn transfer(&self, op: Op, file: u64, offset: u64, len: u64) -> SimulatedCompletion {
        let mut state = self.state();
        let now = self.now(&state);
        let mut completion = SimulatedCompletion { done: now, failure: None };
        for piece in queues::pieces(&self.model, file, offset, len) {
            let drawn = self.draw(&mut state, op);
            let done = state.queues.transfer(&self.model, piece, now, drawn.done);
            completion = completion.and(SimulatedCompletion { done, failure: drawn.failure });
        }
        let SimCounters { read_bytes, written_bytes, .. } = &mut state.counters;
        *(if op == Op::Read { read_bytes } else { written_bytes }) += len;
        completion
    }

    /// Models `requests` metadata or commit requests, one after the other, from `start` or now on.
    fn request(&self, op: Op, requests: u64, start: u64) -> SimulatedCompletion {
        let mut state = self.state();
        let now = self.now(&state);
        let mut completion = SimulatedCompletion { done: start.max(now), failure: None };
        for _ in 0..requests {
            let drawn = self.draw(&mut state, op);
            let done = state.queues.name(&self.model, now, completion.done, drawn.done);
            completion = completion.and(SimulatedCompletion { done, failure: drawn.failure });
        }
        completion
    }

    /// Draws the latency of the next request of a kind, and whether it fails.
    fn draw(&self, state: &mut SimulationState, op: Op) -> SimulatedCompletion {
        let number = state.request_counts[op as usize];
        state.request_counts[op as usize] += 1;
        let counters = &mut state.counters;
        *match op {
            Op::Read => &mut counters.reads,
            Op::Write => &mut counters.writes,
            Op::Commit => &mut counters.commits,
            Op::Meta => &mut counters.metas,
        } += 1;
        // Each kind and number seeds a generator of its own.
        let kind = Rng::new(self.seed.wrapping_add(op as u64)).next();
        let mut rng = Rng::new(Rng::new(kind ^ number).next());
        let [median, p99] = self.model.spread(op);
        let mut latency = (median * (sigma(median, p99) * normal(&mut rng)).exp() * 1e3) as u64;
        for stall in self.model.stall.iter().filter(|stall| stall.of == op) {
            if rng.below(1_000_000) < u64::from(stall.per_million) {
                counters.stalls += 1;
                latency = latency.saturating_add(stall.ms.saturating_mul(1_000_000));
            }
        }
        let mut failure = None;
        for failing in self.model.failure.iter().filter(|failing| failing.of == op) {
            if rng.below(1_000_000) < u64::from(failing.per_million) {
                failure = failure.or(Some(failing.errno));
            }
        }
        counters.failures += u64::from(failure.is_some());
        SimulatedCompletion { done: latency, failure }
    }

    /// Runs the operation on the real store, and returns its result at the simulated completion
    /// time.
    fn complete<T>(
        &self,
        completion: SimulatedCompletion,
        operation: impl fmt::Display,
        object: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if let Some(errno) = completion.failure {
            self.wait(completion.done);
            let source = std::io::Error::from_raw_os_error(errno.number());
            return Err(Error::from_io(format!("{operation} simulated"), object(), source));
        }
        let outcome = work();
        self.finish(completion.done);
        outcome
    }

    /// Counts how much later than `done` the real store was, and waits until `done`.
    fn finish(&self, done: u64) {
        let mut state = self.state();
        let late_ns = self.now(&state).saturating_sub(done);
        if late_ns > 0 && matches!(self.clock, Clock::Real(_)) {
            state.counters.late_ops += 1;
            state.counters.late_us += late_ns / 1000;
        }
        drop(state);
        self.wait(done);
    }

    fn wait(&self, done: u64) {
        match self.clock {
            Clock::Real(started) => {
                thread::sleep(Duration::from_nanos(done).saturating_sub(started.elapsed()));
            }
            Clock::Counted => {
                let mut state = self.state();
                state.now = state.now.max(done);
            }
        }
    }
}

/// The spread of a log-normal distribution by its median and its 99th percentile, which is at
/// 2.326 standard deviations.
fn sigma(median: f64, p99: f64) -> f64 {
    (p99 / median).ln() / 2.326_347_874
}

/// A number from the standard normal distribution (Box and Muller 1958).
fn normal(rng: &mut Rng) -> f64 {
    let [one, two] =
        [rng.next(), rng.next()].map(|bits| ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64);
    (-2.0 * one.ln()).sqrt() * (std::f64::consts::TAU * two).cos()
}
