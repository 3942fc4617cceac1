//! How indexes are kept in files.

pub(crate) mod file_stamp;
pub(crate) mod index_cache;
pub(crate) mod npy;
mod python_json;
