use std::time::{Duration, Instant};

use recipe::config::{Config, Timers};
use recipe::plan::{PlanInputs, RunPlan};

use crate::Perf;

/// Accumulates the times since the last record.
#[derive(Debug)]
pub struct Meter {
    /// Time of steps, including waits for data.
    pub work: Duration,
    /// Waits for data.
    pub data_wait: Duration,
    /// Time blocked by saving.
    pub stall: Duration,
    /// Waits for other ranks, within steps.
    pub comm_wait: Duration,
    /// Steps.
    pub steps: u64,
    /// Their tokens.
    pub tokens: u64,
    started: Instant,
    ranks: u64,
    /// Whether the phases of a step are reported.
    by_phase: bool,
    /// FLOPs of a token by both formulas, divided by the peak FLOP/s of all ranks.
    of_peak: [f64; 2],
}

impl Meter {
    /// For a resolved config on `ranks` ranks with the given peak FLOP/s each.
    #[must_use]
    pub fn new(config: &Config, ranks: u64, peak_flop_per_s: f64) -> Self {
        let flop = RunPlan::new(config, &PlanInputs::default()).flop;
        let peak = peak_flop_per_s * ranks as f64;
        let zero = Duration::ZERO;
        Meter {
            work: zero,
            data_wait: zero,
            stall: zero,
            comm_wait: zero,
            steps: 0,
            tokens: 0,
            started: Instant::now(),
            ranks,
            by_phase: config.log.timers != Timers::Off,
            of_peak: [flop.per_token_6n_12lhs, flop.per_token_6n_6lhs].map(|f| f as f64 / peak),
        }
    }

    /// The means since the last call.
    pub fn take(&mut self) -> Perf {
        let steps = self.steps.max(1) as f64;
        let mean_ms = |time: Duration| time.as_secs_f64() * 1e3 / steps;
        let phase_ms = |time: Duration| self.by_phase.then(|| mean_ms(time));
        let tokens_per_s = self.tokens as f64 / self.work.as_secs_f64().max(1e-9);
        let [mfu_12lct, mfu_6lct] = self.of_peak.map(|part| part * tokens_per_s);
        let perf = Perf {
            tokens_per_s,
            step_ms: mean_ms(self.work + self.stall),
            data_wait_ms: phase_ms(self.data_wait),
            ckpt_stall_ms: phase_ms(self.stall),
            comm_wait_ms: phase_ms(self.comm_wait),
            elapsed_s: self.started.elapsed().as_secs_f64(),
            ranks: self.ranks,
            mfu_12lct,
            mfu_6lct,
        };
        (self.work, self.data_wait, self.stall, self.comm_wait) = Default::default();
        (self.steps, self.tokens) = (0, 0);
        perf
    }
}
