//! Megatron's `.bin` and `.idx`: reading and writing.

pub(crate) mod builder;
pub(crate) mod dataset;
mod drafts;
pub(crate) mod idx;
pub(crate) mod length_log;
pub(crate) mod lengths;
pub(crate) mod similar;
pub(crate) mod sparse_table;
