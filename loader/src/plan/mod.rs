//! Read plans: which requests a round of samples needs.

pub mod round;
pub(crate) mod sample_cache;
mod store_reads;
