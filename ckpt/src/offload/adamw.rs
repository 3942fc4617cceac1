//! AdamW on memory, in the order of operations of libtorch's fused kernel.
//!
//! Every element has the same operations, each rounded once, whatever the vector width, the number
//! of threads or the parts of a parameter; so the result does not depend on these. It is bitwise
//! that of `_fused_adamw_` of libtorch 2.11 on a processor with AVX2 or AVX-512, on any number of
//! threads; without them (`ATEN_CPU_CAPABILITY=default`) libtorch uses no fused multiply-add.
//!
//! Its compiler fused multiplications and additions differently in the loop over vectors and in the
//! loop over the remainder: the squares of a parameter's last elements, beyond a multiple of eight,
//! are rounded differently. This code reproduces that. The parts of libtorch's threads end at
//! multiples of 16, so only the last part has such a remainder.

use storage::{Kernel, Width};

use crate::Dtype;

/// The hyperparameters of an update, the same for all parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Number of the update, counted from 1, by which the moments' bias is corrected.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the running mean of its square.
    pub beta2: f64,
    /// Keeps the division finite.
    pub eps: f64,
    /// Divisor of all gradients: the loss scale times the reduction by clipping; 1 for neither.
    pub grad_divisor: f64,
}

/// Elements that are converted at once: 4 KiB of each array, so that all stay in the L1 cache.
const BATCH: usize = 1024;

/// Elements of one parameter; all slices have the same number of them.
#[derive(Debug)]
pub(super) struct AdamWRow<'a> {
    pub(super) weights: &'a mut [u8],
    pub(super) exp_avgs: &'a mut [u8],
    pub(super) exp_avg_sqs: &'a mut [u8],
    pub(super) grads: &'a [u8],
    pub(super) grad_dtype: Dtype,
    /// The new weights, converted to another type; empty if not needed.
    pub(super) copy: &'a mut [u8],
    pub(super) copy_dtype: Dtype,
}

/// The factors of an update, precomputed for the loop.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    grad: Scale,
    decay: f32,
    /// Factor of the gradient's difference to its mean, and whether the product is added to the
    /// mean or to the gradient, whichever is nearer to the result.
    lerp: f32,
    is_from_mean: bool,
    beta2: f32,
    square: f32,
    bias2_sqrt: f32,
    eps: f32,
    step_size: f32,
}

/// How gradients are scaled.
#[derive(Clone, Copy, Debug)]
enum Scale {
    /// The inverse of a power of two: the product is bitwise the quotient.
    Times(f32),
    Over(f32),
}

impl Scale {
    fn by(divisor: f32) -> Self {
        let (inverse, mantissa) = (1.0 / divisor, divisor.to_bits() & 0x7f_ffff);
        match mantissa == 0 && divisor.is_normal() && inverse.is_normal() {
            true => Scale::Times(inverse),
            false => Scale::Over(divisor),
        }
    }
}

impl AdamW {
    /// The factors for parameters with this weight decay.
    pub(super) fn factors(&self, weight_decay: f64) -> Factors {
        let &AdamW { step, lr, beta1, beta2, eps, grad_divisor } = self;
        // libtorch stores the number of the step as an f32.
        let step = f64::from(step as f32);
        let bias1 = 1.0 - beta1.powf(step);
        let bias2 = 1.0 - beta2.powf(step);
        let lerp = (1.0 - beta1) as f32;
        let is_from_mean = lerp.abs() < 0.5;
        Factors {
            grad: Scale::by(grad_divisor as f32),
            decay: (1.0 - lr * weight_decay) as f32,
            lerp: if is_from_mean { lerp } else { lerp - 1.0 },
            is_from_mean,
            beta2: beta2 as f32,
            square: (1.0 - beta2) as f32,
            bias2_sqrt: bias2.sqrt() as f32,
            eps: eps as f32,
            step_size: -(lr / bias1) as f32,
        }
    }
}

impl AdamWRow<'_> {
    /// Updates the elements.
    pub(super) fn update(self, factors: &Factors, width: Width) {
        width.run(Update { row: self, factors });
    }

    /// Copies the current weights.
    pub(super) fn copy(weights: &[u8], into: &mut [u8], dtype: Dtype, width: Width) {
        width.run(Copy { weights, into, dtype });
    }
}

struct Update<'a, 'f> {
    row: AdamWRow<'a>,
    factors: &'f Factors,
}

impl Kernel for Update<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let AdamWRow { weights, exp_avgs, exp_avg_sqs, grads, grad_dtype, copy, copy_dtype } =
            self.row;
        let mut singles = [[0; 4]; BATCH];
        let grad_bytes = grad_dtype.item_bytes() as usize;
        let copy_bytes = copy_dtype.item_bytes() as usize;
        let rows = weights
            .chunks_mut(4 * BATCH)
            .zip(exp_avgs.chunks_mut(4 * BATCH))
            .zip(exp_avg_sqs.chunks_mut(4 * BATCH))
            .zip(grads.chunks(grad_bytes * BATCH));
        let mut copies = copy.chunks_mut(copy_bytes * BATCH);
        for (((weights, exp_avgs), exp_avg_sqs), grads) in rows {
            let state = [weights, exp_avgs, exp_avg_sqs].map(|part| part.as_chunks_mut::<4>().0);
            let [weights, exp_avgs, exp_avg_sqs] = state;
            let grads = match grad_dtype {
                Dtype::BF16 => widen(grads, &mut singles),
                _ => grads.as_chunks::<4>().0,
            };
            // All cuts except a parameter's end are at multiples of the vector width.
            let body_len = weights.len() / LANES * LANES;
            let (body, end) = weights.split_at_mut(body_len);
            let (mean_body, mean_end) = exp_avgs.split_at_mut(body_len);
            let (square_body, square_end) = exp_avg_sqs.split_at_mut(body_len);
            let (grad_body, grad_end) = grads.split_at(body_len);
            let body = [body, mean_body, square_body];
            let end = [end, mean_end, square_end];
            // One loop for each: a division by 1 would take as long as any other.
            match self.factors.grad {
                Scale::Times(factor) => {
                    update::<false>(body, grad_body, |grad| grad * factor, self.factors);
                    update::<true>(end, grad_end, |grad| grad * factor, self.factors);
                }
                Scale::Over(divisor) => {
                    update::<false>(body, grad_body, |grad| grad / divisor, self.factors);
                    update::<true>(end, grad_end, |grad| grad / divisor, self.factors);
                }
            }
            if let Some(copy) = copies.next() {
                narrow(weights, copy, copy_dtype);
            }
        }
    }
}

struct Copy<'a> {
    weights: &'a [u8],
    into: &'a mut [u8],
    dtype: Dtype,
}

impl Kernel for Copy<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        narrow(self.weights.as_chunks::<4>().0, self.into, self.dtype);
    }
}

/// Elements of libtorch's vectors; those beyond a multiple of it are a parameter's `END`.
const LANES: usize = 8;

#[inline(always)]
fn update<const END: bool>(
    [weights, exp_avgs, exp_avg_sqs]: [&mut [[u8; 4]]; 3],
    grads: &[[u8; 4]],
    scaled: impl Fn(f32) -> f32,
    factors: &Factors,
) {
    let &Factors { decay, lerp, is_from_mean, beta2, square, bias2_sqrt, eps, step_size, .. } =
        factors;
    let state = weights.iter_mut().zip(exp_avgs).zip(exp_avg_sqs);
    for (((weight, exp_avg), exp_avg_sq), grad) in state.zip(grads) {
        // Without a divisor or decay, the factor is 1, which changes no bit.
        let grad = scaled(f32::from_le_bytes(*grad));
        let mean = f32::from_le_bytes(*exp_avg);
        let mean = lerp.mul_add(grad - mean, if is_from_mean { mean } else { grad });
        let mean_sq = f32::from_le_bytes(*exp_avg_sq);
        let mean_sq = match END {
            false => (square * grad).mul_add(grad, mean_sq * beta2),
            true => mean_sq.mul_add(beta2, square * grad * grad),
        };
        let denominator = mean_sq.sqrt() / bias2_sqrt + eps;
        let decayed = f32::from_le_bytes(*weight) * decay;
        *weight = (decayed + step_size * mean / denominator).to_le_bytes();
        *exp_avg = mean.to_le_bytes();
        *exp_avg_sq = mean_sq.to_le_bytes();
    }
}

/// Converts bf16 to f32.
#[inline(always)]
fn widen<'a>(from: &[u8], into: &'a mut [[u8; 4]; BATCH]) -> &'a [[u8; 4]] {
    let from = from.as_chunks::<2>().0;
    for (into, from) in into.iter_mut().zip(from) {
        *into = (u32::from(u16::from_le_bytes(*from)) << 16).to_le_bytes();
    }
    &into[..from.len()]
}

/// Converts f32 to a type that [`is_copy`] allows, rounded to nearest even.
#[inline(always)]
fn narrow(from: &[[u8; 4]], into: &mut [u8], dtype: Dtype) {
    match dtype {
        Dtype::BF16 => halves(from, into, bf16),
        Dtype::F16 => halves(from, into, f16),
        _ => into.copy_from_slice(from.as_flattened()),
    }
}

#[inline(always)]
fn halves(from: &[[u8; 4]], into: &mut [u8], bits: impl Fn(f32) -> u16) {
    for (into, from) in into.as_chunks_mut::<2>().0.iter_mut().zip(from) {
        *into = bits(f32::from_le_bytes(*from)).to_le_bytes();
    }
}

/// Types that gradients may have.
pub(super) fn is_grad(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16)
}

/// Types that new weights may have.
pub(super) fn is_copy(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16)
}

/// Converts to bf16, without branches, so that the compiler vectorizes it.
#[inline(always)]
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let kept = if value.is_nan() { bits | 0x40_0000 } else { rounded };
    (kept >> 16) as u16 // fits: 16 bits remain
}

/// Converts to f16 in the same way. A value below the smallest normal f16 is added to a number
/// whose last bit is worth the smallest subnormal f16, so that the addition rounds it.
#[inline(always)]
fn f16(value: f32) -> u16 {
    const SMALLEST_NORMAL: u32 = (127 - 14) << 23;
    const TOO_LARGE: u32 = (127 + 16) << 23;
    const ROUNDER: f32 = 0.5;
    let bits = value.to_bits();
    let sign = bits >> 16 & 0x8000;
    let size = bits & 0x7fff_ffff;
    let tiny = (f32::from_bits(size) + ROUNDER).to_bits().wrapping_sub(ROUNDER.to_bits());
    let normal = size.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + (size >> 13 & 1)) >> 13;
    let huge = if value.is_nan() { 0x7e00 } else { 0x7c00 };
    let kept = if size < SMALLEST_NORMAL { tiny } else { normal };
    let kept = if size >= TOO_LARGE { huge } else { kept };
    (sign | kept) as u16 // fits: 16 bits remain
}
