//! Switches of the process: repeatability, random numbers, memory, signals.

use std::ffi::CStr;
use std::ptr;

use tch::{Device, Tensor};

use crate::ffi::{
    check, fb_end_with_parent, fb_has_amx, fb_is_deterministic, fb_keep_freed_memory, fb_rng_get,
    fb_rng_set, fb_set_deterministic, fb_signal, fb_torch_version, fb_use_gpu, take,
};
use crate::{Error, Result};

/// The version of libtorch, such as `2.11.0`.
#[must_use]
pub fn torch_version() -> String {
    // SAFETY: a constant of the shim, ended by NUL.
    unsafe { CStr::from_ptr(fb_torch_version()) }.to_string_lossy().into_owned()
}

/// Whether this CPU multiplies bfloat16 in tiles (Intel AMX), several times as fast as float32.
#[must_use]
pub fn has_amx() -> bool {
    fb_has_amx() != 0
}

/// Makes every later operation return the same bits for the same input, or an error if libtorch has
/// no such kernel. On the CPU that holds for one number of threads.
///
/// # Errors
/// Errors of libtorch.
pub fn set_deterministic() -> Result<()> {
    check("enable deterministic kernels", fb_set_deterministic())
}

/// Whether [`set_deterministic`] was called.
#[must_use]
pub fn is_deterministic() -> bool {
    fb_is_deterministic() != 0
}

/// Makes a GPU the current one of this thread, which the barriers of its groups use.
///
/// # Errors
/// Errors of libtorch, for example if there is no such GPU.
pub fn use_gpu(index: usize) -> Result<()> {
    check("select a GPU", fb_use_gpu(i32::try_from(index).unwrap_or(i32::MAX)))
}

/// Makes glibc keep freed memory for the next step, rather than return it to the system and have it
/// zeroed again: about a tenth more resident memory, and up to a sixth more tokens per
/// second. To be called before the first big allocation. False if glibc refuses.
#[must_use]
pub fn keep_freed_memory() -> bool {
    fb_keep_freed_memory() != 0
}

/// The state of libtorch's random numbers on a device. [`set_rng_state`] restores it.
///
/// # Errors
/// Errors of libtorch, for example if there is no such device.
pub fn rng_state(device: Device) -> Result<Vec<u8>> {
    let operation = "read the random state";
    let mut out = ptr::null_mut();
    // SAFETY: `out` has room for one handle.
    let code = unsafe { fb_rng_get(generator(device), &raw mut out) };
    let state = take(operation, code, out)?;
    Vec::try_from(&state)
        .map_err(|error: tch::TchError| Error::Torch { operation, text: error.to_string() })
}

/// Restores a state of [`rng_state`].
///
/// # Errors
/// Errors of libtorch, for example if the bytes are no state.
pub fn set_rng_state(device: Device, state: &[u8]) -> Result<()> {
    let state = Tensor::from_slice(state);
    // SAFETY: the handle is alive during the call.
    let code = unsafe { fb_rng_set(generator(device), state.as_ptr()) };
    check("set the random state", code)
}

fn generator(device: Device) -> i32 {
    match device {
        Device::Cuda(index) => i32::try_from(index).unwrap_or(i32::MAX),
        _ => -1,
    }
}

/// Sends a signal to a process, or with signal 0 checks whether there is one. False if that cannot
/// be done, most likely because it has ended.
#[must_use]
pub fn signal(process: u32, signal: i32) -> bool {
    // A number over this would be a group of processes.
    i32::try_from(process).is_ok_and(|process| process > 0 && fb_signal(process, signal) == 0)
}

/// Makes this process receive SIGTERM when the process that started it ends. False if the system
/// cannot do that.
#[must_use]
pub fn end_with_parent() -> bool {
    fb_end_with_parent() == 0
}
