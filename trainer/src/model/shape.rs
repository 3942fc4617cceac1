use crate::config::ModelConfig;

/// Matrices of one layer: `c_attn`, `attn.c_proj`, `c_fc`, `mlp.c_proj`.
pub(super) const LAYER_MATRICES: usize = 4;
/// Vectors of one layer: gains and biases of both norms, and the biases of the four matrices.
pub(super) const LAYER_VECTORS: usize = 8;

/// The numbers that say what a GPT looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GptShape {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: i64,
    /// Attention heads.
    pub heads: i64,
    /// Width inside the feed-forward block.
    pub ffn: i64,
    /// Tokens of the vocabulary.
    pub vocab: i64,
    /// Rows of the word embedding: `vocab`, rounded up to a multiple of 128.
    pub vocab_padded: i64,
    /// Positions that the model knows.
    pub seq_len: i64,
}

/// How a parameter begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal, with this standard deviation.
    Normal(f64),
    /// All zeros: biases.
    Zeros,
    /// All ones: gains of norms.
    Ones,
}

/// One parameter, before it has values.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Its name, as Hugging Face's `GPT2LMHeadModel` has it.
    pub name: String,
    /// Its shape, row-major.
    pub shape: Vec<i64>,
    /// Its first values.
    pub init: Init,
}

impl ParamSpec {
    /// Elements.
    #[must_use]
    pub fn numel(&self) -> usize {
        // fits: a model that is not addressable fails when it is allocated.
        self.shape.iter().product::<i64>() as usize
    }

    /// Whether weight decay applies: to matrices, never to norms and biases.
    #[must_use]
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

impl GptShape {
    /// From a checked config.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        // fits: the config's maxima are far below 2^63.
        GptShape {
            layers: config.layers as usize,
            hidden: config.hidden as i64,
            heads: config.heads as i64,
            ffn: config.ffn() as i64,
            vocab: config.vocab as i64,
            vocab_padded: config.padded_vocab() as i64,
            seq_len: config.seq_len as i64,
        }
    }

    /// Every parameter, in the order in which the trainer keeps them: first those that decay, then
    /// the rest, so that the optimizer's two groups are two slices. Within each by layer.
    #[must_use]
    pub fn params(&self, config: &ModelConfig) -> Vec<ParamSpec> {
        let std = config.init.std;
        let into_residual =
            if config.init.scaled_output { std / (2.0 * self.layers as f64).sqrt() } else { std };
        let (h, f) = (self.hidden, self.ffn);
        let mut params = vec![
            spec("transformer.wte.weight", &[self.vocab_padded, h], Init::Normal(std)),
            spec("transformer.wpe.weight", &[self.seq_len, h], Init::Normal(std)),
        ];
        for layer in 0..self.layers {
            let name = |part: &str| format!("transformer.h.{layer}.{part}");
            params.extend([
                spec(name("attn.c_attn.weight"), &[h, 3 * h], Init::Normal(std)),
                spec(name("attn.c_proj.weight"), &[h, h], Init::Normal(into_residual)),
                spec(name("mlp.c_fc.weight"), &[h, f], Init::Normal(std)),
                spec(name("mlp.c_proj.weight"), &[f, h], Init::Normal(into_residual)),
            ]);
        }
        for layer in 0..self.layers {
            let name = |part: &str| format!("transformer.h.{layer}.{part}");
            params.extend([
                spec(name("ln_1.weight"), &[h], Init::Ones),
                spec(name("ln_1.bias"), &[h], Init::Zeros),
                spec(name("attn.c_attn.bias"), &[3 * h], Init::Zeros),
                spec(name("attn.c_proj.bias"), &[h], Init::Zeros),
                spec(name("ln_2.weight"), &[h], Init::Ones),
                spec(name("ln_2.bias"), &[h], Init::Zeros),
                spec(name("mlp.c_fc.bias"), &[f], Init::Zeros),
                spec(name("mlp.c_proj.bias"), &[h], Init::Zeros),
            ]);
        }
        params.push(spec("transformer.ln_f.weight", &[h], Init::Ones));
        params.push(spec("transformer.ln_f.bias", &[h], Init::Zeros));
        params
    }
}

fn spec(name: impl Into<String>, shape: &[i64], init: Init) -> ParamSpec {
    ParamSpec { name: name.into(), shape: shape.to_vec(), init }
}
