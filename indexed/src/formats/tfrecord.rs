//! The records of a TFRecord file, the container of TensorFlow.
//!
//! ```text
//! offset      type    field
//! 0           u64     length of the data, n
//! 8           u32     masked CRC-32C of the length
//! 12          bytes   data
//! 12 + n      u32     masked CRC-32C of the data
//! ```
//!
//! Integers are little-endian. A masked CRC is rotated right by 15 bits, plus 0xa282ead8. Source:
//! `tensorflow/core/lib/io/record_writer.h`.

use std::io::{self, BufReader, Read};
use std::ops::Range;
use std::sync::Arc;

use flate2::bufread::ZlibDecoder;
use storage::{Object, RangeRead, crc32c};

use super::members::GzipReader;
use crate::mmididx::idx::malformed;
use crate::{Error, FormatRule, Result};

/// Bytes before the data of a record.
pub const RECORD_HEADER_BYTES: usize = 12;

/// Bytes after the data of a record.
pub const RECORD_FOOTER_BYTES: usize = 4;

/// Maximum data of a record. An example of BERT has 10 KiB, one with a long text a few MiB.
pub const RECORD_BYTES_MAX: u64 = 64 << 20;

/// Bytes of one read.
const READ_BYTES: usize = 1 << 20;

/// A fault in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordFault {
    /// Offset in bytes from the start of the record.
    pub at: usize,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
}

impl RecordFault {
    pub(super) fn new(at: usize, found: impl Into<String>, expected: impl Into<String>) -> Self {
        RecordFault { at, found: found.into(), expected: expected.into() }
    }
}

/// The range of the data of the record at the start of the bytes; `None` if more bytes are needed.
/// The length is checked before it is used, and the data before it is returned. The next record
/// starts [`RECORD_FOOTER_BYTES`] after the end of the range.
///
/// # Errors
/// [`RecordFault`] for a wrong checksum, and for a record above [`RECORD_BYTES_MAX`].
pub fn split_record(bytes: &[u8]) -> std::result::Result<Option<Range<usize>>, RecordFault> {
    let Some((header, rest)) = bytes.split_at_checked(RECORD_HEADER_BYTES) else {
        return Ok(None);
    };
    let (length, crc) = header.split_at(8);
    check_crc(length, crc, 8, "length")?;
    let len = u64::from_le_bytes(length.try_into().expect("split at 8"));
    if len > RECORD_BYTES_MAX {
        let expected = format!("a record of at most {RECORD_BYTES_MAX} bytes");
        return Err(RecordFault::new(0, format!("{len} bytes"), expected));
    }
    let len = len as usize; // fits: at most RECORD_BYTES_MAX
    let Some(crc) = rest.get(len..len + RECORD_FOOTER_BYTES) else { return Ok(None) };
    check_crc(&rest[..len], crc, RECORD_HEADER_BYTES + len, "data")?;
    Ok(Some(RECORD_HEADER_BYTES..RECORD_HEADER_BYTES + len))
}

/// Whether a file that starts with these bytes is a TFRecord file.
#[must_use]
pub fn starts_record(head: &[u8]) -> bool {
    let header = head.split_at_checked(8).and_then(|(len, rest)| Some((len, rest.get(..4)?)));
    header.is_some_and(|(length, crc)| check_crc(length, crc, 8, "length").is_ok())
}

fn check_crc(
    bytes: &[u8],
    stored: &[u8],
    at: usize,
    of: &str,
) -> std::result::Result<(), RecordFault> {
    let stored = u32::from_le_bytes(stored.try_into().expect("4 bytes"));
    let crc = crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8);
    if crc == stored {
        return Ok(());
    }
    let expected = format!("masked CRC-32C {crc:#010x} of the {of}");
    Err(RecordFault::new(at, format!("{stored:#010x}"), expected))
}

/// How a file is compressed, by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zlib,
}

impl Compression {
    /// `None` if a TFRecord file cannot start with these bytes. An empty file has no records.
    pub(super) fn detect(head: &[u8]) -> Option<Self> {
        // zlib: method 8 in the first byte, and two bytes that are a multiple of 31 (RFC 1950).
        let is_zlib =
            |a: u8, b: u8| a & 0x0f == 8 && (u16::from(a) << 8 | u16::from(b)).is_multiple_of(31);
        match head {
            [] => Some(Compression::None),
            _ if starts_record(head) => Some(Compression::None),
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            &[a, b, ..] if is_zlib(a, b) => Some(Compression::Zlib),
            _ => None,
        }
    }
}

/// The records of one file, one after another. Memory: one record and 1 MiB.
pub(super) struct RecordReader {
    file: String,
    input: Box<dyn Read>,
    buf: Vec<u8>,
    /// Bytes of `buf` that were returned.
    used: usize,
    /// Where `buf` starts in the file, decompressed.
    offset: u64,
    /// The next record, from 0.
    next: u64,
    /// Where the last record starts.
    record_at: u64,
}

impl RecordReader {
    pub(super) fn open(object: &Arc<dyn Object>, compression: Compression) -> Self {
        let from = FromStart { object: Arc::clone(object), offset: 0 };
        let buffered = |from| BufReader::with_capacity(READ_BYTES, from);
        let input: Box<dyn Read> = match compression {
            Compression::None => Box::new(from),
            Compression::Gzip => Box::new(GzipReader::new(buffered(from))),
            Compression::Zlib => Box::new(ZlibDecoder::new(buffered(from))),
        };
        let file = object.display();
        RecordReader { file, input, buf: Vec::new(), used: 0, offset: 0, next: 0, record_at: 0 }
    }

    /// The data of the next record.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>> {
        loop {
            self.record_at = self.offset + self.used as u64;
            match split_record(&self.buf[self.used..]) {
                Ok(Some(range)) => {
                    let data = self.used + range.start..self.used + range.end;
                    self.used = data.end + RECORD_FOOTER_BYTES;
                    self.next += 1;
                    return Ok(Some(&self.buf[data]));
                }
                Ok(None) => {}
                Err(fault) => {
                    self.next += 1;
                    return Err(self.bad(&fault));
                }
            }
            if !self.read_more()? {
                return Ok(None);
            }
        }
    }

    /// False at the end of the file, if it is not within a record.
    fn read_more(&mut self) -> Result<bool> {
        self.buf.drain(..self.used);
        self.offset += self.used as u64;
        self.used = 0;
        let len = self.buf.len();
        let read = self.input.by_ref().take(READ_BYTES as u64).read_to_end(&mut self.buf);
        if let Err(error) = read {
            let at = self.offset + self.buf.len() as u64;
            return Err(match error.downcast::<storage::Error>() {
                Ok(error) => error.into(),
                Err(error) => {
                    let expected = "a complete compressed file";
                    malformed(
                        &self.file,
                        at as usize,
                        FormatRule::Record,
                        error.to_string(),
                        expected,
                    )
                }
            });
        }
        let ended = self.buf.len() == len;
        if ended && len > 0 {
            self.next += 1;
            let expected = "a complete record";
            return Err(self.bad(&RecordFault::new(len, "end of file", expected)));
        }
        Ok(!ended)
    }

    /// An error of the last record.
    pub(super) fn bad(&self, fault: &RecordFault) -> Error {
        let at = self.record_at as usize + fault.at; // fits: 64 bits, as in `lib.rs`
        let found = format!("{} in record {}", fault.found, self.next - 1);
        malformed(&self.file, at, FormatRule::Record, found, fault.expected.as_str())
    }
}

impl std::fmt::Debug for RecordReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RecordReader({}, record {})", self.file, self.next)
    }
}

/// An object as a stream.
pub(super) struct FromStart {
    pub(super) object: Arc<dyn Object>,
    pub(super) offset: u64,
}

impl Read for FromStart {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let rest = self.object.len_bytes() - self.offset;
        let count = rest.min(buf.len() as u64) as usize; // fits: as the buffer
        let read = RangeRead { offset: self.offset, buf: &mut buf[..count] };
        self.object.read_many(&mut [read]).map_err(io::Error::other)?;
        self.offset += count as u64;
        Ok(count)
    }
}
