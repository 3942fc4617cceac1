//! Tokens to batches: a reader that knows the future order.
//!
//! Which tokens a training step needs is a pure function of (index, samples consumed), so nothing
//! need wait for a request that could have been made earlier. A [`Loader`] reads minutes ahead of
//! its consumer, many requests at a time, and hands batches over in order. The whole state is one
//! number, the samples consumed: a loader started there gives the same batches as one that came by
//! there.
//!
//! In reading order: an [`SampleOrder`] says which bytes a sample is made of, [`Ranks`] which
//! samples are whose; [`plan`] makes requests of them, both pure. `planner` plans as far ahead as
//! the `window` reaches, one `worker` for each store keeps as many requests in flight as its
//! `depth` says, `batcher` has an [`Assemble`] make batches of the samples, of the kinds in
//! [`batch`]. `shared` says how they pass each other what; [`Metrics`] what they did.

#![forbid(unsafe_code)]

mod assemble;
pub mod batch;
mod batcher;
pub mod cache;
mod depth;
mod error;
mod files;
mod gpt;
mod histogram;
mod loader;
mod metrics;
mod near;
mod node;
mod order;
mod order_encdec;
mod order_file;
mod order_masked;
pub mod plan;
mod planner;
mod queue;
mod ranks;
mod shared;
mod window;
mod worker;

pub use assemble::{Assemble, Sample};
pub use batch::Batch;
pub use error::{Error, Result};
pub use gpt::{GptBatches, GptLoaderOptions};
pub use loader::{Loader, LoaderOptions};
pub use metrics::Metrics;
pub use near::SampleCache;
pub use node::{
    BatchSource, NodeBatches, NodeClient, NodeError, NodeOptions, Open, RawAssemble, RawBatch,
    Samples,
};
pub use order::{BlendOrder, DataFile, GptOrder, PieceRef, SampleOrder, SampleOrigin};
pub use order_encdec::EncDecOrder;
pub use order_file::{BlockOrder, FileOrder};
pub use order_masked::MaskedOrder;
pub use ranks::Ranks;
