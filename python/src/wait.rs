//! Waits that Ctrl-C ends, and processes that were forked.

use std::task::Poll;
use std::time::Duration;

use pyo3::prelude::*;

use crate::errors::FeedlineError;

/// How long a wait may leave signals unseen.
pub(crate) const SIGNALS_EVERY: Duration = Duration::from_millis(50);

/// Calls `poll` without the GIL until it is ready. It must not wait longer than [`SIGNALS_EVERY`].
///
/// # Errors
/// `KeyboardInterrupt`, or what a handler of the caller raises.
pub(crate) fn until_ready<T: Send>(
    py: Python<'_>,
    mut poll: impl FnMut() -> PyResult<Poll<T>> + Send,
) -> PyResult<T> {
    loop {
        if let Poll::Ready(value) = py.detach(&mut poll)? {
            return Ok(value);
        }
        py.check_signals()?;
    }
}

/// The process in which something was started. Threads do not cross `fork`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HomeProcess(u32);

impl HomeProcess {
    pub(crate) fn here() -> Self {
        HomeProcess(std::process::id())
    }

    pub(crate) fn is_here(self) -> bool {
        self == HomeProcess::here()
    }

    /// # Errors
    /// `FeedlineError` in any other process.
    pub(crate) fn check(self, what: &str) -> PyResult<()> {
        if self.is_here() {
            return Ok(());
        }
        Err(FeedlineError::new_err(format!(
            "cannot use this {what} in process {}: expected process {}, which started it (hint: \
             open it again after the fork)",
            std::process::id(),
            self.0
        )))
    }

    /// Drops what holds threads: without the GIL, which their last log lines may need; in a forked
    /// process not at all, because they are not there.
    pub(crate) fn end<T: Send>(self, threads: T) {
        if self.is_here() {
            Python::attach(|py| py.detach(|| drop(threads)));
        } else {
            std::mem::forget(threads);
        }
    }
}
