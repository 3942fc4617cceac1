//! Datasets made of datasets, and repaired.

pub(crate) mod concat;
pub(crate) mod repair;
