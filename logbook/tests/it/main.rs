//! Logs, traces and reports.
//!
//! One binary, because each test binary is linked with all dependencies of the crate.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod log;
mod report;
