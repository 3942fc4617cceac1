//! The whole: tidy rules, commands of the guides, readers of others, real services.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod clean;
mod cpm;
mod guides;
mod names;
mod nfs;
#[path = "../../../storage/tests/it/nfs_server/mod.rs"]
mod nfs_server;
mod readers;
mod reference;
mod services;
mod tidy;
mod words;
