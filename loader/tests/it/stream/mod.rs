//! The stream of samples: equal to Megatron's, and the same for every store, fault and rank count.

mod backends;
mod block;
mod cache;
mod corpus;
mod failures;
mod node;
mod random;
mod resume;
mod verify;
