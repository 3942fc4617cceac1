//! Work that may hang, watched by a thread that does not: whoever waits in a dead mount cannot be
//! asked to stop, but he can be left behind.

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

/// How often the watcher looks at the flag.
const LOOK: Duration = Duration::from_millis(50);

/// What work has to come to its end when it is told to stop: a save that is under way is finished.
const STOP_WAIT: Duration = Duration::from_secs(20);

/// Signals that come together are one: `timeout` sends to the process and then to its group, and so
/// do launchers of jobs. No hand is so quick.
const SAME_SIGNAL: Duration = Duration::from_millis(100);

/// The whole seconds of a time such as `60s` or `5min`; a bare number is seconds.
pub(crate) fn timeout_seconds(text: &str) -> Result<u64, String> {
    text.parse().or_else(|_| {
        let TimeSpan(time) = text.parse()?;
        let is_whole = time.subsec_nanos() == 0;
        is_whole.then_some(time.as_secs()).ok_or_else(|| format!("expected seconds, found {text}"))
    })
}

/// Whether all is to stop: by a signal, or because another process has failed.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(pub Arc<AtomicBool>);

impl StopSignal {
    /// One that SIGINT and SIGTERM set; a later one ends the process as it would have without us.
    ///
    /// # Errors
    /// If the system takes no handlers.
    pub fn at_signals() -> Result<Self> {
        let (stop, mut signals) = (StopSignal::default(), Signals::new([SIGINT, SIGTERM])?);
        let told = stop.clone();
        let listen = move || {
            let mut first = None;
            for signal in signals.forever() {
                told.set();
                if first.get_or_insert_with(Instant::now).elapsed() > SAME_SIGNAL {
                    let _ = emulate_default_handler(signal); // what it cannot end, ends by the flag
                }
            }
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(listen)
            .context("start a thread")?;
        Ok(stop)
    }

    /// Whether it is.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Says so to all.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// For loops.
    ///
    /// # Errors
    /// If it is time to stop.
    pub fn check(&self) -> Result<()> {
        if self.is_set() {
            bail!("interrupted");
        }
        Ok(())
    }

    /// Does the work on a thread of its own, and gives what it gives.
    ///
    /// # Errors
    /// What the work says; that it was told to stop; or that the limit is past, with the oldest
    /// read that hangs. The thread is then left to its wait.
    pub fn guard<T: Send + 'static>(
        &self,
        what: &str,
        limit: Duration,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = sync_channel(1);
        let act = move || drop(answer.send(work()));
        thread::Builder::new().name("bench".to_owned()).spawn(act).context("start a thread")?;
        let until = Instant::now() + limit;
        loop {
            match answered.recv_timeout(LOOK) {
                Ok(given) => return given.with_context(|| what.to_owned()),
                Err(RecvTimeoutError::Disconnected) => bail!("{what}: the work broke off"),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.is_set() {
                return answered.recv_timeout(STOP_WAIT).unwrap_or_else(|_| bail!("interrupted"));
            }
            if Instant::now() > until {
                let story =
                    StuckReads::describe().map(|story| format!(" ({story})")).unwrap_or_default();
                // What is only slow ends now, and writes nothing more.
                self.set();
                let _ = answered.recv_timeout(STOP_WAIT);
                bail!(
                    "{what}: no end after {} s{story}; hint: the target hangs, or is too slow for \
                     --timeout",
                    limit.as_secs()
                );
            }
        }
    }
}
