use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::base::save_control::SaveControl;
use crate::{Drain, DrainReport, Error, Result};

/// Longest backoff after failed passes: a store that is down for hours is tried once a minute.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// A drain on its own thread, which makes a pass whenever it is woken. Drop interrupts the copy in
/// progress, which the next drain resumes, and joins the thread.
#[derive(Debug)]
pub struct DrainTask {
    shared: Arc<DrainShared>,
    thread: Option<JoinHandle<()>>,
}

/// Status of a [`DrainTask`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainStatus {
    /// Whether a pass is running or requested.
    pub busy: bool,
    /// Bytes of the step being copied that are in the second store.
    pub step_bytes: u64,
    /// The last step copied.
    pub last: Option<DrainReport>,
    /// Steps copied so far.
    pub drained: usize,
    /// Why the last pass failed, if it did. It is retried automatically.
    pub failure: Option<String>,
}

#[derive(Debug)]
struct DrainShared {
    state: Mutex<DrainState>,
    changed: Condvar,
    control: Arc<SaveControl>,
}

#[derive(Debug, Default)]
struct DrainState {
    wake: bool,
    end: bool,
    status: DrainStatus,
}

impl DrainShared {
    fn lock(&self) -> MutexGuard<'_, DrainState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drain {
    /// Starts copying in the background. The first pass starts at once.
    ///
    /// # Errors
    /// [`storage::Error::Io`] within [`Error::Storage`] if the thread cannot be created.
    pub fn start(self) -> Result<DrainTask> {
        let mut state = DrainState { wake: true, ..DrainState::default() };
        state.status.busy = true;
        let control = Arc::clone(&self.control);
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(DrainShared { state, changed, control });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("ckpt-drain".to_owned());
        let thread = thread
            .spawn(move || work(&self, &own))
            .map_err(|e| storage::Error::from_io("start", "the drain thread", e))?;
        Ok(DrainTask { shared, thread: Some(thread) })
    }
}

impl DrainTask {
    /// Requests a pass: there is a new step.
    pub fn wake(&self) {
        let mut state = self.shared.lock();
        (state.wake, state.status.busy) = (true, true);
        self.shared.changed.notify_all();
    }

    /// The current status.
    #[must_use]
    pub fn status(&self) -> DrainStatus {
        DrainStatus { step_bytes: self.shared.control.bytes(), ..self.shared.lock().status.clone() }
    }

    /// Waits until every existing step is copied, a pass has failed, or `limit` has passed.
    #[must_use]
    pub fn wait_idle(&self, limit: Duration) -> DrainStatus {
        let state = self.shared.lock();
        let is_busy = |state: &mut DrainState| state.status.busy;
        let waited = self.shared.changed.wait_timeout_while(state, limit, is_busy);
        waited.unwrap_or_else(PoisonError::into_inner).0.status.clone()
    }
}

impl Drop for DrainTask {
    fn drop(&mut self) {
        self.shared.lock().end = true;
        self.shared.control.cancel();
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

fn work(drain: &Drain, shared: &DrainShared) {
    let mut pause = None;
    loop {
        {
            let mut state = shared.lock();
            while !state.wake && !state.end {
                state = match pause {
                    None => shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                    Some(pause) => {
                        let waited = shared.changed.wait_timeout(state, pause);
                        let (mut state, wait_result) =
                            waited.unwrap_or_else(PoisonError::into_inner);
                        state.wake |= wait_result.timed_out();
                        state
                    }
                };
            }
            if state.end {
                return;
            }
            (state.wake, state.status.busy) = (false, true);
        }
        let failure = pass(drain, shared);
        if let Some(failure) = &failure {
            log::error!("drain failed: {failure}");
        }
        pause = failure.as_ref().map(|_| {
            let next = pause.map_or(drain.pause(), |pause: Duration| pause.saturating_mul(2));
            next.min(PAUSE_MAX)
        });
        let mut state = shared.lock();
        state.status.failure = failure;
        state.status.busy = state.wake;
        shared.changed.notify_all();
    }
}

/// Runs a pass. Returns what failed, as one line.
fn pass(drain: &Drain, shared: &DrainShared) -> Option<String> {
    let pass = match drain.run() {
        Ok(pass) => pass,
        Err(Error::Cancelled) => return None,
        Err(error) => return Some(storage::one_line(&error)),
    };
    let mut state = shared.lock();
    for report in &pass.drained {
        log::info!("{report}");
        state.status.drained += 1;
        state.status.last = Some(*report);
    }
    let describe =
        |(step, error): &(u64, Error)| format!("step {step}: {}", storage::one_line(error));
    let failures: Vec<String> = pass.failed.iter().map(describe).collect();
    if failures.is_empty() { None } else { Some(failures.join("; ")) }
}
