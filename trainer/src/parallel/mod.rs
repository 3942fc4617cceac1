//! A step by several processes.
//!
//! [`schedule`] says in which order a rank of a pipeline computes, as data.

pub mod schedule;
