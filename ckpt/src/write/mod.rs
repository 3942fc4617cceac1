//! Tensors into the files of a step.

pub(crate) mod shard_writer;
pub(crate) mod staging;
