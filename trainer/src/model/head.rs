//! Logits and cross-entropy, which are most of a small model: with a vocabulary of 50,257 the
//! logits of a thousand tokens are 200 MB, and autograd would hold three such tensors.
//!
//! So the head has its own forward and backward, a chunk of rows at a time. With `P` the softmax of
//! the logits `h W^T`, and `Y` one-hot targets, the gradient of the loss by the logits is
//! `diag(w) (P - Y)`, where `w` weighs each token. The factor goes to the thin side of both
//! products:
//!
//! ```text
//! dh = diag(w) ((P - Y) W)          dW = (P - Y)^T (diag(w) h)
//! ```
//!
//! and the logits are walked only by two matrix products, the softmax and one exponential. The
//! softmax and the loss are f32 whatever the weights are.

use tch::{Kind, Tensor};

use super::GptShape;
use crate::Result;

/// Rows of logits that exist at once: 512 x 50,304 f32 are 98 MiB. Fewer make the products thin.
pub const HEAD_CHUNK_ROWS: u64 = 512;

/// What the model should have said, and how much each token counts.
#[derive(Debug)]
pub struct LossTokens<'a> {
    /// The token due after each position. Shape `[tokens]`, i64, below the vocabulary.
    pub labels: &'a Tensor,
    /// Weight of each position in the loss. Shape `[tokens]`, f32.
    pub weights: &'a Tensor,
}

/// What goes back from the head.
#[derive(Debug)]
pub struct HeadGrad {
    /// The weighted sum of the tokens' losses, in nats.
    pub loss: f64,
    /// Gradient of the hidden states: their shape and dtype.
    pub hidden: Tensor,
    /// Gradient of the word embedding in its use as the head: its shape, f32.
    pub wte: Tensor,
}

/// Logits of the vocabulary without its padding: `[tokens, vocab]`, f32. `hidden` is
/// `[tokens, hidden]`.
///
/// # Errors
/// [`crate::Error::Torch`].
pub fn logits(shape: &GptShape, wte: &Tensor, hidden: &Tensor) -> Result<Tensor> {
    Ok(hidden.f_mm(&wte.f_tr()?)?.f_narrow(1, 0, shape.vocab)?.f_to_kind(Kind::Float)?)
}

/// The weighted sum of the losses. `hidden` is `[tokens, hidden]`.
///
/// # Errors
/// [`crate::Error::Torch`].
pub fn loss(
    shape: &GptShape,
    wte: &Tensor,
    hidden: &Tensor,
    tokens: &LossTokens<'_>,
) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let mut sum = 0.0;
    for (first, rows) in chunks(hidden.size()[0]) {
        let log_probs = log_probs(shape, wte, &hidden.f_narrow(0, first, rows)?)?;
        sum += picked_loss(&log_probs, tokens, first, rows)?;
    }
    Ok(sum)
}

/// The weighted sum of the losses and its gradients. `hidden` is `[tokens, hidden]`; no graph is
/// made or needed.
///
/// # Errors
/// [`crate::Error::Torch`].
pub fn loss_and_grad(
    shape: &GptShape,
    wte: &Tensor,
    hidden: &Tensor,
    tokens: &LossTokens<'_>,
) -> Result<HeadGrad> {
    let _no_grad = tch::no_grad_guard();
    let kind = hidden.kind();
    let mut grad = HeadGrad {
        loss: 0.0,
        hidden: hidden.f_empty_like()?,
        wte: Tensor::f_zeros(wte.size(), (Kind::Float, wte.device()))?,
    };
    for (first, rows) in chunks(hidden.size()[0]) {
        let chunk = hidden.f_narrow(0, first, rows)?;
        let mut residue = log_probs(shape, wte, &chunk)?;
        grad.loss += picked_loss(&residue, tokens, first, rows)?;

        _ = residue.f_exp_()?;
        let labels = tokens.labels.f_narrow(0, first, rows)?.f_unsqueeze(1)?;
        let minus_one = labels.f_new_full([rows, 1], -1, (Kind::Float, wte.device()))?;
        _ = residue.f_scatter_add_(1, &labels, &minus_one)?;
        let residue = residue.f_to_kind(kind)?;

        let weights = tokens.weights.f_narrow(0, first, rows)?.f_unsqueeze(1)?.f_to_kind(kind)?;
        let to_hidden = residue.f_mm(wte)?.f_mul(&weights)?;
        grad.hidden.f_narrow(0, first, rows)?.f_copy_(&to_hidden)?;
        let weighted = chunk.f_mul(&weights)?;
        if kind == Kind::Float {
            _ = grad.wte.f_addmm_(&residue.f_tr()?, &weighted)?;
        } else {
            let to_wte = residue.f_tr()?.f_mm(&weighted)?;
            _ = grad.wte.f_add_(&to_wte)?;
        }
    }
    Ok(grad)
}

/// `[rows, vocab_padded]`, f32.
fn log_probs(shape: &GptShape, wte: &Tensor, hidden: &Tensor) -> Result<Tensor> {
    let logits = hidden.f_mm(&wte.f_tr()?)?;
    if shape.vocab < shape.vocab_padded {
        let mut padding = logits.f_narrow(1, shape.vocab, shape.vocab_padded - shape.vocab)?;
        _ = padding.f_fill_(f64::NEG_INFINITY)?;
    }
    Ok(logits.f_log_softmax(1, Kind::Float)?)
}

fn picked_loss(log_probs: &Tensor, tokens: &LossTokens<'_>, first: i64, rows: i64) -> Result<f64> {
    let labels = tokens.labels.f_narrow(0, first, rows)?.f_unsqueeze(1)?;
    let weights = tokens.weights.f_narrow(0, first, rows)?.f_to_kind(Kind::Double)?;
    let picked = log_probs.f_gather(1, &labels, false)?.f_squeeze()?.f_to_kind(Kind::Double)?;
    Ok(-picked.f_view([rows])?.f_dot(&weights)?.f_double_value(&[])?)
}

/// First row and number of rows of each chunk.
fn chunks(rows: i64) -> impl Iterator<Item = (i64, i64)> {
    let chunk = HEAD_CHUNK_ROWS as i64; // fits: a constant
    (0..rows).step_by(chunk as usize).map(move |first| (first, chunk.min(rows - first)))
}
