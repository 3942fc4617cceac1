//! BERT. The head that predicts masked tokens gets only those, a sixth of all.

use std::ops::Range;

use recipe::model::{Bert, Head};
use tch::{Kind, Tensor};

use super::attention::AttentionMask;
use super::head::{self, HeadGrad};
use super::layers::{StageParams, activate};
use super::micro::{Micro, Targets};
use super::network::{Context, Network, UnitContext};
use super::tp::embed;
use crate::Result;
use crate::dtype::at_least_f32;

impl Network for Bert {
    fn context(
        &self,
        micro: &Micro,
        _units: &Range<usize>,
        _past: i64,
        kind: Kind,
    ) -> Result<Context> {
        Ok(Context { text: AttentionMask::of(&micro.text, false, kind)?, ..Context::default() })
    }

    /// The last returns the input of the head for each masked token, and for each row the logits of
    /// whether its parts are in order.
    fn unit(&self, work: &UnitContext<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let UnitContext { leaves, micro, context, .. } = *work;
        let (layer, rows) = (&self.layers[unit], micro.text.rows());
        let x = match inputs.first() {
            Some(x) => x.shallow_clone(),
            None => work.drops(unit, "embedding").hidden(embed_text(self, work)?)?,
        };
        let all = leaves.tp.enter(&x)?;
        let seen = leaves.seen(&layer.attention, &all, rows)?;
        let drops = work.drops(unit, "attention");
        let mixed = leaves.attention(&layer.attention, &all, &seen, &context.text, None, drops)?;
        let x = leaves.norm(&layer.norm_1, &x.f_add(&mixed)?)?;
        let made = leaves.feed_forward(&layer.feed_forward, &x, work.drops(unit, "mlp"))?;
        let x = leaves.norm(&layer.norm_2, &x.f_add(&made)?)?;
        if unit + 1 < self.layers.len() {
            return Ok(vec![x]);
        }
        let x = leaves.tp.enter(&x)?;
        let hidden = leaves.linear(&self.transform, &micro.targets.pick(&x)?)?;
        let hidden = leaves.norm(&self.transform_norm, &activate(self.activation, &hidden)?)?;
        let first = x.f_view([rows, micro.text.len(), -1])?.f_select(1, 0)?;
        let pooled = leaves.linear(&self.pooler, &first)?.f_tanh()?;
        Ok(vec![hidden, leaves.linear(&self.order, &pooled)?])
    }

    fn decoder(&self) -> Option<usize> {
        None
    }

    fn head(&self) -> &Head {
        &self.head
    }

    fn loss(&self, leaves: StageParams<'_>, micro: &Micro, outs: &[Tensor]) -> Result<Tensor> {
        let hidden = head::loss(&self.head, leaves, &outs[0], &micro.targets)?;
        Ok(hidden.f_add(&order_loss(&outs[1], &micro.targets)?.0)?)
    }

    fn loss_and_grad(
        &self,
        leaves: StageParams<'_>,
        micro: &Micro,
        outs: &[Tensor],
    ) -> Result<HeadGrad> {
        let mut grad = head::loss_and_grad(&self.head, leaves, &outs[0], &micro.targets)?;
        let (loss, mut to_order) = order_loss(&outs[1], &micro.targets)?;
        _ = grad.loss.f_add_(&loss)?;
        // All ranks compute all of it, and the gradients from here are summed over them.
        if leaves.tp.rank > 0 {
            _ = to_order.f_zero_()?;
        }
        grad.outs.push(to_order);
        Ok(grad)
    }
}

fn embed_text(bert: &Bert, work: &UnitContext<'_>) -> Result<Tensor> {
    let UnitContext { leaves, micro, .. } = *work;
    let (tp, text) = (leaves.tp, &micro.text);
    let words = tp.embed(leaves.get(bert.words), &text.ids)?;
    let types = match &text.types {
        Some(types) => types.shallow_clone(),
        None => text.ids.f_zeros_like()?,
    };
    let x = words.f_add(&embed(leaves.get(bert.types), &tp.own_rows(&types.f_reshape([-1])?)?)?)?;
    leaves.norm(&bert.norm, &x.f_add(&leaves.positions(bert.positions, text, 0)?)?)
}

/// The weighted loss of predicting whether parts are in order, one f64, and the gradient of the
/// logits, `[rows, 2]`.
fn order_loss(logits: &Tensor, targets: &Targets) -> Result<(Tensor, Tensor)> {
    let _no_grad = tch::no_grad_guard();
    let Some((is_random, weight)) = &targets.order else {
        return Ok((head::zero(logits)?, logits.f_zeros_like()?));
    };
    let is_random = is_random.f_unsqueeze(1)?;
    let log_probs = logits.f_log_softmax(1, at_least_f32(logits.kind()))?;
    let picked = log_probs.f_gather(1, &is_random, false)?;
    let loss = picked.f_sum(Kind::Double)?.f_mul_scalar(-*weight)?;
    let expected = log_probs.f_zeros_like()?.f_scatter_value(1, &is_random, 1)?;
    let back = log_probs.f_exp()?.f_sub(&expected)?.f_mul_scalar(*weight)?;
    Ok((loss, back.f_to_kind(logits.kind())?))
}
