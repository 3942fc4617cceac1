use std::fmt;
use std::time::Duration;

use crate::{Error, SaveReport};

/// What [`AsyncSaver::finish_within`](crate::AsyncSaver::finish_within) decided and did. Its
/// `Display` is a log line.
#[derive(Debug)]
pub enum Finish {
    /// No save was in progress, and nothing is lost.
    Idle,
    /// The save in progress is committed.
    Committed(SaveReport),
    /// It was cancelled: it would have taken too long, or did.
    Cancelled {
        /// The step, which does not exist.
        step: u64,
        /// The estimated remaining time.
        need: Duration,
        /// The grace period.
        grace: Duration,
    },
    /// It failed.
    Failed(u64, Error),
    /// It was cancelled but does not end: the store does not respond. If the process exits now,
    /// what was written is left to the next sweep; if it drops the
    /// [`AsyncSaver`](crate::AsyncSaver) first, it waits.
    Stuck {
        /// The step, which may still be committed.
        step: u64,
        /// The grace period.
        grace: Duration,
    },
}

impl fmt::Display for Finish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finish::Idle => f.write_str("no save was in flight"),
            Finish::Committed(report) => write!(f, "finished in time: {report}"),
            Finish::Cancelled { step, need, grace } => write!(
                f,
                "step {step} cancelled: needed {:.1} s more, had {:.1} s; the last commit is \
                 unaffected",
                need.as_secs_f64(),
                grace.as_secs_f64()
            ),
            Finish::Failed(step, error) => write!(f, "step {step} failed: {error}"),
            Finish::Stuck { step, grace } => write!(
                f,
                "step {step} cancelled, but the save did not stop within {:.1} s; the last commit \
                 is unaffected (hint: check that the store responds)",
                grace.as_secs_f64()
            ),
        }
    }
}
