//! Several who do the same from the same moment on, watched by one who looks how far they are.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

use super::counters::{Counters, Witness};
use super::pattern::{Run, TICK_S};
use super::target::Place;

/// Bytes that went to the store so far.
pub type Wrote = Arc<AtomicU64>;

/// Has one thread do something for each of some things, all from the same moment on, and counts
/// what they did until the last was done. What they say that they wrote makes the timeline.
///
/// # Errors
/// The first that one of them meets.
pub fn all_at_once(
    count: usize,
    place: &Place,
    is_read: bool,
    act: &(dyn Fn(usize, &Wrote) -> Result<u64> + Sync),
) -> Result<Run> {
    let before = Counters::now();
    let (wrote, is_over) = (Wrote::default(), AtomicBool::new(false));
    let barrier = Barrier::new(count + 1);
    let one = |nth: usize| {
        barrier.wait();
        let begun = Instant::now();
        act(nth, &wrote).map(|bytes| (bytes, begun, Instant::now()))
    };
    let (done, watched) = thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..count).map(|nth| scope.spawn(move || one(nth))).collect();
        let watching = scope.spawn(|| {
            barrier.wait();
            watch(&wrote, &is_over)
        });
        let join = |thread: thread::ScopedJoinHandle<'_, Result<_>>| {
            thread.join().unwrap_or_else(|_| Err(anyhow!("a writer broke off")))
        };
        let done = threads.into_iter().map(join).collect::<Result<Vec<_>>>();
        is_over.store(true, Relaxed);
        (done, watching.join())
    });
    let done = done?;
    let taken = Counters::since(&before);
    let timeline = watched.unwrap_or_default();
    let mut run = Run { cpu_s: taken.cpu_s, timeline, ..Run::default() };
    let begun = done.iter().map(|(_, begun, _)| *begun).min();
    for (bytes, _, ended) in done {
        let took = begun.map_or(Duration::ZERO, |begun| ended - begun);
        run.bytes += bytes;
        run.ops += 1;
        run.latency.add(took);
        run.seconds = run.seconds.max(took.as_secs_f64());
    }
    run.moved_bytes = match (place.witness, is_read) {
        (Witness::Kernel, true) => taken.read_bytes,
        (Witness::Kernel, false) => taken.written_bytes,
        _ => run.bytes,
    };
    Ok(run)
}

/// Looks every tick how much was written, until it is over; gives the timeline.
fn watch(wrote: &Wrote, is_over: &AtomicBool) -> Vec<u64> {
    let (begun, mut run) = (Instant::now(), Run::default());
    let (mut last_s, mut last) = (0.0, 0);
    while !is_over.load(Relaxed) {
        thread::sleep(Duration::from_secs_f64(TICK_S));
        let (now_s, now) = (begun.elapsed().as_secs_f64(), wrote.load(Relaxed));
        run.passed(last_s, now_s, now - last);
        (last_s, last) = (now_s, now);
    }
    // Of reads nobody says how far they are.
    if last > 0 { run.timeline } else { Vec::new() }
}
