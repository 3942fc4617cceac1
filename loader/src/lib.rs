//! Tokens to batches: a reader that knows the future order.
//!
//! Which tokens a training step needs is a pure function of (index, samples consumed), so nothing
//! need wait for a request that could have been made earlier. [`plan`] works out, for any batch,
//! the extents of the `.bin` that hold it; `prefetch` reads a bounded window of them ahead on a
//! thread of its own and hands them over in order; [`Batch`] is what a step consumes. The whole
//! state is one number, the samples consumed: a loader started there gives the same batches as one
//! that came by there.

#![forbid(unsafe_code)]

mod assemble;
pub mod batch;
pub mod cache;
mod error;
mod near;
mod node;
mod order;
mod order_encdec;
mod order_file;
mod order_masked;
pub mod plan;
mod prefetch;

pub use assemble::{Assemble, Sample};
pub use batch::Batch;
pub use error::{Error, Result};
pub use near::Near;
pub use node::{
    BatchSource, NodeBatches, NodeError, NodeOptions, NodeReader, Open, RawAssemble, RawBatch,
    Samples,
};
pub use order::{BlendOrder, GptOrder, Order, Origin, PieceRef, Source};
pub use order_encdec::EncDecOrder;
pub use order_file::{BlockOrder, FileOrder};
pub use order_masked::MaskedOrder;
pub use prefetch::{GptBatches, Options};
