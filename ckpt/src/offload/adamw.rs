//! AdamW on memory, in the order of operations of libtorch's fused kernel.
//!
//! Every element goes through the same operations, each rounded once, whatever vectors, threads or
//! parts of a parameter they are done in; so none of these shows in the bits. They are those of
//! `_fused_adamw_` of libtorch 2.11 on a processor with AVX2 or AVX-512, on any number of threads;
//! without them (`ATEN_CPU_CAPABILITY=default`) libtorch fuses no product with an addition.
//!
//! Where its compiler fused a product with an addition it did so one way in the loop over vectors,
//! and another in the loop over what is left: the squares of a parameter's last elements, beyond a
//! multiple of eight, are rounded otherwise. That is kept. The parts of libtorch's threads end at
//! multiples of 16, so that of several only the last has such an end.

use storage::{Kernel, Width};

use crate::Dtype;

/// What is the same for all parameters of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Number of the update, counted from 1, by which the moments' bias is corrected.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// How much of the gradient's mean stays.
    pub beta1: f64,
    /// How much of the mean of its squares stays.
    pub beta2: f64,
    /// Keeps the division finite.
    pub eps: f64,
    /// Gradients are divided by it first: a loss scale times what clips them; 1 for neither.
    pub grad_divisor: f64,
}

/// Elements that are converted at once: 4 KiB of each array, so that all stay in the nearest cache.
const BATCH: usize = 1024;

/// Some elements of one parameter: all slices have as many of them.
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

/// The numbers of an update as the loop wants them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    grad: Scale,
    decay: f32,
    /// Of the gradient's difference to its mean, and whether it is added to the mean or to the
    /// gradient, whichever is nearer to the result.
    lerp: f32,
    is_from_mean: bool,
    beta2: f32,
    square: f32,
    bias2_sqrt: f32,
    eps: f32,
    step_size: f32,
}

/// What is done to gradients first.
#[derive(Clone, Copy, Debug)]
enum Scale {
    /// A factor with the bits of a division: the inverse of a power of two.
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
    /// For parameters with this weight decay.
    pub(super) fn factors(&self, weight_decay: f64) -> Factors {
        let &AdamW { step, lr, beta1, beta2, eps, grad_divisor } = self;
        // libtorch keeps the number of the step as a single.
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
            // All cuts but a parameter's end are at multiples of many vectors.
            let whole = weights.len() / LANES * LANES;
            let (body, end) = weights.split_at_mut(whole);
            let (mean_body, mean_end) = exp_avgs.split_at_mut(whole);
            let (square_body, square_end) = exp_avg_sqs.split_at_mut(whole);
            let (grad_body, grad_end) = grads.split_at(whole);
            let body = [body, mean_body, square_body];
            let end = [end, mean_end, square_end];
            // One loop for each, for a division that is not needed takes as long as one that is.
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

/// Elements, of which those of a parameter that are no multiple are at its `END`.
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
        // What has nothing to divide or decay is multiplied by 1, which changes no bit.
        let grad = scaled(f32::from_le_bytes(*grad));
        let mean = f32::from_le_bytes(*exp_avg);
        let mean = lerp.mul_add(grad - mean, if is_from_mean { mean } else { grad });
        let mean_sq = f32::from_le_bytes(*exp_avg_sq);
        let mean_sq = match END {
            false => (square * grad).mul_add(grad, mean_sq * beta2),
            true => mean_sq.mul_add(beta2, square * grad * grad),
        };
        let due = mean_sq.sqrt() / bias2_sqrt + eps;
        let decayed = f32::from_le_bytes(*weight) * decay;
        *weight = (decayed + step_size * mean / due).to_le_bytes();
        *exp_avg = mean.to_le_bytes();
        *exp_avg_sq = mean_sq.to_le_bytes();
    }
}

/// Numbers of bf16 as singles.
#[inline(always)]
fn widen<'a>(from: &[u8], into: &'a mut [[u8; 4]; BATCH]) -> &'a [[u8; 4]] {
    let from = from.as_chunks::<2>().0;
    for (into, from) in into.iter_mut().zip(from) {
        *into = (u32::from(u16::from_le_bytes(*from)) << 16).to_le_bytes();
    }
    &into[..from.len()]
}

/// Singles as numbers of a type that [`is_copy`] allows, rounded to nearest even.
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

/// Without branches, so that it becomes vectors.
#[inline(always)]
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let kept = if value.is_nan() { bits | 0x40_0000 } else { rounded };
    (kept >> 16) as u16 // fits: 16 bits are left
}

/// The same. What is less than the smallest normal half is added to a number whose last bit has the
/// worth of the least half there is, so that the addition rounds it.
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
    (sign | kept) as u16 // fits: 16 bits are left
}
