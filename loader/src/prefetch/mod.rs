//! Reads that are ahead of the batches.

mod batcher;
mod channels;
mod depth;
mod files;
pub(crate) mod loader;
mod planner;
mod window;
mod worker;
