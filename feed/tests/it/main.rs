//! What a run reads, by objective.
//!
//! One binary, because each is linked with all that the crate needs.

mod common;
mod damage;
mod data;
mod samples;
