//! A step by several ranks.
//!
//! [`schedule`] says in which order a rank of a pipeline computes, as data.

pub mod schedule;
