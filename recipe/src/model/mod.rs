//! The networks without values: GPT, T5 and BERT.
//!
//! A [`Blueprint`] lists the parameters, how each is divided among tensor parallel ranks, which
//! units use it, and which parameters each part of a network has. A plan counts with it, a trainer
//! computes with it. Names and shapes are those of Hugging Face's models, so that a checkpoint is
//! exported by copying, and those of the model without parallelism; padding exists only in the
//! memory of a rank.
//!
//! In reading order: `spec` has parameters and their uses, `parts` the building blocks of layers,
//! `gpt`, `t5` and `bert` the families, `first` the initial values.

mod bert;
mod first;
mod gpt;
mod parts;
mod spec;
mod t5;

use ckpt::layout::{Param, TensorSplit};

pub use bert::{Bert, BertLayer};
pub use gpt::{Gpt, GptLayer};
pub use parts::{Attention, FeedForward, Head, Linear, Norm, Stored};
pub use spec::{Init, ParamSpec, Use, UseId};
pub use t5::{Buckets, T5, T5Layer, T5Stack};

use crate::config::{Family, ModelConfig};
use spec::Builder;

/// Rows of logits that exist at once: 512 x 50,304 f32 are 98 MiB. With fewer rows the matrix
/// products are less efficient.
pub const HEAD_CHUNK_ROWS: u64 = 512;

/// The same on a GPU, which is less utilized by small products.
#[must_use]
pub fn head_chunk_rows(on_gpu: bool) -> u64 {
    if on_gpu { 8 * HEAD_CHUNK_ROWS } else { HEAD_CHUNK_ROWS }
}

/// The parameters of a model and their uses.
#[derive(Clone, Debug)]
pub struct Blueprint {
    config: ModelConfig,
    network: Network,
    params: Vec<ParamSpec>,
    uses: Vec<Use>,
}

/// The network of a family.
#[derive(Clone, Debug)]
pub enum Network {
    /// A decoder.
    Gpt(Gpt),
    /// An encoder and a decoder.
    T5(T5),
    /// An encoder.
    Bert(Bert),
}

impl Blueprint {
    /// From a checked config, divided among `tp` tensor parallel ranks.
    #[must_use]
    pub fn new(config: &ModelConfig, tp: u64) -> Self {
        let mut build = Builder::new();
        let network = match config.family {
            Family::Gpt => Network::Gpt(Gpt::new(config, tp, &mut build)),
            Family::T5 => Network::T5(T5::new(config, tp, &mut build)),
            Family::Bert => Network::Bert(Bert::new(config, tp, &mut build)),
        };
        let (params, uses) = build.finish();
        Blueprint { config: config.clone(), network, params, uses }
    }

    /// The config of the model.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The parts of the network with their parameters.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Number of units: layers; of an encoder and a decoder first those of the encoder. The first
    /// embeds the tokens, the last has the head.
    #[must_use]
    pub fn units(&self) -> usize {
        self.config.units() as usize // fits: the config bounds it
    }

    /// Every parameter, in the order of the trainer: first those with weight decay, then the rest,
    /// each group in the order of first use.
    #[must_use]
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// Every use of a parameter, in the order of computation.
    #[must_use]
    pub fn uses(&self) -> &[Use] {
        &self.uses
    }

    /// The parameters as in checkpoints, if `stages` has the stage of each unit.
    ///
    /// # Panics
    /// If `stages` does not have one entry per unit.
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

    /// Tokens in a row of each tensor that a unit receives from the one before.
    #[must_use]
    pub fn carried_lens(&self, unit: usize) -> Vec<i64> {
        let config = &self.config;
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

/// How the vocabulary is divided: padded to the same size on all ranks.
fn vocab_split(config: &ModelConfig, tp: u64) -> TensorSplit {
    TensorSplit::Padded { rows: config.vocab_rows(tp) * tp }
}
