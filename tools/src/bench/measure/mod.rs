//! What is counted, and whether it may be believed.

pub mod counters;
pub mod stats;
pub mod validity;
