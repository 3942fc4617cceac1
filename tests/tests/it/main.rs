//! Tests of the whole project: tidy rules, commands of the guides, readers of other programs, real
//! services.
//!
//! One binary, because each binary is linked with all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod clean;
mod cpm;
mod edges;
mod guides;
mod names;
mod nfs;
#[path = "../../../storage/tests/it/nfs_server/mod.rs"]
mod nfs_server;
mod readers;
mod reference;
mod services;
mod tidy;
mod tidy_locations;
mod words;
