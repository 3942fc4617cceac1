//! Copies of samples that are nearer than their files.

use std::fmt;

/// A cache of whole samples on this node. What it has is not read again from afar.
pub trait SampleCache: fmt::Debug + Send + Sync {
    /// Fills `into` with the bytes of a sample, its pieces back to back, if all of them are there
    /// and verified. Asked for on a thread that reads ahead; it may wait for a local disk.
    fn find(&self, sample: u64, into: &mut [u8]) -> bool;

    /// A sample that came from afar. Told of each, in order; it must not wait, and may forget.
    fn keep(&self, sample: u64, bytes: &[u8]);

    /// So many samples have been delivered by now, counted over all ranks.
    fn consumed(&self, samples: u64);
}
