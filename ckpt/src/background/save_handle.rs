use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::save_control::SaveControl;
use crate::{Error, Result, SaveReport};

/// Fewer bytes than this are too few to estimate a rate.
const RATE_BYTES_MIN: u64 = 64 << 20;

/// A save in the background. Drop does not stop it.
#[derive(Debug)]
pub struct SaveHandle {
    status: Arc<SaveStatus>,
}

/// Progress of a save in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveProgress {
    /// Bytes written to the store.
    pub bytes: u64,
    /// Total bytes.
    pub bytes_total: u64,
    /// Since the copy was made.
    pub time: Duration,
    /// Whether it has ended, with any outcome.
    pub is_done: bool,
    /// Whether cancellation was requested.
    pub is_cancelled: bool,
}

impl SaveHandle {
    pub(crate) fn new(status: Arc<SaveStatus>) -> Self {
        SaveHandle { status }
    }

    /// The step.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.status.step
    }

    /// How long the copy took, during which the caller waited.
    #[must_use]
    pub fn staged(&self) -> Duration {
        self.status.staged
    }

    /// Its progress.
    #[must_use]
    pub fn progress(&self) -> SaveProgress {
        let status = &self.status;
        SaveProgress {
            bytes: status.control.bytes(),
            bytes_total: status.bytes,
            time: status.started.elapsed(),
            is_done: !matches!(*status.lock(), Outcome::Open),
            is_cancelled: status.control.is_cancelled(),
        }
    }

    /// Waits until the step is committed.
    ///
    /// # Errors
    /// The error of [`Checkpoints::save`](crate::Checkpoints::save), once; [`Error::Cancelled`];
    /// [`Error::Reported`] if the error was returned to another caller.
    pub fn wait(&self) -> Result<SaveReport> {
        self.status.wait()
    }

    /// Cancels it and removes what it has written. Returns its report if it was committed before it
    /// could be cancelled.
    ///
    /// # Errors
    /// As [`SaveHandle::wait`], except for [`Error::Cancelled`].
    pub fn cancel(&self) -> Result<Option<SaveReport>> {
        self.status.control.cancel();
        match self.status.wait() {
            Ok(report) => Ok(Some(report)),
            Err(Error::Cancelled) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Status of one save, shared by all observers.
#[derive(Debug)]
pub(crate) struct SaveStatus {
    pub(crate) step: u64,
    pub(crate) control: SaveControl,
    bytes: u64,
    staged: Duration,
    started: Instant,
    outcome: Mutex<Outcome>,
    done: Condvar,
}

#[derive(Debug)]
enum Outcome {
    Open,
    Saved(SaveReport),
    Failed(Error),
    Cancelled,
    /// It failed, and the error was returned to a caller; this is its text.
    Reported(String),
}

impl SaveStatus {
    pub(crate) fn new(step: u64, bytes: u64, staged: Duration) -> Self {
        let (outcome, done) = (Mutex::new(Outcome::Open), Condvar::new());
        let (control, started) = (SaveControl::default(), Instant::now());
        SaveStatus { step, control, bytes, staged, started, outcome, done }
    }

    pub(crate) fn finish(&self, outcome: Result<SaveReport>) {
        *self.lock() = match outcome {
            Ok(report) => Outcome::Saved(report),
            Err(Error::Cancelled) => Outcome::Cancelled,
            Err(error) => Outcome::Failed(error),
        };
        self.done.notify_all();
    }

    pub(crate) fn wait(&self) -> Result<SaveReport> {
        let is_open = |outcome: &mut Outcome| matches!(outcome, Outcome::Open);
        let waited = self.done.wait_while(self.lock(), is_open);
        let mut outcome = waited.unwrap_or_else(PoisonError::into_inner);
        match &*outcome {
            Outcome::Saved(report) => Ok(*report),
            Outcome::Cancelled => Err(Error::Cancelled),
            Outcome::Reported(first) => {
                Err(Error::Reported { step: self.step, first: first.clone() })
            }
            Outcome::Failed(_) | Outcome::Open => {
                Err(take(&mut outcome).expect("matched a failure above"))
            }
        }
    }

    /// The error, for the first caller.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        take(&mut self.lock())
    }

    /// Estimates the remaining time by the progress so far or by the last save; `None` if neither
    /// is known.
    pub(crate) fn remaining_time(&self, last: Option<&SaveReport>) -> Option<Duration> {
        let done = self.control.bytes().min(self.bytes);
        let (bytes, time) = match last {
            _ if done >= RATE_BYTES_MIN => (done, self.started.elapsed()),
            Some(last) => (last.bytes.max(1), last.write),
            None => return None,
        };
        let rest = (self.bytes - done) as f64 / bytes as f64;
        let rest = Duration::try_from_secs_f64(time.as_secs_f64() * rest).unwrap_or(Duration::MAX);
        Some(rest.saturating_add(last.map_or(Duration::ZERO, |last| last.commit)))
    }

    fn lock(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take(outcome: &mut Outcome) -> Option<Error> {
    let Outcome::Failed(error) = outcome else { return None };
    let reported = Outcome::Reported(storage::one_line(error));
    match std::mem::replace(outcome, reported) {
        Outcome::Failed(error) => Some(error),
        _ => None,
    }
}
