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

/// A family, seen from a stage: units that take tensors and give tensors.
pub(super) trait Network {
    /// What some units need to know of a micro-batch; `past` tokens are in a cache.
    fn context(
        &self,
        micro: &Micro,
        units: &Range<usize>,
        past: i64,
        kind: Kind,
    ) -> Result<Context>;

    /// One unit. The first takes nothing and embeds the tokens; the last gives what the head takes.
    fn unit(&self, work: &UnitContext<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>>;

    /// The unit where a decoder begins that can go on from tokens, if there is one. Those before it
    /// are an encoder.
    fn decoder(&self) -> Option<usize>;

    /// What says the tokens.
    fn head(&self) -> &Head;

    /// The weighted loss of what the last unit gave.
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

/// What is the same for all units.
pub(super) struct UnitContext<'a> {
    pub(super) leaves: StageParams<'a>,
    pub(super) micro: &'a Micro,
    pub(super) context: &'a Context,
    /// Of a decoder that goes on.
    pub(super) cache: Option<RefCell<&'a mut KvCache>>,
}

impl UnitContext<'_> {
    /// What is dropped in a block of a unit.
    pub(super) fn drops(&self, unit: usize, block: &'static str) -> DropoutSite<'_> {
        DropoutSite { dropout: self.context.dropout.as_ref(), tp: self.leaves.tp, unit, block }
    }
}

/// What follows from a micro-batch alone, made once for all units. What a family has no use for
/// stays as it is by default.
#[derive(Debug, Default)]
pub(super) struct Context {
    /// How the text sees itself.
    pub(super) text: AttentionMask,
    /// How the answer sees itself, and the text.
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
    /// In training: weights of attention of which some are dropped are those of a matrix, but on a
    /// GPU.
    pub(super) fn dropping(
        mut self,
        dropout: Option<Dropout>,
        text: &Text,
        kind: Kind,
    ) -> Result<Self> {
        let on_gpu = text.ids.device().is_cuda();
        if dropout.is_some_and(|dropout| dropout.drops_weights() && !on_gpu) {
            self.text = self.text.spelled_out(text.len(), kind, text.ids.device())?;
        }
        Ok(Context { dropout, ..self })
    }
}
