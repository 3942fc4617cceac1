//! The files of a checkpoint: shards, their catalog, and blocks that are packed.

pub(crate) mod catalog;
pub(crate) mod chunk_writer;
pub(crate) mod codec;
pub(crate) mod safetensors;
