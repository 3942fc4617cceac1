//! The locations of the members of a zip archive without compression, such as those of
//! `torch.save`.

use std::collections::HashMap;

use crate::{Error, Result};
use storage::{Crc32, Object, RangeRead};

/// A member's bytes in the archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// CRC-32 of these bytes; 0 if it was not computed.
    pub(crate) crc32: u32,
}

impl Member {
    /// Bytes without a checksum.
    pub(crate) fn new(offset: u64, bytes: u64) -> Self {
        Member { offset, bytes, crc32: 0 }
    }

    /// Compares the bytes of a member with their checksum, if there is one.
    pub(crate) fn verify(&self, object: &dyn Object) -> Result<()> {
        if self.crc32 == 0 {
            return Ok(());
        }
        let mut buf = vec![0; self.bytes.min(VERIFY_BYTES) as usize]; // fits: 8 MiB at most
        let (mut sum, mut done) = (Crc32::new(), 0);
        while done < self.bytes {
            let len = (self.bytes - done).min(VERIFY_BYTES) as usize; // fits: as above
            let chunk = &mut buf[..len];
            object.read_many(&mut [RangeRead { offset: self.offset + done, buf: chunk }])?;
            sum.update(chunk);
            done += chunk.len() as u64;
        }
        if sum.value() == self.crc32 {
            return Ok(());
        }
        Err(Error::Corrupt {
            object: object.display(),
            offset: self.offset,
            found: format!("CRC-32 {:08x} of {} bytes", sum.value(), self.bytes),
            expected: format!("CRC-32 {:08x} as in the ZIP directory", self.crc32),
        })
    }
}

/// Bytes read at a time for verification.
const VERIFY_BYTES: u64 = 8 << 20;

/// The record at the end and the longest comment that may follow it.
const END_BYTES: u64 = 22;
const COMMENT_BYTES_MAX: u64 = 65_535;

/// The whole directory is read at once; a member takes 46 bytes and its name.
const DIRECTORY_BYTES_MAX: u64 = 256 << 20;

/// Reads in one batch.
const READS_MAX: usize = 256;

const LOCAL_BYTES: usize = 30;
const ENTRY_BYTES: usize = 46;

/// Whether the file starts with the signature of an archive.
pub(crate) fn is_zip(object: &dyn Object) -> Result<bool> {
    let mut magic = [0; 4];
    if object.len_bytes() >= 4 {
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut magic }])?;
    }
    Ok(magic == *b"PK\x03\x04")
}

/// The members of an archive by name.
pub(crate) fn members(object: &dyn Object) -> Result<HashMap<String, Member>> {
    let bad = |offset: u64, found: &str, expected: &str| {
        Err(Error::Corrupt {
            object: object.display(),
            offset,
            found: found.to_owned(),
            expected: expected.to_owned(),
        })
    };
    let (start, bytes) = directory(object)?;
    let fits = start.checked_add(bytes).is_some_and(|end| end <= object.len_bytes());
    if !fits || bytes > DIRECTORY_BYTES_MAX {
        return bad(start, &format!("{bytes} bytes"), "a ZIP directory within the file");
    }
    let mut directory = vec![0; bytes as usize]; // fits: at most 256 MiB
    object.read_many(&mut [RangeRead { offset: start, buf: &mut directory }])?;
    let mut listed = Vec::new();
    let mut rest = directory.as_slice();
    while rest.starts_with(b"PK\x01\x02") {
        let at = start + (directory.len() - rest.len()) as u64;
        let Some((entry, name, after)) = split_entry(rest) else {
            return bad(at, "a truncated one", "a complete ZIP directory entry");
        };
        rest = after;
        if entry.method != 0 {
            return bad(at, &format!("'{name}' compressed"), "uncompressed members");
        }
        listed.push((name, entry));
    }
    let mut members = HashMap::new();
    for listed in listed.chunks(READS_MAX) {
        // The start of a member's data depends on the local header in front of it.
        let mut locals = vec![[0; LOCAL_BYTES]; listed.len()];
        let reads = locals.iter_mut().zip(listed);
        let mut reads: Vec<RangeRead<'_>> =
            reads.map(|(buf, (_, entry))| RangeRead { offset: entry.local, buf }).collect();
        object.read_many(&mut reads)?;
        for ((name, entry), local) in listed.iter().zip(&locals) {
            let skip = u64::from(short(local, 26)) + u64::from(short(local, 28));
            let offset = entry.local.saturating_add(LOCAL_BYTES as u64 + skip);
            let end = offset.checked_add(entry.bytes);
            if !local.starts_with(b"PK\x03\x04") || end.is_none_or(|end| end > object.len_bytes()) {
                return bad(entry.local, "none", &format!("the listed member '{name}'"));
            }
            let member = Member { offset, bytes: entry.bytes, crc32: entry.crc32 };
            if members.insert(name.clone(), member).is_some() {
                return bad(entry.local, &format!("'{name}' twice"), "each member once");
            }
        }
    }
    Ok(members)
}

struct ZipEntry {
    method: u16,
    crc32: u32,
    bytes: u64,
    local: u64,
}

/// Start and length of the directory.
fn directory(object: &dyn Object) -> Result<(u64, u64)> {
    let len = object.len_bytes();
    let tail_start = len.saturating_sub(END_BYTES + COMMENT_BYTES_MAX + 20);
    let mut tail = vec![0; (len - tail_start) as usize]; // fits: under 70,000
    object.read_many(&mut [RangeRead { offset: tail_start, buf: &mut tail }])?;
    let bad = |offset: u64, expected: &str| Error::Corrupt {
        object: object.display(),
        offset,
        found: "none".to_owned(),
        expected: expected.to_owned(),
    };
    let found = tail.windows(4).rposition(|window| window == b"PK\x05\x06");
    let end = found.filter(|&at| tail.len() - at >= END_BYTES as usize);
    let end = end.ok_or_else(|| bad(len, "the record at the end of a zip archive"))?;
    let (bytes, start) = (word(&tail, end + 12), word(&tail, end + 16));
    if bytes != u32::MAX && start != u32::MAX {
        return Ok((start.into(), bytes.into()));
    }
    let locator = end.checked_sub(20).filter(|&at| tail[at..].starts_with(b"PK\x06\x07"));
    let locator = locator.ok_or_else(|| bad(len, "the locator of a large zip archive"))?;
    let offset = long(&tail, locator + 8);
    let mut record = [0; 56];
    if offset.checked_add(56).is_none_or(|end| end > len) {
        return Err(bad(offset, "the record of a large zip archive"));
    }
    object.read_many(&mut [RangeRead { offset, buf: &mut record }])?;
    if !record.starts_with(b"PK\x06\x06") {
        return Err(bad(offset, "the record of a large zip archive"));
    }
    Ok((long(&record, 48), long(&record, 40)))
}

/// The first entry, its name, and the bytes after it.
fn split_entry(rest: &[u8]) -> Option<(ZipEntry, String, &[u8])> {
    let fixed = rest.get(..ENTRY_BYTES)?;
    let (method, crc32) = (short(fixed, 10), word(fixed, 16));
    let (name_len, extra_len, comment_len) =
        (short(fixed, 28) as usize, short(fixed, 30) as usize, short(fixed, 32) as usize);
    let name = rest.get(ENTRY_BYTES..ENTRY_BYTES + name_len)?;
    let extra_start = ENTRY_BYTES + name_len;
    let mut extra = rest.get(extra_start..extra_start + extra_len)?;
    let after = rest.get(extra_start + extra_len + comment_len..)?;
    let (packed, unpacked) = (word(fixed, 20), word(fixed, 24));
    let (mut bytes, mut local) = (u64::from(unpacked), u64::from(word(fixed, 42)));
    // A ZIP64 extra field has 64-bit values for the fields that overflow, in this order.
    while extra.len() >= 4 {
        let len = short(extra, 2) as usize;
        let mut field = extra.get(4..4 + len)?;
        if short(extra, 0) == 1 {
            let mut next = || {
                let value = (field.len() >= 8).then(|| long(field, 0));
                field = field.get(8..).unwrap_or_default();
                value
            };
            if unpacked == u32::MAX {
                bytes = next()?;
            }
            if packed == u32::MAX {
                next()?;
            }
            if word(fixed, 42) == u32::MAX {
                local = next()?;
            }
        }
        extra = &extra[4 + len..];
    }
    Some((
        ZipEntry { method, crc32, bytes, local },
        String::from_utf8_lossy(name).into_owned(),
        after,
    ))
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
