//! The prefetch window: how far to read ahead of the consumer, in time, as far as memory allows.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes to read ahead before the consumption rate is known: four thousand samples of 2,048 tokens,
/// which is two seconds of the fastest model on the largest node.
const UNKNOWN_BYTES: u64 = 32 << 20;

/// The rate is measured over at least this time, because the micro-batches of one step are consumed
/// at once.
const OBSERVED_MIN: Duration = Duration::from_secs(1);

/// One observation counts an eighth, so that a pause, as for a checkpoint, does not empty the
/// window.
const OBSERVATIONS: f64 = 8.0;

/// Limits of a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowLimits {
    pub(crate) time: Duration,
    pub(crate) bytes: u64,
    pub(crate) batches_min: u64,
}

#[derive(Debug)]
pub(crate) struct PrefetchWindow {
    bounds: WindowLimits,
    state: Mutex<WindowState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct WindowState {
    planned_batches: u64,
    planned_bytes: u64,
    /// Assembled into batches: their bytes are free again.
    done_batches: u64,
    done_bytes: u64,
    rate: Rate,
    closed: bool,
}

impl PrefetchWindow {
    pub(crate) fn new(bounds: WindowLimits) -> Self {
        PrefetchWindow { bounds, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits until there is room for more, and returns how many bytes the window may have in all,
    /// and how many a batch has. If `together` batches are best read together, waits for room for
    /// all of them, as far as they take no more than half of the window. `None` if it was closed.
    pub(crate) fn wait_for_room(&self, together: u64) -> Option<WindowBudget> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let room = state.room(&self.bounds);
            let ahead = state.planned_bytes - state.done_bytes;
            let batches_ahead = state.planned_batches - state.done_batches;
            let wanted = together.saturating_mul(room.batch_bytes).min(self.bounds.bytes / 2);
            let fits = ahead < room.bytes && ahead + wanted <= self.bounds.bytes;
            let room = WindowBudget {
                together: wanted.checked_div(room.batch_bytes).unwrap_or(0),
                ..room
            };
            if fits || batches_ahead < self.bounds.batches_min {
                return Some(room);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn planned(&self, batches: u64, bytes: u64) {
        let mut state = self.lock();
        state.planned_batches += batches;
        state.planned_bytes += bytes;
    }

    pub(crate) fn done(&self, batches: u64, bytes: u64) {
        let mut state = self.lock();
        state.done_batches += batches;
        state.done_bytes += bytes;
        drop(state);
        self.changed.notify_all();
    }

    /// Records that a batch was consumed, after a wait.
    pub(crate) fn consumed(&self, now: Instant, waited: Duration) {
        self.lock().rate.add(now, waited);
    }

    /// Bytes read or being read, and batches per second if known.
    pub(crate) fn status(&self) -> (u64, Option<f64>) {
        let state = self.lock();
        (state.planned_bytes - state.done_bytes, state.rate.per_second)
    }

    /// When the next planned batch will be consumed, if known.
    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let state = self.lock();
        let ahead = (state.planned_batches - state.done_batches) as f64;
        let seconds = ahead / state.rate.per_second?;
        now.checked_add(Duration::try_from_secs_f64(seconds).ok()?)
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, WindowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How much room a window has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowBudget {
    /// Bytes of the whole window.
    pub(crate) bytes: u64,
    /// Bytes of a batch; 0 before the first was planned.
    pub(crate) batch_bytes: u64,
    /// Batches that fit if they are read together.
    pub(crate) together: u64,
}

impl WindowState {
    fn room(&self, bounds: &WindowLimits) -> WindowBudget {
        let batch_bytes = self.planned_bytes.checked_div(self.planned_batches).unwrap_or(0);
        let bytes = match self.rate.per_second {
            None => UNKNOWN_BYTES,
            // fits: a float beyond 64 bits becomes their largest value
            Some(rate) => (rate * bounds.time.as_secs_f64() * batch_bytes as f64) as u64,
        };
        let least = bounds.batches_min.saturating_mul(batch_bytes);
        WindowBudget { bytes: bytes.min(bounds.bytes).max(least), batch_bytes, together: 0 }
    }
}

/// Batches per second while the consumer does not wait for the loader.
#[derive(Debug, Default)]
struct Rate {
    since: Option<Instant>,
    waited: Duration,
    batches: u64,
    observations: f64,
    per_second: Option<f64>,
}

impl Rate {
    fn add(&mut self, now: Instant, waited: Duration) {
        // The first batch only starts the clock.
        let Some(since) = self.since else {
            self.since = Some(now);
            return;
        };
        self.batches += 1;
        self.waited += waited;
        let took = now.saturating_duration_since(since);
        if took < OBSERVED_MIN {
            return;
        }
        // The rate of a consumer that only ever waits cannot be measured: assume a million a
        // second.
        let busy = took.saturating_sub(self.waited).as_secs_f64();
        let seen = self.batches as f64 / busy.max(self.batches as f64 * 1e-6);
        self.observations = (self.observations + 1.0).min(OBSERVATIONS);
        let before = self.per_second.unwrap_or(seen);
        self.per_second = Some(before + (seen - before) / self.observations);
        (self.since, self.waited, self.batches) = (Some(now), Duration::ZERO, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: WindowLimits =
        WindowLimits { time: Duration::from_secs(60), bytes: 512 << 20, batches_min: 2 };

    fn consume(
        window: &PrefetchWindow,
        now: &mut Instant,
        batches: u64,
        each: Duration,
        wait: Duration,
    ) {
        for _ in 0..batches {
            *now += each + wait;
            window.consumed(*now, wait);
        }
    }

    fn room(window: &PrefetchWindow) -> WindowBudget {
        window.lock().room(&BOUNDS)
    }

    #[test]
    fn window_holds_a_minute_of_consumption_within_the_budget() {
        let window = PrefetchWindow::new(BOUNDS);
        let mut now = Instant::now();
        assert_eq!(
            room(&window),
            WindowBudget { bytes: UNKNOWN_BYTES, batch_bytes: 0, together: 0 }
        );
        window.planned(10, 10 << 10);
        assert_eq!(window.next_deadline(now), None, "no batch was consumed yet");
        // Ten batches a second of 1 KiB; the equal time of waiting does not count.
        let tenth = Duration::from_millis(100);
        consume(&window, &mut now, 100, tenth, tenth);
        let actual = room(&window);
        assert!(actual.bytes.abs_diff(600 << 10) < 10 << 10, "{actual:?}");
        let deadline_ms = (window.next_deadline(now).unwrap() - now).as_millis();
        assert!(deadline_ms.abs_diff(1000) < 50, "{deadline_ms}");
        // The same rate in steps of 32 micro-batches that are taken at once.
        for _ in 0..20 {
            consume(&window, &mut now, 31, Duration::ZERO, Duration::ZERO);
            consume(&window, &mut now, 1, Duration::from_millis(3200), Duration::ZERO);
        }
        let actual = room(&window);
        assert!(actual.bytes.abs_diff(600 << 10) < 60 << 10, "{actual:?}");
        // A pause of ten minutes is one observation.
        consume(&window, &mut now, 1, Duration::from_secs(600), Duration::ZERO);
        assert!(room(&window).bytes > 500 << 10);
        // A fast consumer: the whole budget.
        consume(&window, &mut now, 1_000_000, Duration::from_micros(50), Duration::ZERO);
        assert_eq!(room(&window).bytes, 512 << 20);
        // A slow consumer: two batches.
        consume(&window, &mut now, 200, Duration::from_secs(600), Duration::ZERO);
        assert_eq!(room(&window).bytes, 2 << 10);
    }

    #[test]
    fn wait_for_room_ends_with_room_or_at_close() {
        let window = PrefetchWindow::new(WindowLimits { bytes: 100, ..BOUNDS });
        window.planned(1, 100);
        assert!(window.wait_for_room(0).is_some(), "at least two batches");
        window.planned(1, 100);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| window.wait_for_room(0));
            window.done(1, 100);
            assert_eq!(
                waiting.join().unwrap(),
                Some(WindowBudget { bytes: 200, batch_bytes: 100, together: 0 })
            );
            window.planned(1, 100);
            let waiting = scope.spawn(|| window.wait_for_room(0));
            window.close();
            assert_eq!(waiting.join().unwrap(), None);
        });
    }

    #[test]
    fn batches_read_together_take_at_most_half_of_the_budget() {
        let window = PrefetchWindow::new(WindowLimits { bytes: 1000, ..BOUNDS });
        window.planned(1, 100);
        window.planned(2, 200);
        assert_eq!(window.wait_for_room(4).unwrap().together, 4);
        assert_eq!(window.wait_for_room(1 << 60).unwrap().together, 5);
        window.planned(4, 400);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| window.wait_for_room(4));
            window.done(1, 100);
            assert_eq!(waiting.join().unwrap().unwrap().together, 4);
        });
    }
}
