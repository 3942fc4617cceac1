use std::ops::Range;

use recipe::model::{Buckets, Head, T5};
use tch::{Device, Kind, Tensor};

use super::attention::AttentionMask;
use super::micro::Micro;
use super::network::{Context, Network, UnitContext};
use super::tp::embed;
use crate::Result;

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
            context.text = AttentionMask::of(text, false, kind)?;
            let of = |buckets| bucket_of(buckets, 0, text.len(), false, device);
            context.buckets[0] = self.buckets.map(of).transpose()?;
        }
        if units.end > self.encoder.layers.len() {
            let answer = micro.answer();
            // A single new token attends to everything; several are only allowed at the start.
            let attn_mask =
                if past == 0 { AttentionMask::of(answer, true, kind)? } else { AttentionMask::All };
            context.answer = attn_mask.explicit(answer.len(), kind, device)?;
            let of = |buckets| bucket_of(buckets, past, past + answer.len(), true, device);
            context.buckets[1] = self.buckets.map(of).transpose()?;
            context.past = past;
            context.across = AttentionMask::across(answer, text, kind)?;
        }
        Ok(context)
    }

    fn unit(&self, work: &UnitContext<'_>, unit: usize, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        let Some(at) = unit.checked_sub(self.encoder.layers.len()) else {
            return Ok(vec![layer(self, work, unit, inputs.first(), None)?]);
        };
        let (x, given) = match inputs {
            [given] => (None, given),
            [x, given] => (Some(x), given),
            _ => unreachable!("a decoder layer takes the output of the encoder"),
        };
        let x = layer(self, work, at, x, Some(given))?;
        if at + 1 < self.decoder.layers.len() {
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

/// A layer of either stack: `given` is the output of the encoder, in the decoder.
fn layer(
    t5: &T5,
    work: &UnitContext<'_>,
    at: usize,
    x: Option<&Tensor>,
    given: Option<&Tensor>,
) -> Result<Tensor> {
    let (context, leaves) = (work.context, work.leaves);
    let (stack, first, text, attn_mask, buckets) = match given {
        None => (&t5.encoder, 0, &work.micro.text, &context.text, &context.buckets[0]),
        Some(_) => {
            let (first, text) = (t5.encoder.layers.len(), work.micro.answer());
            (&t5.decoder, first, text, &context.answer, &context.buckets[1])
        }
    };
    let layer = &stack.layers[at];
    let drops = |block| work.drops(first + at, block);
    let mut x = match x {
        Some(x) => x.shallow_clone(),
        None => {
            let mut x = leaves.tp.embed(leaves.get(stack.words), &text.ids)?;
            if let Some(table) = stack.positions {
                // The decoder continues after the tokens of the cache.
                let past = if given.is_some() { context.past } else { 0 };
                let own = leaves.positions(table, text, past)?;
                x = x.f_add(&own)?;
            }
            drops("embedding").hidden(x)?
        }
    };
    let biased = match (buckets, layer.relative) {
        (Some(buckets), Some(table)) => Some(with_bias(attn_mask, buckets, leaves.get(table))?),
        _ => None,
    };
    let attn_mask = biased.as_ref().unwrap_or(attn_mask);
    // The initial weights of T5 are small enough; Megatron's are not.
    let scale = t5.buckets.map(|_| 1.0);
    let (rows, cache) = (text.rows(), work.cache.as_ref().filter(|_| given.is_some()));
    let normed = leaves.tp.enter(&leaves.norm(&layer.own_norm, &x)?)?;
    let mut seen = leaves.seen(&layer.own, &normed, rows)?;
    if let Some(cache) = cache {
        seen = cache.borrow_mut().extend(at, seen.0, seen.1)?;
    }
    let drops_own = drops("attention");
    x = x.f_add(&leaves.attention(&layer.own, &normed, &seen, attn_mask, scale, drops_own)?)?;
    if let (Some((norm, part)), Some(given)) = (&layer.across, given) {
        let normed = leaves.tp.enter(&leaves.norm(norm, &x)?)?;
        let make = || leaves.seen(part, &leaves.tp.enter(given)?, rows);
        let seen = match cache {
            Some(cache) => cache.borrow_mut().across(at, make)?,
            None => make()?,
        };
        let attn_mask = &context.across;
        let drops = drops("across");
        x = x.f_add(&leaves.attention(part, &normed, &seen, attn_mask, scale, drops)?)?;
    }
    let normed = leaves.norm(&layer.norm, &x)?;
    x = x.f_add(&leaves.feed_forward(&layer.feed_forward, &normed, drops("mlp"))?)?;
    if at + 1 < stack.layers.len() {
        return Ok(x);
    }
    let x = leaves.norm(&stack.last_norm, &x)?;
    if t5.buckets.is_some() { drops("last").hidden(x) } else { Ok(x) }
}

/// The bucket of each of `len` keys for each query from the place `first` on,
/// `[len - first, len]`.
fn bucket_of(
    buckets: Buckets,
    first: i64,
    len: i64,
    is_decoder: bool,
    device: Device,
) -> Result<Tensor> {
    let places = Tensor::f_arange(len, (Kind::Int64, device))?;
    let queries = places.f_narrow(0, first, len - first)?;
    // How far a key is ahead of a query.
    let ahead = places.f_unsqueeze(0)?.f_sub(&queries.f_unsqueeze(1)?)?;
    if is_decoder {
        return of_distance(buckets, &ahead.f_neg()?.f_clamp_min(0)?);
    }
    let half = Buckets { count: buckets.count / 2, ..buckets };
    let later = ahead.f_gt(0)?.f_to_kind(Kind::Int64)?.f_mul_scalar(half.count)?;
    Ok(of_distance(half, &ahead.f_abs()?)?.f_add(&later)?)
}

fn of_distance(buckets: Buckets, distance: &Tensor) -> Result<Tensor> {
    let Buckets { count, distance_max } = buckets;
    let exact = count / 2;
    // In f32 and in this order, as T5's own code: some distances are at the edge of a bucket.
    let octaves = (distance_max as f64 / exact as f64).ln();
    let far = distance.f_to_kind(Kind::Float)?.f_div_scalar(exact)?.f_log()?;
    let far = far.f_div_scalar(octaves)?.f_mul_scalar(count - exact)?;
    let far = far.f_clamp_min(0)?.f_to_kind(Kind::Int64)?.f_add_scalar(exact)?;
    let far = far.f_clamp_max(count - 1)?;
    Ok(distance.f_where_self(&distance.f_lt(exact)?, &far)?)
}

/// A mask with a bias added for each head and distance.
fn with_bias(attn_mask: &AttentionMask, buckets: &Tensor, table: &Tensor) -> Result<AttentionMask> {
    let (queries, keys) = buckets.size2()?;
    let bias = embed(table, buckets)?.f_view([1, queries, keys, -1])?;
    let bias = bias.f_permute([0, 3, 1, 2])?.f_contiguous()?;
    Ok(AttentionMask::Mask(match attn_mask {
        AttentionMask::Mask(mask) => bias.f_add(mask)?,
        AttentionMask::All => bias,
        AttentionMask::Back => unreachable!("the mask is explicit"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the buckets of T5 start, as `tests/reference/hf.py` prints them.
    #[test]
    fn buckets_are_those_of_t5() {
        let buckets = Buckets { count: 32, distance_max: 128 };
        let starts = |row: Vec<i64>| -> Vec<i64> {
            (0..row.len() as i64)
                .filter(|i| *i == 0 || row[*i as usize] > row[*i as usize - 1])
                .collect()
        };
        let exact = 0..16;
        let expected: Vec<i64> = exact
            .chain([16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113])
            .collect();
        let square = bucket_of(buckets, 0, 400, true, Device::Cpu).unwrap();
        // The last query, from its own place back.
        let back = Vec::<i64>::try_from(square.get(399).flip([0])).unwrap();
        assert_eq!(starts(back), expected);
        assert!(square.get(0).eq_tensor(&square.get(0).zeros_like()).all().int64_value(&[]) == 1);

        let square = bucket_of(buckets, 0, 400, false, Device::Cpu).unwrap();
        let back = Vec::<i64>::try_from(square.get(399).flip([0])).unwrap();
        assert_eq!(starts(back), [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
        let ahead = Vec::<i64>::try_from(square.get(0)).unwrap();
        assert_eq!(ahead[..3], [0, 17, 18]);
        assert_eq!(ahead[399], 31);
    }
}
