//! Attention, its masks, and the rotation of queries and keys by their positions.

use tch::{Device, Kind, Tensor};

use super::dropout::DropoutSite;
use super::micro::Text;
use crate::Result;
use crate::dtype::at_least_f32;

/// Which tokens of a text, or of another text, the tokens of a text attend to.
#[derive(Debug, Default)]
pub(super) enum AttentionMask {
    /// All tokens.
    #[default]
    All,
    /// The token itself, and earlier ones.
    Back,
    /// Added to the logits: 0 where a query attends to a key, a very negative number where it does
    /// not. `[rows or 1, 1, queries, keys]`.
    Mask(Tensor),
}

impl AttentionMask {
    /// The mask within a text: the tokens of the same run, and with `is_causal` no later ones.
    pub(super) fn of(text: &Text, is_causal: bool, kind: Kind) -> Result<Self> {
        match (&text.runs, is_causal) {
            (None, false) => Ok(AttentionMask::All),
            (None, true) => Ok(AttentionMask::Back),
            (Some(runs), _) => {
                let mut visible = same_run(runs, runs)?;
                if is_causal {
                    visible = visible.f_tril(0)?;
                }
                Ok(AttentionMask::Mask(mask(&visible, kind)?))
            }
        }
    }

    /// The mask from an answer to its text: a run attends to the run of the same number.
    pub(super) fn across(answer: &Text, text: &Text, kind: Kind) -> Result<Self> {
        if answer.runs.is_none() && text.runs.is_none() {
            return Ok(AttentionMask::All);
        }
        let runs = |text: &Text| match &text.runs {
            Some(runs) => Ok(runs.shallow_clone()),
            None => text.ids.f_zeros_like(),
        };
        Ok(AttentionMask::Mask(mask(&same_run(&runs(answer)?, &runs(text)?)?, kind)?))
    }

    /// Replaces [`AttentionMask::Back`] by an explicit mask, to which a bias can be added.
    pub(super) fn explicit(self, len: i64, kind: Kind, device: Device) -> Result<Self> {
        let AttentionMask::Back = self else { return Ok(self) };
        let visible = Tensor::f_ones([1, len, len], (Kind::Bool, device))?.f_tril(0)?;
        Ok(AttentionMask::Mask(mask(&visible, kind)?))
    }
}

/// `[rows, queries, keys]`.
fn same_run(queries: &Tensor, keys: &Tensor) -> Result<Tensor> {
    Ok(queries.f_unsqueeze(2)?.f_eq_tensor(&keys.f_unsqueeze(1)?)?)
}

fn mask(visible: &Tensor, kind: Kind) -> Result<Tensor> {
    // Finite, so that a query that attends to nothing has uniform weights rather than NaN. Sums
    // with a logit stay finite too, and products with the binary logarithm of e, as in GPU kernels.
    let hidden = if kind == Kind::Half { -6.0e4 } else { -1.0e30 };
    let zeros = visible.f_zeros_like()?.f_to_kind(kind)?;
    Ok(zeros.f_masked_fill(&visible.f_logical_not()?, hidden)?.f_unsqueeze(1)?)
}

/// `[rows x len, heads x head_dim]` as `[rows, heads, len, head_dim]`.
pub(super) fn split_heads(x: &Tensor, rows: i64, head_dim: i64) -> Result<Tensor> {
    let (tokens, width) = x.size2()?;
    Ok(x.f_view([rows, tokens / rows, width / head_dim, head_dim])?.f_transpose(1, 2)?)
}

/// Attention of queries to keys and values, all `[rows, heads, len, head_dim]`. The logits are
/// multiplied with `scale`, by default one over the root of `head_dim`. The result is
/// `[rows x len, heads x head_dim]`. If weights are dropped, they are computed as a matrix, except
/// on a GPU.
pub(super) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    attn_mask: &AttentionMask,
    scale: Option<f64>,
    drops: DropoutSite<'_>,
) -> Result<Tensor> {
    let (mask, is_causal) = match attn_mask {
        AttentionMask::All => (None, false),
        AttentionMask::Back => (None, true),
        AttentionMask::Mask(mask) => (Some(mask), false),
    };
    let mixed = if drops.drops_weights() && !q.device().is_cuda() {
        assert!(!is_causal, "masks for training are explicit");
        let scale = scale.unwrap_or_else(|| (q.size()[3] as f64).powf(-0.5));
        let mut logits = q.f_mul_scalar(scale)?.f_matmul(&k.f_transpose(2, 3)?)?;
        if let Some(mask) = mask {
            logits = logits.f_add(mask)?;
        }
        let weights = drops.weights(logits.f_softmax(-1, at_least_f32(v.kind()))?)?;
        weights.f_to_kind(v.kind())?.f_matmul(v)?
    } else {
        let rate = drops.seed_weights();
        Tensor::f_scaled_dot_product_attention(q, k, v, mask, rate, is_causal, scale, false)?
    };
    let (rows, heads, len, head_dim) = mixed.size4()?;
    Ok(mixed.f_transpose(1, 2)?.f_reshape([rows * len, heads * head_dim])?)
}

/// Rotary positions (Su et al. 2021): the pair of numbers `i` and `i + head_dim / 2` is rotated
/// by the position times `theta^(-2 i / head_dim)`.
#[derive(Debug)]
pub(super) struct Rope {
    /// Each `[rows or 1, 1, len, head_dim / 2]`.
    cos: Tensor,
    sin: Tensor,
    minus_sin: Tensor,
}

impl Rope {
    /// For positions `[rows or 1, len]`.
    pub(super) fn new(positions: &Tensor, head_dim: i64, theta: f64, kind: Kind) -> Result<Self> {
        let rates = (0..head_dim / 2).map(|i| {
            let power = (2 * i) as f32 / head_dim as f32;
            1.0 / (theta as f32).powf(power)
        });
        let rates = Tensor::f_from_slice(&rates.collect::<Vec<f32>>())?;
        let positions = positions.f_to_kind(Kind::Float)?.f_unsqueeze(1)?.f_unsqueeze(3)?;
        // Without waiting for the work of a GPU.
        let rates = rates.f_to_device_(positions.device(), Kind::Float, true, false)?;
        let angles = positions.f_mul(&rates)?;
        let sin = angles.f_sin()?.f_to_kind(kind)?;
        Ok(Rope { cos: angles.f_cos()?.f_to_kind(kind)?, minus_sin: sin.f_neg()?, sin })
    }

    /// Rotates queries or keys, `[rows, heads, len, head_dim]`.
    pub(super) fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let halves = x.f_chunk(2, -1)?;
        let [a, b] = &halves[..] else { unreachable!("an even width has two halves") };
        let first = a.f_mul(&self.cos)?.f_addcmul(b, &self.minus_sin)?;
        let second = b.f_mul(&self.cos)?.f_addcmul(a, &self.sin)?;
        Ok(Tensor::f_cat(&[first, second], -1)?)
    }
}
