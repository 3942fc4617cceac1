//! A checkpoint that writes: tokens one after the other, each from all before it.
//!
//! Keys and values of the past are kept, so that a new token costs one column of the network. When
//! the positions run out the model goes on from the newer half of what it has seen, for its
//! positions are learned and there are no more of them. The random numbers are a function of the
//! seed and of the place of the token, so the same seed gives the same text again.

use ckpt::{Checkpoint, Checkpoints, Group};
use storage::Key;
use tch::{Kind, Tensor};

pub use crate::sample::Sampling;

use crate::config::Config;
use crate::model::{Cache, Model, Stage, Tp};
use crate::rng::Stream;
use crate::{Error, Result, state};

/// A trained model, ready to write. Computes in f32.
#[derive(Debug)]
pub struct Generator {
    config: Config,
    stage: Stage,
    leaves: Vec<Tensor>,
    step: u64,
}

/// How much to write, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Tokens to write at most.
    pub tokens_max: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Seed of the choices.
    pub seed: u64,
    /// The token that ends the text, which is not given out.
    pub stop: Option<u32>,
}

impl Generator {
    /// Loads the weights of a checkpoint: `place` is the folder of one step, of a run's
    /// checkpoints, or of a run, whose newest complete checkpoint is taken.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if there is none, [`Error::Ckpt`] if it cannot be read.
    pub fn open(place: &str) -> Result<Self> {
        let checkpoint = find(place)?;
        let config = state::config_of(&checkpoint)?;
        let model = Model::new(&config.model, 1);
        let stage = model.stage(0..model.units(), &Tp::alone(), |_| false);
        let zeros = |at| {
            let options = (Kind::Float, tch::Device::Cpu);
            Ok(Tensor::f_zeros(stage.local_shape(at), options)?)
        };
        let mut params = (0..model.params().len()).map(zeros).collect::<Result<Vec<Tensor>>>()?;
        state::load_group(&checkpoint, Group::Model, model.params(), &mut params)?;
        let leaves = stage.leaves(&params, Kind::Float)?;
        Ok(Generator { config, stage, leaves, step: checkpoint.step() })
    }

    /// The config of the run.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The step of the checkpoint.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Writes on after `prompt`, which must not be empty, and hands over each token as it comes.
    /// Ends early when `emit` says so with an error.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a prompt that is empty or not of this vocabulary, those of `emit`,
    /// [`Error::Torch`].
    pub fn write(
        &self,
        prompt: &[u32],
        options: &Options,
        emit: &mut dyn FnMut(u32) -> Result<()>,
    ) -> Result<()> {
        self.check_prompt(prompt)?;
        let _no_grad = tch::no_grad_guard();
        let stream = Stream::new(options.seed, "generate");
        let window_max = self.config.model.seq_len as usize; // fits: the config bounds it
        let mut text: Vec<i64> = prompt.iter().copied().map(i64::from).collect();
        let mut cache = Cache::default();
        let mut seen = text.len().saturating_sub(window_max);
        for place in 0..options.tokens_max {
            if cache.tokens() as usize + (text.len() - seen) > window_max {
                cache = Cache::default();
                seen = text.len() - window_max.div_ceil(2);
            }
            let logits = self.next_logits(&text[seen..], &mut cache)?;
            seen = text.len();
            let token = options.sampling.choose(&logits, stream.uniform(place as u64));
            if options.stop == Some(token) {
                return Ok(());
            }
            emit(token)?;
            text.push(i64::from(token));
        }
        Ok(())
    }

    /// Logits of the token after `new`, which go on from what the cache has seen.
    fn next_logits(&self, new: &[i64], cache: &mut Cache) -> Result<Vec<f32>> {
        let tokens = Tensor::f_from_slice(new)?.f_unsqueeze(0)?;
        let hidden = self.stage.go_on(&self.leaves, &tokens, cache)?;
        let last = hidden.f_narrow(0, new.len() as i64 - 1, 1)?; // fits: a window
        let logits = self.stage.logits(&self.leaves, &last)?;
        Ok(Vec::<f32>::try_from(logits.f_view([-1])?)?)
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<()> {
        let refuse = |detail: String, hint| {
            let doing = "go on from the prompt".to_owned();
            Err(Error::Mismatch { doing, details: vec![detail], hint })
        };
        let vocab = self.config.model.vocab;
        if prompt.is_empty() {
            return refuse(
                "it has no token".to_owned(),
                "give a text, or the end-of-document token",
            );
        }
        match prompt.iter().find(|token| u64::from(**token) >= vocab) {
            None => Ok(()),
            Some(token) => refuse(
                format!("got token {token}, due ids below {vocab}"),
                "the model was trained with another tokenizer",
            ),
        }
    }
}

/// The checkpoint that a place on the command line means.
fn find(place: &str) -> Result<Checkpoint> {
    let place = place.trim_end_matches('/');
    if place.rsplit('/').next().is_some_and(|name| name.starts_with("step-")) {
        return state::open_folder(place);
    }
    for folder in [format!("{place}/ckpt"), place.to_owned()] {
        let checkpoints = Checkpoints::open(storage::open_url(&folder)?, Key::root());
        if let Some(checkpoint) = checkpoints.newest()? {
            return Ok(checkpoint);
        }
    }
    Err(Error::Mismatch {
        doing: format!("look for a checkpoint in {place}"),
        details: vec![format!("no complete step-* in it, nor in {place}/ckpt")],
        hint: "name the folder of a run, of its checkpoints, or of one step",
    })
}

/// Bytes to text as they come: a character that is not complete yet is held back.
#[derive(Debug, Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Takes bytes and gives the text that is complete with them. What can become no character is
    /// given as U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(all) => {
                    text.push_str(all);
                    self.held.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.held[..valid]));
                    let Some(bad) = error.error_len() else {
                        self.held.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.held.drain(..valid + bad);
                }
            }
        }
    }

    /// The end: what is held back will never be complete.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_come_whole() {
        let mut stream = Utf8Stream::default();
        let poem = "床前明月光".as_bytes();
        assert_eq!(stream.push(&poem[..4]), "床");
        assert_eq!(stream.push(&poem[4..5]), "");
        assert_eq!(stream.push(&poem[5..]), "前明月光");
        assert_eq!(stream.push(b"a\xffb\xe5"), "a\u{fffd}b");
        assert_eq!(stream.push(b"c"), "\u{fffd}c");
        assert_eq!(stream.push(b"\xe5\xba"), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }
}
