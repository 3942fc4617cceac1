//! Errors, limits and thread helpers, which every other folder uses.

pub(crate) mod error;
pub(crate) mod hex;
pub(crate) mod parallel_io;
pub(crate) mod rate_limit;
pub(crate) mod save_control;
