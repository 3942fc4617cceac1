//! A histogram of durations, lock-free and of fixed size.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Sixteen counts for each doubling: a quantile is at most 6 % too long.
const PER_DOUBLING: u64 = 16;
const PER_DOUBLING_BITS: u32 = PER_DOUBLING.trailing_zeros();

/// The last bucket starts at 2^36 us, 19 hours.
const BUCKETS: usize = (PER_DOUBLING as usize) * (37 - PER_DOUBLING_BITS as usize);

/// A histogram of durations in microseconds.
#[derive(Debug)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BUCKETS],
    longest_us: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: [const { AtomicU64::new(0) }; BUCKETS], longest_us: AtomicU64::new(0) }
    }
}

impl Histogram {
    pub(crate) fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.counts[bucket(us)].fetch_add(1, Relaxed);
        self.longest_us.fetch_max(us, Relaxed);
    }

    /// The quantile of `share`, in microseconds. 0 if there are no durations.
    pub(crate) fn quantile_us(&self, share: f64) -> u64 {
        let counts = || self.counts.iter().map(|count| count.load(Relaxed));
        let total: u64 = counts().sum();
        let wanted = (total as f64 * share).ceil().max(1.0) as u64; // fits: at most the total
        let mut seen = 0;
        for (nth, count) in counts().enumerate() {
            seen += count;
            if seen >= wanted {
                return end_us(nth).min(self.max_us());
            }
        }
        0
    }

    pub(crate) fn max_us(&self) -> u64 {
        self.longest_us.load(Relaxed)
    }
}

/// Below sixteen each value has its own bucket; above, the four bits after the first one count.
fn bucket(us: u64) -> usize {
    let nth = if us < PER_DOUBLING {
        us
    } else {
        let shift = us.ilog2() - PER_DOUBLING_BITS;
        u64::from(shift) * PER_DOUBLING + (us >> shift)
    };
    usize::try_from(nth).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The longest time that a bucket counts.
fn end_us(nth: usize) -> u64 {
    let nth = nth as u64;
    if nth < 2 * PER_DOUBLING {
        return nth;
    }
    let shift = nth / PER_DOUBLING - 1;
    ((nth % PER_DOUBLING + PER_DOUBLING + 1) << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_in_the_right_bucket() {
        for us in (0..5000).chain([1 << 20, (1 << 36) - 1]) {
            let nth = bucket(us);
            assert!(us <= end_us(nth), "{us} is beyond the end of its bucket");
            assert!(nth == 0 || us > end_us(nth - 1), "{us} belongs to an earlier bucket");
            assert!(
                end_us(nth) as f64 <= us as f64 * 1.0625 + 1.0,
                "the bucket of {us} ends too late"
            );
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_durations() {
        let histogram = Histogram::default();
        assert_eq!((histogram.quantile_us(0.5), histogram.max_us()), (0, 0));
        (1..=1000).for_each(|us| histogram.add(Duration::from_micros(us)));
        let is_near =
            |found: u64, expected: f64| (found as f64 - expected).abs() <= expected * 0.0625;
        assert!(is_near(histogram.quantile_us(0.5), 500.0), "{}", histogram.quantile_us(0.5));
        assert!(is_near(histogram.quantile_us(0.99), 990.0), "{}", histogram.quantile_us(0.99));
        assert_eq!((histogram.quantile_us(1.0), histogram.max_us()), (1000, 1000));
    }
}
