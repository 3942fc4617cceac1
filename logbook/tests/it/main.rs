//! Logs, traces and reports.
//!
//! One binary, because each is linked with all that the crate needs.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod log;
mod report;
