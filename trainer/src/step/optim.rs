//! AdamW over two groups, and gradient clipping.

use bridge::{AdamWStep, Moments, fused_adamw};
use tch::Tensor;

use crate::Result;
use crate::config::OptimConfig;

/// Guards the division when every gradient is zero; PyTorch's and Megatron's.
const CLIP_EPS: f64 = 1e-6;

/// The moments of every parameter, f32, in the order and with the shapes of the parameters.
#[derive(Debug)]
pub struct AdamW {
    /// Running means of the gradients.
    pub exp_avgs: Vec<Tensor>,
    /// Running means of their squares.
    pub exp_avg_sqs: Vec<Tensor>,
    /// Parameters from the first that decay; the rest do not.
    decaying: usize,
}

impl AdamW {
    /// Moments of zero for these parameters, of which the first `decaying` decay.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if the memory does not suffice.
    pub fn new(params: &[Tensor], decaying: usize) -> Result<Self> {
        let zeros = || -> Result<Vec<Tensor>> {
            params.iter().map(|param| Ok(param.f_zeros_like()?)).collect()
        };
        Ok(AdamW { exp_avgs: zeros()?, exp_avg_sqs: zeros()?, decaying })
    }

    /// Update number `step`, counted from 1, of the parameters, in place. Gradients are divided by
    /// `grad_divisor` first, in place.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`].
    pub fn update(
        &mut self,
        config: &OptimConfig,
        params: &mut [Tensor],
        grads: &mut [Tensor],
        step: &StepSize,
    ) -> Result<()> {
        let (params_decaying, params_rest) = params.split_at_mut(self.decaying);
        let (grads_decaying, grads_rest) = grads.split_at_mut(self.decaying);
        let (avgs_decaying, avgs_rest) = self.exp_avgs.split_at_mut(self.decaying);
        let (sqs_decaying, sqs_rest) = self.exp_avg_sqs.split_at_mut(self.decaying);
        let mut update = AdamWStep {
            step: step.step,
            lr: step.lr,
            beta1: config.betas[0],
            beta2: config.betas[1],
            weight_decay: config.weight_decay,
            eps: config.eps,
            grad_divisor: step.grad_divisor,
        };
        let mut moments = Moments { exp_avgs: avgs_decaying, exp_avg_sqs: sqs_decaying };
        fused_adamw(params_decaying, grads_decaying, &mut moments, &update)?;
        update.weight_decay = 0.0;
        let mut moments = Moments { exp_avgs: avgs_rest, exp_avg_sqs: sqs_rest };
        fused_adamw(params_rest, grads_rest, &mut moments, &update)?;
        Ok(())
    }
}

/// What changes from one update to the next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSize {
    /// Number of the update, counted from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// From [`clip_divisor`].
    pub grad_divisor: f64,
}

/// What gradients of this norm are divided by so that it is at most `clip`; 1 if it is, or if
/// `clip` is 0.
#[must_use]
pub fn clip_divisor(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 && norm + CLIP_EPS > clip { (norm + CLIP_EPS) / clip } else { 1.0 }
}
