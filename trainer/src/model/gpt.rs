//! Decoders: GPT-2, and with other settings what came after it. Norm before each block.
//!
//! Names, shapes and orientation are those of Hugging Face's `GPT2LMHeadModel`, so that a
//! checkpoint is exported by copying: matrices are stored `[in, out]`, as its `Conv1D` has them.
//! The output axis of `c_attn` is `[3, heads, head_dim]`: all queries, all keys, all values; that
//! of a gated `c_fc` is the gate, then what it gates.

use std::ops::Range;

use ckpt::layout::Split;
use tch::{Kind, Tensor};

use super::attention::{Rope, Sight, attend, split_heads};
use super::head::Head;
use super::micro::Micro;
use super::network::{Context, Network, Work};
use super::parts::{FeedForward, Linear, Norm, Stored, Style};
use super::spec::{Builder, Init, UseId};
use super::tp::embed;
use super::vocab_split;
use crate::Result;
use crate::config::{ModelConfig, Positions};

#[derive(Clone, Debug)]
pub(super) struct Gpt {
    wte: UseId,
    wpe: Option<UseId>,
    layers: Vec<Layer>,
    last_norm: Norm,
    head: Head,
    head_dim: i64,
    /// Base of the angles of rotary positions.
    rope_theta: Option<f64>,
}

#[derive(Clone, Debug)]
struct Layer {
    norm_1: Norm,
    qkv: Linear,
    proj: Linear,
    norm_2: Norm,
    feed_forward: FeedForward,
}

impl Gpt {
    pub(super) fn new(config: &ModelConfig, tp: u64, build: &mut Builder) -> Self {
        // fits: the config's maxima are far below 2^63.
        let (h, std) = (config.hidden as i64, Init::Normal(config.init.std));
        let (vocab, seq_len) = (config.vocab as i64, config.seq_len as i64);
        let split = vocab_split(config, tp);
        let wte = build.param("transformer.wte.weight", &[vocab, h], std, split.clone());
        let wpe = (config.positions() == Positions::Learned)
            .then(|| build.param("transformer.wpe.weight", &[seq_len, h], std, Split::Replicate));
        let layers = (0..config.layers as usize).map(|at| Layer::new(config, at, build)).collect();
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

impl Network for Gpt {
    fn context(
        &self,
        micro: &Micro,
        _units: &Range<usize>,
        past: i64,
        kind: Kind,
    ) -> Result<Context> {
        let text = &micro.text;
        let rope = self.rope_theta.map(|theta| {
            let positions = match &text.positions {
                Some(positions) => positions.shallow_clone(),
                None => {
                    let options = (Kind::Int64, text.ids.device());
                    Tensor::f_arange_start(past, past + text.len(), options)?.f_unsqueeze(0)?
                }
            };
            Rope::new(&positions, self.head_dim, theta, kind)
        });
        // A single new token may look at everything; several are only allowed as the first.
        let sight = if past == 0 { Sight::of(text, true, kind)? } else { Sight::All };
        Ok(Context { text: sight, rope: rope.transpose()?, past, ..Context::default() })
    }

    fn unit(&self, work: &Work<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Work { leaves, micro, .. } = *work;
        let layer = &self.layers[unit];
        let x = match inputs.first() {
            Some(x) => x.shallow_clone(),
            None => work.drops(unit, "embedding").hidden(self.embed(work)?)?,
        };
        let normed = leaves.tp.enter(&layer.norm_1.apply(leaves, &x)?)?;
        let mixed = self.attention(work, unit, &layer.qkv.apply_fused(leaves, &normed, 3)?)?;
        let mixed = layer.proj.apply_and_leave(leaves, &mixed)?;
        let x = x.f_add(&work.drops(unit, "attention").hidden(mixed)?)?;
        let normed = layer.norm_2.apply(leaves, &x)?;
        let drops = work.drops(unit, "mlp");
        let x = x.f_add(&layer.feed_forward.apply(leaves, &normed, drops)?)?;
        if unit + 1 < self.layers.len() {
            return Ok(vec![x]);
        }
        let x = leaves.tp.enter(&self.last_norm.apply(leaves, &x)?)?;
        Ok(vec![micro.targets.pick(&x)?])
    }

    fn decoder(&self) -> Option<usize> {
        Some(0)
    }

    fn head(&self) -> &Head {
        &self.head
    }
}

impl Gpt {
    fn embed(&self, work: &Work<'_>) -> Result<Tensor> {
        let (leaves, text) = (work.leaves, &work.micro.text);
        let tp = leaves.tp;
        let words = tp.embed(leaves.get(self.wte), &text.ids)?;
        let Some(wpe) = self.wpe.map(|wpe| leaves.get(wpe)) else { return Ok(words) };
        let (rows, len) = (text.rows(), text.len());
        if let Some(positions) = &text.positions {
            let positions = tp.own_rows(&positions.f_view([-1])?)?;
            return Ok(words.f_add(&embed(wpe, &positions)?)?);
        }
        let positions = wpe.f_narrow(0, work.context.past, len)?;
        if !tp.sequence {
            let x = words.f_view([rows, len, -1])?.f_add(&positions)?;
            return Ok(x.f_view([rows * len, -1])?);
        }
        let positions = positions.f_unsqueeze(0)?.f_expand([rows, len, -1], false)?;
        Ok(words.f_add(&tp.own_rows(&positions.f_reshape([rows * len, -1])?)?)?)
    }

    fn attention(&self, work: &Work<'_>, unit: usize, parts: &[Tensor]) -> Result<Tensor> {
        let rows = work.micro.text.rows();
        let [q, k, v] = parts else { unreachable!("three matrices are fused") };
        let mut q = split_heads(q, rows, self.head_dim)?;
        let mut k = split_heads(k, rows, self.head_dim)?;
        let mut v = split_heads(v, rows, self.head_dim)?;
        if let Some(rope) = &work.context.rope {
            (q, k) = (rope.turn(&q)?, rope.turn(&k)?);
        }
        if let Some(cache) = &work.cache {
            (k, v) = cache.borrow_mut().extend(unit, k, v)?;
        }
        attend(&q, &k, &v, &work.context.text, None, work.drops(unit, "attention"))
    }
}

impl Layer {
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
        Layer { norm_1, qkv, proj, norm_2, feed_forward }
    }
}
