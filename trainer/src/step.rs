//! One optimizer step: micro-batches in, weights changed.

use loader::Batch;
use tch::{Kind, Tensor};

use crate::accumulate::{Contribution, TreeSum};
use crate::config::{Config, Dtype, OptimConfig};
use crate::data::Batches;
use crate::model::{self, GptShape, LossTokens, ParamSpec, WTE};
use crate::optim::{self, AdamW, StepSize};
use crate::{Error, Result};

/// Everything that training changes, and the constants that it needs for that.
#[derive(Debug)]
pub struct Trainer {
    shape: GptShape,
    specs: Vec<ParamSpec>,
    /// f32, in the order of `specs`. With fp32 they are the leaves of the graph themselves.
    params: Vec<Tensor>,
    adamw: AdamW,
    dtype: Dtype,
}

/// What a step was like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Mean loss of its tokens before the update, in nats.
    pub loss: f64,
    /// Norm of its gradient before clipping.
    pub grad_norm: f64,
}

impl Trainer {
    /// New weights, drawn from the seed.
    ///
    /// # Errors
    /// [`Error::Torch`] if the memory does not suffice.
    pub fn new(config: &Config) -> Result<Self> {
        let shape = GptShape::new(&config.model);
        let specs = shape.params(&config.model);
        let dtype = config.precision.dtype;
        let params = specs.iter().map(|spec| {
            let values = model::initialize(spec, config.run.seed)?;
            Ok(values.f_set_requires_grad(dtype == Dtype::Fp32)?)
        });
        let params = params.collect::<Result<Vec<Tensor>>>()?;
        let adamw = AdamW::new(&specs)?;
        Ok(Trainer { shape, specs, params, adamw, dtype })
    }

    /// Names and shapes of the parameters.
    #[must_use]
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// The weights and both moments, each in the order of [`Trainer::specs`].
    pub fn state(&self) -> [&[Tensor]; 3] {
        [&self.params, &self.adamw.exp_avgs, &self.adamw.exp_avg_sqs]
    }

    /// As [`Trainer::state`], to be filled from a checkpoint.
    pub fn state_mut(&mut self) -> [&mut [Tensor]; 3] {
        [&mut self.params, &mut self.adamw.exp_avgs, &mut self.adamw.exp_avg_sqs]
    }
}

impl Trainer {
    /// One step over the micro-batches of one global batch, in their order. Every token of the step
    /// weighs the same, whatever micro-batch it is in.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if loss or gradient is no number: nothing was changed then.
    /// [`Error::Torch`] and [`Error::Bridge`] for the rest.
    pub fn step(
        &mut self,
        config: &OptimConfig,
        batches: &[Batch],
        step: u64,
        lr: f64,
    ) -> Result<StepReport> {
        let Contribution { loss, mut grads } = self.gradient(batches)?;
        let grad_norm = optim::global_norm(&grads)?;
        for (what, value) in [("the loss", loss), ("the gradient's norm", grad_norm)] {
            if !value.is_finite() {
                return Err(Error::NotFinite {
                    step,
                    what: format!("{what} ({value})"),
                    first_sample: batches[0].first_sample,
                    samples: batches.iter().map(|batch| batch.rows as u64).sum(),
                });
            }
        }
        let grad_divisor = optim::clip_divisor(grad_norm, config.clip);
        let size = StepSize { step, lr, grad_divisor };
        self.adamw.update(config, &mut self.params, &mut grads, &size)?;
        Ok(StepReport { loss, grad_norm })
    }

    /// Mean loss of a global batch and its gradient, in the order of [`Trainer::specs`], f32.
    ///
    /// # Errors
    /// As [`Trainer::sum`].
    pub fn gradient(&self, batches: &[Batch]) -> Result<Contribution> {
        // A batch without a single token that counts has a loss of 0.
        let weight = 1.0 / counted_tokens(batches).max(1.0);
        let mut sum = self.sum(batches, weight)?;
        optim::join_tied(&mut sum.grads)?;
        Ok(sum)
    }

    /// What some micro-batches of a step contribute to it, every token weighed with `weight`, one
    /// over the tokens of the whole step: it is applied here and nowhere else.
    ///
    /// # Errors
    /// [`Error::Torch`] and [`Error::Bridge`].
    ///
    /// # Panics
    /// If there is no batch.
    pub fn sum(&self, batches: &[Batch], weight: f64) -> Result<Contribution> {
        let copy = self.working_copy()?;
        let leaves = copy.as_deref().unwrap_or(&self.params);
        let mut sum = TreeSum::new();
        for batch in batches {
            sum.push(self.contribution(leaves, batch, weight)?, Contribution::absorb)?;
        }
        Ok(sum.finish(Contribution::absorb)?.expect("a step has a micro-batch"))
    }

    /// Sum of the losses of all tokens of the batches, in nats, and how many tokens that are.
    ///
    /// # Errors
    /// [`Error::Torch`], or what reading the batches said.
    pub fn evaluate(&self, batches: &mut Batches) -> Result<(f64, f64)> {
        let _no_grad = tch::no_grad_guard();
        let copy = self.working_copy()?;
        let leaves = copy.as_deref().unwrap_or(&self.params);
        let (mut loss, mut tokens) = (0.0, 0.0);
        let mut micro = Vec::new();
        loop {
            batches.fill(1, &mut micro)?;
            let Some(batch) = micro.first() else { return Ok((loss, tokens)) };
            tokens += counted_tokens(&micro);
            let input = Input::new(batch, 1.0)?;
            let hidden = model::hidden_states(&self.shape, leaves, &input.tokens, None)?;
            loss += model::loss(&self.shape, &leaves[WTE], &hidden, &input.loss_tokens())?;
        }
    }

    /// The copies that compute, made once a step; `None` if the weights compute themselves.
    fn working_copy(&self) -> Result<Option<Vec<Tensor>>> {
        if self.dtype == Dtype::Fp32 {
            return Ok(None);
        }
        let copies = self.params.iter().map(|param| {
            let copy = param.f_detach()?.f_to_kind(Kind::BFloat16)?;
            Ok(copy.f_set_requires_grad(true)?)
        });
        Ok(Some(copies.collect::<Result<Vec<Tensor>>>()?))
    }

    /// Loss and gradients of one micro-batch, every token weighed with `weight`.
    fn contribution(&self, leaves: &[Tensor], batch: &Batch, weight: f64) -> Result<Contribution> {
        let input = Input::new(batch, weight)?;
        let hidden = model::hidden_states(&self.shape, leaves, &input.tokens, None)?;
        let tokens = input.loss_tokens();
        let head = model::loss_and_grad(&self.shape, &leaves[WTE], &hidden.f_detach()?, &tokens)?;
        bridge::backward(&[hidden], &[head.hidden])?;

        let mut grads = Vec::with_capacity(leaves.len() + 1);
        for leaf in leaves {
            let grad = bridge::take_grad(leaf)?.expect("every parameter is used");
            grads.push(grad.f_to_kind(Kind::Float)?);
        }
        grads.push(head.wte);
        Ok(Contribution { loss: head.loss, grads })
    }
}

/// A batch as tensors.
struct Input {
    /// `[rows, seq_len]`, i64.
    tokens: Tensor,
    /// `[rows x seq_len]`, i64.
    labels: Tensor,
    /// `[rows x seq_len]`, f32.
    weights: Tensor,
}

impl Input {
    fn new(batch: &Batch, weight: f64) -> Result<Self> {
        let shape = [batch.rows as i64, batch.seq_len as i64]; // fits: both are of memory
        Ok(Input {
            tokens: Tensor::f_from_slice(&batch.tokens)?.f_view(shape)?,
            labels: Tensor::f_from_slice(&batch.labels)?,
            weights: Tensor::f_from_slice(&batch.loss_mask)?.f_mul_scalar(weight)?,
        })
    }

    fn loss_tokens(&self) -> LossTokens<'_> {
        LossTokens { labels: &self.labels, weights: &self.weights }
    }
}

/// How many tokens count in the loss.
fn counted_tokens(batches: &[Batch]) -> f64 {
    let mask = batches.iter().flat_map(|batch| &batch.loss_mask);
    mask.map(|weight| f64::from(*weight)).sum()
}
