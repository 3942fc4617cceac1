//! Checks the cached sample orders of a run for corruption, on a background thread.
//!
//! A run starts at once if the seals of its orders match. A seal covers only parts of each file, so
//! a bit may have flipped in another part: samples would silently be skipped or read twice.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::Result;
use crate::orders::CacheCheck;

/// How often a wait checks `stop`.
const CHECK_STOP_EVERY: Duration = Duration::from_millis(50);

/// The checks of a run's orders.
#[derive(Clone, Debug)]
pub(super) struct OrderCheck(Arc<Mutex<State>>);

enum State {
    Ready(Vec<CacheCheck>),
    Running(Receiver<indexed::Result<()>>),
    Done,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            State::Ready(_) => "Ready",
            State::Running(_) => "Running",
            State::Done => "Done",
        })
    }
}

impl OrderCheck {
    pub(super) fn new(checks: Vec<CacheCheck>) -> Self {
        OrderCheck(Arc::new(Mutex::new(State::Ready(checks))))
    }

    /// Starts the thread. If no thread can be started, nothing is checked.
    pub(super) fn start(&self) {
        let mut state = self.lock();
        let State::Ready(checks) = std::mem::replace(&mut *state, State::Done) else { return };
        let (outcome, receiver) = channel();
        let check = move || {
            // The run may have ended.
            let _ = outcome.send(checks.into_iter().try_for_each(run));
        };
        match std::thread::Builder::new().name("order-check".to_owned()).spawn(check) {
            Ok(_) => *state = State::Running(receiver),
            Err(error) => {
                log::warn!("cannot check the cached sample orders: {error}");
            }
        }
    }

    /// The error of the check, if it has ended with one.
    pub(super) fn poll(&self) -> Result<()> {
        let mut state = self.lock();
        let State::Running(receiver) = &*state else { return Ok(()) };
        let Ok(outcome) = receiver.try_recv() else { return Ok(()) };
        *state = State::Done;
        Ok(outcome?)
    }

    /// Waits for the end of the check, or for `stop`, and returns its error.
    pub(super) fn wait(&self, stop: &AtomicBool) -> Result<()> {
        let mut state = self.lock();
        let State::Running(receiver) = &*state else { return Ok(()) };
        while !stop.load(Ordering::Relaxed) {
            let outcome = match receiver.recv_timeout(CHECK_STOP_EVERY) {
                Err(RecvTimeoutError::Timeout) => continue,
                // The panic of the thread was reported on stderr.
                Err(RecvTimeoutError::Disconnected) => Ok(()),
                Ok(outcome) => outcome,
            };
            *state = State::Done;
            return Ok(outcome?);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Corruption is an error. A failed read is not: the order was read before, and the run continues.
fn run(check: CacheCheck) -> indexed::Result<()> {
    match check() {
        Ok(()) | Err(indexed::Error::NoCache { .. }) => Ok(()),
        Err(error @ indexed::Error::Storage(storage::Error::Corrupt { .. })) => Err(error),
        Err(indexed::Error::Storage(error)) => {
            log::warn!("cannot check a cached sample order: {error}");
            Ok(())
        }
        Err(error) => Err(error),
    }
}
