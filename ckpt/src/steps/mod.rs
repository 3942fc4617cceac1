//! The folder of steps, their names, and the peak rate of its store.

pub(crate) mod checkpoints;
pub(crate) mod peak_rate;
