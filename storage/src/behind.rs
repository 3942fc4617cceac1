//! Write-behind: one thread writes a full buffer while the caller fills the other.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::{io, mem};

use crate::Crc64;
use crate::buf::{ALIGN_BYTES, BUF_BYTES, Buf};
use crate::disk::DiskFile;
use crate::piece::{Cause, Failure};

/// Bytes are summed while they are still in the cache that the copy left them in.
const COPY_BYTES: usize = 256 << 10;

/// A file written from its start, in whole aligned buffers. Two are in use: with one being filled
/// at
/// 10 GB/s and one on its way, the device never waits for the copy.
#[derive(Debug)]
pub(crate) struct WriteBehind {
    filling: Buf,
    filled: usize,
    /// The other buffer, until it is first needed.
    spare: Option<Buf>,
    to_writer: Option<Sender<(Buf, usize)>>,
    from_writer: Receiver<Result<Buf, Failure>>,
    writer: Option<JoinHandle<()>>,
}

impl WriteBehind {
    pub(crate) fn start(file: Arc<dyn DiskFile>) -> io::Result<Self> {
        let (to_writer, work) = channel::<(Buf, usize)>();
        let (answers, from_writer) = channel();
        let run = move || {
            let mut offset = 0;
            for (buf, len) in work {
                let outcome = file.write(offset, &buf[..len]);
                offset += len as u64;
                // Nobody listens if the upload was dropped; then nothing more is sent either.
                if answers.send(outcome.map(|()| buf)).is_err() {
                    return;
                }
            }
        };
        let writer = thread::Builder::new().name("storage-write".to_owned()).spawn(run)?;
        Ok(WriteBehind {
            filling: Buf::take(),
            filled: 0,
            spare: Some(Buf::take()),
            to_writer: Some(to_writer),
            from_writer,
            writer: Some(writer),
        })
    }

    /// Copies bytes in, sums them up, and sends off what is full.
    pub(crate) fn push(&mut self, bytes: &[u8], sum: &mut Crc64) -> Result<(), Failure> {
        for chunk in bytes.chunks(COPY_BYTES) {
            let mut rest = chunk;
            while !rest.is_empty() {
                let count = rest.len().min(BUF_BYTES - self.filled);
                let (now, later) = rest.split_at(count);
                self.filling[self.filled..self.filled + count].copy_from_slice(now);
                self.filled += count;
                rest = later;
                if self.filled == BUF_BYTES {
                    self.send()?;
                }
            }
            sum.update(chunk);
        }
        Ok(())
    }

    /// Writes what is left, padded with zeros to a whole block, and waits for all of it. The caller
    /// cuts the file to its length.
    pub(crate) fn finish(mut self) -> Result<(), Failure> {
        let whole = self.filled.next_multiple_of(ALIGN_BYTES);
        self.filling[self.filled..whole].fill(0);
        self.filled = whole;
        if whole > 0 {
            self.send()?;
        }
        self.to_writer = None;
        while let Ok(outcome) = self.from_writer.recv() {
            outcome?;
        }
        // A writer that panicked has answered nothing for the buffer it held.
        let ended = self.writer.take().map(JoinHandle::join);
        if ended.is_some_and(|ended| ended.is_err()) { Err(self.gone()) } else { Ok(()) }
    }

    fn send(&mut self) -> Result<(), Failure> {
        let next = match self.spare.take() {
            Some(buf) => buf,
            None => self.from_writer.recv().map_err(|_| self.gone())??,
        };
        let full = mem::replace(&mut self.filling, next);
        let len = mem::take(&mut self.filled);
        let to_writer = self.to_writer.as_ref().expect("open until finished");
        to_writer.send((full, len)).map_err(|_| self.gone())
    }

    fn gone(&self) -> Failure {
        let cause = Cause::Io(io::Error::other("the writing thread is gone"));
        Failure { offset: 0, due: self.filled, got: 0, cause }
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.to_writer = None;
        if let Some(writer) = self.writer.take() {
            // A panic there has been reported by the panic hook, and by `gone` to the caller.
            let _ = writer.join();
        }
    }
}
