//! The command `feedline`, verb by verb.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bench;
mod ckpt;
mod ckpt_export;
mod command;
mod corpus;
mod damaged;
mod doctor;
mod formats;
#[path = "../../../storage/tests/it/fuse/mod.rs"]
#[expect(dead_code, reason = "the tests of storage use the rest")]
mod fuse;
mod index;
mod interrupted;
mod killed;
mod live;
mod materialize;
#[path = "../../../storage/tests/it/nfs_server/mod.rs"]
mod nfs_server;
mod progress;
mod refusals;
mod samples;
mod signals;
mod simulate;
mod stalled;
mod verbs;
