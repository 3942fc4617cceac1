//! What the families are made of. Each part knows the places of its parameters and computes with
//! the tensors that stand there; `[tokens, width]` goes in and comes out.
//!
//! Tensor parallel ranks [`enter`](super::Tp::enter) before the first matrix of a block, which is
//! cut by its outputs, and [`leave`](super::Tp::leave) after the last, cut by its inputs.

use ckpt::layout::Split;
use tch::Tensor;

use super::attention::{Sight, attend, split_heads};
use super::dropout::Drops;
use super::spec::{Builder, Init, Leaves, UseId};
use crate::Result;
use crate::config::{Activation, Family, ModelConfig, Norm as NormKind};

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// `[in, out]`, as GPT-2's `Conv1D` has it.
    InOut,
    /// `[out, in]`, as a `Linear`.
    OutIn,
}

/// How tensor parallelism cuts a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    /// By its outputs, of which there are so many matrices side by side.
    Outputs(i64),
    /// By its inputs.
    Inputs,
    /// Not at all.
    Whole,
}

/// A matrix, and perhaps a bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    weight: UseId,
    bias: Option<UseId>,
    stored: Stored,
}

/// What a matrix is to be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) inputs: i64,
    pub(super) outputs: i64,
    pub(super) stored: Stored,
    pub(super) cut: Cut,
    pub(super) std: f64,
    pub(super) bias: bool,
}

impl Linear {
    pub(super) fn new(build: &mut Builder, name: &str, spec: &Matrix) -> Self {
        let Matrix { inputs, outputs, stored, cut, .. } = *spec;
        let (shape, axis_in, axis_out) = match stored {
            Stored::InOut => ([inputs, outputs], 0, 1),
            Stored::OutIn => ([outputs, inputs], 1, 0),
        };
        let (split, bias_split) = match cut {
            Cut::Whole => (Split::Replicate, Split::Replicate),
            Cut::Inputs => (Split::Axis(axis_in), Split::Replicate),
            Cut::Outputs(1) => (Split::Axis(axis_out), Split::Axis(0)),
            Cut::Outputs(count) => {
                let blocks = vec![(outputs / count) as u64; count as usize]; // fits: of a shape
                (Split::fused_along(axis_out, &blocks), Split::fused(&blocks))
            }
        };
        let weight = build.param(format!("{name}.weight"), &shape, Init::Normal(spec.std), split);
        let bias = spec
            .bias
            .then(|| build.param(format!("{name}.bias"), &[outputs], Init::Zeros, bias_split));
        Linear { weight, bias, stored }
    }

    fn bias<'a>(&self, leaves: Leaves<'a>) -> Option<&'a Tensor> {
        self.bias.map(|bias| leaves.get(bias))
    }

    /// The product, with the bias.
    pub(super) fn apply(&self, leaves: Leaves<'_>, x: &Tensor) -> Result<Tensor> {
        let weight = leaves.get(self.weight);
        Ok(match (self.stored, self.bias(leaves)) {
            (Stored::InOut, Some(bias)) => bias.f_addmm(x, weight)?,
            (Stored::InOut, None) => x.f_mm(weight)?,
            (Stored::OutIn, bias) => x.f_linear(weight, bias)?,
        })
    }

    /// The products with each of some fused matrices.
    pub(super) fn apply_fused(
        &self,
        leaves: Leaves<'_>,
        x: &Tensor,
        count: i64,
    ) -> Result<Vec<Tensor>> {
        let weight = leaves.get(self.weight);
        if weight.dim() == 2 {
            return Ok(self.apply(leaves, x)?.f_chunk(count, 1)?);
        }
        // A rank's parts of the fused matrices lie one after the other.
        let (_, inputs, outputs) = weight.size3()?;
        let x = x.f_unsqueeze(0)?.f_expand([count, x.size()[0], inputs], false)?;
        let products = match self.bias(leaves) {
            Some(bias) => bias.f_view([count, 1, outputs])?.f_baddbmm(&x, weight, 1, 1)?,
            None => x.f_bmm(weight)?,
        };
        Ok(products.f_unbind(0)?)
    }

    /// The product of a matrix cut by its inputs, summed over the ranks, with the bias.
    pub(super) fn apply_and_leave(&self, leaves: Leaves<'_>, x: &Tensor) -> Result<Tensor> {
        if leaves.tp.is_alone() {
            return self.apply(leaves, x);
        }
        let sum = leaves.tp.leave(&Linear { bias: None, ..*self }.apply(leaves, x)?)?;
        Ok(match self.bias(leaves) {
            Some(bias) => sum.f_add(bias)?,
            None => sum,
        })
    }
}

/// How the matrices of a stack of layers are made.
#[derive(Clone, Copy)]
pub(super) struct Style<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) stored: Stored,
    /// How many layers write into the residual stream.
    pub(super) layers: u64,
}

impl Style<'_> {
    /// So many matrices side by side that read the residual stream, of so many outputs in all.
    pub(super) fn reads(&self, build: &mut Builder, name: &str, outputs: i64, of: i64) -> Linear {
        let (inputs, cut) = (self.config.hidden as i64, Cut::Outputs(of)); // fits: bounded
        let (stored, std, bias) = (self.stored, self.config.init.std, self.config.bias());
        Linear::new(build, name, &Matrix { inputs, outputs, stored, cut, std, bias })
    }

    /// A matrix that writes into the residual stream.
    pub(super) fn writes(&self, build: &mut Builder, name: &str, inputs: i64) -> Linear {
        let (outputs, cut) = (self.config.hidden as i64, Cut::Inputs); // fits: bounded
        let (stored, bias, init) = (self.stored, self.config.bias(), &self.config.init);
        let shrink = if init.scaled_output { (2.0 * self.layers as f64).sqrt() } else { 1.0 };
        let std = init.std / shrink;
        Linear::new(build, name, &Matrix { inputs, outputs, stored, cut, std, bias })
    }
}

/// A norm over the width.
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    gain: UseId,
    bias: Option<UseId>,
    eps: f64,
}

impl Norm {
    pub(super) fn new(build: &mut Builder, name: &str, config: &ModelConfig) -> Self {
        let hidden = [config.hidden as i64]; // fits: the config bounds it
        let gain = build.param(format!("{name}.weight"), &hidden, Init::Ones, Split::Replicate);
        let bias = (config.norm() == NormKind::Layernorm)
            .then(|| build.param(format!("{name}.bias"), &hidden, Init::Zeros, Split::Replicate));
        Norm { gain, bias, eps: config.norm_eps() }
    }

    pub(super) fn apply(&self, leaves: Leaves<'_>, x: &Tensor) -> Result<Tensor> {
        let gain = leaves.get(self.gain);
        Ok(match self.bias {
            Some(bias) => {
                x.f_layer_norm(gain.size(), Some(gain), Some(leaves.get(bias)), self.eps, false)?
            }
            None => x.f_rms_norm(gain.size(), Some(gain), self.eps)?,
        })
    }
}

/// Attention with a matrix each for queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
    head_dim: i64,
}

impl Attention {
    /// `names` are in the order of its fields.
    pub(super) fn new(build: &mut Builder, style: Style<'_>, names: [&str; 4]) -> Self {
        // fits: bounded.
        let (width, head_dim) =
            (style.config.attention_width() as i64, style.config.head_dim() as i64);
        let [q, k, v] = [0, 1, 2].map(|at| style.reads(build, names[at], width, 1));
        Attention { q, k, v, out: style.writes(build, names[3], width), head_dim }
    }

    /// Keys and values of what is seen and has entered, `[rows, heads, len, head_dim]` each.
    pub(super) fn seen(
        &self,
        leaves: Leaves<'_>,
        x: &Tensor,
        rows: i64,
    ) -> Result<(Tensor, Tensor)> {
        let heads = |matrix: &Linear| split_heads(&matrix.apply(leaves, x)?, rows, self.head_dim);
        Ok((heads(&self.k)?, heads(&self.v)?))
    }

    /// What `x` makes of what it sees, with what is left of it in training; it has entered.
    pub(super) fn apply(
        &self,
        leaves: Leaves<'_>,
        x: &Tensor,
        (k, v): &(Tensor, Tensor),
        sight: &Sight,
        scale: Option<f64>,
        drops: Drops<'_>,
    ) -> Result<Tensor> {
        let q = split_heads(&self.q.apply(leaves, x)?, k.size()[0], self.head_dim)?;
        let mixed = attend(&q, k, v, sight, scale, drops)?;
        drops.hidden(self.out.apply_and_leave(leaves, &mixed)?)
    }
}

/// The block that widens, bends and narrows each token by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct FeedForward {
    up: Linear,
    /// Its own matrix, if the two of a gated unit are not one.
    gate: Option<Linear>,
    down: Linear,
    activation: Activation,
    /// Whether something is dropped between the matrices as well.
    drops_inner: bool,
}

impl FeedForward {
    /// Without a name the gate is one matrix with what it gates, and stands first.
    pub(super) fn new(
        build: &mut Builder,
        style: Style<'_>,
        gate: Option<&str>,
        up: &str,
        down: &str,
    ) -> Self {
        let activation = style.config.activation();
        let width = style.config.ffn() as i64; // fits: bounded
        let gate = gate.map(|name| style.reads(build, name, width, 1));
        let fused = if activation.is_gated() && gate.is_none() { 2 } else { 1 };
        let up = style.reads(build, up, fused * width, fused);
        let drops_inner = style.config.family == Family::T5;
        FeedForward { up, gate, down: style.writes(build, down, width), activation, drops_inner }
    }

    pub(super) fn apply(&self, leaves: Leaves<'_>, x: &Tensor, drops: Drops<'_>) -> Result<Tensor> {
        let x = leaves.tp.enter(x)?;
        let bend = |x: &Tensor| bend(self.activation, x);
        let mut inner = match self.gate {
            Some(gate) => bend(&gate.apply(leaves, &x)?)?.f_mul(&self.up.apply(leaves, &x)?)?,
            None if self.activation.is_gated() => {
                let parts = self.up.apply_fused(leaves, &x, 2)?;
                bend(&parts[0])?.f_mul(&parts[1])?
            }
            None => bend(&self.up.apply(leaves, &x)?)?,
        };
        if self.drops_inner {
            inner = drops.inner(inner)?;
        }
        drops.hidden(self.down.apply_and_leave(leaves, &inner)?)
    }
}

/// The function between the matrices; of a gated one, that of the gate.
pub(super) fn bend(activation: Activation, x: &Tensor) -> Result<Tensor> {
    Ok(match activation {
        Activation::Gelu => x.f_gelu("none")?,
        Activation::GeluTanh | Activation::GegluTanh => x.f_gelu("tanh")?,
        Activation::Relu => x.f_relu()?,
        Activation::Swiglu => x.f_silu()?,
    })
}
