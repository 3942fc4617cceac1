//! Positioned reads and writes by `pread` and `pwrite`: the same contract as `ring`, everywhere.

use std::fs::File;
use std::sync::{Mutex, PoisonError};
use std::{io, thread};

use crate::piece::{Failure, Piece, Span, Step};

/// Threads that share one batch. Eight keep a local NVMe at two thirds of its rate and a network file
/// system busy; each costs about 30 us to start, so a thread is due for every eight pieces only.
pub(crate) const THREADS_MAX: usize = 8;

const PIECES_PER_THREAD: usize = 8;

/// A file, as far as this engine knows one.
pub(crate) trait At: Sync {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
}

impl At for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::write_at(self, bytes, offset)
    }
}

/// Carries out all pieces, or fails with the first that did.
pub(crate) fn transfer(
    file: &dyn At,
    pieces: &mut [Piece<'_>],
    threads_max: usize,
) -> Result<(), Failure> {
    let threads = threads_max.min(pieces.len() / PIECES_PER_THREAD);
    if threads < 2 {
        return pieces.iter_mut().try_for_each(|piece| carry(file, piece));
    }
    let queue = Mutex::new(pieces.iter_mut());
    let work = || {
        loop {
            let Some(piece) = queue.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                return Ok(());
            };
            if let Err(failure) = carry(file, piece) {
                // What nobody has begun need not begin.
                queue.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                return Err(failure);
            }
        }
    };
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut outcome = work();
        for helper in helpers {
            let theirs = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(theirs);
        }
        outcome
    })
}

fn carry(file: &dyn At, piece: &mut Piece<'_>) -> Result<(), Failure> {
    loop {
        let came = match piece.rest() {
            (offset, Span::Into(buf)) => file.read_at(buf, offset),
            (offset, Span::From(bytes)) => file.write_at(bytes, offset),
        };
        if piece.advance(came)? == Step::Done {
            return Ok(());
        }
    }
}
