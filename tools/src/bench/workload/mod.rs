//! The requests that a benchmark makes: reads, saves, metadata, replays.

pub mod concurrent;
pub mod metadata;
pub mod reads;
pub mod replay;
pub mod saves;
