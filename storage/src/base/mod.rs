//! Errors, keys, units, checksums and names, on which all else stands.

pub(crate) mod checksum;
pub(crate) mod error;
pub(crate) mod key;
pub(crate) mod process_identity;
pub(crate) mod remote_error;
pub(crate) mod rng;
pub(crate) mod temp_names;
pub(crate) mod units;
