//! The samples that a caller requests in equal strides, as an order of their own.

use std::sync::Arc;

use crate::{DataFile, Error, PieceRef, Result, SampleOrder, SampleOrigin};

/// An order of equal calls: the first call reads the samples `first`, each later call the samples
/// `step` further on. A sampler of data-parallel ranks reads a dataset in this way, so the samples
/// of its next calls can be read ahead.
#[derive(Debug)]
pub struct CallOrder {
    inner: Arc<dyn SampleOrder>,
    first: Vec<u64>,
    step: u64,
    calls: u64,
}

impl CallOrder {
    /// All calls of that pattern for which `inner` has enough samples.
    ///
    /// # Errors
    /// [`Error::Option`] for a call without samples or for samples that `inner` does not have, or
    /// for a step of 0.
    pub fn new(inner: Arc<dyn SampleOrder>, first: Vec<u64>, step: u64) -> Result<Self> {
        let count = inner.sample_count();
        let Some(&last) = first.iter().max() else {
            return Err(Error::Option { name: "call", found: 0, expected: "at least 1 sample" });
        };
        if last >= count {
            let expected = "samples of the order";
            return Err(Error::Option { name: "call", found: last, expected });
        }
        if step == 0 {
            return Err(Error::Option { name: "step", found: 0, expected: "at least 1" });
        }
        let calls = 1 + (count - 1 - last) / step;
        Ok(CallOrder { inner, first, step, calls })
    }

    /// Samples of a call.
    #[must_use]
    pub fn call_samples(&self) -> usize {
        self.first.len()
    }

    fn number(&self, sample: u64) -> u64 {
        let per_call = self.first.len() as u64;
        // fits: below the samples of a call
        self.first[(sample % per_call) as usize] + sample / per_call * self.step
    }
}

impl SampleOrder for CallOrder {
    fn sources(&self) -> &[DataFile] {
        self.inner.sources()
    }

    fn sample_count(&self) -> u64 {
        self.calls.saturating_mul(self.first.len() as u64)
    }

    fn pieces(&self, sample: u64, into: &mut Vec<PieceRef>) -> Result<()> {
        self.inner.pieces(self.number(sample), into)
    }

    fn origin(&self, sample: u64) -> SampleOrigin {
        self.inner.origin(self.number(sample))
    }

    fn together_until(&self, sample: u64) -> u64 {
        let until = self.inner.together_until(self.number(sample));
        let calls = until.saturating_sub(self.first[0]).div_ceil(self.step).min(self.calls);
        (calls * self.first.len() as u64).max(sample + 1)
    }

    fn name(&self) -> String {
        self.inner.name()
    }
}
