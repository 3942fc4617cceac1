//! Verified reads of any regions of a checkpoint's tensors.

pub(crate) mod block_reader;
pub(crate) mod checkpoint;
pub(crate) mod scatter;
pub(crate) mod verified_marks;
pub(crate) mod verify;
