//! A step by several ranks, to the bits of a step by one.
//!
//! In reading order: [`recipe::schedule`] says in which order a rank of a pipeline computes, as
//! data, and [`schedule_run`] does it; [`pipe`] carries what stages exchange, [`weights`] what
//! computes. Gradients go through [`grads`] to a sum over replicas ([`exchange`]), join over the
//! stages that share a parameter ([`tied`]), and have their [`norm`] taken.
//!
//! What makes the bits those of one rank: a micro-batch's gradients are made alone; all sums follow
//! one tree over the micro-batches of the step, then the order of a parameter's uses; norms are of
//! blocks that no slice cuts; and the update goes element by element. Tensor parallelism is the
//! exception: it divides sums within a matrix product.

pub mod accumulate;
pub mod exchange;
pub mod grads;
pub mod norm;
pub mod pipe;
pub mod schedule_run;
pub mod setup;
pub mod tied;
pub mod weights;
