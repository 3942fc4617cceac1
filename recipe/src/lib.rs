//! The definition of a training run: pure functions, without libtorch.
//!
//! [`config`] is the TOML file, [`import`] makes one from the files of other systems, [`model`] has
//! the networks without values, [`plan`] the cost of a run. [`lr`] is the learning rate of each
//! step, [`scaler`] the loss scale, [`rng`] random numbers without state. [`world`] finds the rank
//! of a process, [`mesh`] the coordinates of a rank, and [`schedule`] is the order in which the
//! ranks of a pipeline compute, with a simulator. This crate reads only config files, does not
//! depend on the time and computes no tensors: the same config gives the same results on a laptop
//! and on the cluster.

#![forbid(unsafe_code)]

pub mod config;
mod hosts;
pub mod import;
pub mod lr;
pub mod mesh;
mod mismatch;
pub mod model;
pub mod plan;
pub mod rng;
pub mod scaler;
pub mod schedule;
pub mod text;
pub mod world;

pub use mismatch::Incompatible;
