//! One optimizer step: micro-batches in, weights changed.

use loader::Batch;
use tch::{Kind, Tensor};

use crate::accumulate::{Contribution, TreeSum};
use crate::config::{Config, Dtype, OptimConfig};
use crate::data::Batches;
use crate::model::{LossWeights, Micro, Model, ParamSpec, Stage, Tp};
use crate::optim::{self, AdamW, StepSize};
use crate::{Error, Result};

/// Everything that training changes, and the constants that it needs for that.
#[derive(Debug)]
pub struct Trainer {
    stage: Stage,
    /// f32, in the order of [`Trainer::specs`], padding included.
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
        let model = Model::new(&config.model, 1);
        let recomputes = |unit| config.parallel.recomputes(unit as u64);
        let stage = model.stage(0..model.units(), &Tp::alone(), recomputes);
        let params = (0..stage.params().len()).map(|at| stage.initialize(at, config.run.seed));
        let params = params.collect::<Result<Vec<Tensor>>>()?;
        let adamw = AdamW::new(model.params(), &params)?;
        Ok(Trainer { stage, params, adamw, dtype: config.precision.dtype })
    }

    /// Names and shapes of the parameters.
    #[must_use]
    pub fn specs(&self) -> &[ParamSpec] {
        self.stage.model().params()
    }

    /// What computes.
    #[must_use]
    pub fn stage(&self) -> &Stage {
        &self.stage
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
        sum.grads = self.stage.join(sum.grads)?;
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
        let leaves = self.leaves()?;
        let mut sum = TreeSum::new();
        for batch in batches {
            sum.push(self.contribution(&leaves, batch, weight)?, Contribution::absorb)?;
        }
        Ok(sum.finish(Contribution::absorb)?.expect("a step has a micro-batch"))
    }

    /// Sum of the losses of all tokens of the batches, in nats, and how many tokens that are.
    ///
    /// # Errors
    /// [`Error::Torch`], or what reading the batches said.
    pub fn evaluate(&self, batches: &mut Batches) -> Result<(f64, f64)> {
        let _no_grad = tch::no_grad_guard();
        let leaves = self.leaves()?;
        let (mut loss, mut tokens) = (0.0, 0.0);
        let mut one = Vec::new();
        loop {
            batches.fill(1, &mut one)?;
            let Some(batch) = one.first() else { return Ok((loss, tokens)) };
            tokens += counted_tokens(&one);
            let micro = Micro::gpt(batch, LossWeights { token: 1.0, sample: 1.0 })?;
            let outs = self.stage.infer(&leaves, &micro, Vec::new())?;
            loss += self.stage.loss(&leaves, &micro, &outs)?;
        }
    }

    /// What computes, made once a step.
    fn leaves(&self) -> Result<Vec<Tensor>> {
        let kind = if self.dtype == Dtype::Fp32 { Kind::Float } else { Kind::BFloat16 };
        self.stage.leaves(&self.params, kind)
    }

    /// Loss and gradients of one micro-batch, every token weighed with `weight`.
    fn contribution(&self, leaves: &[Tensor], batch: &Batch, weight: f64) -> Result<Contribution> {
        let micro = Micro::gpt(batch, LossWeights { token: weight, sample: weight })?;
        let pass = self.stage.forward(leaves, &micro, Vec::new())?;
        let head = self.stage.loss_and_grad(leaves, &micro, pass.outs())?;
        self.stage.backward(leaves, &micro, pass, head.outs, &mut |_| Ok(()))?;
        Ok(Contribution { loss: head.loss, grads: self.stage.take_grads(leaves, head.uses)? })
    }
}

/// How many tokens count in the loss.
fn counted_tokens(batches: &[Batch]) -> f64 {
    let mask = batches.iter().flat_map(|batch| &batch.loss_mask);
    mask.map(|weight| f64::from(*weight)).sum()
}
