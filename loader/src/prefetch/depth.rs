//! Tunes the queue depth of one store at run time.

use std::time::{Duration, Instant};

/// A trial lasts this long, as long as its slowest request and [`TRIAL_REQUESTS`] requests,
/// whichever ends last: with late requests, the throughput of a shorter trial depends on whether
/// one of them happens to complete in it.
const TRIAL: Duration = Duration::from_millis(50);
const TRIAL_REQUESTS: u64 = 128;

/// The longest trial.
const TRIAL_MAX: Duration = Duration::from_secs(2);

/// The gain for which a doubled depth is retained: below it only latency grows.
const GAIN: f64 = 1.05;

/// After this many trials a depth that did not pay is tried again: the load on a shared store
/// changes. The first pause is short, because other load may have hidden the gain, and doubles with
/// each failure.
const PAUSE_TRIALS_MIN: u32 = 8;
const PAUSE_TRIALS_MAX: u32 = 100;

/// A request is late after this multiple of the median, and after at least [`LATE_AT_LEAST`]. If
/// all become slow together, the median follows, and none is late.
const LATE_TIMES: f64 = 16.0;
const LATE_AT_LEAST: Duration = Duration::from_millis(20);

/// How far each request moves the median estimate towards its own time: steps of one size find the
/// median, however long the late ones take.
const MEDIAN_STEP: f64 = 1.05;

/// The queue depth of one store: doubled while that raises the throughput, halved when requests
/// fail, and then raised by one per trial.
#[derive(Debug)]
pub(crate) struct Depth {
    depth: usize,
    max: usize,
    /// The previous depth and its throughput, while the next is on trial.
    before: Option<(usize, f64)>,
    /// Trials until the next depth is tried.
    trials_left: u32,
    pause_trials: u32,
    recovering: bool,
    since: Instant,
    bytes: u64,
    requests: u64,
    slowest: Duration,
    saturated: bool,
    /// The estimated median time of a request, in seconds.
    median_s: Option<f64>,
}

impl Depth {
    /// `fixed` disables the tuning.
    pub(crate) fn new(start: usize, max: usize, fixed: Option<usize>, now: Instant) -> Self {
        let max = fixed.unwrap_or(max).clamp(1, max.max(1));
        let depth = fixed.unwrap_or(start).clamp(1, max);
        let trials_left = if fixed.is_some() { u32::MAX } else { 0 };
        Depth {
            depth,
            max,
            before: None,
            trials_left,
            pause_trials: PAUSE_TRIALS_MIN,
            recovering: false,
            since: now,
            bytes: 0,
            requests: 0,
            slowest: Duration::ZERO,
            saturated: true,
            median_s: None,
        }
    }

    pub(crate) fn get(&self) -> usize {
        self.depth
    }

    /// Records that a request completed after `took`.
    pub(crate) fn completed(&mut self, bytes: u64, took: Duration) {
        self.bytes += bytes;
        self.requests += 1;
        self.slowest = self.slowest.max(took);
        let took = took.as_secs_f64();
        let median = self.median_s.get_or_insert(took);
        *median = if took > *median { *median * MEDIAN_STEP } else { *median / MEDIAN_STEP };
    }

    /// Age from which a request is late: it then no longer counts against the depth, because the
    /// store serves others meanwhile. None while unknown.
    pub(crate) fn late_after(&self) -> Option<Duration> {
        let after = Duration::try_from_secs_f64(self.median_s? * LATE_TIMES).ok()?;
        Some(after.max(LATE_AT_LEAST))
    }

    /// Records that there was less work than the depth allows: this trial measures nothing.
    pub(crate) fn starved(&mut self) {
        self.saturated = false;
    }

    /// Records a failed request: the depth may be too large.
    pub(crate) fn failed(&mut self) {
        if self.trials_left != u32::MAX {
            self.depth = (self.depth / 2).max(1);
            (self.before, self.recovering) = (None, true);
        }
    }

    /// Ends the trial if it has lasted long enough.
    pub(crate) fn update(&mut self, now: Instant) {
        let took = now.saturating_duration_since(self.since);
        let trial = self.slowest.clamp(TRIAL, TRIAL_MAX);
        if took < trial || self.requests < TRIAL_REQUESTS {
            return;
        }
        let rate = self.bytes as f64 / took.as_secs_f64();
        if self.saturated {
            self.adjust(rate);
        }
        (self.since, self.bytes, self.requests, self.saturated) = (now, 0, 0, true);
        self.slowest = Duration::ZERO;
    }

    fn adjust(&mut self, rate: f64) {
        if self.recovering {
            self.depth = (self.depth + 1).min(self.max);
            self.recovering = self.depth < self.max;
            return;
        }
        let before = self.before.take();
        if before.is_some_and(|(_, before)| rate >= before * GAIN) {
            self.pause_trials = PAUSE_TRIALS_MIN;
        }
        match before {
            Some((depth, before)) if rate < before * GAIN => {
                self.depth = depth;
                self.trials_left = self.pause_trials;
                self.pause_trials = (self.pause_trials * 2).min(PAUSE_TRIALS_MAX);
            }
            None if self.trials_left > 0 => {
                // A fixed depth has `u32::MAX` trials left forever.
                self.trials_left -= u32::from(self.trials_left != u32::MAX);
            }
            _ if self.depth < self.max => {
                self.before = Some((self.depth, rate));
                self.depth = (self.depth * 2).min(self.max);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that serves this many requests at once, each a millisecond long.
    fn run(depth: &mut Depth, now: &mut Instant, device: usize, trials: usize) {
        for _ in 0..trials {
            for _ in 0..100 {
                *now += Duration::from_millis(1);
                (0..depth.get().min(device))
                    .for_each(|_| depth.completed(4096, Duration::from_millis(1)));
            }
            depth.update(*now);
        }
    }

    #[test]
    fn depth_doubles_while_throughput_grows() {
        let mut now = Instant::now();
        let mut depth = Depth::new(4, 256, None, now);
        run(&mut depth, &mut now, 32, 20);
        assert_eq!(depth.get(), 32);
        // A later trial of a larger depth detects that the device has become faster.
        run(&mut depth, &mut now, 128, 110);
        assert_eq!(depth.get(), 128);
        run(&mut depth, &mut now, 4096, 300);
        assert_eq!(depth.get(), 256, "the maximum of the backend");
    }

    /// One slow trial, in which another process loads the device, does not fix the depth for long.
    #[test]
    fn depth_is_retried_soon_after_a_disturbed_trial() {
        let mut now = Instant::now();
        let mut depth = Depth::new(32, 256, None, now);
        run(&mut depth, &mut now, 4096, 1);
        assert_eq!(depth.get(), 64, "on trial");
        run(&mut depth, &mut now, 8, 1);
        assert_eq!(depth.get(), 32);
        run(&mut depth, &mut now, 4096, 12);
        assert_eq!(depth.get(), 256);
    }

    /// Of 1,000 requests 20 complete a second late and the others at once: throughput grows with
    /// the depth, but in steps of a second, so a trial of 50 ms does not show it.
    #[test]
    fn trials_last_until_late_requests_complete() {
        let mut now = Instant::now();
        let mut depth = Depth::new(32, 256, None, now);
        for _ in 0..20 {
            for _ in 0..20 {
                now += Duration::from_millis(50);
                let (late, quick) = (depth.get() / 20, depth.get() * 49 / 20);
                (0..quick).for_each(|_| depth.completed(4096, Duration::from_millis(1)));
                (0..late).for_each(|_| depth.completed(4096, Duration::from_secs(1)));
                depth.update(now);
            }
        }
        assert_eq!(depth.get(), 256);
    }

    #[test]
    fn depth_halves_on_errors_and_recovers() {
        let mut now = Instant::now();
        let mut depth = Depth::new(16, 64, None, now);
        run(&mut depth, &mut now, 1000, 10);
        assert_eq!(depth.get(), 64);
        depth.failed();
        assert_eq!(depth.get(), 32);
        run(&mut depth, &mut now, 1000, 10);
        assert_eq!(depth.get(), 42);
        (0..20).for_each(|_| depth.failed());
        assert_eq!(depth.get(), 1);
    }

    #[test]
    fn fixed_depth_and_starved_trials_leave_the_depth_unchanged() {
        let mut now = Instant::now();
        let mut fixed = Depth::new(16, 64, Some(7), now);
        fixed.failed();
        run(&mut fixed, &mut now, 1000, 200);
        assert_eq!(fixed.get(), 7);
        let mut depth = Depth::new(8, 64, None, now);
        for _ in 0..10 {
            depth.starved();
            run(&mut depth, &mut now, 1000, 1);
        }
        assert_eq!(depth.get(), 8);
    }

    #[test]
    fn late_threshold_follows_the_median() {
        let now = Instant::now();
        let mut depth = Depth::new(32, 256, None, now);
        assert_eq!(depth.late_after(), None);
        let (quick, late) = (Duration::from_millis(10), Duration::from_secs(5));
        // The first and every third after it is late.
        for nth in 0..900 {
            depth.completed(4096, if nth % 3 == 0 { late } else { quick });
        }
        let found = depth.late_after().unwrap();
        assert!((8 * quick..32 * quick).contains(&found), "{found:?}");
        (0..900).for_each(|_| depth.completed(4096, late));
        assert!(depth.late_after().unwrap() > late, "the whole store is slow");
        (0..900).for_each(|_| depth.completed(4096, Duration::from_micros(90)));
        assert_eq!(depth.late_after(), Some(LATE_AT_LEAST));
    }
}
