//! What is asked of a store.

pub mod concurrent;
pub mod metadata;
pub mod reads;
pub mod replay;
pub mod saves;
