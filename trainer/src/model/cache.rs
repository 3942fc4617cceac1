use tch::Tensor;

use crate::Result;

/// Keys and values of the tokens that a decoder has seen, a pair a layer, each
/// `[rows, heads, tokens, head_dim]`.
#[derive(Debug, Default)]
pub struct Cache {
    layers: Vec<(Tensor, Tensor)>,
    pub(super) tokens: i64,
}

impl Cache {
    /// Tokens seen so far.
    #[must_use]
    pub fn tokens(&self) -> i64 {
        self.tokens
    }

    /// Adds keys and values of a layer, and gives all there are.
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
