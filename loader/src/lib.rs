//! From tokens to batches: a reader that knows the order in advance.
//!
//! Which tokens a training step needs is a pure function of (index, samples consumed), so every
//! request can be submitted early. A [`Loader`] reads minutes ahead of its consumer, many requests
//! at a time, and hands batches over in order. The whole state is one number, the samples consumed:
//! a loader started there returns the same batches as one that has read up to there.
//!
//! In reading order: a [`SampleOrder`] defines which bytes a sample consists of and [`Ranks`] which
//! rank reads it; [`plan::round`] turns samples into requests; all three are pure. In `prefetch`,
//! `planner` plans ahead as far as the `window` allows, one `worker` per store keeps `depth`
//! requests in flight, and `batcher` lets an [`Assemble`] of [`batch`] build batches; `channels`
//! connects them. [`Metrics`] has their counters. [`cache`] keeps copies on the node's own disk,
//! and `node` lets one rank read for all ranks of a node. A [`RandomReader`] reads samples
//! in an order that is not known in advance.

#![forbid(unsafe_code)]

pub mod batch;
pub mod cache;
mod error;
mod gpt;
mod histogram;
mod metrics;
mod node;
mod order;
pub mod plan;
mod prefetch;
mod queue;
mod random;

pub use batch::Batch;
pub use batch::assembler::{Assemble, Sample};
pub use error::{Error, Result};
pub use gpt::{GptBatches, GptLoaderOptions};
pub use metrics::Metrics;
pub use node::{
    BatchSource, NodeBatches, NodeClient, NodeError, NodeOptions, Open, RawAssemble, RawBatch,
    Samples,
};
pub use order::calls::CallOrder;
pub use order::encdec::EncDecOrder;
pub use order::file::{BlockOrder, FileOrder};
pub use order::masked::MaskedOrder;
pub use order::rank_schedule::Ranks;
pub use order::sample_order::{
    BlendOrder, DataFile, GptOrder, PieceRef, SampleOrder, SampleOrigin,
};
pub use plan::sample_cache::SampleCache;
pub use prefetch::loader::{Loader, LoaderOptions, Recycler};
pub use random::RandomReader;
