//! Concatenation and repair of datasets.

pub(crate) mod concat;
pub(crate) mod repair;
