use tch::Tensor;

use crate::ffi::{AdamW, check, fb_fused_adamw, fb_norms, pointers, take};
use crate::{Error, Result};

/// The numbers of one update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// The number of this update, counted from 1: it corrects the bias of the moments.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decay of the weights, times `lr`.
    pub weight_decay: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Every gradient is divided by this first, in place: clipping costs no pass of its own.
    pub grad_divisor: f64,
}

/// Both moments of a list of parameters, in its order and with its shapes.
#[derive(Debug)]
pub struct Moments<'a> {
    /// Running means of the gradients.
    pub exp_avgs: &'a mut [Tensor],
    /// Running means of their squares.
    pub exp_avg_sqs: &'a mut [Tensor],
}

/// One AdamW update of every parameter and its moments, in place, by libtorch's fused kernel. All
/// tensors have one dtype.
///
/// # Errors
/// [`Error::Lengths`], or errors of libtorch, for example if shapes or dtypes differ.
pub fn fused_adamw(
    params: &mut [Tensor],
    grads: &mut [Tensor],
    moments: &mut Moments<'_>,
    update: &AdamWStep,
) -> Result<()> {
    let operation = "run AdamW";
    let found = vec![params.len(), grads.len(), moments.exp_avgs.len(), moments.exp_avg_sqs.len()];
    if found.iter().any(|len| *len != params.len()) {
        return Err(Error::Lengths { operation, found });
    }
    let options = AdamW {
        step: update.step as f64,
        lr: update.lr,
        beta1: update.beta1,
        beta2: update.beta2,
        weight_decay: update.weight_decay,
        eps: update.eps,
        grad_divisor: update.grad_divisor,
    };
    let params_ptrs = pointers(params);
    let grads_ptrs = pointers(grads);
    let exp_avgs = pointers(moments.exp_avgs);
    let exp_avg_sqs = pointers(moments.exp_avg_sqs);
    // SAFETY: four lists of `params.len()` handles, borrowed mutably by us during the call; the
    // kernel checks shapes and dtypes.
    let code = unsafe {
        fb_fused_adamw(
            params_ptrs.as_ptr(),
            grads_ptrs.as_ptr(),
            exp_avgs.as_ptr(),
            exp_avg_sqs.as_ptr(),
            params_ptrs.len(),
            &raw const options,
        )
    };
    check(operation, code)
}

/// The Euclidean norm of each tensor, summed in f64: one tensor of as many f64.
///
/// # Errors
/// Errors of libtorch, for example if the list is empty.
pub fn norms<T: AsRef<Tensor>>(tensors: &[T]) -> Result<Tensor> {
    let list = pointers(tensors);
    let mut out = std::ptr::null_mut();
    // SAFETY: `list` has handles that are alive during the call, and `out` has room for one.
    let code = unsafe { fb_norms(list.as_ptr(), list.len(), &raw mut out) };
    take("compute norms", code, out)
}
