//! The stream of samples: equal to Megatron's, and the same whatever carries it.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod backends;
mod block;
mod cache;
mod corpus;
mod failures;
mod node;
mod resume;
