//! The node reader: one rank of a node reads the samples of all of its ranks.
//!
//! Eight ranks that each open every file, hold every index and keep their own window of reads cost
//! a store eight times what the node needs. Here the first rank to join reads for all: it cuts the
//! rows of each step among the ranks, and puts each rank's samples into a ring of slots in memory
//! that it shares with that rank. Each rank reads its samples in place and assembles its batches
//! from them.
//!
//! The death of any process at any time is handled.
//!
//! The rank that reads is the one that holds the node's [`storage::ipc::LocalListener`]. The kernel
//! gives it to one process at a time and releases it when that process ends, so there is no stale
//! lock and no election. Its name contains the job and the user; the memory has no name, and the
//! kernel frees it with its last process. A rank whose process ended is dropped, and the others
//! continue. When the reader ends, the ranks first consume their slots; then one of them takes over
//! the listener and reads from the smallest of the ranks' positions, each of which is one number.
//!
//! In reading order: `raw` is the data passed between ranks, `client` a rank's side, `server` the
//! side that reads, and [`NodeBatches`] assembles batches from it.

mod batches;
mod client;
mod error;
mod raw;
mod server;

pub use batches::NodeBatches;
pub use client::NodeClient;
pub use error::NodeError;
pub use raw::{RawAssemble, RawBatch, Samples};

use std::sync::Arc;
use std::time::Duration;

use storage::ipc::Geometry;

use crate::{Error, Result};

/// What the ranks of a node read, and how they divide it. All but `rank` and `samples_consumed`
/// must be the same in all of them.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Identifies the job among those of this user on this machine, such as the Slurm job and step
    /// id: 1 to 64 bytes.
    pub job: String,
    /// What the samples depend on (data, order, seed, length) as a line of text, at most 4096
    /// bytes. It must match; a mismatch is reported with both texts.
    pub identity: String,
    /// This process, as an index into `blocks`.
    pub rank: u32,
    /// For each rank of the node, which block of the rows of a step it takes: `[0, 1, 2, 3]` for
    /// four data-parallel ranks, `[0, 0, 1, 1]` if two tensor-parallel ranks take the same rows.
    pub blocks: Vec<u32>,
    /// Rows of a block. Minimum: 1.
    pub micro_batch: usize,
    /// Samples that a step takes from the order, with those of other nodes. Minimum: 1.
    pub step_samples: u64,
    /// Samples consumed by all ranks before this rank's first step: the whole state.
    pub samples_consumed: u64,
    /// One past the last sample: the last step may have fewer than the others. Default: none; every
    /// step then counts as complete.
    pub samples_end: u64,
    /// The largest sample in bytes.
    pub sample_bytes_max: usize,
    /// Steps buffered in a rank's ring, a power of two.
    pub slots: usize,
    /// How long a rank waits for a batch, or for another rank to take over the reading, before it
    /// fails. Default: 330 s, more than the timeout of a read.
    pub wait_max: Duration,
}

/// Reads the batches of the whole node, one for each step.
pub trait BatchSource {
    /// Replaces `into` by the samples of the next step: the rows of block 0, then those of block 1,
    /// and so on. The last step may have fewer, even none, but is a step of every rank. Returns
    /// `false` at the end.
    ///
    /// # Errors
    /// The error of the first read that failed.
    fn next(&mut self, into: &mut RawBatch) -> Result<bool>;
}

/// Starts reading at a number of samples consumed. It may be called in any rank, and several times.
pub type Open = Arc<dyn Fn(u64) -> Result<Box<dyn BatchSource>> + Send + Sync>;

/// Ranks on one machine: more than any has accelerators.
const RANKS_MAX: usize = 256;
const JOB_BYTES_MAX: usize = 64;
/// More samples than any order has: sums of positions cannot overflow.
const SAMPLES_MAX: u64 = 1 << 60;
const IDENTITY_BYTES_MAX: usize = 4096;

impl NodeOptions {
    /// The ranks `0..ranks` of a node that has the whole job to itself, each with its own rows.
    #[must_use]
    pub fn new(job: &str, identity: &str, rank: u32, ranks: u32) -> Self {
        NodeOptions {
            job: job.to_owned(),
            identity: identity.to_owned(),
            rank,
            blocks: (0..ranks).collect(),
            micro_batch: 1,
            step_samples: u64::from(ranks),
            samples_consumed: 0,
            samples_end: u64::MAX,
            sample_bytes_max: 1 << 16,
            slots: 4,
            wait_max: Duration::from_secs(330),
        }
    }

    fn check(&self) -> Result<()> {
        let invalid = |name, found: u64, expected| Err(Error::Option { name, found, expected });
        let ranks = self.blocks.len();
        if ranks == 0 || ranks > RANKS_MAX {
            return invalid("blocks", ranks as u64, "one for each rank, 1 to 256");
        }
        if self.rank as usize >= ranks {
            return invalid("rank", u64::from(self.rank), "less than the number of blocks");
        }
        if let Some(block) = self.blocks.iter().find(|&&block| block as usize >= ranks) {
            return invalid("block", u64::from(*block), "less than the number of ranks");
        }
        if self.job.is_empty() || self.job.len() > JOB_BYTES_MAX {
            return invalid("job", self.job.len() as u64, "a name of 1 to 64 bytes");
        }
        if self.identity.len() > IDENTITY_BYTES_MAX {
            return invalid("identity", self.identity.len() as u64, "at most 4096 bytes");
        }
        if self.micro_batch == 0 {
            return invalid("micro_batch", 0, "at least 1");
        }
        if !(1..=SAMPLES_MAX).contains(&self.step_samples) {
            return invalid("step_samples", self.step_samples, "1 to 2^60");
        }
        if self.samples_consumed > SAMPLES_MAX {
            return invalid("samples_consumed", self.samples_consumed, "at most 2^60");
        }
        Ok(())
    }

    /// Everything that must be equal in all ranks, as one line.
    fn fingerprint(&self) -> String {
        let NodeOptions { identity, blocks, micro_batch, step_samples, slots, .. } = self;
        let (bytes, end) = (self.sample_bytes_max, self.samples_end);
        format!(
            "feedline {}: {identity}; blocks {blocks:?}, micro_batch {micro_batch}, step_samples \
             {step_samples} to {end}, sample_bytes_max {bytes}, slots {slots}",
            env!("CARGO_PKG_VERSION")
        )
    }

    fn geometry(&self) -> Geometry {
        let slot_bytes = raw::message_bytes_max(self.micro_batch, self.sample_bytes_max);
        Geometry { slots: self.slots, slot_bytes }
    }
}
