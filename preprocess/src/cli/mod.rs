//! The command line of `preprocess`: arguments, progress and summary.

pub(crate) mod args;
pub(crate) mod compat;
mod foreign;
mod input;
pub(crate) mod logger;
pub(crate) mod progress;
pub(crate) mod summary;
