//! The networks: GPT, T5 and BERT, as lists of units that a pipeline may be cut between.
//!
//! A [`Model`] says what parameters there are and who uses them; a [`Stage`] is a run of its units
//! on one rank and computes. Parameters are plain lists of tensors that somebody else owns: the
//! same code runs on f32 weights and on their bf16 copies. Names and shapes are those of Hugging
//! Face's models, so that a checkpoint is exported by copying, and of the model without
//! parallelism; padding is in a rank's memory only.
//!
//! In reading order: `spec` names the parameters and their uses, `init` gives them values, `micro`
//! is a batch as tensors, `tp` the ranks that share each matrix, `dropout` what is left out in
//! training, `parts` and `attention` what layers are made of, `network` what a family is, `gpt`,
//! `t5` and `bert` the families, `head` the logits and the loss, `stage` puts them together.

mod attention;
mod bert;
mod cache;
mod dropout;
mod gpt;
mod head;
mod init;
mod micro;
mod network;
mod parts;
mod spec;
mod stage;
mod t5;
mod tp;

use std::ops::Range;
use std::sync::Arc;

use ckpt::layout::{Param, Split};

pub use cache::Cache;
pub use head::{HEAD_CHUNK_ROWS, HeadGrad};
pub use init::initialize;
pub use micro::{LossWeights, Micro};
pub use spec::{Init, ParamSpec, Use};
pub use stage::{Carried, Pass, Stage};
pub use tp::Tp;

use crate::config::{Family, ModelConfig};
use bert::Bert;
use dropout::Dropout;
use gpt::Gpt;
use network::Network;
use spec::Builder;
use t5::T5;

/// A model as it is written down: what parameters it has, and how they are used.
#[derive(Clone, Debug)]
pub struct Model {
    inner: Arc<Inner>,
    /// Of what is dropped in training.
    seed: u64,
}

#[derive(Debug)]
struct Inner {
    config: ModelConfig,
    network: Box<dyn Network>,
    params: Vec<ParamSpec>,
    uses: Vec<Use>,
}

impl Model {
    /// From a checked config, to be cut among so many tensor parallel ranks.
    #[must_use]
    pub fn new(config: &ModelConfig, tp: u64) -> Self {
        let mut build = Builder::new();
        let network: Box<dyn Network> = match config.family {
            Family::Gpt => Box::new(Gpt::new(config, tp, &mut build)),
            Family::T5 => Box::new(T5::new(config, tp, &mut build)),
            Family::Bert => Box::new(Bert::new(config, tp, &mut build)),
        };
        let (params, uses) = build.finish();
        let inner = Arc::new(Inner { config: config.clone(), network, params, uses });
        Model { inner, seed: 0 }
    }

    /// With this seed of what is dropped in training, instead of 0.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        Model { seed, ..self }
    }

    /// How many units there are: layers; of an encoder and a decoder first those of the encoder.
    /// The first embeds the tokens, the last has the head.
    #[must_use]
    pub fn units(&self) -> usize {
        self.inner.config.units() as usize // fits: the config bounds it
    }

    /// Every parameter, in the order in which the trainer keeps them: first those that decay, then
    /// the rest. Within each in the order of their first use.
    #[must_use]
    pub fn params(&self) -> &[ParamSpec] {
        &self.inner.params
    }

    /// Every use of a parameter, in the order of computing.
    #[must_use]
    pub fn uses(&self) -> &[Use] {
        &self.inner.uses
    }

    /// A run of units on one rank of `tp`. `recomputes` says which of them are computed again for
    /// their backward pass instead of keeping what it needs.
    ///
    /// # Panics
    /// If there are no such units.
    #[must_use]
    pub fn stage(&self, units: Range<usize>, tp: &Tp, recomputes: impl Fn(usize) -> bool) -> Stage {
        Stage::new(self, units, tp, recomputes)
    }

    /// The parameters as checkpoints count them, if `stages` has the stage of each unit.
    ///
    /// # Panics
    /// If there are not as many stages as units.
    #[must_use]
    pub fn layout(&self, stages: &[u64]) -> Vec<Param> {
        assert_eq!(stages.len(), self.units(), "every unit has a stage");
        let param = |spec: &ParamSpec| {
            let mut of: Vec<u64> = spec.units.iter().map(|unit| stages[*unit]).collect();
            of.dedup();
            let (name, split) = (spec.name.clone(), spec.split.clone());
            Param { name, shape: spec.shape_u64(), split, stages: of }
        };
        self.params().iter().map(param).collect()
    }

    fn network(&self) -> &dyn Network {
        self.inner.network.as_ref()
    }

    /// What is dropped of a micro-batch in training.
    fn dropout(&self, micro: &Micro) -> Option<Dropout> {
        Dropout::new(&self.inner.config, self.seed, micro.first_sample, micro.text.rows())
    }

    fn hidden(&self) -> i64 {
        self.inner.config.hidden as i64 // fits: the config bounds it
    }

    /// Tokens of a row of each tensor that comes to a unit from the one before.
    fn carried_lens(&self, unit: usize) -> Vec<i64> {
        let config = &self.inner.config;
        // fits: the config bounds them.
        let (len, layers) = (config.seq_len as i64, config.layers as usize);
        let answer_len = config.dec_len.unwrap_or(0) as i64;
        match unit {
            0 => Vec::new(),
            unit if unit <= layers => vec![len],
            _ => vec![answer_len, len],
        }
    }
}

/// How the vocabulary is cut: padded for all ranks alike.
fn vocab_split(config: &ModelConfig, tp: u64) -> Split {
    Split::Padded { rows: config.vocab_rows(tp) * tp }
}
