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

/// Bytes are checksummed in pieces of this size, while the copy has them in cache.
const COPY_BYTES: usize = 256 << 10;

/// Buffers of a file: at least one being filled and one being written. With eight, 64 MiB, a caller
/// that copies 10 GB/s does not wait during a 6 ms pause of the device, and a device of 7 GB/s does
/// not idle during an 8 ms pause of the caller; more only costs memory.
pub(crate) const BUFFERS_MIN: usize = 2;
pub(crate) const BUFFERS_MAX: usize = 8;

/// A full buffer: its file offset, the buffer, and the bytes used of it.
type FullBuffer = (u64, AlignedBuffer, usize);

/// A file written in aligned blocks, from its start or from where another writer stopped.
#[derive(Debug)]
pub(crate) struct WriteBehind {
    file: Arc<dyn FsFile>,
    filling: AlignedBuffer,
    filled: usize,
    /// File offset of `filling`.
    offset: u64,
    /// Written buffers, free to be filled again.
    spare: Vec<AlignedBuffer>,
    /// Buffers in all, and their limit.
    buffers: usize,
    buffers_max: usize,
    /// Buffers handed to the writers.
    in_flight: usize,
    to_writers: Option<Sender<FullBuffer>>,
    from_writers: Receiver<Result<AlignedBuffer, TransferError>>,
    writers: Vec<JoinHandle<()>>,
}

impl WriteBehind {
    pub(crate) fn start(file: Arc<dyn FsFile>, buffers_max: usize) -> io::Result<Self> {
        let (to_writers, work) = channel();
        let (returns, from_writers) = channel();
        let work = Arc::new(Mutex::new(work));
        let mut behind = WriteBehind {
            file,
            filling: AlignedBuffer::take(),
            filled: 0,
            offset: 0,
            spare: Vec::new(),
            buffers: 1,
            buffers_max: buffers_max.clamp(BUFFERS_MIN, BUFFERS_MAX),
            in_flight: 0,
            to_writers: Some(to_writers),
            from_writers,
            writers: Vec::new(),
        };
        for _ in 0..behind.file.writers() {
            let (file, work) = (Arc::clone(&behind.file), Arc::clone(&work));
            let returns = BufferReturn(returns.clone());
            let run = move || write_all(&*file, &work, &returns);
            let writer = thread::Builder::new().name("storage-write".to_owned()).spawn(run)?;
            behind.writers.push(writer);
        }
        Ok(behind)
    }

    /// As [`Self::start`], from the length that a file was truncated to. Its last partial block is
    /// read back into memory, because only complete blocks are written.
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

    /// Waits until all pushed bytes are written, the last block padded with zeros. More can be
    /// pushed after it.
    pub(crate) fn flush(&mut self) -> Result<(), TransferError> {
        while self.in_flight > 0 {
            let written = self.wait()?;
            self.spare.push(written);
        }
        let padded_len = self.filled.next_multiple_of(ALIGN_BYTES);
        self.filling[self.filled..padded_len].fill(0);
        if padded_len == 0 {
            Ok(())
        } else {
            self.file.write(self.offset, &self.filling[..padded_len])
        }
    }

    /// Copies bytes in, updates the checksum, and sends full buffers to the writers.
    pub(crate) fn push(&mut self, bytes: &[u8], crc: &mut Crc64) -> Result<(), TransferError> {
        for chunk in bytes.chunks(COPY_BYTES) {
            self.copy(chunk)?;
            crc.update(chunk);
        }
        Ok(())
    }

    /// Copies bytes in, and sends full buffers to the writers.
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

    /// Writes the rest, padded with zeros to a complete block, and waits for all writes. Returns
    /// the padded length; the caller truncates the file.
    pub(crate) fn finish(mut self) -> Result<u64, TransferError> {
        let padded_len = self.filled.next_multiple_of(ALIGN_BYTES);
        self.filling[self.filled..padded_len].fill(0);
        let end = self.offset + padded_len as u64;
        self.filled = padded_len;
        if padded_len > 0 {
            self.send()?;
        }
        self.to_writers = None;
        while let Ok(outcome) = self.from_writers.recv() {
            outcome?;
        }
        Ok(end)
    }

    /// Sends the full buffer to the writers, and takes another.
    fn send(&mut self) -> Result<(), TransferError> {
        let next = self.next()?;
        let full = mem::replace(&mut self.filling, next);
        let len = mem::take(&mut self.filled);
        let to_writers = self.to_writers.as_ref().expect("open until finished");
        let offset = self.offset;
        self.offset += len as u64;
        self.in_flight += 1;
        to_writers.send((offset, full, len)).map_err(|_| writer_ended())
    }

    /// A free buffer, else a new one, else the next one that a writer returns.
    fn next(&mut self) -> Result<AlignedBuffer, TransferError> {
        if let Some(spare) = self.spare.pop() {
            return Ok(spare);
        }
        match self.from_writers.try_recv() {
            Ok(outcome) => {
                self.in_flight -= 1;
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
        self.in_flight -= 1;
        self.from_writers.recv().map_err(|_| writer_ended())?
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.to_writers = None;
        for writer in self.writers.drain(..) {
            // The panic hook has reported a panic of the thread, and the caller has received an
            // error.
            let _ = writer.join();
        }
    }
}

/// Returns buffers from a writer. A writer that panics sends an error, because the caller may be
/// waiting.
struct BufferReturn(Sender<Result<AlignedBuffer, TransferError>>);

impl Drop for BufferReturn {
    fn drop(&mut self) {
        if thread::panicking() {
            // The receiver is closed if the upload was dropped.
            let _ = self.0.send(Err(writer_ended()));
        }
    }
}

fn write_all(file: &dyn FsFile, work: &Mutex<Receiver<FullBuffer>>, returns: &BufferReturn) {
    // The writer that waits for work holds the lock; the others queue on the lock.
    let take = || work.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok((offset, buf, len)) = take() {
        let outcome = file.write(offset, &buf[..len]);
        // The receiver is closed if the upload was dropped; then no more work is sent either.
        if returns.0.send(outcome.map(|()| buf)).is_err() {
            return;
        }
    }
}

fn writer_ended() -> TransferError {
    let cause =
        TransferErrorKind::Io(io::Error::other("cannot reach the writer thread: it has ended"));
    TransferError { offset: 0, expected: 0, found: 0, cause }
}
