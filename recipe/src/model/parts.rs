//! The building blocks of the families, each with its parameters.

use ckpt::layout::TensorSplit;

use super::spec::{Builder, Init, UseId};
use crate::config::{Activation, ModelConfig, Norm as NormKind, Positions};

/// The orientation of a matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// `[in, out]`, as in the `Conv1D` of GPT-2.
    InOut,
    /// `[out, in]`, as in a `Linear`.
    OutIn,
}

/// How tensor parallelism divides a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatrixSplit {
    /// By its outputs. The number of matrices that are fused along that axis.
    Outputs(i64),
    /// By its inputs.
    Inputs,
    /// Not at all.
    Whole,
}

/// A matrix with an optional bias.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// The matrix.
    pub weight: UseId,
    /// The bias.
    pub bias: Option<UseId>,
    /// Its orientation in memory.
    pub stored: Stored,
}

/// Settings of a matrix.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) inputs: i64,
    pub(super) outputs: i64,
    pub(super) stored: Stored,
    pub(super) cut: MatrixSplit,
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
            MatrixSplit::Whole => (TensorSplit::Replicate, TensorSplit::Replicate),
            MatrixSplit::Inputs => (TensorSplit::Axis(axis_in), TensorSplit::Replicate),
            MatrixSplit::Outputs(1) => (TensorSplit::Axis(axis_out), TensorSplit::Axis(0)),
            MatrixSplit::Outputs(count) => {
                let blocks = vec![(outputs / count) as u64; count as usize]; // fits: of a shape
                (TensorSplit::fused_along(axis_out, &blocks), TensorSplit::fused(&blocks))
            }
        };
        let weight = build.param(format!("{name}.weight"), &shape, Init::Normal(spec.std), split);
        let bias = spec
            .bias
            .then(|| build.param(format!("{name}.bias"), &[outputs], Init::Zeros, bias_split));
        Linear { weight, bias, stored }
    }
}

/// Settings for the matrices of a stack of layers.
#[derive(Clone, Copy)]
pub(super) struct Style<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) stored: Stored,
    /// Number of layers that write into the residual stream.
    pub(super) layers: u64,
}

impl Style<'_> {
    /// `of` fused matrices that read the residual stream, with `outputs` outputs in total.
    pub(super) fn reads(&self, build: &mut Builder, name: &str, outputs: i64, of: i64) -> Linear {
        let (inputs, cut) = (self.config.hidden as i64, MatrixSplit::Outputs(of)); // fits: bounded
        let (stored, std, bias) = (self.stored, self.config.init.std, self.config.bias());
        Linear::new(build, name, &Matrix { inputs, outputs, stored, cut, std, bias })
    }

    /// A matrix that writes into the residual stream.
    pub(super) fn writes(&self, build: &mut Builder, name: &str, inputs: i64) -> Linear {
        let (outputs, cut) = (self.config.hidden as i64, MatrixSplit::Inputs); // fits: bounded
        let (stored, bias, init) = (self.stored, self.config.bias(), &self.config.init);
        let shrink = if init.scaled_output { (2.0 * self.layers as f64).sqrt() } else { 1.0 };
        let std = init.std / shrink;
        Linear::new(build, name, &Matrix { inputs, outputs, stored, cut, std, bias })
    }
}

/// A norm over the width: with a bias a layer norm, without one an RMS norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// The gain.
    pub gain: UseId,
    /// The bias.
    pub bias: Option<UseId>,
    /// The term that is added to the variance.
    pub eps: f64,
}

impl Norm {
    pub(super) fn new(build: &mut Builder, name: &str, config: &ModelConfig) -> Self {
        let hidden = [config.hidden as i64]; // fits: the config bounds it
        let gain =
            build.param(format!("{name}.weight"), &hidden, Init::Ones, TensorSplit::Replicate);
        let bias = (config.norm() == NormKind::Layernorm).then(|| {
            build.param(format!("{name}.bias"), &hidden, Init::Zeros, TensorSplit::Replicate)
        });
        Norm { gain, bias, eps: config.norm_eps() }
    }
}

/// Attention with separate matrices for queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Projection to queries.
    pub q: Linear,
    /// Projection to keys.
    pub k: Linear,
    /// Projection to values.
    pub v: Linear,
    /// Output projection.
    pub out: Linear,
    /// Width of a head.
    pub head_dim: i64,
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
}

/// The feed-forward block: two matrices with an activation function between them.
#[derive(Clone, Copy, Debug)]
pub struct FeedForward {
    /// The first matrix.
    pub up: Linear,
    /// The matrix of the gate, if it is not fused with the first.
    pub gate: Option<Linear>,
    /// The second matrix.
    pub down: Linear,
    /// The activation function.
    pub activation: Activation,
    /// Whether dropout is also applied between the matrices.
    pub drops_inner: bool,
}

impl FeedForward {
    /// Without a name the gate is fused with the first matrix and comes before it.
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
        let drops_inner = style.config.positions() == Positions::RelativeBias;
        FeedForward { up, gate, down: style.writes(build, down, width), activation, drops_inner }
    }
}

/// The output head.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// `[vocab, hidden]`.
    pub weight: UseId,
    /// `[vocab]`.
    pub bias: Option<UseId>,
    /// Tokens, without padding.
    pub vocab: i64,
}
