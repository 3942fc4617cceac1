//! Positioned reads and writes by `pread` and `pwrite`: the contract of `uring_batch`, on any
//! kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::{io, thread};

use crate::io::transfer::{NextStep, Transfer, TransferBuffer, TransferError};
use crate::sys::syscalls;

/// Threads that share one batch of reads that wait for a device. Eight keep a network file system
/// busy; each costs about 30 us to start, so there is one for every eight transfers only.
pub(crate) const THREADS_MAX: usize = 8;

const PIECES_PER_THREAD: usize = 8;

/// A file with positioned reads and writes.
pub(crate) trait PositionedIo: Sync {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Reads cached pages only, and fails if there are none or the kernel does not support this.
    fn read_cached_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
}

impl PositionedIo for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, buf, offset)
    }

    fn read_cached_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        syscalls::read_cached_at(self, buf, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }
}

/// Completes all transfers, or fails with the first that did.
pub(crate) fn transfer(
    file: &dyn PositionedIo,
    pieces: &mut [Transfer<'_>],
    threads_max: usize,
) -> Result<(), TransferError> {
    let threads = |pieces: usize| threads_max.min(pieces / PIECES_PER_THREAD);
    if threads(pieces.len()) < 2 {
        return pieces.iter_mut().try_for_each(|piece| run_transfer(file, piece));
    }
    // Copying from the page cache takes less time than starting a thread.
    let mut uncached = Vec::with_capacity(pieces.len());
    for piece in pieces {
        if !run_from_cache(file, piece)? {
            uncached.push(piece);
        }
    }
    let threads = threads(uncached.len()).max(1);
    share(&mut uncached, threads, || (), |(), piece| run_transfer(file, piece))
}

/// Runs `work` on every item, with this many threads, the caller among them, each with its own
/// `tool`. Returns the first failure; items not started by then are skipped.
pub(crate) fn share<T: Send, Tool>(
    items: &mut [T],
    threads: usize,
    tool: impl Fn() -> Tool + Sync,
    work: impl Fn(&mut Tool, &mut T) -> Result<(), TransferError> + Sync,
) -> Result<(), TransferError> {
    let queue = Mutex::new(items.iter_mut());
    let take = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = || {
        let mut tool = tool();
        while let Some(item) = take() {
            if let Err(failure) = work(&mut tool, item) {
                while take().is_some() {}
                return Err(failure);
            }
        }
        Ok(())
    };
    if threads < 2 {
        return run();
    }
    thread::scope(|scope| {
        // If the system creates no more threads, the existing ones do all the work.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, run).ok();
        let helpers: Vec<_> = (1..threads).filter_map(spawn).collect();
        let mut outcome = run();
        for helper in helpers {
            let other = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            outcome = outcome.and(other);
        }
        outcome
    })
}

fn run_transfer(file: &dyn PositionedIo, piece: &mut Transfer<'_>) -> Result<(), TransferError> {
    loop {
        let result = match piece.rest() {
            (offset, TransferBuffer::Into(buf)) => file.read_at(buf, offset),
            (offset, TransferBuffer::From(bytes)) => file.write_at(bytes, offset),
        };
        if piece.advance(result)? == NextStep::Done {
            return Ok(());
        }
    }
}

/// Whether the transfer is complete. Otherwise it has advanced as far as the cache had pages.
fn run_from_cache(
    file: &dyn PositionedIo,
    piece: &mut Transfer<'_>,
) -> Result<bool, TransferError> {
    loop {
        let (offset, TransferBuffer::Into(buf)) = piece.rest() else { return Ok(false) };
        match file.read_cached_at(buf, offset) {
            Ok(count) if piece.advance(Ok(count))? == NextStep::Done => return Ok(true),
            Ok(_) => {}
            Err(_) => return Ok(false),
        }
    }
}
