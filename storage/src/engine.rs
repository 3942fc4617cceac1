//! Which engine carries a batch: the ring while it may, `pread` else.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Engine;
use crate::piece::{Failure, Piece};
use crate::pread;
use crate::ring::{self, Start, Stop};

/// The engine of one store.
#[derive(Debug)]
pub(crate) struct Mover {
    /// Turned off for good when the kernel refuses a ring or a request; never for an error of data.
    ring: AtomicBool,
    start: Start,
    threads_max: usize,
}

impl Mover {
    pub(crate) fn new(engine: Engine, start: Start, threads_max: usize) -> Self {
        Mover { ring: AtomicBool::new(engine == Engine::Ring), start, threads_max }
    }

    /// Carries out all pieces on one file. Nothing is in flight when it returns.
    pub(crate) fn transfer(&self, file: &File, pieces: &mut [Piece<'_>]) -> Result<(), Failure> {
        // A ring cannot beat one system call with one system call.
        if pieces.len() > 1 && self.ring.load(Ordering::Relaxed) {
            match ring::transfer(file, pieces, self.start) {
                Ok(()) => return Ok(()),
                Err(Stop::Failed(failure)) => return Err(failure),
                Err(Stop::Busy) => {}
                Err(Stop::Refused(why)) => {
                    if self.ring.swap(false, Ordering::Relaxed) {
                        log::warn!("engine pread from now on, because io_uring: {why}");
                    }
                }
            }
            // Reads and writes at offsets give the same when they are done again.
            pieces.iter_mut().for_each(Piece::reset);
        }
        pread::transfer(file, pieces, self.threads_max)
    }
}
