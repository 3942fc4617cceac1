//! GPUs that are none, for tests on machines without one. Their memory is the host's, and the CPU
//! computes; but a tensor of the host among theirs is an error, as it is on a GPU, and whoever asks
//! for the device goes the way of GPUs. What a stream makes of time they do not show: each of their
//! operations has ended when the call returns.

use std::ffi::c_int;
use std::sync::Once;

use crate::ffi::{check, fb_fake_gpus, fb_fake_gpus_hang};

/// From here on this process has eight of them. To be called before anything asks libtorch for
/// GPUs; the second call does nothing.
///
/// # Panics
/// If libtorch refuses.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        check("make simulated GPUs", fb_fake_gpus()).expect("libtorch has none of its own");
    });
}

/// Says whether they hang: then nothing that is waited for comes to an end.
pub fn hang(hang: bool) {
    fb_fake_gpus_hang(c_int::from(hang));
}
