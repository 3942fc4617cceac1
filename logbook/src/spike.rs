use std::collections::VecDeque;

use recipe::config::SpikeConfig;

/// Losses needed to distinguish a spike from a bad start.
const LOSSES_MIN: usize = 10;

/// Detects when the loss rises above its recent mean. It starts from scratch in each process; the
/// result depends only on the losses, so every rank that has them finds the same.
#[derive(Debug)]
pub struct LossSpikeDetector {
    rise: f64,
    window: usize,
    losses: VecDeque<f64>,
    is_high: bool,
}

impl LossSpikeDetector {
    /// Without losses.
    #[must_use]
    pub fn new(config: &SpikeConfig) -> Self {
        let window = config.window as usize; // fits: the config bounds it
        LossSpikeDetector { rise: config.rise, window, losses: VecDeque::new(), is_high: false }
    }

    /// Adds the loss of a step. Returns the mean of the losses before it, if this loss exceeds the
    /// mean by more than the allowed rise and the previous one did not.
    pub fn see(&mut self, loss: f64) -> Option<f64> {
        let count = self.losses.len();
        let mean = self.losses.iter().sum::<f64>() / count.max(1) as f64;
        let was_high = self.is_high;
        self.is_high = count >= LOSSES_MIN.min(self.window) && loss > mean + self.rise;
        if count == self.window {
            self.losses.pop_front();
        }
        self.losses.push_back(loss);
        (self.is_high && !was_high).then_some(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use recipe::config::OnSpike;

    #[test]
    fn spike_is_reported_once() {
        let config = SpikeConfig { action: OnSpike::Warn, rise: 1.0, window: 4 };
        let mut detector = LossSpikeDetector::new(&config);
        let losses = [9.0, 8.0, 7.0, 6.0, 5.0, 6.9, 7.6, 9.9, 9.9, 6.0, 5.0, 5.0, 5.0, 5.0, 6.1];
        let seen: Vec<Option<f64>> = losses.iter().map(|loss| detector.see(*loss)).collect();
        // 7.6 is above (7 + 6 + 5 + 6.9) / 4 = 6.225 by more than one; 9.9 continues the spike.
        let at: Vec<usize> = (0..seen.len()).filter(|at| seen[*at].is_some()).collect();
        assert_eq!(at, [6, 14]);
        assert!((seen[6].unwrap() - 6.225).abs() < 1e-12);
        let mut early = LossSpikeDetector::new(&SpikeConfig { window: 100, ..config });
        assert!([1.0, 1.0, 50.0].into_iter().all(|loss| early.see(loss).is_none()));
    }
}
