//! Exact and near-duplicate detection.

pub(super) mod duplicate_bands;
pub(super) mod exact;
pub(super) mod hash;
pub(super) mod minhash;
pub(super) mod near;
pub(super) mod shingle;
mod text_spool;
