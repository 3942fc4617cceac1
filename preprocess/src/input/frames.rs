//! Splits compressed files into units that can be decompressed in parallel.
//!
//! A Zstandard file is a sequence of frames: many, if several threads wrote it or it is seekable.
//! Their lengths are found by walking over the headers of their blocks, which costs little compared
//! with decompressing them. gzip members do not store their length, except those of bgzip; bzip2
//! and xz files are not split. From a frame that looks invalid or is too long for the memory, the
//! rest of the file is one unit: the decoder has the best error message.

use std::io::{self, BufRead, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use storage::Object;

use super::Input;
use super::codec::{Codec, XZ_HEAD_BYTES, is_zstd, xz_dictionary};
use super::decompress::too_short;
use super::stream::{DecodeError, read_object};
use crate::Error;

/// Frames are grouped up to this size: some milliseconds of work.
const UNIT_BYTES: usize = 1 << 20;

/// A longer frame is not read into memory at once. With 16 threads that is 128 MiB.
const FRAME_BYTES_MAX: usize = 8 << 20;

/// Bytes read at a time.
const READ_BYTES: usize = 1 << 20;

/// Units with a larger decoder window are decompressed one at a time: 16 MiB for each of 16 threads
/// is the limit. Only `zstd -20` and more, and `--long`, have larger ones.
const WINDOW_BYTES_MAX: u64 = 16 << 20;

/// Compressed bytes that one thread decompresses.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) codec: Codec,
    pub(super) bytes: Compressed,
    /// Decompressed bytes to skip, in this unit and then in the next ones.
    pub(super) skip: u64,
    /// It takes more memory than several threads may.
    pub(super) is_big: bool,
}

/// The units of all compressed inputs, in order.
#[derive(Debug)]
pub(super) struct DecodePlan {
    /// The remaining inputs, the next one last.
    inputs: Vec<(usize, Input)>,
    current: Option<Walk>,
    /// Offset at which the next input starts, decompressed.
    start: u64,
}

impl DecodePlan {
    /// The compressed inputs, each with its index among all inputs, and the decompressed offset at
    /// which the first of them starts.
    pub(super) fn new(mut inputs: Vec<(usize, Input)>, start: u64) -> Self {
        inputs.reverse();
        DecodePlan { inputs, current: None, start }
    }

    /// The next unit, and the index of its input. There are none after an error.
    pub(super) fn next(&mut self) -> Option<(usize, Result<Unit, DecodeError>)> {
        loop {
            if self.current.is_none() {
                let (input_idx, input) = self.inputs.pop()?;
                match Walk::new(input_idx, &input, std::mem::take(&mut self.start)) {
                    Ok(walk) => self.current = Some(walk),
                    Err(error) => return Some((input_idx, Err(self.give_up(error)))),
                }
            }
            let walk = self.current.as_mut()?;
            let input_idx = walk.input_idx;
            match walk.next() {
                Ok(Some(unit)) => {
                    if walk.ended {
                        self.current = None;
                    }
                    return Some((input_idx, Ok(unit)));
                }
                Ok(None) if walk.skip > 0 && !walk.started => {
                    let failed = too_short(walk.skip);
                    self.inputs.clear();
                    return Some((input_idx, Err(failed)));
                }
                Ok(None) => self.current = None,
                Err(error) => return Some((input_idx, Err(self.give_up(error.into())))),
            }
        }
    }

    fn give_up(&mut self, error: Error) -> DecodeError {
        self.current = None;
        self.inputs.clear();
        let source = match error {
            Error::Storage(error) => io::Error::other(error),
            other => io::Error::other(other.to_string()),
        };
        DecodeError { stored: None, source }
    }
}

/// A walk over the frames of one file.
#[derive(Debug)]
struct Walk {
    input_idx: usize,
    codec: Codec,
    file: FileWindow,
    /// Decompressed bytes to skip.
    skip: u64,
    /// A unit has been returned.
    started: bool,
    ended: bool,
}

/// The content at one offset of the file.
enum Next {
    Frame(Frame),
    /// The file has ended.
    End,
    /// Left to the decoder.
    Unknown {
        is_big: bool,
    },
}

/// One frame or member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    len: usize,
    /// Its length decompressed, if it says.
    content: Option<u64>,
    is_big: bool,
}

impl Walk {
    fn new(input_idx: usize, input: &Input, start: u64) -> crate::Result<Self> {
        let file = FileWindow { object: input.object()?, start: 0, buf: Vec::new() };
        let codec = input.codec;
        Ok(Walk { input_idx, codec, file, skip: start, started: false, ended: false })
    }

    fn next(&mut self) -> storage::Result<Option<Unit>> {
        let (mut len, mut is_big) = (0, false);
        while len < UNIT_BYTES && !self.ended {
            match self.frame_at(len)? {
                Next::End => {
                    self.ended = true;
                }
                Next::Frame(frame) => {
                    let before = !self.started && len == 0;
                    // A frame that ends where reading starts is read again: the decoder reports a
                    // wrong checksum after the last byte, when all of them may have been consumed.
                    if before && let Some(content) = frame.content.filter(|&c| c < self.skip) {
                        self.skip -= content;
                        self.file.forget(frame.len);
                        continue;
                    }
                    // Groups are decompressed in parallel, unless one of their frames is big.
                    is_big |= frame.is_big;
                    len += frame.len;
                }
                Next::Unknown { .. } if len > 0 => break,
                Next::Unknown { is_big } => {
                    self.ended = true;
                    let bytes = self.file.rest();
                    return Ok(Some(self.unit(bytes, is_big)));
                }
            }
        }
        if len == 0 {
            return Ok(None);
        }
        let bytes = self.file.take(len);
        Ok(Some(self.unit(bytes, is_big)))
    }

    fn unit(&mut self, bytes: Compressed, is_big: bool) -> Unit {
        // The first unit carries the skip.
        let skip = if self.started { 0 } else { self.skip };
        self.started = true;
        Unit { codec: self.codec, bytes, skip, is_big }
    }

    fn frame_at(&mut self, at: usize) -> storage::Result<Next> {
        if !self.file.reach(at + 1)? {
            return Ok(Next::End);
        }
        let frame = match self.codec {
            Codec::Zstd => zstd_frame(&mut self.file, at)?,
            Codec::Gzip => bgzip_member(&mut self.file, at)?,
            _ => None,
        };
        Ok(match frame {
            Some(frame) if self.file.reach(at + frame.len)? => Next::Frame(frame),
            Some(frame) => Next::Unknown { is_big: frame.is_big },
            None => Next::Unknown { is_big: self.window_bytes(at)? > WINDOW_BYTES_MAX },
        })
    }
}

impl Walk {
    /// The memory that the decoder of a frame needs for its decompressed window.
    fn window_bytes(&mut self, at: usize) -> storage::Result<u64> {
        match self.codec {
            Codec::Xz => {
                self.file.reach(at + XZ_HEAD_BYTES)?;
                Ok(xz_dictionary(&self.file.buf[at..]))
            }
            _ => Ok(zstd_window(&self.file.buf[at..])),
        }
    }
}

/// A frame of Zstandard (RFC 8878, 3.1), if all of it is there and it is not too long.
fn zstd_frame(file: &mut FileWindow, at: usize) -> storage::Result<Option<Frame>> {
    if !file.reach(at + 8)? || !is_zstd(&file.buf[at..]) {
        return Ok(None);
    }
    if file.buf[at] != 0x28 {
        let len = le(&file.buf[at + 4..at + 8]) + 8;
        let frame = |len| Frame { len, content: Some(0), is_big: false };
        return Ok(usize::try_from(len).ok().filter(|&len| len <= FRAME_BYTES_MAX).map(frame));
    }
    let descriptor = file.buf[at + 4];
    let has_checksum = descriptor & 4 != 0;
    // The longest header is of 18 bytes, and the shortest frame of 9: more may not be there.
    file.reach(at + 18)?;
    let Some((header_len, content)) = zstd_header(&file.buf[at..]) else { return Ok(None) };
    let is_big = zstd_window(&file.buf[at..]) > WINDOW_BYTES_MAX;
    let mut len = header_len;
    loop {
        if len > FRAME_BYTES_MAX || !file.reach(at + len + 3)? {
            return Ok(None);
        }
        let block = le(&file.buf[at + len..at + len + 3]);
        let (is_last, kind, size) = (block & 1 == 1, block >> 1 & 3, (block >> 3) as usize);
        len += 3 + if kind == 1 { 1 } else { size };
        if kind == 3 {
            return Ok(None);
        }
        if is_last {
            len += if has_checksum { 4 } else { 0 };
            return Ok(Some(Frame { len, content, is_big }).filter(|f| f.len <= FRAME_BYTES_MAX));
        }
    }
}

/// The length of a frame's header, and of its content if it is stored. None: it is truncated.
fn zstd_header(frame: &[u8]) -> Option<(usize, Option<u64>)> {
    let descriptor = *frame.get(4)?;
    let single = descriptor & 0x20 != 0;
    let window = usize::from(!single);
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let content = match descriptor >> 6 {
        0 => usize::from(single),
        other => 1 << other,
    };
    let start = 5 + window + dictionary;
    let field = le(frame.get(start..start + content)?);
    let content_len = match content {
        0 => None,
        2 => Some(field + 256),
        _ => Some(field),
    };
    Some((start + content, content_len))
}

/// The window that the decoder of a frame needs. Zero if it is unknown.
fn zstd_window(frame: &[u8]) -> u64 {
    if !frame.starts_with(&[0x28]) {
        return 0;
    }
    match (frame.get(4), frame.get(5)) {
        (Some(descriptor), Some(&window)) if descriptor & 0x20 == 0 => {
            let base = 1_u64 << (10 + (window >> 3));
            base + base / 8 * u64::from(window & 7)
        }
        _ => zstd_header(frame).and_then(|(_, content)| content).unwrap_or(0),
    }
}

/// A member as bgzip writes it: its length is in an extra field of its header ("The BGZF
/// compression format", SAM specification 4.1). None for another.
fn bgzip_member(file: &mut FileWindow, at: usize) -> storage::Result<Option<Frame>> {
    if !file.reach(at + 18)? {
        return Ok(None);
    }
    let header = &file.buf[at..at + 18];
    // Magic, deflate, an extra field and no other; in it one subfield "BC" of two bytes.
    let is_bgzip = header[..4] == [0x1f, 0x8b, 8, 4] && header[10..16] == *b"\x06\0BC\x02\0";
    let len = le(&header[16..18]) as usize + 1;
    if !is_bgzip || len < 28 || !file.reach(at + len)? {
        return Ok(None);
    }
    let content = le(&file.buf[at + len - 4..at + len]);
    Ok(Some(Frame { len, content: Some(content), is_big: false }))
}

/// At most eight little-endian bytes.
fn le(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// A file, read as far as it was needed.
#[derive(Debug)]
struct FileWindow {
    object: Arc<dyn Object>,
    /// Where `buf` begins in the file.
    start: u64,
    buf: Vec<u8>,
}

impl FileWindow {
    /// Reads until the buffer has `len` bytes. False: the file ends before.
    fn reach(&mut self, len: usize) -> storage::Result<bool> {
        while self.buf.len() < len {
            let had = self.buf.len();
            let mut at = self.start + had as u64;
            self.buf.resize(had + READ_BYTES.max(len - had), 0);
            let read = read_object(self.object.as_ref(), &mut at, &mut self.buf[had..])?;
            self.buf.truncate(had + read);
            if read == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn forget(&mut self, len: usize) {
        self.buf.drain(..len);
        self.start += len as u64;
    }

    fn take(&mut self, len: usize) -> Compressed {
        let rest = self.buf.split_off(len);
        let buf = std::mem::replace(&mut self.buf, rest);
        let start = self.start;
        self.start += len as u64;
        Compressed { buf, at: 0, next: start + len as u64, object: None, count: Count::at(start) }
    }

    /// All from here to the end of the file.
    fn rest(&mut self) -> Compressed {
        let buf = std::mem::take(&mut self.buf);
        let next = self.start + buf.len() as u64;
        let object = Some(Arc::clone(&self.object));
        Compressed { buf, at: 0, next, object, count: Count::at(self.start) }
    }
}

/// The position of a decoder in its file.
#[derive(Clone, Debug)]
pub(super) struct Count(Arc<AtomicU64>);

impl Count {
    fn at(start: u64) -> Self {
        Count(Arc::new(AtomicU64::new(start)))
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The source of a decoder: bytes in memory, and perhaps more from a file.
#[derive(Debug)]
pub(super) struct Compressed {
    buf: Vec<u8>,
    at: usize,
    /// Offset of the next read in the file.
    next: u64,
    object: Option<Arc<dyn Object>>,
    count: Count,
}

impl Compressed {
    pub(super) fn count(&self) -> Count {
        self.count.clone()
    }
}

impl BufRead for Compressed {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.at == self.buf.len()
            && let Some(object) = &self.object
        {
            self.buf.resize(READ_BYTES, 0);
            let read = read_object(object.as_ref(), &mut self.next, &mut self.buf);
            let read = read.map_err(io::Error::other)?;
            self.buf.truncate(read);
            self.at = 0;
        }
        Ok(&self.buf[self.at..])
    }

    fn consume(&mut self, count: usize) {
        self.at += count;
        self.count.0.fetch_add(count as u64, Ordering::Relaxed);
    }
}

impl Read for Compressed {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(out)?;
        self.consume(read);
        Ok(read)
    }
}
