use tch::Tensor;

use crate::Result;

/// Keys and values of the tokens that a decoder has seen, a pair a layer, each
/// `[rows, heads, tokens, head_dim]`.
#[derive(Debug, Default)]
pub struct KvCache {
    layers: Vec<(Tensor, Tensor)>,
    /// Keys and values of the output of an encoder, a pair a layer, and that output.
    across: Vec<(Tensor, Tensor)>,
    pub(super) given: Option<Tensor>,
    pub(super) tokens: i64,
}

impl KvCache {
    /// For a decoder that attends to the output of an encoder.
    pub(super) fn of(given: Tensor) -> Self {
        KvCache { given: Some(given), ..KvCache::default() }
    }

    /// Tokens seen so far.
    #[must_use]
    pub fn tokens(&self) -> i64 {
        self.tokens
    }

    /// Keys and values of the output of an encoder, made once for each layer, in their order.
    pub(super) fn across(
        &mut self,
        layer: usize,
        make: impl FnOnce() -> Result<(Tensor, Tensor)>,
    ) -> Result<(Tensor, Tensor)> {
        if layer == self.across.len() {
            self.across.push(make()?);
        }
        let (k, v) = &self.across[layer];
        Ok((k.shallow_clone(), v.shallow_clone()))
    }

    /// Adds keys and values of a layer, and returns all of them.
    pub(super) fn extend(
        &mut self,
        layer: usize,
        k: Tensor,
        v: Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let all = match self.layers.get(layer) {
            Some(past) => (Tensor::f_cat(&[&past.0, &k], 2)?, Tensor::f_cat(&[&past.1, &v], 2)?),
            None => (k, v),
        };
        let kept = (all.0.shallow_clone(), all.1.shallow_clone());
        match self.layers.get_mut(layer) {
            Some(past) => *past = kept,
            None => self.layers.push(kept),
        }
        Ok(all)
    }
}
