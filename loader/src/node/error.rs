use std::fmt;
use std::time::Duration;

use crate::Error;

/// What went wrong between the ranks of a node.
#[derive(Debug)]
#[non_exhaustive]
pub enum NodeError {
    /// The rank that reads was told to read something else.
    Mismatch {
        /// Its process.
        pid: u32,
        /// What this rank reads.
        ours: String,
        /// What that one does.
        theirs: String,
    },
    /// The rank that reads takes this one for no rank of the node.
    Refused {
        /// Its process.
        pid: u32,
        /// Why.
        told: String,
    },
    /// The rank that reads failed.
    Failed {
        /// Its process.
        pid: u32,
        /// What it met.
        told: String,
    },
    /// Nothing came from the rank that reads, or nobody took its place.
    Silent {
        /// Its process; 0 if there is none, or none that can be seen from here.
        pid: u32,
        /// For how long.
        waited: Duration,
        /// What it was last seen waiting for.
        why: String,
    },
    /// Samples do not fit in a slot.
    Slot {
        /// The first of them.
        first_sample: u64,
        /// How many.
        rows: usize,
        /// Bytes that they take.
        got: usize,
        /// Bytes of a slot.
        due: usize,
    },
    /// What another rank sent is no batch.
    Message {
        /// Its length.
        got: usize,
    },
    /// A sample that another rank read is not as long as the order has it here.
    Sample {
        /// The order.
        order: String,
        /// The sample.
        sample: u64,
        /// Bytes that came.
        got: u64,
        /// Bytes that its pieces have.
        due: u64,
    },
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NodeError::Mismatch { pid, ours, theirs } => write!(
                f,
                "this rank reads '{ours}', process {pid}, which reads for the node, '{theirs}'; \
                 hint: all ranks of a job must have one configuration and one version"
            ),
            NodeError::Refused { pid, told } => {
                write!(f, "process {pid}, which reads for the node, turned this rank away: {told}")
            }
            NodeError::Failed { pid, told } => {
                write!(f, "process {pid}, which reads for the node, failed: {told}")
            }
            NodeError::Silent { pid: 0, waited, why } => {
                write!(f, "no reader of the node within {} s: {why}", waited.as_secs())
            }
            NodeError::Silent { pid, waited, why } => write!(
                f,
                "no batch from process {pid}, which reads for the node, within {} s: {why}",
                waited.as_secs()
            ),
            NodeError::Slot { first_sample, rows, got, due } => write!(
                f,
                "{rows} samples from {first_sample} on have {got} bytes, due at most {due}; \
                 hint: sample_bytes_max is too small for this order"
            ),
            NodeError::Message { got } => {
                write!(f, "{got} bytes that are no batch came from the rank that reads")
            }
            NodeError::Sample { order, sample, got, due } => write!(
                f,
                "sample {sample} of {order} came with {got} bytes, due {due}; \
                 hint: the rank that reads has another index"
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
