//! Tensors out of a checkpoint, verified.

pub(crate) mod block_reader;
pub(crate) mod checkpoint;
pub(crate) mod scatter;
pub(crate) mod verified_marks;
pub(crate) mod verify;
