use ckpt::layout::TensorSplit;

use super::parts::{FeedForward, Head, Linear, Norm, Stored, Style};
use super::spec::{Builder, Init, UseId};
use super::vocab_split;
use crate::config::{ModelConfig, Positions};

/// Decoders: GPT-2 and, with other settings, its successors. Norm before each block.
///
/// Names, shapes and orientation are those of Hugging Face's `GPT2LMHeadModel`, so that a
/// checkpoint is exported by copying: matrices are stored `[in, out]`, as in its `Conv1D`. The
/// output axis of `c_attn` is `[3, heads, head_dim]`: all queries, all keys, all values; that of a
/// gated `c_fc` is the gate, then the gated part.
#[derive(Clone, Debug)]
pub struct Gpt {
    /// The word embedding.
    pub wte: UseId,
    /// The position embedding, if positions are learned.
    pub wpe: Option<UseId>,
    /// One per unit.
    pub layers: Vec<GptLayer>,
    /// The norm before the head.
    pub last_norm: Norm,
    /// The head.
    pub head: Head,
    /// Width of an attention head.
    pub head_dim: i64,
    /// Base of the rotation angles.
    pub rope_theta: Option<f64>,
}

/// A layer of [`Gpt`].
#[derive(Clone, Debug)]
pub struct GptLayer {
    /// The norm before attention.
    pub norm_1: Norm,
    /// Projection to queries, keys and values.
    pub qkv: Linear,
    /// Output projection of attention.
    pub proj: Linear,
    /// The norm before the feed-forward block.
    pub norm_2: Norm,
    /// The feed-forward block.
    pub feed_forward: FeedForward,
}

impl Gpt {
    pub(super) fn new(config: &ModelConfig, tp: u64, build: &mut Builder) -> Self {
        // fits: the config's maxima are far below 2^63.
        let (h, std) = (config.hidden as i64, Init::Normal(config.init.std));
        let (vocab, seq_len) = (config.vocab as i64, config.seq_len as i64);
        let split = vocab_split(config, tp);
        let wte = build.param("transformer.wte.weight", &[vocab, h], std, split.clone());
        let wpe = (config.positions() == Positions::Learned).then(|| {
            build.param("transformer.wpe.weight", &[seq_len, h], std, TensorSplit::Replicate)
        });
        let layers =
            (0..config.layers as usize).map(|at| GptLayer::new(config, at, build)).collect();
        let head = if config.tie_embeddings() {
            build.again(wte)
        } else {
            build.param("lm_head.weight", &[vocab, h], std, split)
        };
        Gpt {
            wte,
            wpe,
            layers,
            last_norm: Norm::new(build, "transformer.ln_f", config),
            head: Head { weight: head, bias: None, vocab },
            head_dim: config.head_dim() as i64,
            rope_theta: (config.positions() == Positions::Rope).then_some(config.rope_theta),
        }
    }
}

impl GptLayer {
    fn new(config: &ModelConfig, at: usize, build: &mut Builder) -> Self {
        build.unit = at;
        let name = |part: &str| format!("transformer.h.{at}.{part}");
        let width = config.attention_width() as i64; // fits: as above
        let style = Style { config, stored: Stored::InOut, layers: config.layers };
        let norm_1 = Norm::new(build, &name("ln_1"), config);
        let qkv = style.reads(build, &name("attn.c_attn"), 3 * width, 3);
        let proj = style.writes(build, &name("attn.c_proj"), width);
        let norm_2 = Norm::new(build, &name("ln_2"), config);
        let (up, down) = (name("mlp.c_fc"), name("mlp.c_proj"));
        let feed_forward = FeedForward::new(build, style, None, &up, &down);
        GptLayer { norm_1, qkv, proj, norm_2, feed_forward }
    }
}
