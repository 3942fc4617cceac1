//! Parameters and floating-point operations.

use serde::Serialize;

use crate::config::{Config, Family, ModelConfig};
use crate::model::{Blueprint, ParamSpec};

/// Parameters by component, without padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Parameters {
    /// The word embedding.
    pub word_embedding: u64,
    /// Embeddings of positions, of relative distances and of token types.
    pub position_embedding: u64,
    /// Attention of all layers.
    pub attention: u64,
    /// Feed-forward blocks of all layers.
    pub feed_forward: u64,
    /// Gains and biases of all norms.
    pub norms: u64,
    /// The head; 0 if it is tied to the word embedding.
    pub head: u64,
    /// The sum.
    pub total: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ParamComponent {
    Words,
    Positions,
    Attention,
    FeedForward,
    Norms,
    Head,
}

/// Maps parts of parameter names to components; the first match counts.
const PARTS: [(&str, ParamComponent); 13] = [
    ("cls.", ParamComponent::Head),
    ("pooler", ParamComponent::Head),
    ("lm_head", ParamComponent::Head),
    ("relative_attention_bias", ParamComponent::Positions),
    ("wpe", ParamComponent::Positions),
    ("position_embeddings", ParamComponent::Positions),
    ("token_type", ParamComponent::Positions),
    ("norm", ParamComponent::Norms),
    ("Norm", ParamComponent::Norms),
    ("ln_", ParamComponent::Norms),
    ("attn", ParamComponent::Attention),
    ("ttention", ParamComponent::Attention),
    ("wte", ParamComponent::Words),
];

impl ParamComponent {
    fn of(spec: &ParamSpec) -> Self {
        let words = ["shared", "word_embeddings"].iter().any(|name| spec.name.contains(name));
        let found = PARTS.iter().find(|(name, _)| spec.name.contains(name));
        found.map_or(
            if words { ParamComponent::Words } else { ParamComponent::FeedForward },
            |(_, part)| *part,
        )
    }
}

impl Parameters {
    /// Counts a model as published: without padding.
    #[must_use]
    pub fn of(model: &Blueprint) -> Self {
        let mut all = Parameters::default();
        for spec in model.params() {
            let count = spec.numel() as u64; // fits: of memory
            *match ParamComponent::of(spec) {
                ParamComponent::Words => &mut all.word_embedding,
                ParamComponent::Positions => &mut all.position_embedding,
                ParamComponent::Attention => &mut all.attention,
                ParamComponent::FeedForward => &mut all.feed_forward,
                ParamComponent::Norms => &mut all.norms,
                ParamComponent::Head => &mut all.head,
            } += count;
            all.total += count;
        }
        all
    }
}

/// Floating-point operations of training: forward and backward, a multiply and an add count as two.
/// Recomputation is not counted. `N` is the number of multiplied parameters: all except positions
/// and an embedding that is not tied to the head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Flop {
    /// `6 N + 12 L h s` (PaLM, nanoGPT). For an encoder and a decoder the mean over the tokens of
    /// both, each through its own layers.
    pub per_token_6n_12lhs: u64,
    /// `6 N + 6 L h s` (llm.c): the attention of a decoder is causal, so half of it is not needed.
    pub per_token_6n_6lhs: u64,
    /// Operations of one step, by the first formula.
    pub per_step: u64,
}

impl Flop {
    pub(super) fn of(config: &Config, model: &Blueprint) -> Self {
        let shape = &config.model;
        let products = 6 * products(config, model);
        let (all, needed) = attention(shape);
        let tokens = u128::from(shape.tokens_per_sample());
        let per_token = |attention: u128| ((products + attention) / tokens) as u64; // fits: < 2^60
        let per_step = (products + all).saturating_mul(u128::from(config.batch.global));
        Flop {
            per_token_6n_12lhs: per_token(all),
            per_token_6n_6lhs: per_token(needed),
            per_step: u64::try_from(per_step).unwrap_or(u64::MAX),
        }
    }
}

/// Elements of matrices times the tokens of a sample that are multiplied by them.
#[expect(clippy::match_same_arms, reason = "the order of the arms says when each applies")]
fn products(config: &Config, model: &Blueprint) -> u128 {
    let shape = &config.model;
    let out_tokens = match shape.family {
        Family::Gpt => shape.seq_len,
        Family::T5 => shape.dec_len.unwrap_or(0),
        // Logits are computed only for masked tokens.
        Family::Bert => (shape.seq_len as f64 * config.data.mask_prob).ceil() as u64,
    };
    let tokens = |spec: &ParamSpec| match ParamComponent::of(spec) {
        ParamComponent::Positions => 0,
        ParamComponent::Words if shape.tie_embeddings() => out_tokens,
        ParamComponent::Words => 0,
        ParamComponent::Head => out_tokens,
        _ if (spec.units[0] as u64) < shape.layers => shape.seq_len,
        _ => shape.dec_len.unwrap_or(0),
    };
    model.params().iter().map(|spec| spec.numel() as u128 * u128::from(tokens(spec))).sum()
}

/// Attention of a sample: all of it, and without the masked half of a decoder.
fn attention(shape: &ModelConfig) -> (u128, u128) {
    let width = u128::from(shape.attention_width());
    let (text, answer) = (u128::from(shape.seq_len), u128::from(shape.dec_len.unwrap_or(0)));
    let (layers, decoder) = (u128::from(shape.layers), u128::from(shape.decoder_layers()));
    let encoder = 12 * layers * width * text * text;
    let back = 12 * decoder * width * answer * answer;
    let across = 12 * decoder * width * answer * text;
    match shape.family {
        Family::Gpt => (encoder, encoder / 2),
        Family::T5 | Family::Bert => (encoder + back + across, encoder + back / 2 + across),
    }
}
