//! What a training run is, before anything runs: pure, and without libtorch.
//!
//! [`config`] is the TOML file, [`import`] makes one from the files of other systems, [`model`] the
//! networks without a number in them, [`plan`] what a run will take. [`lr`] is the learning rate of
//! each step, [`scaler`] the loss scale, [`rng`] random numbers without a state. [`world`] says
//! which rank a process is, [`mesh`] where a rank stands, [`schedule`] the order in which the ranks
//! of a pipeline compute, with a simulator. Nothing here opens anything but config files, knows the
//! time, or computes a tensor: the same config gives the same answers on a laptop and on the
//! cluster.

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
