//! Samples one token of a distribution.

use std::cmp::Ordering;

/// How to choose. The order is the usual one: temperature, then top-k, then top-p of the remaining
/// tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this. 0 takes the likeliest token always.
    pub temperature: f64,
    /// Only this many of the likeliest tokens are candidates; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens that together have this probability are candidates; 1 for all.
    pub top_p: f64,
}

impl Sampling {
    /// The token that the random number `uniform`, in [0, 1), chooses, but never `barred`. Of equal
    /// logits the lower token comes first; NaN is never chosen.
    ///
    /// # Panics
    /// If there is no logit.
    #[must_use]
    pub fn choose(&self, logits: &[f32], barred: Option<u32>, uniform: f64) -> u32 {
        let candidates = self.candidates(logits, barred);
        let mut left = uniform;
        for (token, probability) in &candidates {
            left -= probability;
            if left < 0.0 {
                return *token;
            }
        }
        // Rounding may leave a rest; it belongs to the last candidate.
        candidates[candidates.len() - 1].0
    }

    /// The tokens to choose from, the likeliest first, and their probabilities. At least one; of
    /// equals at the edge of `top_k` those with the lower numbers, so that never more than `top_k`
    /// are left.
    ///
    /// # Panics
    /// If there is no logit.
    #[must_use]
    pub fn candidates(&self, logits: &[f32], barred: Option<u32>) -> Vec<(u32, f64)> {
        let mut order: Vec<u32> = (0..logits.len() as u32).collect(); // fits: a vocabulary
        let value = |token: &u32| match logits[*token as usize] {
            _ if barred == Some(*token) => f32::NEG_INFINITY,
            logit if logit.is_nan() => f32::NEG_INFINITY,
            logit => logit,
        };
        let falling = |a: &u32, b: &u32| match value(b).total_cmp(&value(a)) {
            Ordering::Equal => a.cmp(b),
            other => other,
        };
        if self.temperature == 0.0 {
            let likeliest = order.iter().min_by(|a, b| falling(a, b));
            return vec![(*likeliest.expect("a vocabulary has tokens"), 1.0)];
        }
        if 0 < self.top_k && self.top_k < order.len() {
            order.select_nth_unstable_by(self.top_k - 1, falling);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(falling);

        let peak = f64::from(value(&order[0]));
        let weight = |token: &u32| ((f64::from(value(token)) - peak) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let mut total: f64 = weights.iter().sum();
        if self.top_p < 1.0 {
            let mut sum = 0.0;
            let enough = weights.iter().position(|weight| {
                sum += weight;
                sum >= self.top_p * total
            });
            weights.truncate(enough.map_or(weights.len(), |last| last + 1));
            total = weights.iter().sum();
        }
        order.into_iter().zip(weights.into_iter().map(|weight| weight / total)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often each of four tokens comes up along evenly spaced random numbers.
    fn shares(sampling: Sampling, logits: &[f32]) -> [f64; 4] {
        let mut counts = [0.0; 4];
        for i in 0..1000 {
            counts[sampling.choose(logits, None, f64::from(i) / 1000.0) as usize] += 0.001;
        }
        counts
    }

    #[test]
    fn chooses_by_probability() {
        let logits = [0.1_f32.ln(), 0.4_f32.ln(), 0.2_f32.ln(), 0.3_f32.ln()];
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0 };
        for (sampling, expected) in [
            (all, [0.1, 0.4, 0.2, 0.3]),
            (Sampling { temperature: 0.0, ..all }, [0.0, 1.0, 0.0, 0.0]),
            (Sampling { top_k: 1, ..all }, [0.0, 1.0, 0.0, 0.0]),
            (Sampling { top_k: 2, ..all }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]),
            (Sampling { top_k: 9, ..all }, [0.1, 0.4, 0.2, 0.3]),
            (Sampling { top_p: 0.5, ..all }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]),
            (Sampling { top_p: 0.0, ..all }, [0.0, 1.0, 0.0, 0.0]),
            // Squares: 1, 16, 4, 9.
            (Sampling { temperature: 0.5, ..all }, [1.0, 16.0, 4.0, 9.0].map(|s| s / 30.0)),
        ] {
            let found = shares(sampling, &logits);
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 2e-3, "{sampling:?}: found {found:?}");
            }
        }
    }

    #[test]
    fn equal_barred_and_broken_logits_have_an_order() {
        let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0 };
        assert_eq!(greedy.choose(&[1.0, 3.0, 3.0], None, 0.9), 1);
        assert_eq!(greedy.choose(&[1.0, 3.0, 3.0], Some(1), 0.9), 2);
        assert_eq!(greedy.choose(&[f32::NAN, 1.0], None, 0.9), 1);
        let even = Sampling { temperature: 1.0, ..greedy };
        assert_eq!(even.choose(&[f32::NAN, 1.0], None, 0.0), 1);
        assert_eq!(even.choose(&[5.0, 1.0], Some(0), 0.0), 1);
    }
}
