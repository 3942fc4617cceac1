//! Batches to weights: trains GPT, T5 and BERT on libtorch.
//!
//! A run is a TOML file ([`config`]); [`plan`] says what it will take, [`train`](train()) carries
//! it out, [`mod@eval`] measures a checkpoint, and [`generate`] lets it write. The state of a run
//! is its weights, their moments and the number of samples consumed. Everything else is a function
//! of the config: the order of the samples, the learning rate, the first weights. A resumed run
//! therefore ends in the bits of one that was never interrupted, on the same number of threads.
//!
//! What needs no libtorch is elsewhere: what a run is in [`recipe`], what it reads in [`feed`],
//! what it writes down of itself in [`logbook`].
//!
//! In reading order: `train` is the loop, [`step`] one optimizer step, [`model`] the network,
//! [`launch`] how processes become one run, [`parallel`] how ranks divide a step and join
//! gradients, [`checkpoint`] what is saved, when, and how a run resumes.

#![forbid(unsafe_code)]

pub mod checkpoint;
mod device;
mod dtype;
mod error;
pub mod eval;
pub mod exit;
pub mod generate;
pub mod launch;
pub mod model;
pub mod parallel;
pub mod step;
mod train;

pub use recipe::{config, mesh, plan, rng};

pub use error::{Error, Result};
pub use feed::{Batches, Data, NodePeers, open_corpus, open_tokenizer, with_special};
pub use step::local_tensors::{LocalTensor, LocalTensorMut};
pub use step::{StepReport, Trainer};
pub use train::{Host, Outcome, train};
