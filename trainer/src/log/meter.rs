use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use super::Perf;
use crate::Result;
use crate::config::{Config, Dtype};
use crate::plan::{Known, Plan};

/// Where the time since the last record went.
#[derive(Debug)]
pub(crate) struct Meter {
    /// Time of steps, waiting for data included.
    pub(crate) work: Duration,
    pub(crate) data_wait: Duration,
    /// Time that saving held up.
    pub(crate) stall: Duration,
    pub(crate) steps: u64,
    pub(crate) tokens: u64,
    begun: Instant,
    ranks: u64,
    /// Operations of a token by both formulas, over those that all ranks could do in a second.
    of_peak: [f64; 2],
}

impl Meter {
    /// For a resolved config on so many ranks, each of which could do so many operations a second.
    pub(crate) fn new(config: &Config, ranks: u64, peak_flop_per_s: f64) -> Self {
        let flop = Plan::new(config, &Known::default()).flop;
        let peak = peak_flop_per_s * ranks as f64;
        let zero = Duration::ZERO;
        Meter {
            work: zero,
            data_wait: zero,
            stall: zero,
            steps: 0,
            tokens: 0,
            begun: Instant::now(),
            ranks,
            of_peak: [flop.per_token_6n_12lhs, flop.per_token_6n_6lhs].map(|f| f as f64 / peak),
        }
    }

    /// The means since the last call.
    pub(crate) fn take(&mut self) -> Perf {
        let steps = self.steps.max(1) as f64;
        let mean_ms = |time: Duration| time.as_secs_f64() * 1e3 / steps;
        let tokens_per_s = self.tokens as f64 / self.work.as_secs_f64().max(1e-9);
        let [mfu_12lct, mfu_6lct] = self.of_peak.map(|part| part * tokens_per_s);
        let perf = Perf {
            tokens_per_s,
            step_ms: mean_ms(self.work + self.stall),
            data_wait_ms: mean_ms(self.data_wait),
            ckpt_stall_ms: mean_ms(self.stall),
            elapsed_s: self.begun.elapsed().as_secs_f64(),
            ranks: self.ranks,
            mfu_12lct,
            mfu_6lct,
        };
        (self.work, self.data_wait, self.stall) = Default::default();
        (self.steps, self.tokens) = (0, 0);
        perf
    }
}

/// What a rank could do in a second: as the config says, or as its libtorch multiplies two large
/// matrices, the best of as many times as fit into a tenth of a second, and two at least.
pub(crate) fn peak_flop_per_s(config: &Config, device: Device) -> Result<f64> {
    if let Some(given) = config.log.peak_flop_per_s {
        return Ok(given);
    }
    let kind = match config.precision.dtype {
        Dtype::Fp32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::Fp16 => Kind::Half,
    };
    // On a GPU that has to be seen to take time at all.
    let n: i64 = if device.is_cuda() { 8192 } else { 768 };
    let _no_grad = tch::no_grad_guard();
    let matrix = Tensor::f_ones([n, n], (kind, device))?;
    let (begun, mut best_s) = (Instant::now(), f64::INFINITY);
    for round in 0.. {
        let round_begun = Instant::now();
        // Reading a number waits for the device.
        _ = matrix.f_mm(&matrix)?.f_double_value(&[0, 0])?;
        best_s = best_s.min(round_begun.elapsed().as_secs_f64());
        if round > 0 && begun.elapsed() > Duration::from_millis(100) {
            break;
        }
    }
    Ok(2.0 * (n as f64).powi(3) / best_s)
}
