//! The networks: GPT, T5 and BERT, as lists of units that a pipeline may be cut between.
//!
//! A [`Model`] is a [`Blueprint`] that computes; a [`Stage`] is a run of its units on one rank.
//! Parameters are plain lists of tensors that the caller owns: the same code runs on f32 weights
//! and on their bf16 copies.
//!
//! In reading order: `init` sets initial values, `micro` is a batch as tensors, `tp` the ranks that
//! share each matrix; `dropout`, `layers` and `attention` are the operations, `network` the
//! interface of a family, `gpt`, `t5` and `bert` the families, `head` the logits and the loss,
//! `saved_activations` what is stored until the backward pass, and `stage` combines them.

mod attention;
mod bert;
mod dropout;
mod gpt;
mod head;
mod init;
pub mod input;
mod kv_cache;
mod layers;
mod micro;
mod network;
mod saved_activations;
mod stage;
mod t5;
mod tp;

use std::ops::{Deref, Range};
use std::sync::Arc;

pub use head::HeadGrad;
pub use init::initialize;
pub use kv_cache::KvCache;
pub use micro::{LossWeights, Micro};
pub use recipe::model::{Blueprint, HEAD_CHUNK_ROWS, Init, ParamSpec, Use};
pub use saved_activations::ActivationStore;
pub use stage::{Pass, Stage};
pub use tp::Tp;

use crate::config::ModelConfig;
use dropout::Dropout;
use network::Network;

/// A blueprint with the seed of dropout.
#[derive(Clone, Debug)]
pub struct Model {
    blueprint: Arc<Blueprint>,
    /// Of dropout.
    seed: u64,
}

impl Deref for Model {
    type Target = Blueprint;

    fn deref(&self) -> &Blueprint {
        &self.blueprint
    }
}

impl Model {
    /// From a checked config, to be divided among `tp` tensor parallel ranks.
    #[must_use]
    pub fn new(config: &ModelConfig, tp: u64) -> Self {
        Model { blueprint: Arc::new(Blueprint::new(config, tp)), seed: 0 }
    }

    /// With this seed of dropout, instead of 0.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Model { seed, ..self }
    }

    /// A run of units on one rank of `tp`. `recomputes` selects the units that are recomputed for
    /// their backward pass instead of saving their activations.
    ///
    /// # Panics
    /// If there are no such units.
    #[must_use]
    pub fn stage(&self, units: Range<usize>, tp: &Tp, recomputes: impl Fn(usize) -> bool) -> Stage {
        Stage::new(self, units, tp, recomputes)
    }

    fn family(&self) -> &dyn Network {
        use recipe::model::Network::{Bert, Gpt, T5};
        match self.blueprint.network() {
            Gpt(gpt) => gpt,
            T5(t5) => t5,
            Bert(bert) => bert,
        }
    }

    /// The dropout of a micro-batch in training.
    fn dropout(&self, micro: &Micro) -> Option<Dropout> {
        Dropout::new(self.config(), self.seed, micro.first_sample, micro.text.rows())
    }
}
