//! Chooses the engine of a batch: the ring if possible, else `pread`.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::IoEngine;
use crate::io::pread;
use crate::io::transfer::{Transfer, TransferError};
use crate::io::uring_batch::{self, BatchError, SubmitMode};

/// The engine of one store.
#[derive(Debug)]
pub(crate) struct BatchEngine {
    /// Turned off permanently when the kernel refuses a ring or a request; never for an I/O error.
    ring: AtomicBool,
    start: SubmitMode,
    threads_max: usize,
}

impl BatchEngine {
    pub(crate) fn new(engine: IoEngine, start: SubmitMode, threads_max: usize) -> Self {
        BatchEngine { ring: AtomicBool::new(engine == IoEngine::Ring), start, threads_max }
    }

    /// Completes all transfers on one file. Nothing is in flight when it returns.
    pub(crate) fn transfer(
        &self,
        file: &File,
        pieces: &mut [Transfer<'_>],
    ) -> Result<(), TransferError> {
        // For a single transfer a ring gains nothing: it takes a system call too.
        if pieces.len() > 1 && self.ring.load(Ordering::Relaxed) {
            match uring_batch::transfer(file, pieces, self.start) {
                Ok(()) => return Ok(()),
                Err(BatchError::Failed(failure)) => return Err(failure),
                Err(BatchError::Busy) => {}
                Err(BatchError::Refused(why)) => {
                    if self.ring.swap(false, Ordering::Relaxed) {
                        log::warn!("io_uring failed; engine pread is used from now on: {why}");
                    }
                }
            }
            // Positioned reads and writes can be repeated.
            pieces.iter_mut().for_each(Transfer::reset);
        }
        pread::transfer(file, pieces, self.threads_max)
    }
}
