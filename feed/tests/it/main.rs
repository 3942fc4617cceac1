//! The data that a run reads.
//!
//! One binary, because each test binary is linked with all dependencies of the crate.

mod buckets;
mod common;
mod damage;
mod data;
mod samples;
