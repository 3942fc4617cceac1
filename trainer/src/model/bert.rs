//! The encoder of BERT: learned positions, kinds of tokens, norm after each block, and two tasks:
//! to say what is hidden, and whether the second part of a row follows the first.
//!
//! Names, shapes and orientation are those of Hugging Face's `BertForPreTraining`. The head that
//! says what is hidden sees those tokens only, a sixth of all.

use std::ops::Range;

use ckpt::layout::Split;
use tch::{Kind, Tensor};

use super::attention::Sight;
use super::head::{Head, HeadGrad};
use super::micro::{Micro, Targets};
use super::network::{Context, Network, Work};
use super::parts::{Attention, Cut, FeedForward, Linear, Matrix, Norm, Stored, Style, bend};
use super::spec::{Builder, Init, Leaves, UseId};
use super::tp::embed;
use super::vocab_split;
use crate::Result;
use crate::config::{Activation, ModelConfig};

#[derive(Clone, Debug)]
pub(super) struct Bert {
    words: UseId,
    positions: UseId,
    types: UseId,
    norm: Norm,
    layers: Vec<Layer>,
    /// Of the first token of a row, before it is told whether the parts are in order.
    pooler: Linear,
    order: Linear,
    transform: Linear,
    transform_norm: Norm,
    head: Head,
    activation: Activation,
}

#[derive(Clone, Debug)]
struct Layer {
    attention: Attention,
    norm_1: Norm,
    feed_forward: FeedForward,
    norm_2: Norm,
}

impl Bert {
    pub(super) fn new(config: &ModelConfig, tp: u64, build: &mut Builder) -> Self {
        // fits: the config's maxima are far below 2^63.
        let (vocab, h) = (config.vocab as i64, config.hidden as i64);
        let std = config.init.std;
        let table = |name: &str, rows: u64, split, build: &mut Builder| {
            let name = format!("bert.embeddings.{name}_embeddings.weight");
            build.param(name, &[rows as i64, h], Init::Normal(std), split)
        };
        let split = vocab_split(config, tp);
        let words = table("word", config.vocab, split.clone(), build);
        let positions = table("position", config.seq_len, Split::Replicate, build);
        let types = table("token_type", config.token_types, Split::Replicate, build);
        let norm = Norm::new(build, "bert.embeddings.LayerNorm", config);
        let layers = (0..config.layers as usize).map(|at| Layer::new(config, at, build)).collect();
        build.is_joined = true;
        let (stored, cut) = (Stored::OutIn, Cut::Whole);
        let whole = |outputs| Matrix { inputs: h, outputs, stored, cut, std, bias: true };
        let pooler = Linear::new(build, "bert.pooler.dense", &whole(h));
        let order = Linear::new(build, "cls.seq_relationship", &whole(2));
        let transform = Linear::new(build, "cls.predictions.transform.dense", &whole(h));
        let transform_norm = Norm::new(build, "cls.predictions.transform.LayerNorm", config);
        let weight = if config.tie_embeddings() {
            build.again(words)
        } else {
            let name = "cls.predictions.decoder.weight";
            build.param(name, &[vocab, h], Init::Normal(std), split.clone())
        };
        let bias = build.param("cls.predictions.bias", &[vocab], Init::Zeros, split);
        Bert {
            words,
            positions,
            types,
            norm,
            layers,
            pooler,
            order,
            transform,
            transform_norm,
            head: Head { weight, bias: Some(bias), vocab },
            activation: config.activation(),
        }
    }

    fn embed(&self, work: &Work<'_>) -> Result<Tensor> {
        let Work { leaves, micro, .. } = *work;
        let (tp, text) = (leaves.tp, &micro.text);
        let words = tp.embed(leaves.get(self.words), &text.ids)?;
        let options = (Kind::Int64, text.ids.device());
        let own = |table: UseId, ids: &Tensor| {
            embed(leaves.get(table), &tp.own_rows(&ids.f_reshape([-1])?)?)
        };
        let positions = Tensor::f_arange(text.len(), options)?.f_expand_as(&text.ids)?;
        let types = match &text.types {
            Some(types) => types.shallow_clone(),
            None => text.ids.f_zeros_like()?,
        };
        let x = words.f_add(&own(self.types, &types)?)?;
        self.norm.apply(leaves, &x.f_add(&own(self.positions, &positions)?)?)
    }
}

impl Network for Bert {
    fn context(
        &self,
        micro: &Micro,
        _units: &Range<usize>,
        _past: i64,
        kind: Kind,
    ) -> Result<Context> {
        Ok(Context { text: Sight::of(&micro.text, false, kind)?, ..Context::default() })
    }

    /// The last gives, of each hidden token, what the head takes, and of each row the logits of its
    /// parts being in order and not.
    fn unit(&self, work: &Work<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Work { leaves, micro, context, .. } = *work;
        let (layer, rows) = (&self.layers[unit], micro.text.rows());
        let x = match inputs.first() {
            Some(x) => x.shallow_clone(),
            None => work.drops(unit, "embedding").hidden(self.embed(work)?)?,
        };
        let all = leaves.tp.enter(&x)?;
        let seen = layer.attention.seen(leaves, &all, rows)?;
        let drops = work.drops(unit, "attention");
        let mixed = layer.attention.apply(leaves, &all, &seen, &context.text, None, drops)?;
        let x = layer.norm_1.apply(leaves, &x.f_add(&mixed)?)?;
        let made = layer.feed_forward.apply(leaves, &x, work.drops(unit, "mlp"))?;
        let x = layer.norm_2.apply(leaves, &x.f_add(&made)?)?;
        if unit + 1 < self.layers.len() {
            return Ok(vec![x]);
        }
        let x = leaves.tp.enter(&x)?;
        let hidden = self.transform.apply(leaves, &micro.targets.pick(&x)?)?;
        let hidden = self.transform_norm.apply(leaves, &bend(self.activation, &hidden)?)?;
        let first = x.f_view([rows, micro.text.len(), -1])?.f_select(1, 0)?;
        let pooled = self.pooler.apply(leaves, &first)?.f_tanh()?;
        Ok(vec![hidden, self.order.apply(leaves, &pooled)?])
    }

    fn decoder(&self) -> Option<usize> {
        None
    }

    fn head(&self) -> &Head {
        &self.head
    }

    fn loss(&self, leaves: Leaves<'_>, micro: &Micro, outs: &[Tensor]) -> Result<f64> {
        let hidden = self.head.loss(leaves, &outs[0], &micro.targets)?;
        Ok(hidden + order_loss(&outs[1], &micro.targets)?.0)
    }

    fn loss_and_grad(
        &self,
        leaves: Leaves<'_>,
        micro: &Micro,
        outs: &[Tensor],
    ) -> Result<HeadGrad> {
        let mut grad = self.head.loss_and_grad(leaves, &outs[0], &micro.targets)?;
        let (loss, mut to_order) = order_loss(&outs[1], &micro.targets)?;
        grad.loss += loss;
        // All ranks know all of it, and what goes back from here is summed over them.
        if leaves.tp.rank > 0 {
            _ = to_order.f_zero_()?;
        }
        grad.outs.push(to_order);
        Ok(grad)
    }
}

/// The weighted loss of saying whether parts are in order, and the gradient of the logits,
/// `[rows, 2]`.
fn order_loss(logits: &Tensor, due: &Targets) -> Result<(f64, Tensor)> {
    let _no_grad = tch::no_grad_guard();
    let Some((is_random, weight)) = &due.order else { return Ok((0.0, logits.f_zeros_like()?)) };
    let is_random = is_random.f_unsqueeze(1)?;
    let log_probs = logits.f_log_softmax(1, Kind::Float)?;
    let picked = log_probs.f_gather(1, &is_random, false)?;
    let loss = -picked.f_sum(Kind::Double)?.f_double_value(&[])? * weight;
    let due = log_probs.f_zeros_like()?.f_scatter_value(1, &is_random, 1)?;
    let back = log_probs.f_exp()?.f_sub(&due)?.f_mul_scalar(*weight)?;
    Ok((loss, back.f_to_kind(logits.kind())?))
}

impl Layer {
    fn new(config: &ModelConfig, at: usize, build: &mut Builder) -> Self {
        build.unit = at;
        let name = |part: &str| format!("bert.encoder.layer.{at}.{part}");
        let style = Style { config, stored: Stored::OutIn, layers: config.layers };
        let of = ["self.query", "self.key", "self.value", "output.dense"];
        let names = of.map(|matrix| name(&format!("attention.{matrix}")));
        let attention = Attention::new(build, style, names.each_ref().map(String::as_str));
        let norm_1 = Norm::new(build, &name("attention.output.LayerNorm"), config);
        let (up, down) = (name("intermediate.dense"), name("output.dense"));
        let feed_forward = FeedForward::new(build, style, None, &up, &down);
        let norm_2 = Norm::new(build, &name("output.LayerNorm"), config);
        Layer { attention, norm_1, feed_forward, norm_2 }
    }
}
