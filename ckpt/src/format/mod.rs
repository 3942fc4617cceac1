//! The files of a checkpoint: safetensors shards, their catalog, and compressed blocks.

pub(crate) mod catalog;
pub(crate) mod chunk_writer;
pub(crate) mod codec;
pub(crate) mod safetensors;
pub(crate) mod tensor_file;
