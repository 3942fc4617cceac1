//! Checkpoints and offloaded state: formats, layouts, faults, kills.
//!
//! One binary, because each would be linked with all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod agent;
mod amplification;
mod background;
mod background_together;
mod common;
mod convert;
mod crash;
mod crash_tiers;
mod damage;
mod faults;
mod foreign;
mod hostile;
mod kill;
mod model;
mod offload;
mod offload_disks;
mod offload_faults;
mod offload_kill;
mod packed;
mod reshard;
mod retention;
mod round_trip;
mod s3;
mod sim;
mod spill;
mod tiers;
mod together;
mod unlucky;
