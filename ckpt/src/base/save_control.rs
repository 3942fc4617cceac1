use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{Error, Result};

/// Progress and cancellation of a save, shared by the thread that writes and its observers. For one
/// save.
#[derive(Debug, Default)]
pub struct SaveControl {
    bytes: Arc<AtomicU64>,
    cancelled: AtomicBool,
    aborted: AtomicBool,
}

impl SaveControl {
    /// Counts bytes in the caller's counter.
    pub(crate) fn counting(bytes: Arc<AtomicU64>) -> Self {
        SaveControl { bytes, ..SaveControl::default() }
    }

    /// Adds to the bytes written.
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the save was cancelled or aborted.
    pub(crate) fn wrote(&self, bytes: u64) -> Result<()> {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.check()
    }

    /// Fails if the save was cancelled or aborted.
    pub(crate) fn check(&self) -> Result<()> {
        let ends = self.is_cancelled() || self.aborted.load(Ordering::Relaxed);
        if ends { Err(Error::Cancelled) } else { Ok(()) }
    }

    /// Marks the joint save that this is part of as aborted.
    pub(crate) fn mark_aborted(&self) {
        self.aborted.store(true, Ordering::Relaxed);
    }

    /// Cancels the save, for all of its writers: it ends with [`Error::Cancelled`] and leaves
    /// nothing, unless it is committed by then.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Bytes written so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Sets the count, to that of another process or to bytes that were there before.
    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}
