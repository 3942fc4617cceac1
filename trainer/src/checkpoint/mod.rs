//! A run's state: what a checkpoint holds, when one is saved, and how a run resumes.

pub(crate) mod manager;
pub(crate) mod resume;
pub mod state;
