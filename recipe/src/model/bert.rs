use ckpt::layout::TensorSplit;

use super::parts::{
    Attention, FeedForward, Head, Linear, Matrix, MatrixSplit, Norm, Stored, Style,
};
use super::spec::{Builder, Init, UseId};
use super::vocab_split;
use crate::config::{Activation, ModelConfig};

/// The encoder of BERT: learned positions, token types, norm after each block, and two objectives:
/// to predict the masked tokens, and whether the second segment follows the first.
///
/// Names, shapes and orientation are those of Hugging Face's `BertForPreTraining`.
#[derive(Clone, Debug)]
pub struct Bert {
    /// The word embedding.
    pub words: UseId,
    /// The position embedding.
    pub positions: UseId,
    /// The token type embedding.
    pub types: UseId,
    /// The norm of their sum.
    pub norm: Norm,
    /// One per unit.
    pub layers: Vec<BertLayer>,
    /// The pooler: a projection of the first token, the input of the sentence-order head.
    pub pooler: Linear,
    /// The sentence-order head.
    pub order: Linear,
    /// The transform of a masked token before the head.
    pub transform: Linear,
    /// The norm after the transform.
    pub transform_norm: Norm,
    /// The head for masked tokens.
    pub head: Head,
    /// The activation function of the transform.
    pub activation: Activation,
}

/// A layer of [`Bert`].
#[derive(Clone, Debug)]
pub struct BertLayer {
    /// Attention.
    pub attention: Attention,
    /// The norm after it.
    pub norm_1: Norm,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
    /// The norm after it.
    pub norm_2: Norm,
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
        let positions = table("position", config.seq_len, TensorSplit::Replicate, build);
        let types = table("token_type", config.token_types, TensorSplit::Replicate, build);
        let norm = Norm::new(build, "bert.embeddings.LayerNorm", config);
        let layers =
            (0..config.layers as usize).map(|at| BertLayer::new(config, at, build)).collect();
        build.is_joined = true;
        let (stored, cut) = (Stored::OutIn, MatrixSplit::Whole);
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
}

impl BertLayer {
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
        BertLayer { attention, norm_1, feed_forward, norm_2 }
    }
}
