use std::fmt;
use std::time::Duration;

use crate::dist::{ranks_text, seconds};

/// An error of libtorch or of the bridge.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A C++ exception, as text.
    Torch {
        /// What failed, as a verb.
        operation: &'static str,
        /// The message of libtorch.
        text: String,
    },
    /// Lists that belong together have different lengths.
    Lengths {
        /// What failed, as a verb.
        operation: &'static str,
        /// The length of each.
        found: Vec<usize>,
    },
    /// An operation of several ranks did not complete.
    Collective {
        /// The operation.
        op: &'static str,
        /// The group's name.
        group: String,
        /// The group's ranks in the world.
        ranks: Vec<usize>,
        /// The missing ranks, and the error of c10d.
        text: String,
    },
    /// Ranks did not reach a barrier in time.
    Absent {
        /// What failed, as a verb.
        operation: String,
        /// The missing ranks.
        missing: Vec<usize>,
        /// How long this rank waited for them.
        after: Duration,
    },
    /// A rank reported that it has failed.
    Peer {
        /// What failed, as a verb.
        operation: String,
        /// The rank, and its reason.
        text: String,
    },
    /// The store does not answer, or has no such key.
    Store {
        /// What failed, as a verb.
        operation: String,
        /// The error.
        text: String,
    },
    /// The store cannot be hosted here.
    Serve {
        /// Its host and port.
        address: String,
        /// The error of the system.
        text: String,
    },
    /// The memory of a tensor cannot be lent.
    NotLendable {
        /// Why not.
        reason: &'static str,
    },
}

/// `std`'s result, with this [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether the cause is another rank or the connection to it, and not this rank.
    #[must_use]
    pub fn is_peer_lost(&self) -> bool {
        matches!(
            self,
            Error::Collective { .. }
                | Error::Absent { .. }
                | Error::Peer { .. }
                | Error::Store { .. }
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Torch { operation, text } => write!(f, "cannot {operation}: {text}"),
            Error::Lengths { operation, found } => {
                write!(f, "cannot {operation}: expected lists of equal length, found {found:?}")
            }
            Error::Collective { op, group, ranks, text } => {
                write!(f, "cannot complete {op} on {group} (ranks {}): {text}", ranks_text(ranks))
            }
            Error::Absent { operation, missing, after } => {
                let noun = if missing.len() == 1 { "rank" } else { "ranks" };
                let after = seconds(after.as_secs_f64());
                write!(
                    f,
                    "cannot {operation}: {noun} {} missing after {after}",
                    ranks_text(missing)
                )
            }
            Error::Peer { operation, text } | Error::Store { operation, text } => {
                write!(f, "cannot {operation}: {text}")
            }
            Error::Serve { address, text } => {
                write!(f, "cannot serve a store on {address}: {text}")
            }
            Error::NotLendable { reason } => {
                write!(f, "cannot access the bytes of a tensor: {reason}")
            }
        }
    }
}

impl std::error::Error for Error {}
