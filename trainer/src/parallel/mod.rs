//! A step by several ranks, bit-identical to a step by one.
//!
//! In reading order: [`recipe::schedule`] is the order in which a rank of a pipeline computes, as
//! data, and [`schedule_run`] executes it; [`pipe`] sends tensors between stages, and [`weights`]
//! prepares the weights. [`grads`] sums gradients over replicas ([`exchange`]), [`tied`] over the
//! stages that share a parameter, and [`norm`] computes their norm.
//!
//! The bits are those of one rank for these reasons. Each micro-batch's gradients are computed
//! separately. All sums follow one tree over the micro-batches of the step, then the order of a
//! parameter's uses. Norms are summed over blocks that no slice cuts. The update is elementwise.
//! Tensor parallelism is the exception: it divides sums within a matrix product.

pub mod accumulate;
pub mod exchange;
pub mod grads;
pub mod norm;
pub mod pipe;
pub mod schedule_run;
pub mod setup;
pub mod tied;
pub mod weights;
