//! Simulated GPUs, for tests on machines without one. Their memory is the host's, and the CPU
//! computes; but a tensor of the host among theirs is an error, as it is on a GPU, and code that
//! checks the device takes the path for GPUs. They have no asynchronous streams: each operation is
//! complete when the call returns.

use std::ffi::c_int;
use std::sync::Once;

use crate::ffi::{check, fb_fake_gpus, fb_fake_gpus_hang};

/// Gives this process eight of them. To be called before anything asks libtorch for GPUs; the
/// second call does nothing.
///
/// # Panics
/// If libtorch refuses.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        check("make simulated GPUs", fb_fake_gpus()).expect("libtorch has none of its own");
    });
}

/// Sets whether they hang: then their events never complete.
pub fn hang(hang: bool) {
    fb_fake_gpus_hang(c_int::from(hang));
}
