//! The dtype of a run's computation, and its peak rate.

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::config::{Config, Dtype};

/// libtorch's name of a dtype.
pub(crate) fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Fp32 => Kind::Float,
        Dtype::Bf16 => Kind::BFloat16,
        Dtype::Fp16 => Kind::Half,
    }
}

/// The kind that softmax, losses and sums of gradients have in a network of `kind`: f32 at least.
/// A network of f64, as tests compute one, is f64 throughout.
pub(crate) fn at_least_f32(kind: Kind) -> Kind {
    if kind == Kind::Double { kind } else { Kind::Float }
}

/// The peak rate of a rank: that of the config, or the rate at which its libtorch multiplies two
/// large matrices, the best of as many products as fit into a tenth of a second, and two at least.
pub(crate) fn peak_flop_per_s(config: &Config, device: Device) -> Result<f64> {
    if let Some(given) = config.log.peak_flop_per_s {
        return Ok(given);
    }
    // On a GPU a smaller product is too short to measure.
    let n: i64 = if device.is_cuda() { 8192 } else { 768 };
    let _no_grad = tch::no_grad_guard();
    let matrix = Tensor::f_ones([n, n], (kind(config.precision.dtype), device))?;
    let (started, mut best_s) = (Instant::now(), f64::INFINITY);
    for round in 0.. {
        let round_started = Instant::now();
        // Reading a number waits for the device.
        _ = matrix.f_mm(&matrix)?.f_double_value(&[0, 0])?;
        best_s = best_s.min(round_started.elapsed().as_secs_f64());
        if round > 0 && started.elapsed() > Duration::from_millis(100) {
            break;
        }
    }
    Ok(2.0 * (n as f64).powi(3) / best_s)
}
