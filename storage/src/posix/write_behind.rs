//! Write-behind: threads write full buffers while the caller fills the next one.

use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::{io, mem};

use crate::Crc64;
use crate::RangeRead;
use crate::fs::filesystem::FsFile;
use crate::io::transfer::{TransferError, TransferErrorKind};
use crate::sys::aligned_buffer::{ALIGN_BYTES, AlignedBuffer, BUF_BYTES};

/// Bytes are summed while they are still in the cache that the copy left them in.
const COPY_BYTES: usize = 256 << 10;

/// Buffers of a file: one that fills, and one on its way, at least. With eight, 64 MiB, a caller
/// that copies 10 GB/s is kept busy through a device's pause of 6 ms, and a device of 7 GB/s
/// through a caller's of 8 ms; more is only more memory to touch.
pub(crate) const BUFFERS_MIN: usize = 2;
pub(crate) const BUFFERS_MAX: usize = 8;

/// A full buffer: where it goes, and how much of it.
type FullBuffer = (u64, AlignedBuffer, usize);

/// A file written in whole aligned buffers, from its start or from where another left off.
#[derive(Debug)]
pub(crate) struct WriteBehind {
    file: Arc<dyn FsFile>,
    filling: AlignedBuffer,
    filled: usize,
    /// Where in the file `filling` begins.
    offset: u64,
    /// Buffers that came back and wait to be filled.
    spare: Vec<AlignedBuffer>,
    /// Buffers in all, and the most that there may be.
    buffers: usize,
    buffers_max: usize,
    /// Buffers on their way.
    flying: usize,
    to_writers: Option<Sender<FullBuffer>>,
    from_writers: Receiver<Result<AlignedBuffer, TransferError>>,
    writers: Vec<JoinHandle<()>>,
}

impl WriteBehind {
    pub(crate) fn start(file: Arc<dyn FsFile>, buffers_max: usize) -> io::Result<Self> {
        let (to_writers, work) = channel();
        let (answers, from_writers) = channel();
        let work = Arc::new(Mutex::new(work));
        let mut behind = WriteBehind {
            file,
            filling: AlignedBuffer::take(),
            filled: 0,
            offset: 0,
            spare: Vec::new(),
            buffers: 1,
            buffers_max: buffers_max.clamp(BUFFERS_MIN, BUFFERS_MAX),
            flying: 0,
            to_writers: Some(to_writers),
            from_writers,
            writers: Vec::new(),
        };
        for _ in 0..behind.file.writers() {
            let (file, work) = (Arc::clone(&behind.file), Arc::clone(&work));
            let answers = BufferReturn(answers.clone());
            let run = move || write_all(&*file, &work, &answers);
            let writer = thread::Builder::new().name("storage-write".to_owned()).spawn(run)?;
            behind.writers.push(writer);
        }
        Ok(behind)
    }

    /// The same from the length that a file has been cut to. The last block is taken back into
    /// memory, for only whole ones are written.
    pub(crate) fn resume(
        file: &Arc<dyn FsFile>,
        len_bytes: u64,
        buffers_max: usize,
    ) -> Result<Self, TransferError> {
        let failed = |e| TransferError {
            offset: len_bytes,
            expected: 0,
            found: 0,
            cause: TransferErrorKind::Io(e),
        };
        let mut behind = Self::start(Arc::clone(file), buffers_max).map_err(failed)?;
        behind.filled = (len_bytes % ALIGN_BYTES as u64) as usize; // fits: below a block
        behind.offset = len_bytes - behind.filled as u64;
        if behind.filled > 0 {
            let buf = &mut behind.filling[..behind.filled];
            file.read_many(&mut [RangeRead { offset: behind.offset, buf }])?;
        }
        Ok(behind)
    }

    /// Writes all that has been pushed, the last block padded with zeros, and goes on from there.
    pub(crate) fn flush(&mut self) -> Result<(), TransferError> {
        while self.flying > 0 {
            let back = self.wait()?;
            self.spare.push(back);
        }
        let whole = self.filled.next_multiple_of(ALIGN_BYTES);
        self.filling[self.filled..whole].fill(0);
        if whole == 0 { Ok(()) } else { self.file.write(self.offset, &self.filling[..whole]) }
    }

    /// Copies bytes in, sums them up, and sends off what is full.
    pub(crate) fn push(&mut self, bytes: &[u8], sum: &mut Crc64) -> Result<(), TransferError> {
        for chunk in bytes.chunks(COPY_BYTES) {
            self.copy(chunk)?;
            sum.update(chunk);
        }
        Ok(())
    }

    /// Copies bytes in, and sends off what is full.
    pub(crate) fn copy(&mut self, mut bytes: &[u8]) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BUF_BYTES - self.filled));
            self.filling[self.filled..self.filled + now.len()].copy_from_slice(now);
            self.filled += now.len();
            bytes = later;
            if self.filled == BUF_BYTES {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Writes what is left, padded with zeros to a whole block, and waits for all of it. The caller
    /// cuts the file to its length. Gives the length that it has now.
    pub(crate) fn finish(mut self) -> Result<u64, TransferError> {
        let whole = self.filled.next_multiple_of(ALIGN_BYTES);
        self.filling[self.filled..whole].fill(0);
        let end = self.offset + whole as u64;
        self.filled = whole;
        if whole > 0 {
            self.send()?;
        }
        self.to_writers = None;
        while let Ok(outcome) = self.from_writers.recv() {
            outcome?;
        }
        Ok(end)
    }

    /// Sends off the buffer that was filled, and goes on with another.
    fn send(&mut self) -> Result<(), TransferError> {
        let next = self.next()?;
        let full = mem::replace(&mut self.filling, next);
        let len = mem::take(&mut self.filled);
        let to_writers = self.to_writers.as_ref().expect("open until finished");
        let offset = self.offset;
        self.offset += len as u64;
        self.flying += 1;
        to_writers.send((offset, full, len)).map_err(|_| gone())
    }

    /// One that came back, else a new one, else the first to come back.
    fn next(&mut self) -> Result<AlignedBuffer, TransferError> {
        if let Some(spare) = self.spare.pop() {
            return Ok(spare);
        }
        match self.from_writers.try_recv() {
            Ok(outcome) => {
                self.flying -= 1;
                outcome
            }
            Err(TryRecvError::Empty) if self.buffers < self.buffers_max => {
                self.buffers += 1;
                Ok(AlignedBuffer::take())
            }
            Err(_) => self.wait(),
        }
    }

    fn wait(&mut self) -> Result<AlignedBuffer, TransferError> {
        self.flying -= 1;
        self.from_writers.recv().map_err(|_| gone())?
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.to_writers = None;
        for writer in self.writers.drain(..) {
            // A panic there has been reported by the panic hook, and by its answer to the caller.
            let _ = writer.join();
        }
    }
}

/// Where a writer gives back buffers. One that panics says so, for somebody may wait for it.
struct BufferReturn(Sender<Result<AlignedBuffer, TransferError>>);

impl Drop for BufferReturn {
    fn drop(&mut self) {
        if thread::panicking() {
            // Nobody listens if the upload was dropped.
            let _ = self.0.send(Err(gone()));
        }
    }
}

fn write_all(file: &dyn FsFile, work: &Mutex<Receiver<FullBuffer>>, answers: &BufferReturn) {
    // Whoever waits for work holds the lock meanwhile; the others are behind it in the queue.
    let take = || work.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok((offset, buf, len)) = take() {
        let outcome = file.write(offset, &buf[..len]);
        // Nobody listens if the upload was dropped; then nothing more is sent either.
        if answers.0.send(outcome.map(|()| buf)).is_err() {
            return;
        }
    }
}

fn gone() -> TransferError {
    let cause = TransferErrorKind::Io(io::Error::other("the writing thread is gone"));
    TransferError { offset: 0, expected: 0, found: 0, cause }
}
