//! Tests of the storage contract on the available file systems and servers.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod conformance;
mod crash;
mod frozen;
mod fuse;
mod lustre;
mod page_cache;
mod posix;
mod reader;
mod s3;
mod shared;
mod simulated;
