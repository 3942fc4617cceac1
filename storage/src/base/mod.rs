//! Errors, keys, units, checksums, names and the log, which all other modules use.

pub(crate) mod checksum;
pub(crate) mod error;
pub(crate) mod key;
pub(crate) mod pending_call;
pub(crate) mod per_process;
pub(crate) mod printable;
pub(crate) mod process_identity;
pub(crate) mod remote_error;
pub(crate) mod rng;
pub(crate) mod stderr_log;
pub(crate) mod temp_names;
pub(crate) mod time_span;
pub(crate) mod units;
pub(crate) mod watchdog;
