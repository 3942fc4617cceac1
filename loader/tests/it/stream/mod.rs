//! The stream of samples: equal to Megatron's, and the same whatever carries it.

mod backends;
mod block;
mod cache;
mod corpus;
mod failures;
mod node;
mod random;
mod resume;
mod verify;
