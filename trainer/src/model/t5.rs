//! Encoder and decoder with relative positions: T5 v1.1 and CPM-2, and with other settings T5 v1.0.
//! Norm before each block, logits of attention not scaled.
//!
//! Names, shapes and orientation are those of Hugging Face's `T5ForConditionalGeneration`. A
//! learned number for each head and bucket of distances is added to the logits of self-attention;
//! the table is of the first layer of each stack, and the others use it. Encoder layers carry the
//! encoder's hidden states, decoder layers the decoder's and what the encoder gave.

use std::ops::Range;

use ckpt::layout::Split;
use tch::{Device, Kind, Tensor};

use super::attention::Sight;
use super::head::Head;
use super::micro::Micro;
use super::network::{Context, Network, Work};
use super::parts::{Attention, FeedForward, Norm, Stored, Style};
use super::spec::{Builder, Init, UseId};
use super::tp::embed;
use super::vocab_split;
use crate::Result;
use crate::config::ModelConfig;

#[derive(Clone, Debug)]
pub(super) struct T5 {
    encoder: Stack,
    decoder: Stack,
    head: Head,
    /// What the hidden states are multiplied with before the head.
    scale: Option<f64>,
    buckets: Buckets,
}

#[derive(Clone, Debug)]
struct Stack {
    /// Its use of the word embedding.
    words: UseId,
    layers: Vec<Layer>,
    last_norm: Norm,
}

#[derive(Clone, Debug)]
struct Layer {
    /// Its use of its stack's table of relative positions, `[buckets, heads]`.
    relative: UseId,
    own_norm: Norm,
    own: Attention,
    /// To what the encoder gave.
    across: Option<(Norm, Attention)>,
    norm: Norm,
    feed_forward: FeedForward,
}

impl T5 {
    pub(super) fn new(config: &ModelConfig, tp: u64, build: &mut Builder) -> Self {
        // fits: the config's maxima are far below 2^63.
        let (vocab, h) = (config.vocab as i64, config.hidden as i64);
        let (std, split) = (Init::Normal(config.init.std), vocab_split(config, tp));
        let (layers, decoder_layers) = (config.layers as usize, config.decoder_layers() as usize);
        let words = build.param("shared.weight", &[vocab, h], std, split.clone());
        let encoder = Stack::new("encoder", words, 0..layers, config, build);
        build.unit = layers;
        let words = build.again(words);
        let decoder = Stack::new("decoder", words, layers..layers + decoder_layers, config, build);
        let is_tied = config.tie_embeddings();
        let head = if is_tied {
            build.again(words)
        } else {
            build.param("lm_head.weight", &[vocab, h], std, split)
        };
        T5 {
            encoder,
            decoder,
            head: Head { weight: head, bias: None, vocab },
            scale: is_tied.then(|| (h as f64).powf(-0.5)),
            buckets: Buckets {
                count: config.relative_buckets as i64,
                distance_max: config.relative_max as i64,
            },
        }
    }
}

impl Network for T5 {
    fn context(
        &self,
        micro: &Micro,
        units: &Range<usize>,
        past: i64,
        kind: Kind,
    ) -> Result<Context> {
        let (text, device) = (&micro.text, micro.text.ids.device());
        let mut context = Context::default();
        if units.start < self.encoder.layers.len() {
            context.text = Sight::of(text, false, kind)?;
            context.buckets[0] = Some(self.buckets.of(0, text.len(), false, device)?);
        }
        if units.end > self.encoder.layers.len() {
            let answer = micro.answer();
            // A single new token may look at everything; several are only allowed as the first.
            let sight = if past == 0 { Sight::of(answer, true, kind)? } else { Sight::All };
            context.answer = sight.spelled_out(answer.len(), kind, device)?;
            let keys = past + answer.len();
            context.buckets[1] = Some(self.buckets.of(past, keys, true, device)?);
            context.across = Sight::across(answer, text, kind)?;
        }
        Ok(context)
    }

    fn unit(&self, work: &Work<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Some(layer) = unit.checked_sub(self.encoder.layers.len()) else {
            return Ok(vec![self.layer(work, &self.encoder, unit, inputs.first(), None)?]);
        };
        let (x, given) = match inputs {
            [given] => (None, given),
            [x, given] => (Some(x), given),
            _ => unreachable!("a decoder layer takes what the encoder gave"),
        };
        let x = self.layer(work, &self.decoder, layer, x, Some(given))?;
        if layer + 1 < self.decoder.layers.len() {
            return Ok(vec![x, given.shallow_clone()]);
        }
        let x = match self.scale {
            Some(scale) => x.f_mul_scalar(scale)?,
            None => x,
        };
        Ok(vec![work.micro.targets.pick(&work.leaves.tp.enter(&x)?)?])
    }

    fn decoder(&self) -> Option<usize> {
        Some(self.encoder.layers.len())
    }

    fn head(&self) -> &Head {
        &self.head
    }
}

impl T5 {
    /// A layer of either stack: `given` is what the encoder gave to the decoder.
    fn layer(
        &self,
        work: &Work<'_>,
        stack: &Stack,
        at: usize,
        x: Option<&Tensor>,
        given: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (layer, context, leaves) = (&stack.layers[at], work.context, work.leaves);
        let (first, text, sight, buckets) = match given {
            None => (0, &work.micro.text, &context.text, &context.buckets[0]),
            Some(_) => {
                let first = self.encoder.layers.len();
                (first, work.micro.answer(), &context.answer, &context.buckets[1])
            }
        };
        let drops = |block| work.drops(first + at, block);
        let mut x = match x {
            Some(x) => x.shallow_clone(),
            None => {
                let words = leaves.tp.embed(leaves.get(stack.words), &text.ids)?;
                drops("embedding").hidden(words)?
            }
        };
        let buckets = buckets.as_ref().expect("a stage has those of its stacks");
        let sight = with_bias(sight, buckets, leaves.get(layer.relative))?;
        let (rows, cache) = (text.rows(), work.cache.as_ref().filter(|_| given.is_some()));
        let normed = leaves.tp.enter(&layer.own_norm.apply(leaves, &x)?)?;
        let mut seen = layer.own.seen(leaves, &normed, rows)?;
        if let Some(cache) = cache {
            seen = cache.borrow_mut().extend(at, seen.0, seen.1)?;
        }
        let drops_own = drops("attention");
        x = x.f_add(&layer.own.apply(leaves, &normed, &seen, &sight, SCALE, drops_own)?)?;
        if let (Some((norm, part)), Some(given)) = (&layer.across, given) {
            let normed = leaves.tp.enter(&norm.apply(leaves, &x)?)?;
            let make = || part.seen(leaves, &leaves.tp.enter(given)?, rows);
            let seen = match cache {
                Some(cache) => cache.borrow_mut().across(at, make)?,
                None => make()?,
            };
            let sight = &context.across;
            x = x.f_add(&part.apply(leaves, &normed, &seen, sight, SCALE, drops("across"))?)?;
        }
        let normed = layer.norm.apply(leaves, &x)?;
        x = x.f_add(&layer.feed_forward.apply(leaves, &normed, drops("mlp"))?)?;
        if at + 1 < stack.layers.len() {
            return Ok(x);
        }
        drops("last").hidden(stack.last_norm.apply(leaves, &x)?)
    }
}

/// Of the logits of attention: the first weights are small enough.
const SCALE: Option<f64> = Some(1.0);

impl Stack {
    fn new(
        name: &str,
        words: UseId,
        units: Range<usize>,
        config: &ModelConfig,
        build: &mut Builder,
    ) -> Self {
        let mut relative = None;
        let layers = units.clone().enumerate().map(|(at, unit)| {
            build.unit = unit;
            let layer = Layer::new(name, at, units.len(), relative, config, build);
            relative = Some(layer.relative);
            layer
        });
        let layers = layers.collect();
        let last_norm = Norm::new(build, &format!("{name}.final_layer_norm"), config);
        Stack { words, layers, last_norm }
    }
}

impl Layer {
    fn new(
        stack: &str,
        at: usize,
        layers: usize,
        relative: Option<UseId>,
        config: &ModelConfig,
        build: &mut Builder,
    ) -> Self {
        let name = |part: &str| format!("{stack}.block.{at}.layer.{part}");
        // fits: the config's maxima are far below 2^63.
        let relative = match relative {
            Some(first) => build.again(first),
            None => {
                let name = name("0.SelfAttention.relative_attention_bias.weight");
                let shape = [config.relative_buckets as i64, config.heads as i64];
                build.param(name, &shape, Init::Normal(config.init.std), Split::Axis(1))
            }
        };
        let style = Style { config, stored: Stored::OutIn, layers: layers as u64 };
        let mut attention = |place: u32, part: &str| {
            let names =
                ["q", "k", "v", "o"].map(|matrix| name(&format!("{place}.{part}.{matrix}")));
            let part = Attention::new(build, style, names.each_ref().map(String::as_str));
            (Norm::new(build, &name(&format!("{place}.layer_norm")), config), part)
        };
        let (own_norm, own) = attention(0, "SelfAttention");
        let has_across = stack == "decoder";
        let across = has_across.then(|| attention(1, "EncDecAttention"));
        let last = if has_across { 2 } else { 1 };
        let [gate, up, plain, down] =
            ["wi_0", "wi_1", "wi", "wo"].map(|of| name(&format!("{last}.DenseReluDense.{of}")));
        let feed_forward = if config.activation().is_gated() {
            FeedForward::new(build, style, Some(gate.as_str()), &up, &down)
        } else {
            FeedForward::new(build, style, None, &plain, &down)
        };
        let norm = Norm::new(build, &name(&format!("{last}.layer_norm")), config);
        Layer { relative, own_norm, own, across, norm, feed_forward }
    }
}

/// Distances in so many buckets: half of them one distance each, half ranges that grow, up to a
/// maximum. Where both directions are seen each has half of all.
#[derive(Clone, Copy, Debug)]
struct Buckets {
    count: i64,
    distance_max: i64,
}

impl Buckets {
    /// The bucket of each of `len` keys for each query from the place `first` on,
    /// `[len - first, len]`.
    fn of(self, first: i64, len: i64, is_decoder: bool, device: Device) -> Result<Tensor> {
        let places = Tensor::f_arange(len, (Kind::Int64, device))?;
        let queries = places.f_narrow(0, first, len - first)?;
        // What a key is ahead of a query.
        let ahead = places.f_unsqueeze(0)?.f_sub(&queries.f_unsqueeze(1)?)?;
        if is_decoder {
            return self.of_distance(&ahead.f_neg()?.f_clamp_min(0)?, self.count);
        }
        let half = self.count / 2;
        let later = ahead.f_gt(0)?.f_to_kind(Kind::Int64)?.f_mul_scalar(half)?;
        Ok(self.of_distance(&ahead.f_abs()?, half)?.f_add(&later)?)
    }

    fn of_distance(self, distance: &Tensor, count: i64) -> Result<Tensor> {
        let exact = count / 2;
        // In f32 and in this order, as T5's own code: some distances are at the edge of a bucket.
        let octaves = (self.distance_max as f64 / exact as f64).ln();
        let far = distance.f_to_kind(Kind::Float)?.f_div_scalar(exact)?.f_log()?;
        let far = far.f_div_scalar(octaves)?.f_mul_scalar(count - exact)?;
        let far = far.f_clamp_min(0)?.f_to_kind(Kind::Int64)?.f_add_scalar(exact)?;
        let far = far.f_clamp_max(count - 1)?;
        Ok(distance.f_where_self(&distance.f_lt(exact)?, &far)?)
    }
}

/// A sight with a number added for each head and distance.
fn with_bias(sight: &Sight, buckets: &Tensor, table: &Tensor) -> Result<Sight> {
    let (queries, keys) = buckets.size2()?;
    let bias = embed(table, buckets)?.f_view([1, queries, keys, -1])?;
    let bias = bias.f_permute([0, 3, 1, 2])?.f_contiguous()?;
    Ok(Sight::Mask(match sight {
        Sight::Mask(mask) => bias.f_add(mask)?,
        Sight::All => bias,
        Sight::Back => unreachable!("it was spelled out"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the buckets of T5 begin, as `tests/reference/hf.py` prints them.
    #[test]
    fn buckets_are_those_of_t5() {
        let buckets = Buckets { count: 32, distance_max: 128 };
        let begins = |row: Vec<i64>| -> Vec<i64> {
            (0..row.len() as i64)
                .filter(|i| *i == 0 || row[*i as usize] > row[*i as usize - 1])
                .collect()
        };
        let exact = 0..16;
        let due: Vec<i64> = exact
            .chain([16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113])
            .collect();
        let square = buckets.of(0, 400, true, Device::Cpu).unwrap();
        // The last query, from its own place back.
        let back = Vec::<i64>::try_from(square.get(399).flip([0])).unwrap();
        assert_eq!(begins(back), due);
        assert!(square.get(0).eq_tensor(&square.get(0).zeros_like()).all().int64_value(&[]) == 1);

        let square = buckets.of(0, 400, false, Device::Cpu).unwrap();
        let back = Vec::<i64>::try_from(square.get(399).flip([0])).unwrap();
        assert_eq!(begins(back), [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
        let ahead = Vec::<i64>::try_from(square.get(0)).unwrap();
        assert_eq!(ahead[..3], [0, 17, 18]);
        assert_eq!(ahead[399], 31);
    }
}
