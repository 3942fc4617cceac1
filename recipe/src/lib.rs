//! What a training run is, before anything runs: pure, and without libtorch.
//!
//! [`config`] is the TOML file, [`import`] makes one from the files of other systems, [`lr`] the
//! learning rate of each step, [`mesh`] where a rank stands, [`schedule`] the order in which the
//! ranks of a pipeline compute, with a simulator. Nothing here opens anything but config files,
//! knows the time, or computes a tensor: the same config gives the same answers on a laptop and on
//! the cluster.

#![forbid(unsafe_code)]

pub mod config;
pub mod import;
pub mod lr;
pub mod mesh;
pub mod schedule;
