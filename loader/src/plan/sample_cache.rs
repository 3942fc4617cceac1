//! A local cache of samples.

use std::fmt;

/// A cache of complete samples on this node. A sample that it has is not read from its file.
pub trait SampleCache: fmt::Debug + Send + Sync {
    /// Fills `into` with the bytes of a sample, its pieces back to back, if all of them are there
    /// and verified. Called on the planner thread; it may wait for a local disk.
    fn find(&self, sample: u64, into: &mut [u8]) -> bool;

    /// Offers a sample that was read from its file. Called for each, in order; it must not block,
    /// and may drop the sample.
    fn keep(&self, sample: u64, bytes: &[u8]);

    /// Reports the number of samples delivered so far, counted over all ranks.
    fn consumed(&self, samples: u64);
}
