//! The C++ bridge to libtorch: what `tch` does not bind.
//!
//! A training step needs four things of libtorch that `tch` leaves out: backward from given
//! gradients ([`backward`]), gradients that can be moved out rather than zeroed ([`take_grad`]),
//! the fused AdamW kernel on tensors whose moments the caller owns ([`fused_adamw`]), and a few
//! switches of the process (in [`runtime`]). A checkpoint needs a fifth: the memory of a tensor as
//! bytes ([`bytes()`], [`bytes_mut`]).
//!
//! Several ranks need c10d: groups, collectives, messages ([`dist`]), and collectives with
//! a gradient ([`autograd`]).
//!
//! The C++ side is a plain C interface in `shim/`, one file a subject, where every exception
//! becomes text. It is compiled against libtorch 2.11 and refuses to compile against another. All
//! unsafe code of the trainer is in this crate.

pub mod autograd;
mod bytes;
pub mod dist;
mod error;
#[cfg(feature = "fake_gpu")]
pub mod fake_gpu;
mod ffi;
mod optim;
pub mod runtime;

pub use autograd::{backward, take_grad};
pub use bytes::{bytes, bytes_mut, is_alone};
pub use error::{Error, Result};
pub use optim::{AdamWStep, Moments, fused_adamw, norms};
