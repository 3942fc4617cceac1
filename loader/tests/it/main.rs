//! Batches from stores of every kind, with faults, restarts and several ranks.
//!
//! One binary, because each test binary is linked with all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod batches;
mod cache;
mod common;
mod endings;
mod failures;
#[path = "../../../storage/tests/it/nfs_server/mod.rs"]
mod nfs_server;
mod node;
mod plan;
mod samples;
mod samples_encdec;
mod stream;
