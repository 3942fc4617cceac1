//! Logits and cross-entropy, which are most of a small model: with a vocabulary of 50,257 the
//! logits of a thousand tokens are 200 MB, and autograd would hold three such tensors.
//!
//! So the head has its own forward and backward, a chunk of rows at a time. With `P` the softmax of
//! the logits `h W^T + b`, and `Y` one-hot targets, the gradient of the loss by the logits is
//! `diag(w) (P - Y)`, where `w` weighs each token. The factor is applied to the thin side of both
//! products:
//!
//! ```text
//! dh = diag(w) ((P - Y) W)          dW = (P - Y)^T (diag(w) h)          db = (P - Y)^T w
//! ```
//!
//! and only two matrix products, the softmax and one exponential pass over the logits. The softmax
//! and the loss are f32 at least, whatever the weights are.
//!
//! Tensor parallel ranks each have an equal run of the vocabulary and exchange three numbers a
//! token: the largest logit, the sum of the exponentials, and the logit of the label. Each rank
//! computes `dh` of its own run; [`Tp::enter`] sums it over the ranks in its backward pass. Padding
//! of the vocabulary is set to minus infinity before the maximum.

use recipe::model::{Head, head_chunk_rows};
use tch::{Kind, Tensor};

use super::Tp;
use super::layers::StageParams;
use super::micro::Targets;
use crate::Result;
use crate::dtype::at_least_f32;

/// The loss and the gradients of the head.
#[derive(Debug)]
pub struct HeadGrad {
    /// The weighted sum of the tokens' losses, in nats: one f64 on the device of the outs, so that
    /// the CPU does not wait for it here.
    pub loss: Tensor,
    /// Gradients of [`super::Pass::outs`], in their shapes and dtype.
    pub outs: Vec<Tensor>,
    /// Gradients of the head's parameters, f32: the place in [`super::Stage::uses`], and the
    /// gradient there.
    pub uses: Vec<(usize, Tensor)>,
}

/// The parameters of the head.
struct Weights<'a> {
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    /// Rows that are no padding.
    vocab: i64,
    /// The first row, counted through all ranks.
    first: i64,
    tp: &'a Tp,
}

/// Logits of the rank's part of the vocabulary without its padding: `[tokens, vocab]`, f32.
/// `hidden` is `[tokens, hidden]`.
pub(super) fn logits(head: &Head, leaves: StageParams<'_>, hidden: &Tensor) -> Result<Tensor> {
    let weights = Weights::new(head, leaves);
    let product = weights.product(hidden)?.f_narrow(1, 0, weights.vocab)?;
    Ok(product.f_to_kind(at_least_f32(hidden.kind()))?)
}

/// The weighted sum of the losses, one f64.
pub(super) fn loss(
    head: &Head,
    leaves: StageParams<'_>,
    hidden: &Tensor,
    targets: &Targets,
) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let weights = Weights::new(head, leaves);
    let mut sum = zero(hidden)?;
    for (first, rows) in chunks(hidden) {
        let hidden = hidden.f_narrow(0, first, rows)?;
        let labels = targets.labels.f_narrow(0, first, rows)?;
        _ = sum.f_sub_(&targets.weigh(&weights.softmax(&hidden, &labels)?.0, first, rows)?)?;
    }
    Ok(sum)
}

/// The weighted sum of the losses, the gradient of `hidden`, and those of the parameters. No
/// graph is made or needed.
pub(super) fn loss_and_grad(
    head: &Head,
    leaves: StageParams<'_>,
    hidden: &Tensor,
    targets: &Targets,
) -> Result<HeadGrad> {
    let _no_grad = tch::no_grad_guard();
    let weights = Weights::new(head, leaves);
    let (kind, wide) = (hidden.kind(), at_least_f32(hidden.kind()));
    let zeros = |like: &Tensor| like.f_zeros_like().and_then(|zeros| zeros.f_to_kind(wide));
    let mut loss = zero(hidden)?;
    let to_hidden = hidden.f_empty_like()?;
    let mut to_weight = zeros(weights.weight)?;
    let mut to_bias = weights.bias.map(zeros).transpose()?;
    for (first, rows) in chunks(hidden) {
        let chunk = hidden.f_narrow(0, first, rows)?;
        let labels = targets.labels.f_narrow(0, first, rows)?;
        let (picked, mut residue) = weights.softmax(&chunk, &labels)?;
        _ = loss.f_sub_(&targets.weigh(&picked, first, rows)?)?;
        weights.subtract_targets(&mut residue, &labels)?;

        let counts = targets.weights.f_narrow(0, first, rows)?.f_to_kind(wide)?;
        if let Some(to_bias) = &mut to_bias {
            _ = to_bias.f_addmv_(&residue.f_tr()?, &counts)?;
        }
        let residue = residue.f_to_kind(kind)?;
        let counts = counts.f_unsqueeze(1)?.f_to_kind(kind)?;
        let back = residue.f_mm(weights.weight)?.f_mul(&counts)?;
        to_hidden.f_narrow(0, first, rows)?.f_copy_(&back)?;
        let weighted = chunk.f_mul(&counts)?;
        if kind == wide {
            _ = to_weight.f_addmm_(&residue.f_tr()?, &weighted)?;
        } else {
            _ = to_weight.f_add_(&residue.f_tr()?.f_mm(&weighted)?)?;
        }
    }
    let mut uses = vec![(leaves.place(head.weight), to_weight)];
    uses.extend(head.bias.map(|bias| leaves.place(bias)).zip(to_bias));
    Ok(HeadGrad { loss, outs: vec![to_hidden], uses })
}

impl<'a> Weights<'a> {
    fn new(head: &Head, leaves: StageParams<'a>) -> Self {
        let (weight, tp) = (leaves.get(head.weight), leaves.tp);
        let first = weight.size()[0] * tp.rank as i64; // fits: ranks are few
        let vocab = (head.vocab - first).clamp(0, weight.size()[0]);
        Weights { weight, bias: head.bias.map(|bias| leaves.get(bias)), vocab, first, tp }
    }

    /// `[rows, vocab]` with padding.
    fn product(&self, hidden: &Tensor) -> Result<Tensor> {
        let logits = hidden.f_mm(&self.weight.f_tr()?)?;
        Ok(match self.bias {
            Some(bias) => logits.f_add(bias)?,
            None => logits,
        })
    }

    /// The log-probability of each label, `[rows]`, and this rank's part of the probabilities,
    /// `[rows, vocab]`, f32.
    fn softmax(&self, hidden: &Tensor, labels: &Tensor) -> Result<(Tensor, Tensor)> {
        let logits = self.product(hidden)?;
        let wide = at_least_f32(logits.kind());
        let rows_padded = logits.size()[1];
        if self.vocab < rows_padded {
            let mut padding = logits.f_narrow(1, self.vocab, rows_padded - self.vocab)?;
            _ = padding.f_fill_(f64::NEG_INFINITY)?;
        }
        if self.tp.is_alone() {
            let mut log_probs = logits.f_log_softmax(1, wide)?;
            let picked = log_probs.f_gather(1, &labels.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
            _ = log_probs.f_exp_()?;
            return Ok((picked, log_probs));
        }
        let mut logits = logits.f_to_kind(wide)?;
        let mut top = logits.f_amax(1, true)?;
        self.tp.max(&mut top)?;
        _ = logits.f_sub_(&top)?;
        let (labels, is_elsewhere) = self.own_labels(labels)?;
        let picked = logits.f_gather(1, &labels.f_unsqueeze(1)?, false)?.f_squeeze_dim(1)?;
        let picked = picked.f_masked_fill(&is_elsewhere, 0)?;
        _ = logits.f_exp_()?;
        let sum = logits.f_sum_dim_intlist(1, false, wide)?;
        let mut both = Tensor::f_stack(&[&picked, &sum], 0)?;
        self.tp.sum(&mut both)?;
        let (picked, sum) = (both.f_get(0)?, both.f_get(1)?);
        _ = logits.f_div_(&sum.f_unsqueeze(1)?)?;
        Ok((picked.f_sub(&sum.f_log()?)?, logits))
    }

    /// Subtracts the one-hot targets from probabilities.
    fn subtract_targets(&self, probs: &mut Tensor, labels: &Tensor) -> Result<()> {
        let rows = labels.size()[0];
        let mut minus_one = probs.f_new_full([rows, 1], -1, (probs.kind(), probs.device()))?;
        let (labels, is_elsewhere) = self.own_labels(labels)?;
        if !self.tp.is_alone() {
            _ = minus_one.f_masked_fill_(&is_elsewhere.f_unsqueeze(1)?, 0)?;
        }
        _ = probs.f_scatter_add_(1, &labels.f_unsqueeze(1)?, &minus_one)?;
        Ok(())
    }

    /// Labels as rows of this rank, and which of them are another rank's and set to 0.
    fn own_labels(&self, labels: &Tensor) -> Result<(Tensor, Tensor)> {
        let own = labels.f_sub_scalar(self.first)?;
        let is_elsewhere = own.f_lt(0)?.f_logical_or(&own.f_ge(self.weight.size()[0])?)?;
        Ok((own.f_masked_fill(&is_elsewhere, 0)?, is_elsewhere))
    }
}

impl Targets {
    /// The weighted sum of the log-probabilities of some labels, one f64.
    fn weigh(&self, picked: &Tensor, first: i64, rows: i64) -> Result<Tensor> {
        let weights = self.weights.f_narrow(0, first, rows)?.f_to_kind(Kind::Double)?;
        Ok(picked.f_to_kind(Kind::Double)?.f_dot(&weights)?)
    }
}

/// One f64 of 0, on the device of `like`.
pub(super) fn zero(like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_zeros([0_i64; 0], (Kind::Double, like.device()))?)
}

/// First row and number of rows of each chunk.
fn chunks(hidden: &Tensor) -> impl Iterator<Item = (i64, i64)> + use<> {
    let rows = hidden.size()[0];
    let chunk = head_chunk_rows(hidden.device().is_cuda()) as i64; // fits: a constant
    (0..rows).step_by(chunk as usize).map(move |first| (first, chunk.min(rows - first)))
}
