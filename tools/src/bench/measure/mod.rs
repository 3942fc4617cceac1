//! Counters, statistics, and the checks of a measurement's validity.

pub mod counters;
pub mod stats;
pub mod validity;
