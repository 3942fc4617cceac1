//! Generates text with a checkpoint: one token after the other, each from all before it.
//!
//! Keys and values of the past are cached, so that a new token costs one column of the network.
//! When the positions run out, the model continues from the newer half of the text, because it was
//! not trained on more positions. In a model of an encoder and a decoder the encoder reads the
//! prompt once, and its keys and values are cached for every layer of the decoder. The random
//! numbers are a function of the seed, the number of the sample and the place of the token, so the
//! same seed gives the same text again.

mod sampling;
mod trained;
mod utf8;

use recipe::Incompatible;
use tch::Tensor;

pub use sampling::Sampling;
pub use trained::Trained;
pub use utf8::Utf8Stream;

use crate::config::{Family, Positions};
use crate::model::KvCache;
use crate::rng::Stream;
use crate::{Error, Result};

/// What to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Texts to write, side by side.
    pub samples: usize,
    /// Tokens of each at least.
    pub tokens_min: usize,
    /// Tokens of each at most.
    pub tokens_max: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Seed of the choices.
    pub seed: u64,
    /// The token that ends a text, which is not emitted.
    pub stop: Option<u32>,
    /// The first token of a decoder after an encoder; it is not emitted either.
    pub start: u32,
}

impl Trained {
    /// Continues `prompt`, which must not be empty, or answers it with an encoder and a decoder.
    /// Calls `emit` with the number of the sample and each token. Ends early if `emit` returns an
    /// error.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a prompt that is empty or not of this vocabulary, those of `emit`,
    /// [`Error::Torch`].
    pub fn write(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        emit: &mut dyn FnMut(usize, u32) -> Result<()>,
    ) -> Result<()> {
        self.check_prompt(prompt)?;
        let model = &self.config().model;
        let mut window_max = model.seq_len as usize; // fits: the config bounds it
        let mut prompt: Vec<i64> = prompt.iter().copied().map(i64::from).collect();
        // An answer starts at position 0, and has no more positions than in training.
        let places = match (model.family, model.positions()) {
            (Family::T5, Positions::Learned) => model.seq_len.max(model.dec_len.unwrap_or(0)),
            _ => u64::MAX,
        } as usize; // fits: as above
        prompt.drain(..prompt.len().saturating_sub(places));
        let rows = Tensor::f_from_slice(&prompt.repeat(options.samples))?;
        let rows = rows.f_view([options.samples as i64, prompt.len() as i64])?; // fits: of memory
        let rows = rows.f_to_device(self.device())?;
        let mut cache = KvCache::default();
        if let Some(read) = self.stage.read(&self.leaves, &rows)? {
            // Relative distances are not limited.
            window_max = usize::MAX;
            (cache, prompt) = (read, vec![i64::from(options.start)]);
        }
        let mut samples: Vec<Sample> = (0..options.samples)
            .map(|number| Sample {
                text: prompt.clone(),
                random: Stream::new(options.seed, &format!("generate {number}")),
                has_ended: false,
            })
            .collect();
        let mut seen = prompt.len().saturating_sub(window_max);
        for place in 0..options.tokens_max.min(places) {
            let len = prompt.len() + place;
            if cache.tokens() as usize + (len - seen) > window_max {
                cache = KvCache::default();
                seen = len - window_max.div_ceil(2);
            }
            let logits = self.next_logits(&samples, seen, &mut cache)?;
            seen = len;
            let vocab = logits.len() / samples.len().max(1);
            for (number, sample) in samples.iter_mut().enumerate() {
                let logits = &logits[number * vocab..][..vocab];
                if let Some(token) = sample.next(logits, place, options) {
                    emit(number, token)?;
                }
            }
            if samples.iter().all(|sample| sample.has_ended) {
                break;
            }
        }
        Ok(())
    }

    /// Logits of the token after the text of each sample, of which the cache has `seen` tokens.
    fn next_logits(
        &self,
        samples: &[Sample],
        seen: usize,
        cache: &mut KvCache,
    ) -> Result<Vec<f32>> {
        let new: Vec<i64> =
            samples.iter().flat_map(|sample| &sample.text[seen..]).copied().collect();
        let rows = samples.len() as i64; // fits: of memory
        let tokens = Tensor::f_from_slice(&new)?.f_view([rows, -1])?.f_to_device(self.device())?;
        let hidden = self.stage.next(&self.leaves, &tokens, cache)?;
        let last = hidden.f_view([rows, tokens.size()[1], -1])?.f_select(1, -1)?;
        Ok(Vec::<f32>::try_from(self.logits(&last)?.f_reshape([-1])?)?)
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::Mismatch(Incompatible::new(
                "cannot continue the prompt",
                "expected at least one token, found none",
                "pass a text, or the end-of-document token",
            )));
        }
        self.check_tokens(prompt)
    }
}

/// One text in generation.
#[derive(Debug)]
struct Sample {
    text: Vec<i64>,
    random: Stream,
    has_ended: bool,
}

impl Sample {
    /// Chooses the next token; `None` if the text has ended. A token is added in any case, because
    /// all texts have the same length.
    fn next(&mut self, logits: &[f32], place: usize, options: &GenerateOptions) -> Option<u32> {
        let stop = options.stop.filter(|_| !self.has_ended);
        let barred = stop.filter(|_| place < options.tokens_min);
        let token = options.sampling.choose(logits, barred, self.random.uniform(place as u64));
        self.has_ended |= stop == Some(token);
        self.text.push(i64::from(token));
        (!self.has_ended).then_some(token)
    }
}
