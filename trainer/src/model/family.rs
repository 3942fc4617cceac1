//! What the families have in common, seen from a stage: units that take tensors and give tensors.

use std::ops::Range;

use tch::{Kind, Tensor};

use super::gpt::{self, Gpt};
use super::head::{Head, HeadGrad};
use super::spec::Leaves;
use super::{Cache, Micro};
use crate::Result;

#[derive(Clone, Debug)]
pub(super) enum Family {
    Gpt(Gpt),
}

/// What all units of a stage need to know of a micro-batch.
#[derive(Debug)]
pub(super) enum Context {
    Gpt(gpt::Context),
}

impl Family {
    pub(super) fn context(
        &self,
        micro: &Micro,
        _units: &Range<usize>,
        kind: Kind,
    ) -> Result<Context> {
        match self {
            Family::Gpt(gpt) => Ok(Context::Gpt(gpt.context(micro, 0, kind)?)),
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
        }
    }

    pub(super) fn head(&self) -> &Head {
        match self {
            Family::Gpt(gpt) => &gpt.head,
        }
    }

    pub(super) fn loss(&self, leaves: Leaves<'_>, micro: &Micro, outs: &[Tensor]) -> Result<f64> {
        match self {
            Family::Gpt(gpt) => gpt.head.loss(leaves, &outs[0], &micro.targets),
        }
    }

    pub(super) fn loss_and_grad(
        &self,
        leaves: Leaves<'_>,
        micro: &Micro,
        outs: &[Tensor],
    ) -> Result<HeadGrad> {
        match self {
            Family::Gpt(gpt) => gpt.head.loss_and_grad(leaves, &outs[0], &micro.targets),
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
        }
    }
}
