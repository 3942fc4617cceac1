//! A histogram of durations. Those of several threads and processes are merged by adding their
//! counts, never by averaging percentiles.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// 64 buckets for each power of two: a value read back is at most 1.6 % too long.
const PER_DOUBLING_BITS: u32 = 6;
const PER_DOUBLING: u64 = 1 << PER_DOUBLING_BITS;

/// The last bucket begins at 2^43 ns, 2.4 hours.
const BUCKETS: usize = (PER_DOUBLING as usize) * (44 - PER_DOUBLING_BITS as usize);

/// Counts of durations, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Sparse", into = "Sparse")]
pub struct Histogram {
    counts: Vec<u64>,
    longest_ns: u64,
}

/// The form that processes exchange: most counts are 0 and omitted.
#[derive(Serialize, Deserialize)]
struct Sparse {
    longest_ns: u64,
    counts: Vec<(usize, u64)>,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: vec![0; BUCKETS], longest_ns: 0 }
    }
}

impl Histogram {
    /// Counts one duration.
    pub fn add(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(ns)] += 1;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// Adds the counts of another histogram.
    pub fn join(&mut self, other: &Histogram) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.longest_ns = self.longest_ns.max(other.longest_ns);
    }

    /// How many durations were counted.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The quantile `share`, in milliseconds; 0 if there are no durations.
    #[must_use]
    pub fn quantile_ms(&self, share: f64) -> f64 {
        let wanted = (self.count() as f64 * share).ceil().max(1.0);
        self.steps().find(|(_, seen)| *seen as f64 >= wanted).map_or(0.0, |(ms, _)| ms)
    }

    /// The longest, in milliseconds.
    #[must_use]
    pub fn max_ms(&self) -> f64 {
        self.longest_ns as f64 / 1e6
    }

    /// The cumulative distribution: milliseconds, and the share of durations up to them.
    #[must_use]
    pub fn distribution(&self) -> Vec<(f64, f64)> {
        let total = self.count() as f64;
        self.steps().map(|(ms, seen)| (ms, seen as f64 / total)).collect()
    }

    /// The end of each bucket in use, in milliseconds, and the count up to there.
    fn steps(&self) -> impl Iterator<Item = (f64, u64)> {
        let used = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        used.scan(0, |seen, (nth, count)| {
            *seen += count;
            Some((end_ns(nth).min(self.longest_ns) as f64 / 1e6, *seen))
        })
    }
}

impl From<Sparse> for Histogram {
    fn from(sparse: Sparse) -> Self {
        let mut histogram = Histogram { longest_ns: sparse.longest_ns, ..Histogram::default() };
        for (nth, count) in sparse.counts {
            // A process of another version may send a larger index.
            histogram.counts[nth.min(BUCKETS - 1)] += count;
        }
        histogram
    }
}

impl From<Histogram> for Sparse {
    fn from(histogram: Histogram) -> Self {
        let counts = histogram.counts.iter().copied().enumerate().filter(|(_, count)| *count > 0);
        Sparse { longest_ns: histogram.longest_ns, counts: counts.collect() }
    }
}

/// Below 64 each value has its own bucket; above, the six bits after the leading one select it.
fn bucket(ns: u64) -> usize {
    let nth = if ns < PER_DOUBLING {
        ns
    } else {
        let shift = ns.ilog2() - PER_DOUBLING_BITS;
        u64::from(shift) * PER_DOUBLING + (ns >> shift)
    };
    usize::try_from(nth).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The longest duration in a bucket.
fn end_ns(nth: usize) -> u64 {
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
    fn durations_fall_into_their_bucket() {
        for ns in (0..9000).chain([1 << 20, (1 << 30) + 1, (1 << 43) - 1]) {
            let nth = bucket(ns);
            assert!(ns <= end_ns(nth), "{ns} is beyond the end of its bucket");
            assert!(nth == 0 || ns > end_ns(nth - 1), "{ns} is of an earlier bucket");
            assert!(end_ns(nth) as f64 <= ns as f64 * 1.016 + 1.0, "{ns} is read back too long");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn join_equals_counting_together() {
        let mut all = Histogram::default();
        let mut halves = [Histogram::default(), Histogram::default()];
        for us in 1..=1000 {
            let took = Duration::from_micros(us);
            all.add(took);
            halves[(us % 2) as usize].add(took);
        }
        let [mut joined, other] = halves;
        joined.join(&other);
        assert_eq!(joined, all);
        let near = |found: f64, expected: f64| (found - expected).abs() <= expected * 0.016;
        assert!(near(all.quantile_ms(0.5), 0.5) && near(all.quantile_ms(0.99), 0.99));
        assert_eq!((all.quantile_ms(1.0), all.max_ms()), (1.0, 1.0));
        assert_eq!(Histogram::default().quantile_ms(0.5), 0.0);
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Histogram>(&text).unwrap(), all);
    }
}
