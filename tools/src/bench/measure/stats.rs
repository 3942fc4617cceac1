//! Statistics of a few noisy measurements.
//!
//! Targets are measured in turn, so that drift (a device that warms up, a neighbour) affects both
//! numbers of a round and not their ratio. The result is the median of the ratios of all rounds.
//! Its interval is the percentile bootstrap's: with five numbers it spans nearly all of them, so
//! two equal targets would differ once in sixteen times. Two more conditions must therefore hold:
//! Student's 98 % interval of the mean of the logarithms excludes 0, and the difference is large
//! enough to act upon.

use serde::Serialize;

use crate::bench::random::Random;

/// Smaller differences are not reported, whatever the noise: 3 % is no reason to move a corpus.
pub const MARGIN: f64 = 0.03;

/// With fewer rounds no difference is significant.
pub const ROUNDS_MIN: usize = 5;

/// Bootstrap medians of an interval. More would move its ends by less than a rank.
const DRAWS: usize = 4000;

/// A median, and its 95 % bootstrap interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// The median.
    pub median: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
}

/// One target compared with another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RatioEstimate {
    /// The median of the ratios of all rounds, the first target divided by the second.
    pub ratio: f64,
    /// The lower end of its interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// Whether the two differ by more than chance and more than [`MARGIN`].
    pub significant: bool,
}

/// The middle of the values, or the mean of the two in the middle; 0 if there are none.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n => f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]),
    }
}

impl Estimate {
    /// Estimates the median of `values`. The same seed gives the same interval.
    #[must_use]
    pub fn of(values: &[f64], seed: u64) -> Self {
        let Some(last) = values.len().checked_sub(1) else { return Estimate::default() };
        let mut random = Random::new(seed);
        let mut drawn = vec![0.0; values.len()];
        let mut medians = Vec::with_capacity(DRAWS);
        for _ in 0..DRAWS {
            // fits: an index
            drawn.fill_with(|| values[random.below(last as u64 + 1) as usize]);
            medians.push(median(&drawn));
        }
        medians.sort_by(f64::total_cmp);
        let at = |share: f64| medians[(share * (DRAWS - 1) as f64).round() as usize];
        Estimate { median: median(values), low: at(0.025), high: at(0.975) }
    }
}

impl RatioEstimate {
    /// Compares two targets round by round; `None` if there is no round or a value is not above 0.
    #[must_use]
    pub fn of(first: &[f64], second: &[f64], seed: u64) -> Option<Self> {
        let pairs = first.iter().zip(second);
        let is_good = |value: &f64| value.is_finite() && *value > 0.0;
        if first.is_empty() || !first.iter().chain(second).all(is_good) {
            return None;
        }
        let logs: Vec<f64> = pairs.map(|(a, b)| (a / b).ln()).collect();
        let Estimate { median, low, high } = Estimate::of(&logs, seed);
        let is_beyond_chance = (low > 0.0 || high < 0.0) && mean_is_off(&logs);
        let is_worth_it = median.abs() >= (1.0 + MARGIN).ln();
        let significant = logs.len() >= ROUNDS_MIN && is_beyond_chance && is_worth_it;
        Some(RatioEstimate { ratio: median.exp(), low: low.exp(), high: high.exp(), significant })
    }
}

/// Whether Student's interval of the mean excludes 0.
fn mean_is_off(values: &[f64]) -> bool {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let error = (squares / (count - 1.0).max(1.0) / count).sqrt();
    mean.abs() > student_98(values.len() - 1) * error
}

/// The quantile of Student's distribution for a 98 % interval, by degrees of freedom.
fn student_98(freedom: usize) -> f64 {
    const KNOWN: [f64; 11] =
        [f64::INFINITY, 31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764];
    // Beyond the table, the quantile of the next smaller entry is slightly conservative.
    const BEYOND: [(usize, f64); 3] = [(30, 2.457), (20, 2.528), (10, 2.764)];
    let beyond = || BEYOND.iter().find(|(least, _)| freedom >= *least).map(|(_, at)| *at);
    KNOWN.get(freedom).copied().or_else(beyond).unwrap_or(f64::INFINITY)
}
