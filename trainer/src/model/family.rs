//! What the families have in common, seen from a stage: units that take tensors and give tensors.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::attention::Sight;
use super::bert::Bert;
use super::gpt::{self, Gpt};
use super::head::{Head, HeadGrad};
use super::spec::{Builder, Leaves};
use super::t5::{self, T5};
use super::{Cache, Micro};
use crate::config::{self, ModelConfig};
use crate::{Error, Result};

#[derive(Clone, Debug)]
pub(super) enum Family {
    Gpt(Gpt),
    T5(T5),
    Bert(Bert),
}

/// What all units of a stage need to know of a micro-batch.
#[derive(Debug)]
pub(super) enum Context {
    Gpt(gpt::Context),
    T5(t5::Context),
    Bert(Sight),
}

impl Family {
    pub(super) fn new(config: &ModelConfig, tp: u64, build: &mut Builder) -> Self {
        match config.family {
            config::Family::Gpt => Family::Gpt(Gpt::new(config, tp, build)),
            config::Family::T5 => Family::T5(T5::new(config, tp, build)),
            config::Family::Bert => Family::Bert(Bert::new(config, tp, build)),
        }
    }

    pub(super) fn context(
        &self,
        micro: &Micro,
        units: &Range<usize>,
        kind: Kind,
    ) -> Result<Context> {
        match self {
            Family::Gpt(gpt) => Ok(Context::Gpt(gpt.context(micro, 0, kind)?)),
            Family::T5(t5) => Ok(Context::T5(t5.context(micro, units, kind)?)),
            Family::Bert(bert) => Ok(Context::Bert(bert.context(micro, kind)?)),
        }
    }

    /// One unit. The first of the model takes nothing.
    pub(super) fn unit(
        &self,
        leaves: Leaves<'_>,
        unit: usize,
        micro: &Micro,
        context: &Context,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        match (self, context) {
            (Family::Gpt(gpt), Context::Gpt(context)) => {
                gpt.unit(leaves, unit, micro, context, inputs, None)
            }
            (Family::T5(t5), Context::T5(context)) => t5.unit(leaves, unit, micro, context, inputs),
            (Family::Bert(bert), Context::Bert(sight)) => {
                bert.unit(leaves, unit, micro, sight, inputs)
            }
            _ => unreachable!("a context is made by the family that uses it"),
        }
    }

    pub(super) fn head(&self) -> &Head {
        match self {
            Family::Gpt(gpt) => &gpt.head,
            Family::T5(t5) => &t5.head,
            Family::Bert(bert) => &bert.head,
        }
    }

    pub(super) fn loss(&self, leaves: Leaves<'_>, micro: &Micro, outs: &[Tensor]) -> Result<f64> {
        match self {
            Family::Bert(bert) => bert.loss(leaves, micro, outs),
            _ => self.head().loss(leaves, &outs[0], &micro.targets),
        }
    }

    pub(super) fn loss_and_grad(
        &self,
        leaves: Leaves<'_>,
        micro: &Micro,
        outs: &[Tensor],
    ) -> Result<HeadGrad> {
        match self {
            Family::Bert(bert) => bert.loss_and_grad(leaves, micro, outs),
            _ => self.head().loss_and_grad(leaves, &outs[0], &micro.targets),
        }
    }

    /// All units, with a cache.
    pub(super) fn go_on(
        &self,
        leaves: Leaves<'_>,
        micro: &Micro,
        kind: Kind,
        cache: &mut Cache,
    ) -> Result<Vec<Tensor>> {
        match self {
            Family::Gpt(gpt) => gpt.go_on(leaves, micro, kind, cache),
            Family::T5(t5) => t5.go_on(leaves, &micro.text, kind, cache),
            Family::Bert(_) => Err(Error::Mismatch {
                doing: "go on from a text".to_owned(),
                details: vec!["got an encoder, due a decoder".to_owned()],
                hint: "models of the families \"gpt\" and \"t5\" write",
            }),
        }
    }

    /// What an encoder gives to a decoder of a text; `None` if there is no encoder before one.
    pub(super) fn read(
        &self,
        leaves: Leaves<'_>,
        micro: &Micro,
        kind: Kind,
    ) -> Result<Option<Tensor>> {
        match self {
            Family::T5(t5) => Ok(Some(t5.read(leaves, &micro.text, kind)?)),
            Family::Gpt(_) | Family::Bert(_) => Ok(None),
        }
    }
}
