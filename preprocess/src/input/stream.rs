//! The bytes of one input, in order, decompressed.

use std::fs::File;
use std::io::{self, BufReader, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use storage::{ByteSize, Crc64, Object};

use super::codec::{Codec, HEAD_BYTES};
use super::decompress::{DecodedChunk, Decompressor};
use super::{Input, InputLocation, bad_input};
use crate::checksum::Checksum;
use crate::{Error, Result};

/// Requests of 1 MiB, several at a time, keep disks and parallel file systems busy.
const REQUEST_BYTES: usize = 1 << 20;

/// Size of a request where latency is high, as for an object store.
const FETCH_BYTES: usize = 8 << 20;

/// A decoder takes compressed bytes in pieces of this size.
const COMPRESSED_BYTES: usize = 1 << 20;

/// The bytes of one input.
#[derive(Debug)]
pub(super) struct InputStream {
    name: String,
    bytes: Bytes,
    pub(super) decompressed: bool,
    /// Bytes taken from the input as it is stored.
    stored: Arc<AtomicU64>,
    /// Offset of the next byte to return in the input, decompressed.
    offset: u64,
    stored_all: Option<u64>,
    expand_free_bytes: u64,
    expand_ratio_max: Option<u64>,
    /// The error that ended the input.
    failed: Option<DecodeError>,
}

/// The decoder's error, and its offset in the stored input.
#[derive(Debug)]
pub(super) struct DecodeError {
    pub(super) stored: Option<u64>,
    pub(super) source: io::Error,
}

enum Bytes {
    Object {
        object: Arc<dyn Object>,
        at: u64,
        fetched: ObjectChunk,
    },
    Stream(Box<dyn io::Read + Send>),
    /// Chunks of this input that other threads decompress.
    Ahead {
        ahead: Arc<Decompressor>,
        input_idx: usize,
        chunk: DecodedChunk,
    },
}

/// Bytes of an object from `at` on, some of which have been returned.
#[derive(Debug, Default)]
struct ObjectChunk {
    bytes: Vec<u8>,
    returned: usize,
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bytes::Object { object, .. } => object.fmt(f),
            Bytes::Stream(_) => f.write_str("Stream"),
            Bytes::Ahead { input_idx, .. } => write!(f, "Ahead({input_idx})"),
        }
    }
}

impl InputStream {
    /// Opens a stream, or an uncompressed file at a byte offset.
    ///
    /// # Errors
    /// Errors of the store or the system; [`Error::BadInput`] for a stream of an unknown format.
    pub(super) fn open(input: &Input, offset: u64) -> Result<InputStream> {
        let stored = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&stored);
        let failed = |source| at_start(&input.name, source);
        let (bytes, decompressed) = match &input.place {
            InputLocation::Object { .. } => {
                let object = input.object()?;
                if object.len_bytes() < offset {
                    let found = format!("a file of {} bytes", object.len_bytes());
                    let expected = format!("at least the {offset} bytes read before");
                    return Err(bad_input(&input.name, found, expected));
                }
                (Bytes::Object { object, at: offset, fetched: ObjectChunk::default() }, false)
            }
            InputLocation::Pipe(path) => {
                stream(input, File::open(path).map_err(failed)?, count, offset)?
            }
            InputLocation::Stdin => stream(input, io::stdin(), count, offset)?,
        };
        Ok(InputStream::new(input, bytes, decompressed, stored, offset))
    }

    /// Reads what other threads decompress, from byte `offset` on.
    pub(super) fn ahead(
        input: &Input,
        input_idx: usize,
        ahead: &Arc<Decompressor>,
        offset: u64,
    ) -> InputStream {
        let ahead = Arc::clone(ahead);
        let bytes = Bytes::Ahead { ahead, input_idx, chunk: DecodedChunk::default() };
        InputStream::new(input, bytes, true, Arc::default(), offset)
    }

    fn new(
        input: &Input,
        bytes: Bytes,
        decompressed: bool,
        stored: Arc<AtomicU64>,
        offset: u64,
    ) -> InputStream {
        InputStream {
            name: input.name.clone(),
            bytes,
            decompressed,
            stored,
            offset,
            stored_all: input.stored_bytes,
            expand_free_bytes: input.expand_free_bytes,
            expand_ratio_max: input.expand_ratio_max,
            failed: None,
        }
    }

    /// Appends up to `bytes_max` bytes. `None` at the end of the input. Bytes read before an error
    /// are returned first.
    ///
    /// # Errors
    /// [`Error::Storage`]; [`Error::Stream`] for streams and data that cannot be decompressed;
    /// [`Error::NoMemory`]; [`Error::BadInput`] for data that expands beyond its limit.
    pub(super) fn read(&mut self, buf: &mut Vec<u8>, bytes_max: usize) -> Result<Option<usize>> {
        if let Some(failed) = self.failed.take() {
            return Err(stream_error(&self.name, self.offset, failed));
        }
        let len = buf.len();
        let reserved = buf.try_reserve(bytes_max).or_else(|_| buf.try_reserve_exact(bytes_max));
        reserved.map_err(|_| Error::NoMemory {
            input: self.name.clone(),
            offset: self.offset,
            bytes: len as u64 + bytes_max as u64,
        })?;
        buf.resize(len + bytes_max, 0);
        let (read, failed) = self.fill(&mut buf[len..]);
        buf.truncate(len + read);
        self.offset += read as u64;
        self.check_expansion()?;
        match failed {
            Some(failed) if read == 0 => Err(stream_error(&self.name, self.offset, failed)),
            failed => {
                self.failed = failed;
                Ok((read > 0).then_some(read))
            }
        }
    }

    fn fill(&mut self, buf: &mut [u8]) -> (usize, Option<DecodeError>) {
        match &mut self.bytes {
            Bytes::Object { object, at, fetched } => {
                let (read, error) = match object.file() {
                    Some(_) => match read_object(object.as_ref(), at, buf) {
                        Ok(read) => (read, None),
                        Err(error) => (0, Some(error)),
                    },
                    None => fetched.read(object.as_ref(), at, buf),
                };
                self.stored.store(*at, Ordering::Relaxed);
                let failed = |error| DecodeError { stored: None, source: io::Error::other(error) };
                (read, error.map(failed))
            }
            Bytes::Stream(stream) => {
                let (read, failed) = read_stream(stream.as_mut(), buf);
                let stored = self.decompressed.then(|| self.stored.load(Ordering::Relaxed));
                (read, failed.map(|source| DecodeError { stored, source }))
            }
            Bytes::Ahead { ahead, input_idx, chunk } => {
                let mut len = 0;
                while len < buf.len() {
                    if chunk.is_empty() {
                        match ahead.next(*input_idx, std::mem::take(chunk)) {
                            Ok(Some(next)) => *chunk = next,
                            Ok(None) => break,
                            Err(failed) => return (len, Some(failed)),
                        }
                        self.stored.store(chunk.stored, Ordering::Relaxed);
                    }
                    len += chunk.take(&mut buf[len..]);
                }
                (len, None)
            }
        }
    }

    /// Limits the expansion, so that a small file cannot fill a disk.
    fn check_expansion(&self) -> Result<()> {
        if !self.decompressed || self.offset <= self.expand_free_bytes {
            return Ok(());
        }
        let Some(ratio_max) = self.expand_ratio_max else { return Ok(()) };
        let stored = self.stored_all.unwrap_or_else(|| self.stored_bytes());
        if self.offset / ratio_max.max(1) <= stored {
            return Ok(());
        }
        let (found, stored) = (ByteSize(self.offset), ByteSize(stored));
        Err(bad_input(
            &self.name,
            format!("at least {found} from {stored}"),
            format!(
                "at most {ratio_max} times the stored size beyond {}",
                ByteSize(self.expand_free_bytes)
            ),
        )
        .with_hint("raise --expand-max if it is not a decompression bomb"))
    }

    /// Stored bytes read from the input so far.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }
}

impl ObjectChunk {
    /// As [`read_object`], but bytes read before an error count.
    fn read(
        &mut self,
        object: &dyn Object,
        at: &mut u64,
        buf: &mut [u8],
    ) -> (usize, Option<storage::Error>) {
        let mut len = 0;
        while len < buf.len() {
            if self.returned == self.bytes.len() {
                self.bytes.resize(FETCH_BYTES, 0);
                let read = read_object(object, &mut at.clone(), &mut self.bytes);
                self.bytes.truncate(*read.as_ref().unwrap_or(&0));
                self.returned = 0;
                match read {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(error) => return (len, Some(error)),
                }
            }
            let count = (self.bytes.len() - self.returned).min(buf.len() - len);
            let fetched = &self.bytes[self.returned..self.returned + count];
            buf[len..len + count].copy_from_slice(fetched);
            (self.returned, len, *at) = (self.returned + count, len + count, *at + count as u64);
        }
        (len, None)
    }
}

/// Opens a stream. Its first bytes are read to detect compression. Bytes before `offset` are
/// skipped; they must be those that an earlier process has read.
fn stream(
    input: &Input,
    mut raw: impl io::Read + Send + 'static,
    count: Arc<AtomicU64>,
    offset: u64,
) -> Result<(Bytes, bool)> {
    let name = &input.name;
    let failed = |source| at_start(name, source);
    let mut head = Vec::new();
    raw.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut head).map_err(failed)?;
    let codec = Codec::detect(name, &head)?;
    if codec == Codec::Parquet {
        return Err(bad_input(name, "a stream of Parquet", super::PARQUET_FILE));
    }
    let counted = Counted { inner: io::Cursor::new(head).chain(raw), count };
    let mut bytes: Box<dyn io::Read + Send> = match codec.is_compressed() {
        true => {
            codec.decoder(BufReader::with_capacity(COMPRESSED_BYTES, counted)).map_err(failed)?
        }
        false => Box::new(counted),
    };
    let mut crc64 = ChecksumSink::default();
    let skipped = io::copy(&mut bytes.by_ref().take(offset), &mut crc64).map_err(failed)?;
    if skipped < offset {
        let found = format!("the end after {skipped} bytes");
        return Err(bad_input(name, found, format!("at least the {offset} bytes read before")));
    }
    let found = Checksum(crc64.0.value());
    if let Some(expected) = input.skipped_crc64.filter(|expected| *expected != found) {
        let words = |crc64| format!("CRC-64 {crc64} of its first {offset} bytes");
        let (expected, found) = (words(expected), words(found));
        return Err(Error::Changed { object: name.clone(), expected, found });
    }
    Ok((Bytes::Stream(bytes), codec.is_compressed()))
}

/// The first bytes of a file, decompressed, for format detection.
pub(super) fn decompressed_head(input: &Input, bytes_max: u64) -> Result<Vec<u8>> {
    let failed = |source| at_start(&input.name, source);
    let reader = BufReader::with_capacity(COMPRESSED_BYTES, ObjectRead::new(input.object()?, 0));
    let decoder = input.codec.decoder(reader).map_err(failed)?;
    let mut head = Vec::new();
    decoder.take(bytes_max).read_to_end(&mut head).map_err(failed)?;
    Ok(head)
}

/// Fills the buffer from an object, up to its end, with requests that may run in parallel.
pub(super) fn read_object(
    object: &dyn Object,
    at: &mut u64,
    buf: &mut [u8],
) -> storage::Result<usize> {
    let left = object.len_bytes().saturating_sub(*at);
    let len = left.min(buf.len() as u64) as usize; // fits: at most the buffer
    let offsets = (*at..).step_by(REQUEST_BYTES);
    let chunks = buf[..len].chunks_mut(REQUEST_BYTES);
    let mut reads: Vec<_> =
        offsets.zip(chunks).map(|(offset, buf)| storage::RangeRead { offset, buf }).collect();
    object.read_many(&mut reads)?;
    *at += len as u64;
    Ok(len)
}

/// Fills the buffer from a stream, until it ends or fails.
pub(super) fn read_stream(stream: &mut dyn io::Read, buf: &mut [u8]) -> (usize, Option<io::Error>) {
    let mut len = 0;
    while len < buf.len() {
        match stream.read(&mut buf[len..]) {
            Ok(0) => break,
            Ok(read) => len += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return (len, Some(e)),
        }
    }
    (len, None)
}

/// Unwraps an error of the decoder's input.
pub(super) fn stream_error(input: &str, offset: u64, failed: DecodeError) -> Error {
    let input = input.to_owned();
    match failed.source.downcast::<storage::Error>() {
        Ok(error) => Error::Storage(error),
        Err(source) => Error::Stream { input, offset, stored: failed.stored, source },
    }
}

/// The error of a stream that cannot be opened, or read at its start.
fn at_start(input: &str, source: io::Error) -> Error {
    stream_error(input, 0, DecodeError { stored: None, source })
}

/// Computes the checksum of the bytes written to it.
#[derive(Debug, Default)]
struct ChecksumSink(Crc64);

impl io::Write for ChecksumSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An object as a reader for decoders.
#[derive(Debug)]
pub(super) struct ObjectRead {
    object: Arc<dyn Object>,
    at: u64,
}

impl ObjectRead {
    pub(super) fn new(object: Arc<dyn Object>, at: u64) -> Self {
        ObjectRead { object, at }
    }
}

impl io::Read for ObjectRead {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        read_object(self.object.as_ref(), &mut self.at, buf).map_err(io::Error::other)
    }
}

/// Counts the bytes read.
#[derive(Debug)]
pub(super) struct Counted<R> {
    pub(super) inner: R,
    pub(super) count: Arc<AtomicU64>,
}

impl<R: io::Read> io::Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buf)?;
        self.count.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
