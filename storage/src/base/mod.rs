//! Errors, keys, units, checksums and names, which all other modules use.

pub(crate) mod checksum;
pub(crate) mod error;
pub(crate) mod key;
pub(crate) mod per_process;
pub(crate) mod printable;
pub(crate) mod process_identity;
pub(crate) mod remote_error;
pub(crate) mod rng;
pub(crate) mod temp_names;
pub(crate) mod time_span;
pub(crate) mod units;
