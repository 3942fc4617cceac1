//! Trains GPT, T5 and BERT on libtorch.
//!
//! A run is a TOML file ([`config`]); [`plan`] estimates its resources, [`train`](train()) runs it,
//! [`mod@eval`] measures a checkpoint, and [`generate`] writes text with it. The state of a run is
//! its weights, their moments and the number of samples consumed. Everything else is a function of
//! the config: the order of the samples, the learning rate, the initial weights. A resumed run is
//! therefore bit-identical to an uninterrupted one, on the same number of threads.
//!
//! Code without libtorch is in other crates: the config of a run in [`recipe`], its data in
//! [`feed`], its logs in [`logbook`].
//!
//! In reading order: `train` is the loop, [`step`] one optimizer step, [`model`] the network,
//! [`launch`] connects the processes of a run, [`parallel`] divides a step among ranks and sums
//! gradients, [`checkpoint`] saves and resumes.

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
