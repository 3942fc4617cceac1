use tch::Tensor;

use super::shape::{GptShape, LAYER_MATRICES, LAYER_VECTORS};
use super::{WPE, WTE};
use crate::Result;

/// GPT-2's.
const NORM_EPS: f64 = 1e-5;

/// Keys and values of the tokens that the model has seen, a pair a layer, each
/// `[rows, heads, tokens, head_dim]`.
#[derive(Debug, Default)]
pub struct Cache {
    layers: Vec<(Tensor, Tensor)>,
    tokens: i64,
}

impl Cache {
    /// Tokens seen so far.
    #[must_use]
    pub fn tokens(&self) -> i64 {
        self.tokens
    }
}

/// The network up to and with its last norm. `tokens` is `[rows, columns]`, i64; the result
/// `[rows x columns, hidden]` in the dtype of the parameters. With a cache, `tokens` go on where it
/// ends, and are added to it; either it is empty or there is one column.
///
/// # Errors
/// [`crate::Error::Torch`], for example if there are more columns than positions.
pub fn hidden_states(
    shape: &GptShape,
    params: &[Tensor],
    tokens: &Tensor,
    mut cache: Option<&mut Cache>,
) -> Result<Tensor> {
    let (rows, columns) = tokens.size2()?;
    let past = cache.as_ref().map_or(0, |cache| cache.tokens);
    let words = Tensor::f_embedding(&params[WTE], tokens, -1, false, false)?;
    let positions = params[WPE].f_narrow(0, past, columns)?;
    let mut x = words.f_add(&positions)?.f_view([rows * columns, shape.hidden])?;

    let (matrices, vectors) = params[2..].split_at(shape.layers * LAYER_MATRICES);
    let layers =
        matrices.chunks_exact(LAYER_MATRICES).zip(vectors.chunks_exact(LAYER_VECTORS)).enumerate();
    for (layer, (matrices, vectors)) in layers {
        let [c_attn, attn_proj, c_fc, mlp_proj] = matrices else {
            unreachable!("chunks of LAYER_MATRICES")
        };
        let [ln_1, ln_1_b, c_attn_b, attn_proj_b, ln_2, ln_2_b, c_fc_b, mlp_proj_b] = vectors
        else {
            unreachable!("chunks of LAYER_VECTORS")
        };
        let qkv = c_attn_b.f_addmm(&norm(&x, ln_1, ln_1_b)?, c_attn)?;
        let qkv = qkv.f_view([rows, columns, 3, shape.heads, shape.hidden / shape.heads])?;
        let mixed = attention(&qkv, layer, cache.as_deref_mut())?;
        x = x.f_add(&attn_proj_b.f_addmm(&mixed, attn_proj)?)?;

        let inner = c_fc_b.f_addmm(&norm(&x, ln_2, ln_2_b)?, c_fc)?.f_gelu("tanh")?;
        x = x.f_add(&mlp_proj_b.f_addmm(&inner, mlp_proj)?)?;
    }
    if let Some(cache) = cache {
        cache.tokens += columns;
    }
    let [.., ln_f, ln_f_b] = vectors else { unreachable!("the last norm is always there") };
    norm(&x, ln_f, ln_f_b)
}

fn norm(x: &Tensor, gain: &Tensor, bias: &Tensor) -> Result<Tensor> {
    Ok(x.f_layer_norm(gain.size(), Some(gain), Some(bias), NORM_EPS, false)?)
}

/// Causal attention. `qkv` is `[rows, columns, 3, heads, head_dim]`; the result
/// `[rows x columns, hidden]`.
fn attention(qkv: &Tensor, layer: usize, cache: Option<&mut Cache>) -> Result<Tensor> {
    let (rows, columns, _, heads, head_dim) = qkv.size5()?;
    let mut parts = qkv.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?.into_iter();
    let (Some(q), Some(mut k), Some(mut v)) = (parts.next(), parts.next(), parts.next()) else {
        unreachable!("the axis has three places")
    };
    let mut causal = true;
    if let Some(cache) = cache {
        // A single new token may look at everything; several are only allowed as the first.
        causal = cache.tokens == 0;
        match cache.layers.get_mut(layer) {
            Some(past) => {
                k = Tensor::f_cat(&[&past.0, &k], 2)?;
                v = Tensor::f_cat(&[&past.1, &v], 2)?;
                *past = (k.shallow_clone(), v.shallow_clone());
            }
            None => cache.layers.push((k.shallow_clone(), v.shallow_clone())),
        }
    }
    let no_mask = None::<&Tensor>;
    let mixed =
        Tensor::f_scaled_dot_product_attention(&q, &k, &v, no_mask, 0.0, causal, None, false)?;
    Ok(mixed.f_transpose(1, 2)?.f_reshape([rows * columns, heads * head_dim])?)
}
