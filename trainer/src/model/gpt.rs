use std::ops::Range;

use recipe::model::{Gpt, Head};
use tch::{Kind, Tensor};

use super::attention::{AttentionMask, Rope, attend, split_heads};
use super::micro::Micro;
use super::network::{Context, Network, UnitContext};
use crate::Result;

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
        // A single new token attends to everything; several are only allowed at the start.
        let attn_mask =
            if past == 0 { AttentionMask::of(text, true, kind)? } else { AttentionMask::All };
        Ok(Context { text: attn_mask, rope: rope.transpose()?, past, ..Context::default() })
    }

    fn unit(&self, work: &UnitContext<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let UnitContext { leaves, micro, .. } = *work;
        let layer = &self.layers[unit];
        let x = match inputs.first() {
            Some(x) => x.shallow_clone(),
            None => work.drops(unit, "embedding").hidden(embed_text(self, work)?)?,
        };
        let normed = leaves.tp.enter(&leaves.norm(&layer.norm_1, &x)?)?;
        let mixed = mix(self, work, unit, &leaves.fused(&layer.qkv, &normed, 3)?)?;
        let mixed = leaves.linear_and_leave(&layer.proj, &mixed)?;
        let x = x.f_add(&work.drops(unit, "attention").hidden(mixed)?)?;
        let normed = leaves.norm(&layer.norm_2, &x)?;
        let drops = work.drops(unit, "mlp");
        let x = x.f_add(&leaves.feed_forward(&layer.feed_forward, &normed, drops)?)?;
        if unit + 1 < self.layers.len() {
            return Ok(vec![x]);
        }
        let x = leaves.tp.enter(&leaves.norm(&self.last_norm, &x)?)?;
        Ok(vec![micro.targets.pick(&x)?])
    }

    fn decoder(&self) -> Option<usize> {
        Some(0)
    }

    fn head(&self) -> &Head {
        &self.head
    }
}

fn embed_text(gpt: &Gpt, work: &UnitContext<'_>) -> Result<Tensor> {
    let (leaves, text) = (work.leaves, &work.micro.text);
    let tp = leaves.tp;
    let words = tp.embed(leaves.get(gpt.wte), &text.ids)?;
    let Some(wpe) = gpt.wpe else { return Ok(words) };
    let (rows, len) = (text.rows(), text.len());
    if text.positions.is_some() || tp.sequence {
        return Ok(words.f_add(&leaves.positions(wpe, text, work.context.past)?)?);
    }
    let positions = leaves.get(wpe).f_narrow(0, work.context.past, len)?;
    Ok(words.f_view([rows, len, -1])?.f_add(&positions)?.f_view([rows * len, -1])?)
}

/// Attention of the queries, keys and values of a fused product.
fn mix(gpt: &Gpt, work: &UnitContext<'_>, unit: usize, parts: &[Tensor]) -> Result<Tensor> {
    let rows = work.micro.text.rows();
    let [q, k, v] = parts else { unreachable!("three matrices are fused") };
    let mut q = split_heads(q, rows, gpt.head_dim)?;
    let mut k = split_heads(k, rows, gpt.head_dim)?;
    let mut v = split_heads(v, rows, gpt.head_dim)?;
    if let Some(rope) = &work.context.rope {
        (q, k) = (rope.rotate(&q)?, rope.rotate(&k)?);
    }
    if let Some(cache) = &work.cache {
        (k, v) = cache.borrow_mut().extend(unit, k, v)?;
    }
    attend(&q, &k, &v, &work.context.text, None, work.drops(unit, "attention"))
}
