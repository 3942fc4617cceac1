//! Several who do the same from the same moment on, watched by one who looks how far they are.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use std::{io, thread};

use anyhow::{Context as _, Result, anyhow};

use crate::bench::measure::counters::{CounterSource, Counters};
use crate::bench::patterns::{PatternRun, TICK_S};
use crate::bench::target::TargetFolder;

/// Bytes of one of several that went to the store, or came from it, so far.
pub type ProgressCounter = Arc<AtomicU64>;

/// Has one thread do something for each of some things, all from the same moment on, and counts
/// what they did until the last was done. What they say of how far they are makes the timeline.
///
/// # Errors
/// The first that one of them meets.
pub fn all_at_once(
    count: usize,
    place: &TargetFolder,
    is_read: bool,
    act: &(dyn Fn(usize, &ProgressCounter) -> Result<u64> + Sync),
) -> Result<PatternRun> {
    let before = Counters::now();
    let so_far: Vec<ProgressCounter> = (0..count).map(|_| ProgressCounter::default()).collect();
    let (begins, over) = (OnceLock::new(), OnceLock::new());
    let one = |nth: usize| {
        begins.get_or_init(|| ());
        let begun = Instant::now();
        act(nth, &so_far[nth]).map(|bytes| (bytes, begun, Instant::now()))
    };
    let (done, watched) = thread::scope(|scope| {
        let watching = thread::Builder::new().spawn_scoped(scope, || {
            begins.wait();
            watch(&so_far, &over)
        });
        let watching = watching.context("cannot start the progress thread")?;
        let done = on_threads(count, one);
        begins.get_or_init(|| ()); // none may have begun
        over.get_or_init(Instant::now);
        Ok::<_, anyhow::Error>((done?, watching.join()))
    })?;
    let taken = Counters::since(&before);
    let timeline = watched.unwrap_or_default();
    let mut run = PatternRun { timeline, ..PatternRun::default() };
    run.took(&taken);
    let begun = done.iter().map(|(_, begun, _)| *begun).min();
    for (bytes, _, ended) in done {
        let took = begun.map_or(Duration::ZERO, |begun| ended - begun);
        run.bytes += bytes;
        run.ops += 1;
        run.latency.add(took);
        run.seconds = run.seconds.max(took.as_secs_f64());
    }
    run.moved_bytes = match (place.witness, is_read) {
        (CounterSource::Kernel, true) => taken.read_bytes,
        (CounterSource::Kernel, false) => taken.written_bytes,
        // Nobody has counted.
        _ => 0,
    };
    Ok(run)
}

/// Calls `work` on `count` threads, each with its number, all from the same moment on.
///
/// # Errors
/// The first that one of them returns. If not all of the threads can be started, none begins.
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

/// Looks every tick how far each is, until it is over; gives the timeline. What one of them counts
/// in lumps has passed since its lump before.
fn watch(so_far: &[ProgressCounter], over: &OnceLock<Instant>) -> Vec<u64> {
    let (begun, mut run) = (Instant::now(), PatternRun::default());
    let mut last = vec![(0.0, 0); so_far.len()];
    loop {
        thread::sleep(Duration::from_secs_f64(TICK_S));
        let ended = over.get().copied();
        let at = ended.unwrap_or_else(Instant::now);
        let now_s = at.saturating_duration_since(begun).as_secs_f64();
        for (so_far, (last_s, last)) in so_far.iter().zip(&mut last) {
            let now = so_far.load(Relaxed);
            if now > *last {
                run.passed(*last_s, now_s, now - *last);
                (*last_s, *last) = (now_s, now);
            }
        }
        if ended.is_some() {
            return run.timeline;
        }
    }
}
