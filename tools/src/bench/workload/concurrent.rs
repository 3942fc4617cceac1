//! The same work on several threads that start together, while another thread samples their
//! progress.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{io, thread};

use anyhow::{Context as _, Result, anyhow};

use crate::bench::measure::counters::{CounterSource, Counters};
use crate::bench::patterns::{PatternRun, TICK_S};
use crate::bench::target::TargetFolder;

/// Bytes that one thread has read or written so far.
pub type ProgressCounter = Arc<AtomicU64>;

/// Calls `act` on `count` threads that start together, and measures until the last is done. Their
/// progress counters give the timeline.
///
/// # Errors
/// The first error of a thread.
pub fn all_at_once(
    count: usize,
    place: &TargetFolder,
    is_read: bool,
    act: &(dyn Fn(usize, &ProgressCounter) -> Result<u64> + Sync),
) -> Result<PatternRun> {
    let before = Counters::now();
    let so_far: Vec<ProgressCounter> = (0..count).map(|_| ProgressCounter::default()).collect();
    let (first_start, over) = (OnceLock::new(), OnceLock::new());
    let one = |nth: usize| {
        first_start.get_or_init(|| ());
        let started = Instant::now();
        act(nth, &so_far[nth]).map(|bytes| (bytes, started, Instant::now()))
    };
    let (done, watched) = thread::scope(|scope| {
        let watching = thread::Builder::new().spawn_scoped(scope, || {
            first_start.wait();
            watch(&so_far, &over)
        });
        let watching = watching.context("cannot start the progress thread")?;
        let done = on_threads(count, one);
        first_start.get_or_init(|| ()); // no thread may have started
        over.get_or_init(Instant::now);
        Ok::<_, anyhow::Error>((done?, watching.join()))
    })?;
    let taken = Counters::since(&before);
    let timeline = watched.unwrap_or_default();
    let mut run = PatternRun { timeline, ..PatternRun::default() };
    run.record_cpu(&taken);
    let started = done.iter().map(|(_, started, _)| *started).min();
    for (bytes, _, ended) in done {
        let took = started.map_or(Duration::ZERO, |started| ended - started);
        run.bytes += bytes;
        run.ops += 1;
        run.latency.add(took);
        run.seconds = run.seconds.max(took.as_secs_f64());
    }
    run.moved_bytes = match (place.witness, is_read) {
        (CounterSource::Kernel, true) => taken.read_bytes,
        (CounterSource::Kernel, false) => taken.written_bytes,
        // Not counted.
        _ => 0,
    };
    Ok(run)
}

/// Calls `work` on `count` threads that start together, each with its number.
///
/// # Errors
/// The first error of a call. If a thread cannot be started, `work` is not called.
pub fn on_threads<T: Send>(
    count: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let all_started = OnceLock::new();
    let run = |nth| {
        if *all_started.wait() { work(nth) } else { Err(anyhow!("cannot start all threads")) }
    };
    thread::scope(|scope| {
        let run = &run;
        let start = |nth| thread::Builder::new().spawn_scoped(scope, move || run(nth));
        let threads: io::Result<Vec<_>> = (0..count).map(start).collect();
        all_started.get_or_init(|| threads.is_ok());
        let threads = threads.with_context(|| format!("cannot start {count} threads"))?;
        let join = |thread: thread::ScopedJoinHandle<'_, Result<T>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("cannot measure: a thread panicked")))
        };
        threads.into_iter().map(join).collect()
    })
}

/// Samples the counters every tick until the end, and returns the timeline. An increase is spread
/// evenly over the time since the counter's previous increase.
fn watch(so_far: &[ProgressCounter], over: &OnceLock<Instant>) -> Vec<u64> {
    let (started, mut run) = (Instant::now(), PatternRun::default());
    let mut last = vec![(0.0, 0); so_far.len()];
    loop {
        thread::sleep(Duration::from_secs_f64(TICK_S));
        let ended = over.get().copied();
        let at = ended.unwrap_or_else(Instant::now);
        let now_s = at.saturating_duration_since(started).as_secs_f64();
        for (so_far, (last_s, last)) in so_far.iter().zip(&mut last) {
            let now = so_far.load(Relaxed);
            if now > *last {
                run.record_progress(*last_s, now_s, now - *last);
                (*last_s, *last) = (now_s, now);
            }
        }
        if ended.is_some() {
            return run.timeline;
        }
    }
}
