//! ZIP files with uncompressed members, as `numpy.savez` writes them.

use std::sync::Arc;

use storage::{Crc32, Object, RangeRead};

use super::writer::Write;
use crate::mmididx::idx::malformed;
use crate::{Error, FormatRule, Result};

/// The `.npz` files here have two members; a far larger directory is refused.
const DIRECTORY_BYTES_MAX: u64 = 1 << 20;
/// The end record with the longest comment.
const END_BYTES_MAX: u64 = END_BYTES + 0xffff;
const END_BYTES: u64 = 22;
const LOCATOR_BYTES: u64 = 20;
/// Bytes of one read of a member.
const STEP_BYTES: u64 = 4 << 20;

/// A member: a range of the file.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub name: String,
    pub offset: u64,
    pub bytes: u64,
    crc32: u32,
}

/// Lists the members. Every offset is checked against the length of the file.
pub(super) fn members(object: &Arc<dyn Object>) -> Result<Vec<Member>> {
    let zip = Zip { object: object.as_ref(), file: object.display() };
    let (offset, bytes) = zip.directory()?;
    let directory = zip.read(offset, bytes)?;
    let mut members = Vec::new();
    let mut at = 0;
    while at < directory.len() {
        let place = offset + at as u64;
        let bad = |found: &str| zip.bad(place, found, "an entry of the central directory");
        let entry = directory.get(at..at + 46).ok_or_else(|| bad("a truncated entry"))?;
        if entry[..4] != *b"PK\x01\x02" {
            return Err(bad("other bytes"));
        }
        let [name, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(entry, at)));
        let tail = directory.get(at + 46..at + 46 + name + extra + comment);
        let tail = tail.ok_or_else(|| bad("a truncated entry"))?;
        let (name, rest) = tail.split_at(name);
        members.push(zip.member(place, entry, name, &rest[..extra])?);
        at += 46 + tail.len();
    }
    Ok(members)
}

/// Reads a member and compares it with its checksum.
pub(super) fn verify(object: &Arc<dyn Object>, member: &Member) -> Result<()> {
    let zip = Zip { object: object.as_ref(), file: object.display() };
    let mut sum = Crc32::new();
    let mut done = 0;
    while done < member.bytes {
        let count = (member.bytes - done).min(STEP_BYTES);
        sum.update(&zip.read(member.offset + done, count)?);
        done += count;
    }
    if sum.value() == member.crc32 {
        return Ok(());
    }
    let found = format!("CRC-32 {:08x} of member {}", sum.value(), member.name);
    let expected = format!("CRC-32 {:08x} as in the directory", member.crc32);
    Err(zip.bad(member.offset, &found, &expected))
}

struct Zip<'a> {
    object: &'a dyn Object,
    file: String,
}

impl Zip<'_> {
    /// Where the central directory is.
    fn directory(&self) -> Result<(u64, u64)> {
        let len = self.object.len_bytes();
        let tail_at = len.saturating_sub(END_BYTES_MAX);
        let tail = self.read(tail_at, len - tail_at)?;
        let ends = |&at: &usize| {
            let end = &tail[at..];
            end.starts_with(b"PK\x05\x06")
                && end.len() as u64 == END_BYTES + u64::from(u16_at(end, 20))
        };
        let last = tail.len().saturating_sub(END_BYTES as usize); // fits: 22
        let end_at =
            (0..=last).rev().filter(|&at| tail.len() - at >= END_BYTES as usize).find(ends);
        let Some(end_at) = end_at else {
            return Err(self.bad(len, "end of file", "the end record of a ZIP file"));
        };
        let end = &tail[end_at..];
        let (mut offset, mut bytes) = (u64::from(u32_at(end, 16)), u64::from(u32_at(end, 12)));
        let mut limit = tail_at + end_at as u64;
        if offset == u64::from(u32::MAX)
            || bytes == u64::from(u32::MAX)
            || u16_at(end, 10) == 0xffff
        {
            (offset, bytes, limit) = self.directory_64(limit)?;
        }
        if bytes > DIRECTORY_BYTES_MAX || offset.checked_add(bytes).is_none_or(|end| end > limit) {
            let found = format!("{bytes} bytes from byte {offset} and the end record");
            let expected = "a central directory of at most 1 MiB before its end record";
            return Err(self.bad(limit, &found, expected));
        }
        Ok((offset, bytes))
    }

    /// The same in a file of more than 4 GiB: a locator precedes the end record.
    fn directory_64(&self, end_at: u64) -> Result<(u64, u64, u64)> {
        let bad = || self.bad(end_at, "the end record alone", "a ZIP64 end record");
        let locator_at = end_at.checked_sub(LOCATOR_BYTES).ok_or_else(bad)?;
        let locator = self.read(locator_at, LOCATOR_BYTES)?;
        let record_at = u64_at(&locator, 8);
        if !locator.starts_with(b"PK\x06\x07")
            || record_at.checked_add(56).is_none_or(|end| end > locator_at)
        {
            return Err(bad());
        }
        let record = self.read(record_at, 56)?;
        if !record.starts_with(b"PK\x06\x06") {
            return Err(bad());
        }
        Ok((u64_at(&record, 48), u64_at(&record, 40), record_at))
    }

    fn member(&self, place: u64, entry: &[u8], name: &[u8], extra: &[u8]) -> Result<Member> {
        let name = String::from_utf8_lossy(name).into_owned();
        let mut sizes = Wide { extra: wide_fields(extra) };
        let bytes = sizes.resolve(u32_at(entry, 24));
        let stored = sizes.resolve(u32_at(entry, 20));
        let header_at = sizes.resolve(u32_at(entry, 42));
        let (Some(bytes), Some(stored), Some(header_at)) = (bytes, stored, header_at) else {
            return Err(self.bad(place, "none", "64-bit sizes"));
        };
        if u16_at(entry, 10) != 0 || bytes != stored {
            let found = format!("compressed member {name}");
            let expected = "a stored member, as of numpy.savez and not of savez_compressed";
            return Err(self.bad(place, &found, expected));
        }
        let expected = "a local header and its data before the directory";
        let truncated = || self.bad(header_at, &format!("truncated member {name}"), expected);
        if header_at.checked_add(30).is_none_or(|end| end > place) {
            return Err(truncated());
        }
        let header = self.read(header_at, 30)?;
        if !header.starts_with(b"PK\x03\x04") {
            return Err(self.bad(header_at, "other bytes", "a local header"));
        }
        let before = 30 + u64::from(u16_at(&header, 26)) + u64::from(u16_at(&header, 28));
        let offset = header_at + before;
        if offset.checked_add(bytes).is_none_or(|end| end > place) {
            return Err(truncated());
        }
        Ok(Member { name, offset, bytes, crc32: u32_at(entry, 16) })
    }

    fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let mut buf = vec![0; bytes as usize]; // fits: a tail, a directory or a step
        self.object.read_many(&mut [RangeRead { offset, buf: &mut buf }])?;
        Ok(buf)
    }

    fn bad(&self, at: u64, found: &str, expected: &str) -> Error {
        malformed(&self.file, at as usize, FormatRule::Zip, found, expected)
    }
}

/// Sizes that do not fit 32 bits are in an extra field, in order.
struct Wide<'a> {
    extra: &'a [u8],
}

impl Wide<'_> {
    fn resolve(&mut self, short: u32) -> Option<u64> {
        if short != u32::MAX {
            return Some(short.into());
        }
        let (wide, rest) = self.extra.split_first_chunk::<8>()?;
        self.extra = rest;
        Some(u64::from_le_bytes(*wide))
    }
}

/// The content of the extra field of number 1.
fn wide_fields(mut extra: &[u8]) -> &[u8] {
    while let Some((head, rest)) = extra.split_first_chunk::<4>() {
        let (kind, len) = (u16_at(head, 0), usize::from(u16_at(head, 2)).min(rest.len()));
        if kind == 1 {
            return &rest[..len];
        }
        extra = &rest[len..];
    }
    &[]
}

/// Above this, sizes and offsets are written in 64 bits, as in Python.
const WIDE_MIN: u64 = 1 << 31;

/// A ZIP file being written, byte for byte as `numpy.savez` does: members are not compressed, every
/// local header has room for sizes of 64 bits, and all dates are 1980-01-01.
#[derive(Debug, Default)]
pub(super) struct ZipWriter {
    directory: Vec<u8>,
    members: u16,
    /// Bytes written so far.
    offset: u64,
}

/// Computes the CRC-32 of a member.
struct Summing(Crc32);

impl Write for Summing {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.update(bytes);
        Ok(())
    }
}

impl ZipWriter {
    /// Writes a member of this size. `content` is called twice, because the checksum precedes the
    /// data.
    pub(super) fn member(
        &mut self,
        to: &mut dyn Write,
        name: &str,
        bytes: u64,
        mut content: impl FnMut(&mut dyn Write) -> Result<()>,
    ) -> Result<()> {
        let mut sum = Summing(Crc32::new());
        content(&mut sum)?;
        let crc32 = sum.0.value();
        let mut header = Vec::new();
        header.extend_from_slice(b"PK\x03\x04");
        header.extend_from_slice(&FIXED);
        header.extend_from_slice(&crc32.to_le_bytes());
        header.extend_from_slice(&[0xff; 8]);
        header.extend_from_slice(&(name.len() as u16).to_le_bytes()); // fits: names of this crate
        header.extend_from_slice(&20_u16.to_le_bytes());
        header.extend_from_slice(name.as_bytes());
        header.extend_from_slice(&wide(&[bytes, bytes]));
        to.write(&header)?;
        content(to)?;
        self.list(name, bytes, crc32);
        self.offset += header.len() as u64 + bytes;
        Ok(())
    }

    fn list(&mut self, name: &str, bytes: u64, crc32: u32) {
        let mut fields = Vec::new();
        let size = if bytes >= WIDE_MIN { u32::MAX } else { bytes as u32 };
        if bytes >= WIDE_MIN {
            fields.extend([bytes, bytes]);
        }
        let place = if self.offset >= WIDE_MIN { u32::MAX } else { self.offset as u32 };
        if self.offset >= WIDE_MIN {
            fields.push(self.offset);
        }
        let extra = wide(&fields);
        let out = &mut self.directory;
        out.extend_from_slice(b"PK\x01\x02");
        out.extend_from_slice(&[45, 3]); // made by version 4.5 on Unix
        out.extend_from_slice(&FIXED);
        out.extend_from_slice(&crc32.to_le_bytes());
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(&(name.len() as u16).to_le_bytes()); // fits: names of this crate
        out.extend_from_slice(&(extra.len() as u16).to_le_bytes()); // fits: 28 at most
        out.extend_from_slice(&[0; 6]); // comment, disk, internal attributes
        out.extend_from_slice(&0x0180_0000_u32.to_le_bytes()); // rw------- on Unix
        out.extend_from_slice(&place.to_le_bytes());
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(&extra);
        self.members += 1;
    }

    /// Writes the directory and the end record.
    pub(super) fn end(self, to: &mut dyn Write) -> Result<()> {
        let bytes = self.directory.len() as u64;
        let mut end = self.directory;
        let mut place = self.offset as u32;
        if self.offset >= WIDE_MIN {
            place = u32::MAX;
            let record_at = self.offset + bytes;
            end.extend_from_slice(b"PK\x06\x06");
            end.extend_from_slice(&44_u64.to_le_bytes());
            end.extend_from_slice(&[45, 0, 45, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            for field in [self.members.into(), self.members.into(), bytes, self.offset] {
                end.extend_from_slice(&u64::to_le_bytes(field));
            }
            end.extend_from_slice(b"PK\x06\x07\0\0\0\0");
            end.extend_from_slice(&record_at.to_le_bytes());
            end.extend_from_slice(&1_u32.to_le_bytes());
        }
        end.extend_from_slice(b"PK\x05\x06\0\0\0\0");
        end.extend_from_slice(&self.members.to_le_bytes());
        end.extend_from_slice(&self.members.to_le_bytes());
        end.extend_from_slice(&(bytes as u32).to_le_bytes()); // fits: two entries
        end.extend_from_slice(&place.to_le_bytes());
        end.extend_from_slice(&[0; 2]);
        to.write(&end)
    }
}

/// Version 4.5, no flags, uncompressed, and the first date of the format.
const FIXED: [u8; 10] = [45, 0, 0, 0, 0, 0, 0, 0, 0x21, 0];

/// The extra field of number 1.
fn wide(fields: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    if !fields.is_empty() {
        out.extend_from_slice(&[1, 0, 8 * fields.len() as u8, 0]);
        fields.iter().for_each(|field| out.extend_from_slice(&field.to_le_bytes()));
    }
    out
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
