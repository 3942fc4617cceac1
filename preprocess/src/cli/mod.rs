//! The command line: its arguments, and what it shows.

pub(crate) mod args;
pub(crate) mod compat;
mod foreign;
mod input;
pub(crate) mod progress;
pub(crate) mod summary;
