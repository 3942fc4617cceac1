//! The C interface of `shim/`, and its errors.

use std::ffi::{CStr, c_char, c_int};

use tch::Tensor;
use torch_sys::C_tensor;

use crate::dist::LostPeer;
use crate::{Error, Result, dist};

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

/// `c10d::Store`.
#[repr(C)]
pub(crate) struct RawStore([u8; 0]);

/// `feedline::Group`.
#[repr(C)]
pub(crate) struct RawGroup([u8; 0]);

/// `feedline::Work`.
#[repr(C)]
pub(crate) struct RawWork([u8; 0]);

/// `feedline::Call` of `shim/dist.h`.
#[repr(C)]
pub(crate) struct Call {
    pub(crate) op: i32,
    pub(crate) reduce: i32,
    pub(crate) peer: i32,
    pub(crate) tag: i32,
}

/// `struct Wait` of `shim/dist.cpp`.
#[repr(C)]
pub(crate) struct RawWait {
    pub(crate) op: *const c_char,
    pub(crate) peer: i32,
    pub(crate) number: u64,
    pub(crate) seconds: f64,
}

unsafe extern "C" {
    fn fb_last_error() -> *const c_char;
    fn fb_last_lost() -> *const LostPeer;

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

    pub(crate) fn fb_norms(
        list: *const *const C_tensor,
        count: usize,
        out: *mut *mut C_tensor,
    ) -> c_int;

    pub(crate) fn fb_store_open(
        host: *const c_char,
        port: u16,
        listener: c_int,
        timeout_ms: i64,
        out: *mut *mut RawStore,
    ) -> c_int;
    pub(crate) fn fb_store_again(store: *mut RawStore, out: *mut *mut RawStore) -> c_int;
    pub(crate) fn fb_store_free(store: *mut RawStore);
    pub(crate) fn fb_store_set(
        store: *mut RawStore,
        key: *const c_char,
        data: *const u8,
        length: usize,
    ) -> c_int;
    pub(crate) fn fb_store_get(
        store: *mut RawStore,
        key: *const c_char,
        data: *mut *const u8,
        length: *mut usize,
    ) -> c_int;
    pub(crate) fn fb_store_add(
        store: *mut RawStore,
        key: *const c_char,
        amount: i64,
        sum: *mut i64,
    ) -> c_int;
    pub(crate) fn fb_store_has(
        store: *mut RawStore,
        keys: *const *const c_char,
        count: usize,
        all: *mut c_int,
    ) -> c_int;
    pub(crate) fn fb_store_wait(
        store: *mut RawStore,
        keys: *const *const c_char,
        count: usize,
        timeout_ms: i64,
        came: *mut c_int,
    ) -> c_int;

    pub(crate) fn fb_group_gloo(
        store: *mut RawStore,
        prefix: *const c_char,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        interface: *const c_char,
        address: *const c_char,
        id: u64,
        out: *mut *mut RawGroup,
    ) -> c_int;
    pub(crate) fn fb_group_nccl(
        store: *mut RawStore,
        prefix: *const c_char,
        rank: c_int,
        size: c_int,
        timeout_ms: i64,
        id: u64,
        out: *mut *mut RawGroup,
    ) -> c_int;
    pub(crate) fn fb_group_free(group: *mut RawGroup);
    pub(crate) fn fb_group_waits(group: *mut RawGroup, out: *mut RawWait) -> c_int;
    pub(crate) safe fn fb_settle() -> c_int;
    pub(crate) fn fb_start(
        group: *mut RawGroup,
        call: *const Call,
        out: *const C_tensor,
        input: *const C_tensor,
        work: *mut *mut RawWork,
    ) -> c_int;
    pub(crate) fn fb_work_wait(work: *mut RawWork) -> c_int;
    pub(crate) fn fb_work_done(work: *mut RawWork) -> c_int;
    pub(crate) fn fb_work_free(work: *mut RawWork);
    pub(crate) safe fn fb_waited_ns() -> i64;

    pub(crate) fn fb_copy_in(g: *mut RawGroup, x: *const C_tensor, y: *mut *mut C_tensor) -> c_int;
    pub(crate) fn fb_reduce_out(
        g: *mut RawGroup,
        x: *const C_tensor,
        y: *mut *mut C_tensor,
    ) -> c_int;
    pub(crate) fn fb_gather_rows(
        g: *mut RawGroup,
        x: *const C_tensor,
        y: *mut *mut C_tensor,
    ) -> c_int;
    pub(crate) fn fb_scatter_rows(
        g: *mut RawGroup,
        x: *const C_tensor,
        y: *mut *mut C_tensor,
    ) -> c_int;

    pub(crate) safe fn fb_use_gpu(index: c_int) -> c_int;
    #[cfg(feature = "fake_gpu")]
    pub(crate) safe fn fb_fake_gpus() -> c_int;
    #[cfg(feature = "fake_gpu")]
    pub(crate) safe fn fb_fake_gpus_hang(hang: c_int);
    pub(crate) fn fb_rng_get(cuda: c_int, out: *mut *mut C_tensor) -> c_int;
    pub(crate) fn fb_rng_set(cuda: c_int, state: *const C_tensor) -> c_int;

    pub(crate) safe fn fb_quiet();
    pub(crate) safe fn fb_signal(pid: c_int, signal: c_int) -> c_int;
    pub(crate) safe fn fb_end_with_parent() -> c_int;
    pub(crate) safe fn fb_torch_version() -> *const c_char;
    pub(crate) safe fn fb_has_amx() -> c_int;
    pub(crate) safe fn fb_set_deterministic() -> c_int;
    pub(crate) safe fn fb_is_deterministic() -> c_int;
    pub(crate) safe fn fb_keep_freed_memory() -> c_int;
}

/// The code that a call returned, as a result with the reason.
pub(crate) fn check(operation: &'static str, code: c_int) -> Result<()> {
    match code {
        0 => Ok(()),
        2 => {
            // SAFETY: it takes no argument and may be called at any time.
            let lost = unsafe { fb_last_lost() };
            // SAFETY: it is memory of this thread that no other thread writes.
            let lost = unsafe { *lost };
            Err(dist::explain(&lost, &last_error()))
        }
        _ => Err(Error::Torch { operation, text: last_error() }),
    }
}

/// The error of the last call of this thread that failed.
pub(crate) fn last_error() -> String {
    // SAFETY: it takes no argument and may be called at any time.
    let text = unsafe { fb_last_error() };
    // SAFETY: it is a string of this thread, ended by NUL, that stays until the next failure.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().trim_end().to_owned()
}

/// Handles to lend for one call. They are valid as long as the borrow of the tensors.
pub(crate) fn pointers<T: AsRef<Tensor>>(tensors: &[T]) -> Vec<*const C_tensor> {
    tensors.iter().map(|tensor| tensor.as_ref().as_ptr()).collect()
}

/// The tensor that a call returned.
pub(crate) fn take(operation: &'static str, code: c_int, handle: *mut C_tensor) -> Result<Tensor> {
    check(operation, code)?;
    // SAFETY: the call succeeded, so the shim made this handle with `new` and passed its ownership.
    Ok(unsafe { Tensor::from_ptr(handle) })
}
