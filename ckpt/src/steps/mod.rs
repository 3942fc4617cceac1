//! The folder of steps, their names, what it holds, and the peak rate of its store.

pub(crate) mod checkpoints;
pub(crate) mod folder_listing;
pub(crate) mod peak_rate;
