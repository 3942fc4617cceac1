use std::cell::RefCell;
use std::ops::Range;

use recipe::model::Head;
use tch::{Kind, Tensor};

use super::attention::{AttentionMask, Rope};
use super::dropout::{Dropout, DropoutSite};
use super::head::{self, HeadGrad};
use super::layers::StageParams;
use super::micro::Text;
use super::{KvCache, Micro};
use crate::Result;

/// A family, from the view of a stage: units that map tensors to tensors.
pub(super) trait Network {
    /// What some units need of a micro-batch; `past` tokens are in a cache.
    fn context(
        &self,
        micro: &Micro,
        units: &Range<usize>,
        past: i64,
        kind: Kind,
    ) -> Result<Context>;

    /// One unit. The first takes nothing and embeds the tokens; the last returns the input of the
    /// head.
    fn unit(&self, work: &UnitContext<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>>;

    /// The first unit of a decoder that can continue tokens, if there is one. Those before it are
    /// an encoder.
    fn decoder(&self) -> Option<usize>;

    /// The head that predicts tokens.
    fn head(&self) -> &Head;

    /// The weighted loss of the output of the last unit.
    fn loss(&self, leaves: StageParams<'_>, micro: &Micro, outs: &[Tensor]) -> Result<Tensor> {
        head::loss(self.head(), leaves, &outs[0], &micro.targets)
    }

    /// The same, and its gradients.
    fn loss_and_grad(
        &self,
        leaves: StageParams<'_>,
        micro: &Micro,
        outs: &[Tensor],
    ) -> Result<HeadGrad> {
        head::loss_and_grad(self.head(), leaves, &outs[0], &micro.targets)
    }
}

/// The inputs that are the same for all units.
pub(super) struct UnitContext<'a> {
    pub(super) leaves: StageParams<'a>,
    pub(super) micro: &'a Micro,
    pub(super) context: &'a Context,
    /// For a decoder that continues a text.
    pub(super) cache: Option<RefCell<&'a mut KvCache>>,
}

impl UnitContext<'_> {
    /// The dropout in a block of a unit.
    pub(super) fn drops(&self, unit: usize, block: &'static str) -> DropoutSite<'_> {
        DropoutSite { dropout: self.context.dropout.as_ref(), tp: self.leaves.tp, unit, block }
    }
}

/// Data that depends only on a micro-batch, made once for all units. A family leaves what it does
/// not use at the default.
#[derive(Debug, Default)]
pub(super) struct Context {
    /// From the text to itself.
    pub(super) text: AttentionMask,
    /// From the answer to itself, and to the text.
    pub(super) answer: AttentionMask,
    pub(super) across: AttentionMask,
    /// The bucket of each distance in the text and in the answer, `[queries, keys]`.
    pub(super) buckets: [Option<Tensor>; 2],
    pub(super) rope: Option<Rope>,
    /// In training.
    pub(super) dropout: Option<Dropout>,
    /// Tokens of the cache.
    pub(super) past: i64,
}

impl Context {
    /// For training: attention weights of which some are dropped are computed as a matrix, except
    /// on a GPU.
    pub(super) fn dropping(
        mut self,
        dropout: Option<Dropout>,
        text: &Text,
        kind: Kind,
    ) -> Result<Self> {
        let on_gpu = text.ids.device().is_cuda();
        if dropout.is_some_and(|dropout| dropout.drops_weights() && !on_gpu) {
            self.text = self.text.explicit(text.len(), kind, text.ids.device())?;
        }
        Ok(Context { dropout, ..self })
    }
}
