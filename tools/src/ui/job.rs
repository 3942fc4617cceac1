//! Work that Ctrl-C stops and whose progress a bar shows.
//!
//! A command that writes opens its stores through [`CancellableJob`]. They check the stop signal
//! before each request. When it is set, requests fail with an ordinary error, after which every
//! upload is dropped and every file removed, as after any other error. Deletions are never refused.
//! The stores also count bytes for the bar.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use storage::{Key, Storage};

use crate::ui::output_claim::CommitMarker;
use crate::ui::progress_layer::ProgressLayer;
use crate::ui::terminal::{Gauge, ProgressLine};
use crate::ui::timeout::StopSignal;

/// Which bytes a bar counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedBytes {
    /// Those that are read.
    Read,
    /// Those that are written.
    Written,
    /// Both.
    Any,
}

/// The stop signal and the progress of some work.
#[derive(Debug)]
pub struct CancellableJob {
    stop: StopSignal,
    /// Whether a request was refused because of `stop`.
    refused: AtomicBool,
    /// Bytes read and written.
    moved_bytes: AtomicU64,
    shown: Option<Mutex<Shown>>,
    /// The store of all keys of [`CancellableJob::locate`], in place of URLs.
    store: Option<Arc<dyn Storage>>,
    /// Markers that are created before outputs become visible.
    commits: Mutex<Vec<CommitMarker>>,
}

#[derive(Debug)]
struct Shown {
    line: ProgressLine,
    now: Option<(CountedBytes, Gauge)>,
    done_bytes: u64,
}

impl CancellableJob {
    /// Work that SIGINT and SIGTERM stop: the first signal by errors of its stores, the second at
    /// once.
    ///
    /// # Errors
    /// If signal handlers cannot be installed.
    pub fn at_signals() -> Result<Arc<Self>> {
        Ok(CancellableJob::new(StopSignal::at_signals()?, None))
    }

    /// Work that only reads: signals keep their default action.
    #[must_use]
    pub fn of_reading() -> Arc<Self> {
        CancellableJob::new(StopSignal::default(), None)
    }

    /// Work that fails with an error of its stores when `stop` is set, and shows no bar.
    #[must_use]
    pub fn until(stop: StopSignal) -> Arc<Self> {
        CancellableJob::with(stop, None, None)
    }

    /// Work in a store that has no URL: [`CancellableJob::locate`] takes keys of it.
    #[must_use]
    pub fn in_store(store: Arc<dyn Storage>) -> Arc<Self> {
        CancellableJob::new(StopSignal::default(), Some(store))
    }

    fn new(stop: StopSignal, store: Option<Arc<dyn Storage>>) -> Arc<Self> {
        let line = ProgressLine::new();
        CancellableJob::with(stop, store, line.is_terminal().then_some(line))
    }

    fn with(
        stop: StopSignal,
        store: Option<Arc<dyn Storage>>,
        line: Option<ProgressLine>,
    ) -> Arc<Self> {
        let shown = line.map(|line| Mutex::new(Shown { line, now: None, done_bytes: 0 }));
        let (refused, moved_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
        let commits = Mutex::default();
        Arc::new(CancellableJob { stop, refused, moved_bytes, shown, store, commits })
    }

    /// Bytes read and written so far.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }

    /// As [`storage::open_url`], with the store watched.
    ///
    /// # Errors
    /// As there.
    pub fn open_url(self: &Arc<Self>, url: &str) -> storage::Result<Arc<dyn Storage>> {
        Ok(self.watch(storage::open_url(url)?))
    }

    /// As [`storage::locate`], with the store watched.
    ///
    /// # Errors
    /// As there.
    pub fn locate(self: &Arc<Self>, url: &str) -> storage::Result<(Arc<dyn Storage>, Key)> {
        let (store, key) = match &self.store {
            Some(store) => (Arc::clone(store), Key::new(url)?),
            None => storage::locate(url)?,
        };
        Ok((self.watch(store), key))
    }

    /// The same store, watched.
    #[must_use]
    pub fn watch(self: &Arc<Self>, inner: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Arc::new(ProgressLayer::new(inner, self))
    }

    /// Registers markers: each is created before the first of its outputs becomes visible.
    pub(super) fn before_outputs(&self, commits: Vec<CommitMarker>) {
        *self.commits.lock().unwrap_or_else(PoisonError::into_inner) = commits;
    }

    /// Called before the upload of this key becomes visible.
    pub(super) fn begin_finish(&self, key: &Key) -> storage::Result<()> {
        let commit = {
            let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
            let place = commits.iter().position(|commit| commit.is_of(key));
            place.map(|place| commits.swap_remove(place))
        };
        // The lock is released first: the marker is an upload of this job too.
        commit.map_or(Ok(()), CommitMarker::create)
    }

    /// Checks the stop signal, for work without requests.
    ///
    /// # Errors
    /// [`storage::Error::Interrupted`] if it is set.
    pub fn check(&self) -> storage::Result<()> {
        if self.stop.is_set() {
            self.refused.store(true, Ordering::Relaxed);
            return Err(storage::Error::Interrupted);
        }
        Ok(())
    }

    /// Starts a stage of `total_bytes`. Without a total, the line has no bar.
    pub fn begin(&self, what: impl Into<String>, way: CountedBytes, total_bytes: Option<u64>) {
        let Some(shown) = &self.shown else { return };
        let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gauge = Gauge::new(what, total_bytes);
        gauge.at(&mut shown.line, 0);
        (shown.now, shown.done_bytes) = (Some((way, gauge)), 0);
    }

    /// Records that bytes were read or written.
    pub fn moved(&self, which: CountedBytes, bytes: u64) {
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
        let Some(shown) = &self.shown else { return };
        let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
        let Shown { line, now, done_bytes } = &mut *shown;
        if let Some((way, gauge)) = now
            && (*way == which || *way == CountedBytes::Any)
        {
            *done_bytes += bytes;
            gauge.at(line, *done_bytes);
        }
    }

    /// Removes the bar, and returns the result. An error after a refused request is reported as an
    /// interruption.
    ///
    /// # Errors
    /// The error of `result`.
    pub fn end<T>(&self, result: Result<T>) -> Result<T> {
        if let Some(shown) = &self.shown {
            let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
            shown.now = None;
            shown.line.clear();
        }
        let is_interrupted = self.refused.load(Ordering::Relaxed);
        result.map_err(|error| if is_interrupted { error.context("interrupted") } else { error })
    }
}
