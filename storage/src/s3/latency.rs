//! Tracks latencies by request size, to decide which request is late.
//!
//! A late request is hedged on a new connection, because the slowest hundredth of requests is slow
//! for reasons that do not affect the next one: a front end, a disk, a lost packet. When all
//! requests are slow a hedge only adds load, so then there is none, and never for more than one
//! request in twenty.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// No request is late before this.
const LATE_MIN: Duration = Duration::from_millis(200);

/// With fewer samples of a size, its latency is unknown.
const SEEN_MIN: u32 = 16;

/// One hedge for so many requests.
const REQUESTS_PER_HEDGE: u32 = 20;

/// Limit of the budget: otherwise 20 pauses of a second in a row would end in a burst of hedges.
const BUDGET_MAX: u32 = 5 * REQUESTS_PER_HEDGE;

/// Sizes by powers of two, from 4 KiB and below to 128 MiB and above.
const CLASSES: usize = 16;

/// The measured latencies, and the rest of the hedge budget.
#[derive(Debug)]
pub(crate) struct LatencyTracker(Mutex<LatencyState>);

#[derive(Debug)]
struct LatencyState {
    classes: [Class; CLASSES],
    budget: u32,
}

#[derive(Clone, Copy, Debug)]
struct Class {
    /// The last hundreds: the current latency.
    recent: Times,
    /// The last thousands: the long-term latency.
    usual: Times,
}

impl LatencyTracker {
    pub(crate) fn new() -> Self {
        let class = Class { recent: Times::new(64), usual: Times::new(4096) };
        LatencyTracker(Mutex::new(LatencyState { classes: [class; CLASSES], budget: 0 }))
    }

    fn state(&self) -> MutexGuard<'_, LatencyState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the time of a request of `len` bytes.
    pub(crate) fn record(&self, len: usize, time: Duration) {
        let mut state = self.state();
        state.budget = (state.budget + 1).min(BUDGET_MAX);
        let class = &mut state.classes[class_of(len)];
        class.recent.add(time);
        class.usual.add(time);
    }

    /// When a request of `len` bytes is late, counted from its start; `None` if unknown, or if all
    /// are late.
    pub(crate) fn late_after(&self, len: usize, slack: Option<Duration>) -> Option<Duration> {
        let class = self.state().classes[class_of(len)];
        if class.usual.seen < SEEN_MIN {
            return None;
        }
        let slow_for_all = class.recent.at(500) > class.usual.at(500).saturating_mul(2);
        let late = class.usual.at(950).max(LATE_MIN);
        // If less time remains than two slow requests take, waiting for the first is too risky.
        let hurry = slack.map(|slack| slack.saturating_sub(class.usual.at(990).saturating_mul(2)));
        (!slow_for_all).then(|| hurry.map_or(late, |hurry| hurry.clamp(LATE_MIN / 4, late)))
    }

    /// Takes a hedge out of the budget; false if the budget is too small.
    pub(crate) fn may_hedge(&self) -> bool {
        let mut state = self.state();
        let has_budget = state.budget >= REQUESTS_PER_HEDGE;
        state.budget -= if has_budget { REQUESTS_PER_HEDGE } else { 0 };
        has_budget
    }
}

fn class_of(len: usize) -> usize {
    let log = len.max(1).next_power_of_two().trailing_zeros() as usize; // fits: at most 64
    log.saturating_sub(12).min(CLASSES - 1)
}

/// A histogram of times that decays: when it is full, all counts are halved.
#[derive(Clone, Copy, Debug)]
struct Times {
    counts: [u32; BUCKETS],
    seen: u32,
    full: u32,
}

/// Four for each doubling, from 0.25 ms to a minute: a quantile is at most 19 % too large.
const BUCKETS: usize = 72;

impl Times {
    fn new(full: u32) -> Self {
        Times { counts: [0; BUCKETS], seen: 0, full }
    }

    fn add(&mut self, time: Duration) {
        let quarters = (time.as_secs_f64() * 4000.0).max(1.0).log2() * 4.0;
        self.counts[(quarters.ceil() as usize).min(BUCKETS - 1)] += 1; // fits: below 200
        self.seen += 1;
        if self.seen == self.full {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.seen = self.counts.iter().sum();
        }
    }

    /// The time within which this many in a thousand completed.
    fn at(&self, per_mille: u32) -> Duration {
        let rank = (self.seen * per_mille).div_ceil(1000);
        let mut sum = 0;
        let bucket = self.counts.iter().position(|count| {
            sum += count;
            sum >= rank
        });
        let quarters = bucket.unwrap_or(BUCKETS - 1) as f64;
        Duration::from_secs_f64((quarters / 4.0).exp2() / 4000.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn quantiles_are_at_most_a_fifth_too_large() {
        let mut times = Times::new(4096);
        (1..=1000).for_each(|i| times.add(MS * i));
        for (per_mille, expected) in [(500, 500), (950, 950), (990, 990)] {
            let at = times.at(per_mille);
            let ratio = at.as_secs_f64() / (MS * expected).as_secs_f64();
            assert!((1.0..1.2).contains(&ratio), "{per_mille}: {at:?}");
        }
    }

    #[test]
    fn a_request_is_late_past_the_95th_percentile_of_its_size() {
        let tracker = LatencyTracker::new();
        assert_eq!(tracker.late_after(1 << 20, None), None, "no latency is recorded yet");
        (0..100).for_each(|_| tracker.record(1 << 20, MS * 400));
        let late = tracker.late_after(1 << 20, None).unwrap();
        assert!((MS * 400..MS * 480).contains(&late), "{late:?}");
        assert_eq!(tracker.late_after(1 << 13, None), None, "sizes are tracked separately");
        (0..100).for_each(|_| tracker.record(1 << 13, MS));
        assert_eq!(tracker.late_after(1 << 13, None), Some(LATE_MIN));
        assert!(tracker.late_after(1 << 20, Some(MS * 900)).unwrap() < MS * 400, "in a hurry");
    }

    #[test]
    fn no_hedges_when_everything_is_slow() {
        let tracker = LatencyTracker::new();
        (0..1000).for_each(|_| tracker.record(1 << 20, MS * 10));
        assert!(tracker.late_after(1 << 20, None).is_some());
        (0..60).for_each(|_| tracker.record(1 << 20, MS * 100));
        assert_eq!(tracker.late_after(1 << 20, None), None);
    }

    #[test]
    fn one_hedge_for_twenty_requests() {
        let tracker = LatencyTracker::new();
        assert!(!tracker.may_hedge());
        let hedges = (0..1000).filter(|_| {
            tracker.record(1, MS);
            tracker.may_hedge()
        });
        assert_eq!(hedges.count(), 50);
        (0..1000).for_each(|_| tracker.record(1, MS));
        assert_eq!((0..100).filter(|_| tracker.may_hedge()).count(), 5, "saved up");
    }
}
