//! Tensors written to the shards of a step.

pub(crate) mod shard_writer;
pub(crate) mod staging;
