//! Batches of the loader, as a step takes them.

pub use feed::AnyBatch;
use loader::Batch;
use loader::batch::{BertBatch, EncDecBatch, T5Batch};

use crate::Result;
use crate::model::{LossWeights, Micro};

/// A micro-batch, of whatever family.
pub trait Input {
    /// The sample in its first row, as a place in the order of samples.
    fn first_sample(&self) -> u64;

    /// Samples.
    fn rows(&self) -> usize;

    /// How much each of its tokens counts.
    fn loss_mask(&self) -> &[f32];

    /// As tensors.
    ///
    /// # Errors
    /// [`crate::Error::Torch`].
    fn micro(&self, weights: LossWeights) -> Result<Micro>;

    /// How many tokens count in the loss.
    fn counted_tokens(&self) -> f64 {
        self.loss_mask().iter().map(|weight| f64::from(*weight)).sum()
    }
}

macro_rules! input {
    ($($batch:ty: $make:path),*) => {
        $(impl Input for $batch {
            fn first_sample(&self) -> u64 {
                self.first_sample
            }

            fn rows(&self) -> usize {
                self.rows
            }

            fn loss_mask(&self) -> &[f32] {
                &self.loss_mask
            }

            fn micro(&self, weights: LossWeights) -> Result<Micro> {
                $make(self, weights)
            }
        })*
    };
}

input!(Batch: Micro::gpt, T5Batch: Micro::t5, EncDecBatch: Micro::encdec, BertBatch: Micro::bert);

impl Input for AnyBatch {
    fn first_sample(&self) -> u64 {
        AnyBatch::first_sample(self)
    }

    fn rows(&self) -> usize {
        AnyBatch::rows(self)
    }

    fn loss_mask(&self) -> &[f32] {
        AnyBatch::loss_mask(self)
    }

    fn micro(&self, weights: LossWeights) -> Result<Micro> {
        match self {
            AnyBatch::Lm(batch) => Micro::gpt(batch, weights),
            AnyBatch::Spans(batch) => Micro::t5(batch, weights),
            AnyBatch::Triple(batch) => Micro::encdec(batch, weights),
            AnyBatch::Masked(batch) => Micro::bert(batch, weights),
        }
    }
}
