//! The contract of every store, with the traits in `lib.rs`.

pub(crate) mod location;
pub(crate) mod manifest;
pub(crate) mod pending_dir_sync;
pub(crate) mod reader;
pub(crate) mod settings;
pub(crate) mod startup_step;
