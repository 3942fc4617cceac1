//! The state of a run, saved and restored.

pub(crate) mod manager;
pub(crate) mod resume;
pub mod state;
