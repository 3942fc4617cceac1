//! The storage contract on file systems: data becomes durable first, then visible.

mod durable_dirs;
pub(crate) mod in_place_file;
pub(crate) mod kernel_copy;
pub(crate) mod store;
mod upload;
mod write_behind;
