//! Index caches: `.npy` files under Megatron's names, with a check that they are current.

pub(crate) mod file_stamp;
pub(crate) mod index_cache;
pub(crate) mod npy;
mod python_json;
