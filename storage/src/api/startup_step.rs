use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::base::watchdog::WARN_AFTER;
use crate::{Error, Result};

/// A startup step with a name and a time limit, such as `open corpus.bin`.
///
/// Opening a file on a dead server may block for ever. A stage runs the step on a thread of its
/// own: after the limit the start fails with an error that names the step, and the thread stays
/// blocked.
///
/// ```
/// use std::time::Duration;
/// let stage = storage::Stage::begin("add up", Duration::from_secs(60));
/// assert_eq!(stage.run(|| 2 + 2)?, 4);
/// # Ok::<(), storage::Error>(())
/// ```
#[derive(Debug)]
pub struct Stage {
    operation: String,
    limit: Duration,
    warn_after: [Duration; 3],
    stop: Option<(Arc<AtomicBool>, Duration)>,
}

/// Interval at which the stop flag is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl Stage {
    /// A step with this time limit. The log reports it at 10, 30 and 60 s.
    #[must_use]
    pub fn begin(operation: impl Into<String>, limit: Duration) -> Self {
        Stage { operation: operation.into(), limit, warn_after: WARN_AFTER, stop: None }
    }

    /// Sets the ages at which the log reports it.
    #[must_use]
    pub fn warn_after(self, warn_after: [Duration; 3]) -> Self {
        Stage { warn_after, ..self }
    }

    /// Shortens the remaining time to this when the flag is set.
    #[must_use]
    pub fn or_when(self, flag: &Arc<AtomicBool>, grace: Duration) -> Self {
        Stage { stop: Some((Arc::clone(flag), grace)), ..self }
    }

    /// Runs the step on a thread of its own, and returns its result.
    ///
    /// # Errors
    /// [`Error::StageTimeout`] after the limit; [`Error::Io`] if no thread can be started.
    ///
    /// # Panics
    /// If the step panics.
    pub fn run<T: Send + 'static>(self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let Stage { operation, mut limit, warn_after, mut stop } = self;
        let (sender, receiver) = sync_channel(1);
        let started = Instant::now();
        let run = move || drop(sender.send(work()));
        let worker = thread::Builder::new()
            .name("stage".to_owned())
            .spawn(run)
            .map_err(|e| Error::from_io("start", format!("a thread to {operation}"), e))?;
        let limit_max = limit;
        let mut warnings = warn_after.into_iter().filter(|after| *after < limit_max).peekable();
        while started.elapsed() < limit {
            let next = warnings.peek().copied().unwrap_or(limit).min(limit);
            let wait = next.saturating_sub(started.elapsed());
            let wait = if stop.is_some() { wait.min(POLL_INTERVAL) } else { wait };
            match receiver.recv_timeout(wait) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => {
                    let panic =
                        worker.join().expect_err("a thread that sends no result has panicked");
                    std::panic::resume_unwind(panic);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if let Some((_, grace)) = stop.take_if(|(flag, _)| flag.load(Ordering::Relaxed)) {
                limit = limit.min(started.elapsed() + grace);
            }
            if let Some(after) = warnings.next_if(|after| started.elapsed() >= *after) {
                log::warn!("{operation}: not done after {} s", after.as_secs());
            }
        }
        Err(Error::StageTimeout { stage: operation, limit })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_step_returns_its_result_or_a_timeout() {
        let long = Duration::from_secs(600);
        assert_eq!(Stage::begin("a", long).run(|| 7).unwrap(), 7);
        // The step blocks until the end of this test.
        let (_release, released) = channel::<()>();
        let short = Stage::begin("open corpus.bin", Duration::from_millis(20));
        let short = short.warn_after([Duration::from_millis(5); 3]);
        let error = short.run(move || released.recv().is_err()).unwrap_err();
        assert!(matches!(&error, Error::StageTimeout { stage, .. } if stage == "open corpus.bin"));
        assert!(
            error.to_string().starts_with("cannot open corpus.bin: not done after 0.02 s"),
            "{error}"
        );
    }

    #[test]
    fn the_stop_flag_shortens_the_limit() {
        let (_release, released) = channel::<()>();
        let flag = Arc::new(AtomicBool::new(true));
        let stage = Stage::begin("read corpus.bin", Duration::from_secs(600));
        let stage = stage.or_when(&flag, Duration::from_millis(50));
        let error = stage.run(move || released.recv().is_err()).unwrap_err();
        assert!(matches!(&error, Error::StageTimeout { .. }), "{error}");
        let stage = Stage::begin("add up", Duration::from_secs(600));
        let value = stage.or_when(&flag, Duration::from_secs(600)).run(|| 7).unwrap();
        assert_eq!(value, 7);
    }

    #[test]
    #[should_panic(expected = "the step failed")]
    fn a_panic_is_resumed_in_the_caller() {
        let _ = Stage::begin("a", Duration::from_secs(600)).run(|| panic!("the step failed"));
    }
}
