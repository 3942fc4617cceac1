//! Prefetch: threads that read ahead of the consumer and assemble batches.

mod batcher;
mod channels;
mod depth;
pub(crate) mod files;
pub(crate) mod loader;
mod planner;
mod window;
mod worker;
