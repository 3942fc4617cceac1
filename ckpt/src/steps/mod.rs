//! The steps in a folder, and their names.

pub(crate) mod checkpoints;
pub(crate) mod peak_rate;
