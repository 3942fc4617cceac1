//! The operations of a network on the tensors of its parameters, from `[tokens, width]` to
//! `[tokens, width]`.
//!
//! Tensor parallel ranks [`enter`](Tp::enter) before the first matrix of a block, which is cut by
//! its outputs, and [`leave`](Tp::leave) after the last, cut by its inputs.

use recipe::model::{Attention, FeedForward, Linear, Norm, Stored, UseId};
use tch::{Kind, Tensor};

use super::Tp;
use super::attention::{AttentionMask, attend, split_heads};
use super::dropout::DropoutSite;
use super::micro::Text;
use super::tp::embed;
use crate::Result;
use crate::config::Activation;

/// The tensors that a stage computes with, one a use, and its tensor parallel ranks.
#[derive(Clone, Copy)]
pub(super) struct StageParams<'a> {
    pub(super) tensors: &'a [Tensor],
    /// Where the tensor of each use of the model is, if the stage has it.
    pub(super) places: &'a [Option<usize>],
    pub(super) tp: &'a Tp,
}

impl<'a> StageParams<'a> {
    pub(super) fn get(self, at: UseId) -> &'a Tensor {
        &self.tensors[self.place(at)]
    }

    /// Where the tensor of a use is among those of the stage.
    pub(super) fn place(self, at: UseId) -> usize {
        self.places[at.0].expect("a unit has what it uses")
    }

    fn bias(self, matrix: &Linear) -> Option<&'a Tensor> {
        matrix.bias.map(|bias| self.get(bias))
    }

    /// The product, with the bias.
    pub(super) fn linear(self, matrix: &Linear, x: &Tensor) -> Result<Tensor> {
        let weight = self.get(matrix.weight);
        Ok(match (matrix.stored, self.bias(matrix)) {
            (Stored::InOut, Some(bias)) => bias.f_addmm(x, weight)?,
            (Stored::InOut, None) => x.f_mm(weight)?,
            (Stored::OutIn, bias) => x.f_linear(weight, bias)?,
        })
    }

    /// The products with each of some fused matrices.
    pub(super) fn fused(self, matrix: &Linear, x: &Tensor, count: i64) -> Result<Vec<Tensor>> {
        let weight = self.get(matrix.weight);
        if weight.dim() == 2 {
            return Ok(self.linear(matrix, x)?.f_chunk(count, 1)?);
        }
        // A rank's parts of the fused matrices are consecutive.
        let (_, inputs, outputs) = weight.size3()?;
        let x = x.f_unsqueeze(0)?.f_expand([count, x.size()[0], inputs], false)?;
        let products = match self.bias(matrix) {
            Some(bias) => bias.f_view([count, 1, outputs])?.f_baddbmm(&x, weight, 1, 1)?,
            None => x.f_bmm(weight)?,
        };
        Ok(products.f_unbind(0)?)
    }

    /// The product of a matrix cut by its inputs, summed over the ranks, with the bias.
    pub(super) fn linear_and_leave(self, matrix: &Linear, x: &Tensor) -> Result<Tensor> {
        if self.tp.is_alone() {
            return self.linear(matrix, x);
        }
        let sum = self.tp.leave(&self.linear(&Linear { bias: None, ..*matrix }, x)?)?;
        Ok(match self.bias(matrix) {
            Some(bias) => sum.f_add(bias)?,
            None => sum,
        })
    }

    /// The rows of a table that are those of a text's positions, which count from `past` unless
    /// the text has its own: `[tokens, width]`, of this rank's tokens.
    pub(super) fn positions(self, table: UseId, text: &Text, past: i64) -> Result<Tensor> {
        let options = (Kind::Int64, text.ids.device());
        let places = match &text.positions {
            Some(positions) => positions.shallow_clone(),
            None => {
                Tensor::f_arange_start(past, past + text.len(), options)?.f_expand_as(&text.ids)?
            }
        };
        embed(self.get(table), &self.tp.own_rows(&places.f_reshape([-1])?)?)
    }

    /// A norm over the width.
    pub(super) fn norm(self, norm: &Norm, x: &Tensor) -> Result<Tensor> {
        let gain = self.get(norm.gain);
        Ok(match norm.bias.map(|bias| self.get(bias)) {
            Some(bias) => x.f_layer_norm(gain.size(), Some(gain), Some(bias), norm.eps, false)?,
            None => x.f_rms_norm(gain.size(), Some(gain), norm.eps)?,
        })
    }

    /// Keys and values of `x`, after [`Tp::enter`], `[rows, heads, len, head_dim]` each.
    pub(super) fn seen(self, of: &Attention, x: &Tensor, rows: i64) -> Result<(Tensor, Tensor)> {
        let heads = |matrix| split_heads(&self.linear(matrix, x)?, rows, of.head_dim);
        Ok((heads(&of.k)?, heads(&of.v)?))
    }

    /// Attention of `x`, after [`Tp::enter`], to keys and values, with dropout in training.
    pub(super) fn attention(
        self,
        of: &Attention,
        x: &Tensor,
        (k, v): &(Tensor, Tensor),
        attn_mask: &AttentionMask,
        scale: Option<f64>,
        drops: DropoutSite<'_>,
    ) -> Result<Tensor> {
        let q = split_heads(&self.linear(&of.q, x)?, k.size()[0], of.head_dim)?;
        let mixed = attend(&q, k, v, attn_mask, scale, drops)?;
        drops.hidden(self.linear_and_leave(&of.out, &mixed)?)
    }

    /// The block that computes each token independently.
    pub(super) fn feed_forward(
        self,
        block: &FeedForward,
        x: &Tensor,
        drops: DropoutSite<'_>,
    ) -> Result<Tensor> {
        let x = self.tp.enter(x)?;
        let activate = |x: &Tensor| activate(block.activation, x);
        let mut inner = match &block.gate {
            Some(gate) => activate(&self.linear(gate, &x)?)?.f_mul(&self.linear(&block.up, &x)?)?,
            None if block.activation.is_gated() => {
                let parts = self.fused(&block.up, &x, 2)?;
                activate(&parts[0])?.f_mul(&parts[1])?
            }
            None => activate(&self.linear(&block.up, &x)?)?,
        };
        if block.drops_inner {
            inner = drops.inner(inner)?;
        }
        drops.hidden(self.linear_and_leave(&block.down, &inner)?)
    }
}

/// The activation function; for a gated one, that of the gate.
pub(super) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    Ok(match activation {
        Activation::Gelu => x.f_gelu("none")?,
        Activation::GeluTanh | Activation::GegluTanh => x.f_gelu("tanh")?,
        Activation::Relu => x.f_relu()?,
        Activation::Swiglu => x.f_silu()?,
    })
}
