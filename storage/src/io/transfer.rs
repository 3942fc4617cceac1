//! One positioned transfer, and how a completion advances it. Both engines, and the fault-injection
//! disk, run their requests as [`Transfer`]s, so that short transfers, interruptions and ends of
//! files are handled in one place.

use std::{fmt, io, thread, time::Duration};

use crate::{Error, RangeRead};

/// Requests are cut into pieces of this size. 1 MiB is past the knee of every known device, and 64
/// pieces in flight carry 7 GB/s up to 9.5 ms of latency.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Consecutive interrupted or postponed calls before a transfer fails: with [`BACKOFF`] that is 64
/// ms of `EAGAIN`, which no healthy file system returns.
const RETRIES_MAX: u32 = 32;

/// The pause before a postponed call is retried.
const BACKOFF: Duration = Duration::from_millis(2);

/// The destination or source of the bytes.
#[derive(Debug)]
pub(crate) enum TransferBuffer<'a> {
    /// Read into here.
    Into(&'a mut [u8]),
    /// Write from here.
    From(&'a [u8]),
}

/// One transfer of at most [`PIECE_BYTES`].
#[derive(Debug)]
pub(crate) struct Transfer<'a> {
    span: TransferBuffer<'a>,
    offset: u64,
    progress: TransferProgress,
}

/// The progress of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferProgress {
    /// Bytes that must be transferred. Fewer than requested only where direct I/O rounds past the
    /// end.
    expected: usize,
    /// A resumed transfer starts at a multiple of this.
    align: usize,
    done: usize,
    retries: u32,
}

/// What to do with a transfer after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// All expected bytes are transferred.
    Done,
    /// Submit the rest.
    Again,
}

/// Why a transfer stopped, and where.
#[derive(Debug)]
pub(crate) struct TransferError {
    pub(crate) offset: u64,
    pub(crate) expected: usize,
    pub(crate) found: usize,
    pub(crate) cause: TransferErrorKind,
}

#[derive(Debug)]
pub(crate) enum TransferErrorKind {
    Io(io::Error),
    /// The file ended: it was truncated, or replaced, after it was opened.
    End,
}

impl<'a> Transfer<'a> {
    pub(crate) fn read(offset: u64, buf: &'a mut [u8]) -> Self {
        let progress = TransferProgress::new(buf.len(), 1);
        Transfer { span: TransferBuffer::Into(buf), offset, progress }
    }

    pub(crate) fn write(offset: u64, bytes: &'a [u8]) -> Self {
        let progress = TransferProgress::new(bytes.len(), 1);
        Transfer { span: TransferBuffer::From(bytes), offset, progress }
    }

    /// Resumes at multiples of `align` only, and needs only `needed` bytes.
    pub(crate) fn direct(mut self, align: usize, needed: usize) -> Self {
        self.progress = TransferProgress::new(needed.min(self.progress.expected), align);
        self
    }

    /// Cuts reads into pieces.
    pub(crate) fn of_reads<'r: 'a>(reads: &'a mut [RangeRead<'r>]) -> Vec<Self> {
        let pieces = reads.iter_mut().flat_map(|read| {
            let first = read.offset;
            let chunks = read.buf.chunks_mut(PIECE_BYTES).enumerate();
            chunks.map(move |(i, buf)| Transfer::read(first + (i * PIECE_BYTES) as u64, buf))
        });
        pieces.collect()
    }

    /// Cuts one write into pieces.
    pub(crate) fn of_write(offset: u64, bytes: &'a [u8], align: usize) -> Vec<Self> {
        let chunks = bytes.chunks(PIECE_BYTES).enumerate();
        let piece = |(i, chunk): (usize, &'a [u8])| {
            Transfer::write(offset + (i * PIECE_BYTES) as u64, chunk)
        };
        let aligned = |piece: Self| {
            let expected = piece.progress.expected;
            piece.direct(align, expected)
        };
        chunks.map(piece).map(aligned).collect()
    }

    /// The rest to transfer: the file offset and the memory.
    pub(crate) fn rest(&mut self) -> (u64, TransferBuffer<'_>) {
        let done = self.progress.done;
        let offset = self.offset + done as u64;
        match &mut self.span {
            TransferBuffer::Into(buf) => (offset, TransferBuffer::Into(&mut buf[done..])),
            TransferBuffer::From(bytes) => (offset, TransferBuffer::From(&bytes[done..])),
        }
    }

    /// Restarts from the first byte, after an engine failed.
    pub(crate) fn reset(&mut self) {
        self.progress = TransferProgress::new(self.progress.expected, self.progress.align);
    }

    /// Processes a completion.
    ///
    /// # Errors
    /// The end of the file, exhausted retries, or the error of the system.
    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> Result<NextStep, TransferError> {
        self.progress.advance(result).map_err(|cause| {
            let cause = match (&self.span, cause) {
                // Only a read can hit the end of a file.
                (TransferBuffer::From(_), TransferErrorKind::End) => {
                    TransferErrorKind::Io(io::ErrorKind::WriteZero.into())
                }
                (_, cause) => cause,
            };
            let TransferProgress { expected, done, .. } = self.progress;
            TransferError { offset: self.offset, expected, found: done.min(expected), cause }
        })
    }
}

impl TransferProgress {
    pub(crate) fn new(expected: usize, align: usize) -> Self {
        TransferProgress { expected, align, done: 0, retries: 0 }
    }

    /// Bytes transferred, from the start. The rest starts here.
    pub(crate) fn done(&self) -> usize {
        self.done
    }

    /// Processes a completion.
    ///
    /// # Errors
    /// The end of the file, exhausted retries, or the error of the system.
    pub(crate) fn advance(
        &mut self,
        result: io::Result<usize>,
    ) -> Result<NextStep, TransferErrorKind> {
        match result {
            Ok(0) if self.done < self.expected => Err(TransferErrorKind::End),
            Ok(count) => {
                let done = self.done + count;
                if done >= self.expected {
                    self.done = done;
                    return Ok(NextStep::Done);
                }
                // Direct IO refuses an unaligned rest: resume at the last aligned byte. If that
                // repeatedly makes no progress, the file is truncated.
                let resumed = done / self.align * self.align;
                if resumed > self.done {
                    (self.done, self.retries) = (resumed, 0);
                    return Ok(NextStep::Again);
                }
                if self.may_retry() {
                    return Ok(NextStep::Again);
                }
                self.done = done;
                Err(TransferErrorKind::End)
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => self.retry(&e),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                thread::sleep(BACKOFF);
                self.retry(&e)
            }
            Err(e) => Err(TransferErrorKind::Io(e)),
        }
    }

    fn may_retry(&mut self) -> bool {
        self.retries += 1;
        self.retries <= RETRIES_MAX
    }

    fn retry(&mut self, last: &io::Error) -> Result<NextStep, TransferErrorKind> {
        if self.may_retry() {
            return Ok(NextStep::Again);
        }
        let text = format!("{last}, after {RETRIES_MAX} retries");
        Err(TransferErrorKind::Io(io::Error::new(last.kind(), text)))
    }
}

impl TransferError {
    pub(crate) fn errno(&self) -> Option<i32> {
        match &self.cause {
            TransferErrorKind::Io(e) => e.raw_os_error(),
            TransferErrorKind::End => None,
        }
    }

    /// The error of the system.
    pub(crate) fn into_io(self) -> io::Error {
        match self.cause {
            TransferErrorKind::Io(e) => e,
            TransferErrorKind::End => io::ErrorKind::WriteZero.into(),
        }
    }

    /// The error of a failed read of `object`, which had `len_bytes` when it was opened.
    pub(crate) fn of_read(self, object: &str, len_bytes: u64) -> Error {
        let TransferError { offset, expected, found, cause } = self;
        let object = object.to_owned();
        match cause {
            TransferErrorKind::End => Error::ShortRead {
                object,
                offset,
                found: found as u64,
                expected: expected as u64,
                len_bytes,
            },
            TransferErrorKind::Io(source) => {
                let operation = format!("read {expected} bytes at byte {offset} of");
                Error::from_io(operation, object, source)
            }
        }
    }
}

impl fmt::Display for TransferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            TransferErrorKind::Io(e) => e.fmt(f),
            TransferErrorKind::End => f.write_str("end of file"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errno(number: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(number))
    }

    #[test]
    fn resumes_short_transfers() {
        let mut buf = [0; 100];
        let mut piece = Transfer::read(7, &mut buf);
        assert_eq!(piece.advance(Ok(30)).unwrap(), NextStep::Again);
        let (offset, TransferBuffer::Into(rest)) = piece.rest() else { panic!("a read") };
        assert_eq!((offset, rest.len()), (37, 70));
        assert_eq!(piece.advance(Ok(70)).unwrap(), NextStep::Done);
    }

    #[test]
    fn direct_resumes_where_it_is_aligned_and_may_end_early() {
        let mut buf = [0; 2048];
        let mut piece = Transfer::read(4096, &mut buf).direct(512, 1500);
        assert_eq!(piece.advance(Ok(1400)).unwrap(), NextStep::Again);
        assert_eq!(piece.rest().0, 4096 + 1024);
        assert_eq!(piece.advance(Ok(476)).unwrap(), NextStep::Done);

        let mut piece = Transfer::read(0, &mut buf).direct(512, 2048);
        let stuck = (0..=RETRIES_MAX).find_map(|_| piece.advance(Ok(100)).err()).unwrap();
        assert!(
            matches!(stuck, TransferError { found: 100, cause: TransferErrorKind::End, .. }),
            "{stuck:?}"
        );
    }

    #[test]
    fn interruptions_are_bounded_and_end_of_file_is_reported() {
        let mut buf = [0; 10];
        let mut piece = Transfer::read(5, &mut buf);
        assert_eq!(piece.advance(errno(libc::EINTR)).unwrap(), NextStep::Again);
        assert_eq!(piece.advance(errno(libc::EAGAIN)).unwrap(), NextStep::Again);
        assert_eq!(piece.advance(Ok(4)).unwrap(), NextStep::Again);
        let error = piece.advance(Ok(0)).unwrap_err().of_read("a.bin", 15).to_string();
        let expected = "cannot read a.bin: expected 10 bytes at byte 5, found end of file after 4 \
                        bytes (object has 15 bytes)";
        assert_eq!(error, expected);

        piece.reset();
        let exhausted = (0..=RETRIES_MAX).find_map(|_| piece.advance(errno(libc::EINTR)).err());
        assert!(exhausted.unwrap().to_string().contains("after 32 retries"));
        piece.reset();
        let stale = piece.advance(errno(libc::ESTALE)).unwrap_err().of_read("a.bin", 15);
        assert!(matches!(stale, Error::Stale { .. }), "{stale:?}");
        let failed = Transfer::write(0, &[1]).advance(errno(libc::EIO)).unwrap_err();
        assert_eq!(failed.errno(), Some(libc::EIO));
    }
}
