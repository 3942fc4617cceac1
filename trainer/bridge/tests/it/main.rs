//! The C++ bridge: autograd, optimizers, process groups, lost ranks.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bridge;
mod common;
mod dist;
mod lost;
mod parallel;
