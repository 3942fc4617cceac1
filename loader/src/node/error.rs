use std::fmt;
use std::time::Duration;

use crate::Error;

/// Errors between the ranks of a node.
#[derive(Debug)]
#[non_exhaustive]
pub enum NodeError {
    /// The node reader has other options.
    Mismatch {
        /// Its process id.
        pid: u32,
        /// The options of this rank.
        ours: String,
        /// The options of the node reader.
        theirs: String,
    },
    /// The node reader refused this rank.
    Refused {
        /// Its process id.
        pid: u32,
        /// Why.
        reason: String,
    },
    /// The node reader failed.
    Failed {
        /// Its process id.
        pid: u32,
        /// Its error.
        reason: String,
    },
    /// Nothing was received from the node reader in time, or no rank took its place.
    Silent {
        /// Its process id; 0 if there is none, or none visible from here.
        pid: u32,
        /// How long this rank waited.
        waited: Duration,
        /// What the node reader was last waiting for.
        reason: String,
    },
    /// Samples do not fit in a slot.
    Slot {
        /// The first of them.
        first_sample: u64,
        /// How many.
        rows: usize,
        /// Bytes that they need.
        found: usize,
        /// Bytes of a slot.
        expected: usize,
    },
    /// A message of another rank is not a valid batch.
    Message {
        /// Its length.
        found: usize,
    },
    /// A sample that another rank read has another length than in the order of this rank.
    Sample {
        /// The order.
        order: String,
        /// The sample.
        sample: u64,
        /// Bytes received.
        found: u64,
        /// Bytes of its pieces.
        expected: u64,
    },
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeError::Mismatch { pid, ours, theirs } => write!(
                f,
                "cannot join node reader (process {pid}): expected options '{theirs}', found \
                 '{ours}' (hint: run all ranks of a job with the same configuration and version)"
            ),
            NodeError::Refused { pid, reason } => {
                write!(f, "cannot join node reader (process {pid}): {reason}")
            }
            NodeError::Failed { pid, reason } => {
                write!(f, "cannot receive batch from node reader (process {pid}): {reason}")
            }
            NodeError::Silent { pid: 0, waited, reason } => {
                write!(f, "cannot find node reader within {} s: {reason}", waited.as_secs())
            }
            NodeError::Silent { pid, waited, reason } => write!(
                f,
                "cannot receive batch from node reader (process {pid}) within {} s: {reason}",
                waited.as_secs()
            ),
            NodeError::Slot { first_sample, rows, found, expected } => write!(
                f,
                "cannot send {rows} samples from sample {first_sample}: expected at most \
                 {expected} bytes, found {found} bytes (hint: raise sample_bytes_max)"
            ),
            NodeError::Message { found } => {
                write!(
                    f,
                    "cannot decode batch from node reader: malformed message of {found} bytes"
                )
            }
            NodeError::Sample { order, sample, found, expected } => write!(
                f,
                "cannot use sample {sample} of {order} from node reader: expected {expected} \
                 bytes, found {found} (hint: use the same index on all ranks of a node)"
            ),
        }
    }
}

impl std::error::Error for NodeError {}

impl From<NodeError> for Error {
    fn from(error: NodeError) -> Self {
        Error::Node(error)
    }
}
