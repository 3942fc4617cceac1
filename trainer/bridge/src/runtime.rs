//! Switches of the process: repeatability and memory.

use std::ffi::CStr;

use crate::Result;
use crate::ffi::{check, fb_has_amx, fb_keep_freed_memory, fb_set_deterministic, fb_torch_version};

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

/// From here on every operation gives the same bits for the same input, or is an error if libtorch
/// has no such kernel. On the CPU that holds for one number of threads.
///
/// # Errors
/// What libtorch says.
pub fn set_deterministic() -> Result<()> {
    check("ask for repeatable kernels", fb_set_deterministic())
}

/// Tells glibc to keep what is freed for the next step, rather than give it back to the system and
/// have it zeroed again: about a tenth more resident memory, and up to a sixth more tokens per
/// second. To be called before the first big allocation. False if glibc does not listen.
#[must_use]
pub fn keep_freed_memory() -> bool {
    fb_keep_freed_memory() != 0
}
