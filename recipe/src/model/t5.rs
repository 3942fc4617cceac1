use std::ops::Range;

use ckpt::layout::TensorSplit;

use super::parts::{Attention, FeedForward, Head, Norm, Stored, Style};
use super::spec::{Builder, Init, UseId};
use super::vocab_split;
use crate::config::{ModelConfig, Positions};

/// Encoder and decoder: T5 v1.1 and CPM-2, and with other settings T5 v1.0, or the T5 of Megatron.
/// Norm before each block.
///
/// Names, shapes and orientation are those of Hugging Face's `T5ForConditionalGeneration`. A
/// learned number for each head and bucket of distances is added to the logits of self-attention,
/// which are not scaled. The table belongs to the first layer of each stack, and the other layers
/// use it. In the T5 of Megatron both stacks add the same learned position embedding to the word
/// embedding instead, and a tied head has a bias.
#[derive(Clone, Debug)]
pub struct T5 {
    /// The encoder.
    pub encoder: T5Stack,
    /// The decoder.
    pub decoder: T5Stack,
    /// The head.
    pub head: Head,
    /// Factor of the hidden states before the head.
    pub scale: Option<f64>,
    /// The distance buckets of relative positions, if there are any.
    pub buckets: Option<Buckets>,
}

/// One of the two stacks of [`T5`].
#[derive(Clone, Debug)]
pub struct T5Stack {
    /// Its use of the word embedding.
    pub words: UseId,
    /// Its use of the position embedding, if positions are learned.
    pub positions: Option<UseId>,
    /// One per unit.
    pub layers: Vec<T5Layer>,
    /// The norm after the last unit.
    pub last_norm: Norm,
}

/// A layer of [`T5`].
#[derive(Clone, Debug)]
pub struct T5Layer {
    /// Its use of the table of relative positions of its stack, `[buckets, heads]`, if there is
    /// one.
    pub relative: Option<UseId>,
    /// The norm before `own`.
    pub own_norm: Norm,
    /// Self-attention.
    pub own: Attention,
    /// Cross-attention to the encoder output, and the norm before it.
    pub across: Option<(Norm, Attention)>,
    /// The norm before `feed_forward`.
    pub norm: Norm,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
}

/// Distance buckets: half of them have one distance each, the others growing ranges, up to a
/// maximum. If both directions are visible, each direction has half of the buckets.
#[derive(Clone, Copy, Debug)]
pub struct Buckets {
    /// Number of buckets.
    pub count: i64,
    /// Distance from which all distances share a bucket.
    pub distance_max: i64,
}

impl T5 {
    pub(super) fn new(config: &ModelConfig, tp: u64, build: &mut Builder) -> Self {
        // fits: the config's maxima are far below 2^63.
        let (vocab, h) = (config.vocab as i64, config.hidden as i64);
        let (std, split) = (Init::Normal(config.init.std), vocab_split(config, tp));
        let (layers, decoder_layers) = (config.layers as usize, config.decoder_layers() as usize);
        let words = build.param("shared.weight", &[vocab, h], std, split.clone());
        let is_relative = config.positions() == Positions::RelativeBias;
        let positions = (!is_relative).then(|| {
            let places = config.seq_len.max(config.dec_len.unwrap_or(0)) as i64;
            build.param("position_embeddings.weight", &[places, h], std, TensorSplit::Replicate)
        });
        let encoder = T5Stack::new("encoder", (words, positions), 0..layers, config, build);
        build.unit = layers;
        let first = (build.again(words), positions.map(|of| build.again(of)));
        let units = layers..layers + decoder_layers;
        let decoder = T5Stack::new("decoder", first, units, config, build);
        let is_tied = config.tie_embeddings();
        let weight = if is_tied {
            build.again(words)
        } else {
            build.param("lm_head.weight", &[vocab, h], std, split.clone())
        };
        let bias = (is_tied && !is_relative && config.bias())
            .then(|| build.param("lm_head.bias", &[vocab], Init::Zeros, split));
        T5 {
            encoder,
            decoder,
            head: Head { weight, bias, vocab },
            scale: (is_tied && is_relative).then(|| (h as f64).powf(-0.5)),
            buckets: is_relative.then_some(Buckets {
                count: config.relative_buckets as i64,
                distance_max: config.relative_max as i64,
            }),
        }
    }
}

impl T5Stack {
    fn new(
        name: &str,
        (words, positions): (UseId, Option<UseId>),
        units: Range<usize>,
        config: &ModelConfig,
        build: &mut Builder,
    ) -> Self {
        let mut relative = None;
        let layers = units.clone().enumerate().map(|(at, unit)| {
            build.unit = unit;
            let layer = T5Layer::new(name, at, units.len(), relative, config, build);
            relative = layer.relative;
            layer
        });
        let layers = layers.collect();
        let last_norm = Norm::new(build, &format!("{name}.final_layer_norm"), config);
        T5Stack { words, positions, layers, last_norm }
    }
}

impl T5Layer {
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
            _ if config.positions() != Positions::RelativeBias => None,
            Some(first) => Some(build.again(first)),
            None => {
                let name = name("0.SelfAttention.relative_attention_bias.weight");
                let shape = [config.relative_buckets as i64, config.heads as i64];
                Some(build.param(name, &shape, Init::Normal(config.init.std), TensorSplit::Axis(1)))
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
        T5Layer { relative, own_norm, own, across, norm, feed_forward }
    }
}
