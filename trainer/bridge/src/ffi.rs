//! The C interface of `shim/`, and its way of saying no.

use std::ffi::{CStr, c_char, c_int};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::{Error, Result};

/// `struct AdamW` of `shim/optim.cpp`.
#[repr(C)]
pub(crate) struct AdamW {
    pub(crate) step: f64,
    pub(crate) lr: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) eps: f64,
    pub(crate) grad_divisor: f64,
}

unsafe extern "C" {
    fn fb_last_error() -> *const c_char;

    pub(crate) fn fb_backward(
        roots: *const *const C_tensor,
        grads: *const *const C_tensor,
        count: usize,
    ) -> c_int;
    pub(crate) fn fb_take_grad(leaf: *const C_tensor, out: *mut *mut C_tensor) -> c_int;
    pub(crate) fn fb_is_sole_owner(tensor: *const C_tensor) -> c_int;

    pub(crate) fn fb_fused_adamw(
        params: *const *const C_tensor,
        grads: *const *const C_tensor,
        exp_avgs: *const *const C_tensor,
        exp_avg_sqs: *const *const C_tensor,
        count: usize,
        options: *const AdamW,
    ) -> c_int;

    pub(crate) safe fn fb_torch_version() -> *const c_char;
    pub(crate) safe fn fb_has_amx() -> c_int;
    pub(crate) safe fn fb_set_deterministic() -> c_int;
    pub(crate) safe fn fb_keep_freed_memory() -> c_int;
}

/// The code that a call returned, as a result with the reason.
pub(crate) fn check(doing: &'static str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: takes nothing, and is always there to be asked.
    let text = unsafe { fb_last_error() };
    // SAFETY: it is a string of this thread, ended by NUL, that stays until the next failure.
    let text = unsafe { CStr::from_ptr(text) };
    Err(Error::Torch { doing, text: text.to_string_lossy().trim_end().to_owned() })
}

/// Handles to lend for one call. They are valid as long as the borrow of the tensors.
pub(crate) fn pointers<T: AsRef<Tensor>>(tensors: &[T]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ref().as_ptr()).collect()
}
