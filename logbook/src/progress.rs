use std::time::Duration;

use recipe::text::{thousands, time_text};

use crate::{EvalRecord, StepRecord};

/// The progress lines on the terminal.
///
/// ```text
/// step 120/800 | loss 5.1234 | lr 3.000e-4 | gnorm 1.02 | 5,321 tok/s | mfu(6N+12LCT) 41.3% \
///     | data wait 0.3% | comm wait 4.1% | eta 1m12s
/// ```
///
/// Each step has its own line, also on a terminal, so that the history of the loss stays visible
/// and other messages keep their own lines.
#[derive(Clone, Copy, Debug)]
pub struct ProgressLog {
    step_first: u64,
    steps_total: u64,
}

impl ProgressLog {
    /// For a run that continues after `step`, to `steps_total`.
    #[must_use]
    pub fn new(step: u64, steps_total: u64) -> Self {
        ProgressLog { step_first: step, steps_total }
    }

    /// The line of a training step.
    #[must_use]
    pub fn step(&self, record: &StepRecord) -> String {
        let perf = &record.perf;
        let mut parts = vec![
            format!("step {}/{}", record.step, self.steps_total),
            format!("loss {:.4}", record.loss),
            format!("lr {:.3e}", record.lr),
            format!("gnorm {:.2}", record.grad_norm),
            format!("{} tok/s", thousands(perf.tokens_per_s)),
            format!("mfu(6N+12LCT) {:.1}%", 100.0 * perf.mfu_12lct),
        ];
        for (name, part) in [
            ("data wait", perf.data_wait_ms),
            ("comm wait", perf.comm_wait_ms.filter(|_| perf.ranks > 1)),
            ("save", perf.ckpt_stall_ms.filter(|ms| *ms > 0.0)),
        ] {
            parts.extend(part.map(|ms| format!("{name} {:.1}%", percent(ms, perf.step_ms))));
        }
        parts.extend(record.loss_scale.map(|scale| format!("scale {scale}")));
        parts.extend(self.eta(record).map(|eta| format!("eta {}", time_text(eta))));
        parts.join(" | ")
    }

    /// The line of an evaluation. Perplexity is per token of this tokenizer.
    #[must_use]
    pub fn eval(&self, record: &EvalRecord) -> String {
        format!(
            "step {}/{} | eval loss {:.4} | ppl {:.2} | {} tokens in {:.1}s",
            record.step,
            self.steps_total,
            record.eval_loss,
            record.eval_loss.exp(),
            thousands(record.eval_tokens as f64),
            record.perf.eval_ms / 1e3,
        )
    }

    /// The remaining time at the pace of this process so far, including saves and evaluations.
    fn eta(&self, record: &StepRecord) -> Option<Duration> {
        let done = record.step.checked_sub(self.step_first).filter(|done| *done > 0)?;
        let left = self.steps_total.saturating_sub(record.step);
        Duration::try_from_secs_f64(record.perf.elapsed_s / done as f64 * left as f64).ok()
    }
}

fn percent(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { 100.0 * part / whole } else { 0.0 }
}
