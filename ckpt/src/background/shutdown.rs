use std::fmt;
use std::time::Duration;

use crate::{Error, SaveReport};

/// What [`AsyncSaver::finish_within`] decided and what came of it. Its text is a line for a log.
#[derive(Debug)]
pub enum Finish {
    /// Nothing was being written, and nothing is lost.
    Idle,
    /// The save in flight is committed.
    Committed(SaveReport),
    /// It was cancelled, for it would have taken too long, or did.
    Cancelled {
        /// The step that is not there.
        step: u64,
        /// What it would still have taken, by its rate.
        need: Duration,
        /// What it was given.
        grace: Duration,
    },
    /// It failed.
    Failed(u64, Error),
    /// It was cancelled, and does not end: the store does not answer. A process that ends now
    /// leaves what was written to the next sweep; one that drops the [`AsyncSaver`] first waits.
    Stuck {
        /// The step, which may still come to be there.
        step: u64,
        /// What it was given.
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
                "step {step} cancelled: it would have taken {:.1} s more, of {:.1} s given; the \
                 last commit stays",
                need.as_secs_f64(),
                grace.as_secs_f64()
            ),
            Finish::Failed(step, error) => write!(f, "step {step} failed: {error}"),
            Finish::Stuck { step, grace } => write!(
                f,
                "step {step} was cancelled and does not end within {:.1} s; hint: does the store \
                 answer? The last commit stays",
                grace.as_secs_f64()
            ),
        }
    }
}
