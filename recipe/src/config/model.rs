//! `[model]`: the shape of the network.

use serde::{Deserialize, Serialize};

use super::check::{refused, within};
use super::node::KeyError;
use super::{Activation, Family, Norm, Positions};

/// The rows of the word embedding are padded to a multiple of this: matrix units compute whole
/// tiles. Megatron also pads to 128.
const VOCAB_MULTIPLE: u64 = 128;

/// `[model]`: the shape of the network.
///
/// The defaults are those of the first model of each family: GPT-2, T5 v1.1 and BERT.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Architecture: `"gpt"`, `"t5"` or `"bert"`. Default: `"gpt"`.
    #[serde(default)]
    pub family: Family,
    /// Transformer layers; with `"t5"` layers of the encoder. Required. Minimum: 1. Maximum: 1024.
    pub layers: u64,
    /// Layers of the decoder. Only with `"t5"`. Default: `layers`. Minimum: 1. Maximum: 1024.
    #[serde(default)]
    pub decoder_layers: Option<u64>,
    /// Width of the residual stream. Required. Minimum: 1. Maximum: 131072.
    pub hidden: u64,
    /// Attention heads. Required. Minimum: 1. Maximum: 1024.
    pub heads: u64,
    /// Width of one attention head. Must be even with `"rope"`. Default: `hidden / heads`, which
    /// must be an integer. Minimum: 1. Maximum: 131072.
    #[serde(default)]
    pub head_dim: Option<u64>,
    /// Width of the feed-forward block. Default: `4 x hidden`. Minimum: 1. Maximum: 1048576.
    #[serde(default)]
    pub ffn: Option<u64>,
    /// Activation function of the feed-forward block: `"gelu"`, `"gelu-tanh"`, `"relu"`, or the
    /// gated `"geglu-tanh"` and `"swiglu"`. Default: `"gelu-tanh"`; `"geglu-tanh"` with `"t5"`,
    /// `"gelu"` with `"bert"`.
    #[serde(default)]
    pub activation: Option<Activation>,
    /// Normalization: `"layernorm"` or `"rmsnorm"`. Default: `"layernorm"`; `"rmsnorm"` with
    /// `"t5"`.
    #[serde(default)]
    pub norm: Option<Norm>,
    /// Term that is added to the variance in the norm. Default: 1e-5; 1e-6 with `"t5"`, 1e-12 with
    /// `"bert"`. Minimum: 1e-16. Maximum: 1.
    #[serde(default)]
    pub norm_eps: Option<f64>,
    /// Position encoding: `"learned"`, `"relative-bias"`, `"rope"` or `"none"`. `"gpt"` takes
    /// `"learned"`, `"rope"` and `"none"`; `"t5"` takes `"relative-bias"` and `"learned"`; `"bert"`
    /// takes `"learned"`. `"learned"` with `"t5"` is the T5 of Megatron: attention logits are
    /// scaled, and dropout is applied as in GPT-2. Default: `"learned"`; `"relative-bias"` with
    /// `"t5"`.
    #[serde(default)]
    pub positions: Option<Positions>,
    /// Base of the rotation angles. Only with `"rope"`. Default: 10000. Minimum: 1. Maximum: 1e12.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Number of distance buckets. Only with `"relative-bias"`. Default: 32. Minimum: 4. Maximum:
    /// 4096.
    #[serde(default = "default_relative_buckets")]
    pub relative_buckets: u64,
    /// Distance in tokens from which all distances share one bucket. Only with `"relative-bias"`.
    /// Default: 128. Minimum: `relative_buckets`. Maximum: 1048576.
    #[serde(default = "default_relative_max")]
    pub relative_max: u64,
    /// Whether linear layers have biases. Default: true; false with `"t5"`.
    #[serde(default)]
    pub bias: Option<bool>,
    /// Whether the output layer shares the weights of the word embedding. Default: true; false with
    /// `"t5"`.
    #[serde(default)]
    pub tie_embeddings: Option<bool>,
    /// Number of tokens in the vocabulary, without padding. Required. Minimum: 2. Maximum:
    /// 16777216.
    pub vocab: u64,
    /// Sequence length in tokens; with `"t5"` that of the encoder. `enc_len` is an alias of this
    /// key. Required. Minimum: 1; 2 with `"encdec"`, 4 with `"span-corruption"`, 5 with `"mlm"`.
    /// Maximum: 1048576.
    #[serde(alias = "enc_len")]
    pub seq_len: u64,
    /// Sequence length of the decoder in tokens. Only with `"t5"`, where it is required. Minimum:
    /// 1. Maximum: 1048576.
    #[serde(default)]
    pub dec_len: Option<u64>,
    /// Number of token types. Only with `"bert"`. Default: 2. Minimum: 1. Maximum: 1024.
    #[serde(default = "default_token_types")]
    pub token_types: u64,
    /// Dropout probability, rounded to a multiple of 1/65536. Applied after the embedding and after
    /// each block; with `"t5"` also in feed-forward blocks and after the last norms. Default: 0.
    /// Minimum: 0. Maximum: below 1.
    #[serde(default)]
    pub dropout: f64,
    /// Dropout probability of the attention weights. A value above 0 stores the attention matrix,
    /// which takes time and memory. Default: `dropout`. Minimum: 0. Maximum: below 1.
    #[serde(default)]
    pub attention_dropout: Option<f64>,
    /// The initial weights.
    #[serde(default)]
    pub init: InitConfig,
}

/// `[model.init]`: the initial weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct InitConfig {
    /// Standard deviation of the normal distribution of the initial weights. Default: 0.02.
    /// Minimum: 0. Maximum: 1.
    pub std: f64,
    /// Whether the two matrices that write into the residual stream start with `std / sqrt(2 x
    /// layers)`. The variance of the stream then does not grow with depth. Default: true.
    pub scaled_output: bool,
}

impl Default for InitConfig {
    fn default() -> Self {
        InitConfig { std: 0.02, scaled_output: true }
    }
}

pub(super) fn default_rope_theta() -> f64 {
    10_000.0
}

pub(super) fn default_relative_buckets() -> u64 {
    32
}

pub(super) fn default_relative_max() -> u64 {
    128
}

pub(super) fn default_token_types() -> u64 {
    2
}

impl ModelConfig {
    fn of_family<T>(&self, given: Option<T>, gpt: T, t5: T, bert: T) -> T {
        given.unwrap_or(match self.family {
            Family::Gpt => gpt,
            Family::T5 => t5,
            Family::Bert => bert,
        })
    }

    /// Layers of the decoder; 0 without one.
    #[must_use]
    pub fn decoder_layers(&self) -> u64 {
        if self.family == Family::T5 { self.decoder_layers.unwrap_or(self.layers) } else { 0 }
    }

    /// Layers of the encoder and the decoder, which a pipeline divides among its stages.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.layers + self.decoder_layers()
    }

    /// Width of one attention head.
    #[must_use]
    pub fn head_dim(&self) -> u64 {
        self.head_dim.unwrap_or(self.hidden / self.heads)
    }

    /// Width of the queries of all heads: `hidden` unless `head_dim` is set.
    #[must_use]
    pub fn attention_width(&self) -> u64 {
        self.heads * self.head_dim()
    }

    /// Width inside the feed-forward block.
    #[must_use]
    pub fn ffn(&self) -> u64 {
        self.ffn.unwrap_or(4 * self.hidden)
    }

    /// The activation function of the feed-forward block.
    #[must_use]
    pub fn activation(&self) -> Activation {
        use Activation::{GegluTanh, Gelu, GeluTanh};
        self.of_family(self.activation, GeluTanh, GegluTanh, Gelu)
    }

    /// The norm.
    #[must_use]
    pub fn norm(&self) -> Norm {
        self.of_family(self.norm, Norm::Layernorm, Norm::Rmsnorm, Norm::Layernorm)
    }

    /// Term that is added to the variance in the norm.
    #[must_use]
    pub fn norm_eps(&self) -> f64 {
        self.of_family(self.norm_eps, 1e-5, 1e-6, 1e-12)
    }

    /// The position encoding.
    #[must_use]
    pub fn positions(&self) -> Positions {
        use Positions::{Learned, RelativeBias};
        self.of_family(self.positions, Learned, RelativeBias, Learned)
    }

    /// Whether linear layers have biases.
    #[must_use]
    pub fn bias(&self) -> bool {
        self.of_family(self.bias, true, false, true)
    }

    /// Whether the output layer shares the weights of the word embedding.
    #[must_use]
    pub fn tie_embeddings(&self) -> bool {
        self.of_family(self.tie_embeddings, true, false, true)
    }

    /// Dropout probability of the attention weights.
    #[must_use]
    pub fn attention_dropout(&self) -> f64 {
        self.attention_dropout.unwrap_or(self.dropout)
    }

    /// Tokens of one sample: with `"t5"` those of the encoder and the decoder.
    #[must_use]
    pub fn tokens_per_sample(&self) -> u64 {
        self.seq_len + self.dec_len.unwrap_or(0)
    }

    /// Rows of the word embedding: `vocab`, rounded up to a multiple of 128. The rows above
    /// `vocab` belong to no token; they only speed up the matrix product.
    #[must_use]
    pub fn padded_vocab(&self) -> u64 {
        self.vocab.next_multiple_of(VOCAB_MULTIPLE)
    }

    /// Rows of the word embedding on each of `tp` ranks, padding included.
    #[must_use]
    pub fn vocab_rows(&self, tp: u64) -> u64 {
        self.vocab.next_multiple_of(VOCAB_MULTIPLE * tp) / tp
    }

    /// Fills in the defaults of the family.
    pub(super) fn resolve(&mut self) {
        if self.family == Family::T5 {
            self.decoder_layers = Some(self.decoder_layers());
        }
        self.head_dim = Some(self.head_dim());
        self.ffn = Some(self.ffn());
        self.activation = Some(self.activation());
        self.norm = Some(self.norm());
        self.norm_eps = Some(self.norm_eps());
        self.positions = Some(self.positions());
        self.bias = Some(self.bias());
        self.tie_embeddings = Some(self.tie_embeddings());
        self.attention_dropout = Some(self.attention_dropout());
    }

    pub(super) fn checked(&self) -> Result<(), KeyError> {
        within("model.layers", self.layers, 1..=1024)?;
        within("model.hidden", self.hidden, 1..=1 << 17)?;
        within("model.heads", self.heads, 1..=1024)?;
        if self.head_dim.is_none() && !self.hidden.is_multiple_of(self.heads) {
            let problem =
                format!("expected a divisor of hidden {}, found {}", self.hidden, self.heads);
            return Err(refused("model.heads", problem).hint("set model.head_dim"));
        }
        within("model.head_dim", self.head_dim(), 1..=1 << 17)?;
        within("model.ffn", self.ffn(), 1..=1 << 20)?;
        within("model.norm_eps", self.norm_eps(), 1e-16..=1.0)?;
        within("model.rope_theta", self.rope_theta, 1.0..=1e12)?;
        within("model.relative_buckets", self.relative_buckets, 4..=4096)?;
        within("model.relative_max", self.relative_max, self.relative_buckets..=1 << 20)?;
        within("model.vocab", self.vocab, 2..=1 << 24)?;
        within("model.seq_len", self.seq_len, 1..=1 << 20)?;
        within("model.token_types", self.token_types, 1..=1024)?;
        within("model.init.std", self.init.std, 0.0..=1.0)?;
        let drops = [("", self.dropout), ("attention_", self.attention_dropout())];
        if let Some((name, part)) = drops.iter().find(|(_, part)| !(0.0..1.0).contains(part)) {
            let problem = format!("expected at least 0 and below 1, found {part}");
            return Err(refused(&format!("model.{name}dropout"), problem));
        }
        self.check_family()
    }

    fn check_family(&self) -> Result<(), KeyError> {
        let family = self.family;
        match (family, self.dec_len) {
            (Family::T5, None) => {
                return Err(refused("model.dec_len", "required with family \"t5\" and missing"));
            }
            (Family::T5, Some(dec_len)) => within("model.dec_len", dec_len, 1..=1 << 20)?,
            (_, None) => {}
            (_, Some(_)) => return Err(refused("model.dec_len", "only valid with family \"t5\"")),
        }
        match self.decoder_layers {
            Some(layers) if family == Family::T5 => {
                within("model.decoder_layers", layers, 1..=1024)?;
            }
            Some(_) => {
                return Err(refused("model.decoder_layers", "only valid with family \"t5\""));
            }
            None => {}
        }
        let positions = self.positions();
        let possible = match family {
            Family::Gpt => positions != Positions::RelativeBias,
            Family::T5 => matches!(positions, Positions::RelativeBias | Positions::Learned),
            Family::Bert => positions == Positions::Learned,
        };
        if !possible {
            return Err(refused("model.positions", "not supported by model.family").hint(
                "gpt takes learned, rope or none; t5 takes relative-bias or learned; bert takes \
                 learned",
            ));
        }
        if positions == Positions::Rope && !self.head_dim().is_multiple_of(2) {
            let problem =
                format!("expected an even number with \"rope\", found {}", self.head_dim());
            return Err(refused("model.head_dim", problem));
        }
        Ok(())
    }
}
