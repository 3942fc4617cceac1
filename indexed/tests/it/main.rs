//! Token files and sample orders, against golden files and other readers.
//!
//! One binary, because each binary is linked with all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod builder_faults;
mod builder_resume;
mod checksums;
mod common;
mod formats;
mod gpt_cache;
mod gpt_parts;
mod helpers_golden;
mod idx_golden;
mod kinds;
mod lengths;
mod malformed;
mod masked_cache;
mod other_writers;
mod rng_golden;
mod seal;
mod splice;
mod tfrecord;
