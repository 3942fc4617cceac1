use std::fmt;
use std::time::Duration;

use crate::dist::{ranks_text, seconds};

/// Why libtorch, or the bridge before it, refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A C++ exception, as text.
    Torch {
        /// What we were doing.
        operation: &'static str,
        /// What libtorch said.
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
            Error::Torch { operation, text } => write!(f, "{operation}: {text}"),
            Error::Lengths { operation, found } => {
                write!(f, "{operation}: got lists of {found:?} tensors, due equal lengths")
            }
            Error::Collective { op, group, ranks, text } => {
                write!(f, "{op} on {group} (ranks {}): {text}", ranks_text(ranks))
            }
            Error::Absent { operation, missing, after } => {
                let noun = if missing.len() == 1 { "rank" } else { "ranks" };
                let after = seconds(after.as_secs_f64());
                write!(f, "{operation}: {noun} {} missing after {after}", ranks_text(missing))
            }
            Error::Peer { operation, text } | Error::Store { operation, text } => {
                write!(f, "{operation}: {text}")
            }
            Error::Serve { address, text } => write!(f, "keep a store on {address}: {text}"),
            Error::NotLendable { reason } => write!(f, "lend the bytes of a tensor: {reason}"),
        }
    }
}

impl std::error::Error for Error {}
