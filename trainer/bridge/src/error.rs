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
        /// What we were doing.
        operation: &'static str,
        /// How long each was.
        found: Vec<usize>,
    },
    /// An operation of several ranks did not come to its end.
    Collective {
        /// The operation.
        op: &'static str,
        /// The group's name.
        group: String,
        /// The group's ranks in the world.
        ranks: Vec<usize>,
        /// Who is missing, and what c10d said.
        text: String,
    },
    /// Ranks did not come to a place where they were waited for.
    Absent {
        /// The place.
        operation: String,
        /// Who did not come.
        missing: Vec<usize>,
        /// How long they were waited for.
        after: Duration,
    },
    /// A rank said that it cannot go on.
    Peer {
        /// Where it was waited for.
        operation: String,
        /// Which rank, and why.
        text: String,
    },
    /// The store does not answer, or has no such key.
    Store {
        /// What we were doing.
        operation: String,
        /// What came.
        text: String,
    },
    /// The store cannot be kept here.
    Serve {
        /// Its host and port.
        address: String,
        /// What the system said.
        text: String,
    },
    /// The memory of a tensor cannot be lent.
    NotLendable {
        /// What is in the way.
        reason: &'static str,
    },
}

/// `std`'s, with our [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether other ranks, or the way to them, are the reason, and nothing of this one.
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
