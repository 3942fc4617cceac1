//! The numbers that a run computes with, and how fast.

use std::time::{Duration, Instant};

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::config::{Config, Dtype};

/// libtorch's name of them.
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

/// What a rank could do in a second: as the config says, or as its libtorch multiplies two large
/// matrices, the best of as many times as fit into a tenth of a second, and two at least.
pub(crate) fn peak_flop_per_s(config: &Config, device: Device) -> Result<f64> {
    if let Some(given) = config.log.peak_flop_per_s {
        return Ok(given);
    }
    // On a GPU that has to be seen to take time at all.
    let n: i64 = if device.is_cuda() { 8192 } else { 768 };
    let _no_grad = tch::no_grad_guard();
    let matrix = Tensor::f_ones([n, n], (kind(config.precision.dtype), device))?;
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
