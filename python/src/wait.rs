//! Waits that Ctrl-C ends, and processes that were forked.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tools::ui::timeout::StopSignal;

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

/// A stop signal that several calls share. It is cleared when a call begins and no other is
/// running.
#[derive(Debug, Default)]
pub(crate) struct SharedStop {
    pub(crate) signal: StopSignal,
    running: Mutex<usize>,
}

/// A running call.
#[derive(Debug)]
pub(crate) struct RunningCall(Arc<SharedStop>);

impl SharedStop {
    /// Begins a call. This never waits, so it may be called with the GIL.
    pub(crate) fn begin(self: &Arc<Self>) -> RunningCall {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if *running == 0 {
            self.signal.0.store(false, Ordering::Relaxed);
        }
        *running += 1;
        RunningCall(Arc::clone(self))
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

/// Does work on a thread of its own that Ctrl-C abandons: it continues, and its result is dropped.
///
/// # Errors
/// `KeyboardInterrupt`, or what a handler of the caller raises; `RuntimeError` if the work panics.
pub(crate) fn abandonable<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, done) = sync_channel(1);
    let run = move || {
        if let Ok(value) = catch_unwind(AssertUnwindSafe(work)) {
            sender.send(value).ok();
        }
    };
    std::thread::Builder::new().name("feedline-call".to_owned()).spawn(run)?;
    let done = Mutex::new(done);
    loop {
        let wait =
            || done.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SIGNALS_EVERY);
        match py.detach(wait) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
        }
    }
}

/// The error of a thread that panicked.
pub(crate) fn panicked() -> PyErr {
    PyRuntimeError::new_err("a thread of feedline panicked")
}

/// Does work on a thread of its own; Ctrl-C calls `stop`, and waits for the end of the work.
///
/// # Errors
/// `KeyboardInterrupt`, or what a handler of the caller raises; `RuntimeError` if the work panics.
pub(crate) fn beside<T: Send>(
    py: Python<'_>,
    stop: impl FnOnce(),
    work: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    beside_with(py, stop, work, |_| Ok(()))
}

/// As [`beside`], and calls `look` meanwhile; its exception ends the work too.
///
/// # Errors
/// As [`beside`], and those of `look`.
pub(crate) fn beside_with<T: Send>(
    py: Python<'_>,
    stop: impl FnOnce(),
    work: impl FnOnce() -> T + Send,
    mut look: impl FnMut(Python<'_>) -> PyResult<()>,
) -> PyResult<T> {
    let (sender, done) = sync_channel(1);
    let done = Mutex::new(done);
    // A panic must not end the interpreter, nor travel to other processes, which cannot read it.
    let work = move || catch_unwind(AssertUnwindSafe(work)).ok();
    let came = std::thread::scope(|scope| {
        // The receiver lives as long as the scope.
        scope.spawn(move || sender.send(work()).ok());
        loop {
            let wait =
                |time| done.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(time);
            match py.detach(|| wait(SIGNALS_EVERY)) {
                Ok(came) => return PyResult::Ok(came),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
            if let Err(raised) = py.check_signals().and_then(|()| look(py)) {
                stop();
                // The scope waits for the thread: without the GIL, which a log line may need.
                let end = || done.lock().unwrap_or_else(PoisonError::into_inner).recv();
                py.detach(end).ok();
                return Err(raised);
            }
        }
    })?;
    came.ok_or_else(panicked)
}

/// Calls a function of the caller, if there is one, with a number of bytes: for [`beside_with`].
pub(crate) fn reporting<'py>(
    progress: Option<&Bound<'py, PyAny>>,
    bytes: impl Fn() -> u64,
) -> impl FnMut(Python<'_>) -> PyResult<()> {
    move |_| match progress {
        Some(progress) => progress.call1((bytes(),)).map(|_| ()),
        None => Ok(()),
    }
}
