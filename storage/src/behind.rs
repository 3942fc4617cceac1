//! Write-behind: one thread writes a full buffer while the caller fills the other.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::{io, mem};

use crate::Crc64;
use crate::Read;
use crate::buf::{ALIGN_BYTES, BUF_BYTES, Buf};
use crate::disk::DiskFile;
use crate::piece::{Cause, Failure};

/// Bytes are summed while they are still in the cache that the copy left them in.
const COPY_BYTES: usize = 256 << 10;

/// A file written in whole aligned buffers, from its start or from where another left off. Two are
/// in use: with one being filled at 10 GB/s and one on its way, the device never waits for the
/// copy.
#[derive(Debug)]
pub(crate) struct WriteBehind {
    file: Arc<dyn DiskFile>,
    filling: Buf,
    filled: usize,
    /// Where in the file `filling` begins.
    offset: u64,
    /// The other buffer, until it is first needed.
    spare: Option<Buf>,
    to_writer: Option<Sender<(u64, Buf, usize)>>,
    from_writer: Receiver<Result<Buf, Failure>>,
    writer: Option<JoinHandle<()>>,
}

impl WriteBehind {
    pub(crate) fn start(file: Arc<dyn DiskFile>) -> io::Result<Self> {
        let (to_writer, work) = channel::<(u64, Buf, usize)>();
        let (answers, from_writer) = channel();
        let ours = Arc::clone(&file);
        let run = move || {
            for (offset, buf, len) in work {
                let outcome = file.write(offset, &buf[..len]);
                // Nobody listens if the upload was dropped; then nothing more is sent either.
                if answers.send(outcome.map(|()| buf)).is_err() {
                    return;
                }
            }
        };
        let writer = thread::Builder::new().name("storage-write".to_owned()).spawn(run)?;
        Ok(WriteBehind {
            file: ours,
            filling: Buf::take(),
            filled: 0,
            offset: 0,
            spare: Some(Buf::take()),
            to_writer: Some(to_writer),
            from_writer,
            writer: Some(writer),
        })
    }

    /// The same from the length that a file has been cut to. The last block is taken back into
    /// memory, for only whole ones are written.
    pub(crate) fn resume(file: &Arc<dyn DiskFile>, len_bytes: u64) -> Result<Self, Failure> {
        let failed = |e| Failure { offset: len_bytes, due: 0, got: 0, cause: Cause::Io(e) };
        let mut behind = Self::start(Arc::clone(file)).map_err(failed)?;
        behind.filled = (len_bytes % ALIGN_BYTES as u64) as usize; // fits: below a block
        behind.offset = len_bytes - behind.filled as u64;
        if behind.filled > 0 {
            let buf = &mut behind.filling[..behind.filled];
            file.read_many(&mut [Read { offset: behind.offset, buf }])?;
        }
        Ok(behind)
    }

    /// Writes all that has been pushed, the last block padded with zeros, and goes on from there.
    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        if self.spare.is_none() {
            self.spare = Some(self.from_writer.recv().map_err(|_| self.gone())??);
        }
        let whole = self.filled.next_multiple_of(ALIGN_BYTES);
        self.filling[self.filled..whole].fill(0);
        if whole == 0 { Ok(()) } else { self.file.write(self.offset, &self.filling[..whole]) }
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
        let offset = self.offset;
        self.offset += len as u64;
        to_writer.send((offset, full, len)).map_err(|_| self.gone())
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
