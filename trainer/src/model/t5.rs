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

use super::attention::{Sight, attend, split_heads};
use super::head::Head;
use super::micro::{Micro, Text};
use super::parts::{Cut, FeedForward, Linear, Matrix, Norm, Stored};
use super::spec::{Builder, Init, Leaves, UseId};
use super::tp::embed;
use super::{Cache, into_residual, vocab_split};
use crate::Result;
use crate::config::ModelConfig;

#[derive(Clone, Debug)]
pub(super) struct T5 {
    encoder: Stack,
    decoder: Stack,
    pub(super) head: Head,
    /// What the hidden states are multiplied with before the head.
    scale: Option<f64>,
    head_dim: i64,
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
    own: Attention,
    /// To what the encoder gave.
    cross: Option<Attention>,
    norm: Norm,
    feed_forward: FeedForward,
}

#[derive(Clone, Debug)]
struct Attention {
    norm: Norm,
    q: Linear,
    k: Linear,
    v: Linear,
    out: Linear,
}

/// What the layers of a stage need to know of a micro-batch.
#[derive(Debug)]
pub(super) struct Context {
    /// Absent if the stage has no layer of that stack.
    encoder: Option<Own>,
    decoder: Option<Own>,
    cross: Sight,
}

/// How a text sees itself.
#[derive(Debug)]
struct Own {
    sight: Sight,
    /// The bucket of each distance, `[len, len]`.
    buckets: Tensor,
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
            head_dim: config.head_dim() as i64,
            buckets: Buckets {
                count: config.relative_buckets as i64,
                distance_max: config.relative_max as i64,
            },
        }
    }

    pub(super) fn context(
        &self,
        micro: &Micro,
        units: &Range<usize>,
        kind: Kind,
    ) -> Result<Context> {
        let own = |text: &Text, is_decoder: bool| -> Result<Own> {
            let (len, device) = (text.len(), text.ids.device());
            let sight = Sight::of(text, is_decoder, kind)?.spelled_out(len, kind, device)?;
            Ok(Own { sight, buckets: self.buckets.of(0, len, is_decoder, device)? })
        };
        let has_encoder = units.start < self.encoder.layers.len();
        let has_decoder = units.end > self.encoder.layers.len();
        let (text, answer) = (&micro.text, micro.answer());
        Ok(Context {
            encoder: has_encoder.then(|| own(text, false)).transpose()?,
            decoder: has_decoder.then(|| own(answer, true)).transpose()?,
            cross: Sight::across(answer, text, kind)?,
        })
    }

    /// One layer. The first of each stack embeds its tokens.
    pub(super) fn unit(
        &self,
        leaves: Leaves<'_>,
        unit: usize,
        micro: &Micro,
        context: &Context,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        match unit.checked_sub(self.encoder.layers.len()) {
            None => {
                let x = inputs.first().map(Tensor::shallow_clone);
                let own = context.encoder.as_ref().expect("of a stage with encoder layers");
                Ok(vec![self.layer(
                    leaves,
                    &self.encoder,
                    unit,
                    &micro.text,
                    own,
                    x,
                    None,
                    None,
                )?])
            }
            Some(layer) => {
                let (x, given) = match inputs {
                    [given] => (None, given),
                    [x, given] => (Some(x.shallow_clone()), given),
                    _ => unreachable!("a decoder layer takes what the encoder gave"),
                };
                let own = context.decoder.as_ref().expect("of a stage with decoder layers");
                let cross = Some((given, &context.cross));
                let stack = &self.decoder;
                let answer = micro.answer();
                let x = self.layer(leaves, stack, layer, answer, own, x, cross, None)?;
                if layer + 1 < stack.layers.len() {
                    return Ok(vec![x, given.shallow_clone()]);
                }
                Ok(vec![micro.targets.pick(&leaves.tp.enter(&self.scaled(x)?)?)?])
            }
        }
    }

    /// What the encoder gives of a text.
    pub(super) fn read(&self, leaves: Leaves<'_>, text: &Text, kind: Kind) -> Result<Tensor> {
        let sight = Sight::of(text, false, kind)?;
        let own = Own { sight, buckets: self.buckets.of(0, text.len(), false, text.ids.device())? };
        let layer = |x: Option<Tensor>, at: usize| -> Result<Option<Tensor>> {
            Ok(Some(self.layer(leaves, &self.encoder, at, text, &own, x, None, None)?))
        };
        let x = (0..self.encoder.layers.len()).try_fold(None, layer)?;
        Ok(x.expect("an encoder has layers"))
    }

    /// All layers of the decoder, of tokens that go on where the cache ends.
    pub(super) fn go_on(
        &self,
        leaves: Leaves<'_>,
        text: &Text,
        kind: Kind,
        cache: &mut Cache,
    ) -> Result<Vec<Tensor>> {
        let given = cache.given.as_ref().expect("a text was read").shallow_clone();
        let (past, device) = (cache.tokens, text.ids.device());
        // A single new token may look at everything; several are only allowed as the first.
        let sight = if past == 0 { Sight::of(text, true, kind)? } else { Sight::All };
        let own = Own {
            sight: sight.spelled_out(text.len(), kind, device)?,
            buckets: self.buckets.of(past, past + text.len(), true, device)?,
        };
        let cross = Some((&given, &Sight::All));
        let layer = |x: Option<Tensor>, at: usize| -> Result<Option<Tensor>> {
            let cache = Some(&mut *cache);
            Ok(Some(self.layer(leaves, &self.decoder, at, text, &own, x, cross, cache)?))
        };
        let x = (0..self.decoder.layers.len()).try_fold(None, layer)?;
        Ok(vec![self.scaled(x.expect("a decoder has layers"))?])
    }

    fn scaled(&self, x: Tensor) -> Result<Tensor> {
        Ok(match self.scale {
            Some(scale) => x.f_mul_scalar(scale)?,
            None => x,
        })
    }

    #[expect(clippy::too_many_arguments, reason = "a layer of either stack")]
    fn layer(
        &self,
        leaves: Leaves<'_>,
        stack: &Stack,
        at: usize,
        text: &Text,
        own: &Own,
        x: Option<Tensor>,
        cross: Option<(&Tensor, &Sight)>,
        mut cache: Option<&mut Cache>,
    ) -> Result<Tensor> {
        let layer = &stack.layers[at];
        let mut x = match x {
            Some(x) => x,
            None => leaves.tp.embed(leaves.get(stack.words), &text.ids)?,
        };
        let sight = own.with_bias(leaves.get(layer.relative))?;
        let normed = leaves.tp.enter(&layer.own.norm.apply(leaves, &x)?)?;
        let rows = text.rows();
        let mixed = self.attention(leaves, &layer.own, &normed, rows, &sight, || {
            let (k, v) = self.seen(leaves, &layer.own, &normed, rows)?;
            match &mut cache {
                Some(cache) => cache.extend(at, k, v),
                None => Ok((k, v)),
            }
        })?;
        x = x.f_add(&mixed)?;
        if let (Some(part), Some((given, sight))) = (&layer.cross, cross) {
            let normed = leaves.tp.enter(&part.norm.apply(leaves, &x)?)?;
            let mixed = self.attention(leaves, part, &normed, rows, sight, || {
                let make = || self.seen(leaves, part, &leaves.tp.enter(given)?, rows);
                match &mut cache {
                    Some(cache) => cache.across(at, make),
                    None => make(),
                }
            })?;
            x = x.f_add(&mixed)?;
        }
        let normed = layer.norm.apply(leaves, &x)?;
        x = x.f_add(&layer.feed_forward.apply(leaves, &normed)?)?;
        if at + 1 < stack.layers.len() {
            return Ok(x);
        }
        stack.last_norm.apply(leaves, &x)
    }

    fn attention(
        &self,
        leaves: Leaves<'_>,
        part: &Attention,
        x: &Tensor,
        rows: i64,
        sight: &Sight,
        seen: impl FnOnce() -> Result<(Tensor, Tensor)>,
    ) -> Result<Tensor> {
        let q = split_heads(&part.q.apply(leaves, x)?, rows, self.head_dim)?;
        let (k, v) = seen()?;
        part.out.apply_and_leave(leaves, &attend(&q, &k, &v, sight, Some(1.0))?)
    }
}

impl T5 {
    /// Keys and values of what is looked at.
    fn seen(
        &self,
        leaves: Leaves<'_>,
        part: &Attention,
        x: &Tensor,
        rows: i64,
    ) -> Result<(Tensor, Tensor)> {
        let heads = |matrix: &Linear| split_heads(&matrix.apply(leaves, x)?, rows, self.head_dim);
        Ok((heads(&part.k)?, heads(&part.v)?))
    }
}

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
        let (h, f, heads) = (config.hidden as i64, config.ffn() as i64, config.heads as i64);
        let std = config.init.std;
        let into_residual = into_residual(config, layers as u64);
        let relative = match relative {
            Some(first) => build.again(first),
            None => {
                let name = name("0.SelfAttention.relative_attention_bias.weight");
                let shape = [config.relative_buckets as i64, heads];
                build.param(name, &shape, Init::Normal(std), Split::Axis(1))
            }
        };
        let (stored, bias) = (Stored::OutIn, config.bias());
        let into = |cut, inputs, outputs| Matrix { inputs, outputs, stored, cut, std, bias };
        let out = |inputs| Matrix { std: into_residual, ..into(Cut::Inputs, inputs, h) };
        let attention = |place: u32, part: &str, build: &mut Builder| {
            let width = config.attention_width() as i64;
            let norm = name(&format!("{place}.layer_norm"));
            let name = |matrix: &str| name(&format!("{place}.{part}.{matrix}"));
            let into = into(Cut::Outputs(1), h, width);
            Attention {
                q: Linear::new(build, &name("q"), &into),
                k: Linear::new(build, &name("k"), &into),
                v: Linear::new(build, &name("v"), &into),
                out: Linear::new(build, &name("o"), &out(width)),
                norm: Norm::new(build, &norm, config),
            }
        };
        let own = attention(0, "SelfAttention", build);
        let has_cross = stack == "decoder";
        let cross = has_cross.then(|| attention(1, "EncDecAttention", build));
        let last = if has_cross { 2 } else { 1 };
        let name = |part: &str| name(&format!("{last}.{part}"));
        let (activation, into) = (config.activation(), into(Cut::Outputs(1), h, f));
        let feed_forward = if activation.is_gated() {
            let gate = Linear::new(build, &name("DenseReluDense.wi_0"), &into);
            let up = Linear::new(build, &name("DenseReluDense.wi_1"), &into);
            let down = Linear::new(build, &name("DenseReluDense.wo"), &out(f));
            FeedForward::gated(gate, up, down, activation)
        } else {
            let up = Linear::new(build, &name("DenseReluDense.wi"), &into);
            let down = Linear::new(build, &name("DenseReluDense.wo"), &out(f));
            FeedForward::fused(up, down, activation)
        };
        let norm = Norm::new(build, &name("layer_norm"), config);
        Layer { relative, own, cross, norm, feed_forward }
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

impl Own {
    /// The sight with a number added for each head and distance.
    fn with_bias(&self, table: &Tensor) -> Result<Sight> {
        let (queries, keys) = self.buckets.size2()?;
        let bias = embed(table, &self.buckets)?.f_view([1, queries, keys, -1])?;
        let bias = bias.f_permute([0, 3, 1, 2])?.f_contiguous()?;
        Ok(Sight::Mask(match &self.sight {
            Sight::Mask(mask) => bias.f_add(mask)?,
            Sight::All => bias,
            Sight::Back => unreachable!("it was spelled out"),
        }))
    }
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
