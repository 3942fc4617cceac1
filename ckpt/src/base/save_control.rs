use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Error, Result};

/// How far a save has come, and whether it is to end: shared by the thread that writes and those
/// that watch it.
#[derive(Debug, Default)]
pub(crate) struct SaveControl {
    bytes: Arc<AtomicU64>,
    cancelled: AtomicBool,
    given_up: AtomicBool,
}

impl SaveControl {
    /// Counts where another looks.
    pub(crate) fn counting(bytes: Arc<AtomicU64>) -> Self {
        SaveControl { bytes, ..SaveControl::default() }
    }

    /// So many more bytes went to the store.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if there shall be no more.
    pub(crate) fn wrote(&self, bytes: u64) -> Result<()> {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.check()
    }

    /// Whether to go on.
    pub(crate) fn check(&self) -> Result<()> {
        let ends = self.is_cancelled() || self.given_up.load(Ordering::Relaxed);
        if ends { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Others have given up what this is a part of.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// What another process has counted.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}
