//! Runs work that may hang on a separate thread: a thread that is stuck in a dead mount cannot be
//! stopped, but its caller can continue without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use storage::{StuckReads, TimeSpan};

/// Interval at which the stop signal is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum time until work ends after a stop: a running save is finished first.
const STOP_WAIT: Duration = Duration::from_secs(20);

/// Signals within this time count as one: `timeout` and job launchers signal the process and then
/// its group. No user is that fast.
const SAME_SIGNAL: Duration = Duration::from_millis(100);

/// The whole seconds of a time such as `60s` or `5min`; a bare number is seconds.
pub(crate) fn timeout_seconds(text: &str) -> Result<u64, String> {
    text.parse().or_else(|_| {
        let TimeSpan(time) = text.parse()?;
        let is_whole = time.subsec_nanos() == 0;
        is_whole.then_some(time.as_secs()).ok_or_else(|| format!("expected seconds, found {text}"))
    })
}

/// Whether all work must stop: after a signal, or because another process has failed.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(pub Arc<AtomicBool>);

impl StopSignal {
    /// A flag that SIGINT and SIGTERM set. A later signal has its default action.
    ///
    /// # Errors
    /// If signal handlers cannot be installed.
    pub fn at_signals() -> Result<Self> {
        let (stop, mut signals) = (StopSignal::default(), Signals::new([SIGINT, SIGTERM])?);
        let flag = stop.clone();
        let listen = move || {
            let mut first = None;
            for signal in signals.forever() {
                flag.set();
                if first.get_or_insert_with(Instant::now).elapsed() > SAME_SIGNAL {
                    let _ = emulate_default_handler(signal); // if it fails, the flag ends the work
                }
            }
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(listen)
            .context("cannot start a thread")?;
        Ok(stop)
    }

    /// Whether it is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Sets it for all of its clones.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Fails if it is set; for loops.
    ///
    /// # Errors
    /// If it is set.
    pub fn check(&self) -> Result<()> {
        if self.is_set() {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Runs the work on a separate thread, and returns its result. `what` follows "cannot" in
    /// errors.
    ///
    /// # Errors
    /// Errors of the work; an interruption; or a timeout, with the oldest stuck read. The thread
    /// then continues to wait.
    pub fn guard<T: Send + 'static>(
        &self,
        what: &str,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (sender, receiver) = sync_channel(1);
        let act = move || drop(sender.send(work()));
        thread::Builder::new()
            .name("bench".to_owned())
            .spawn(act)
            .context("cannot start a thread")?;
        let until = Instant::now() + limit;
        loop {
            match receiver.recv_timeout(POLL_INTERVAL) {
                Ok(result) => return result.with_context(|| format!("cannot {what}")),
                Err(RecvTimeoutError::Disconnected) => bail!("cannot {what}: its thread panicked"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.is_set() {
                return receiver.recv_timeout(STOP_WAIT).unwrap_or_else(|_| bail!("interrupted"));
            }
            if Instant::now() > until {
                let oldest =
                    StuckReads::describe().map(|oldest| format!(" ({oldest})")).unwrap_or_default();
                // Work that is slow but not stuck ends now, and writes nothing more.
                self.set();
                let _ = receiver.recv_timeout(STOP_WAIT);
                bail!(
                    "cannot {what}: not finished after {} s{oldest} (hint: use a larger --timeout \
                     if the target is slow and does not hang)",
                    limit.as_secs()
                );
            }
        }
    }
}
