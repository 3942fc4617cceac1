//! Megatron's `.bin` and `.idx`, read and written.

pub(crate) mod builder;
pub(crate) mod dataset;
mod drafts;
pub(crate) mod idx;
pub(crate) mod length_log;
pub(crate) mod lengths;
pub(crate) mod sparse_table;
