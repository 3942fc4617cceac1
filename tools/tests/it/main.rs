//! The command `feedline`, verb by verb.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod bench;
mod bench_honesty;
mod bench_interrupted;
mod bench_replay;
mod bench_report;
mod ckpt;
mod clean;
mod command;
mod doctor;
mod doctor_interrupted;
mod doctor_services;
mod formats;
#[path = "../../../storage/tests/it/fuse/mod.rs"]
#[expect(dead_code, reason = "the tests of storage use the rest")]
mod fuse;
mod index;
mod interrupted;
mod materialize;
mod materialize_s3;
#[path = "../../../storage/tests/it/nfs_server/mod.rs"]
mod nfs_server;
mod progress;
mod refusals;
mod samples;
mod signals;
mod simulate;
