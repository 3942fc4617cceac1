//! One file of an [`OrderLog`](super::OrderLog): samples one after the other, and a table of them.
//!
//! | offset | type | what |
//! |---|---|---|
//! | 0 | 8 bytes | `FEEDLOG` and 1, the version |
//! | 8 | u64 x 3 | the identity of the order: checksum, samples, bytes |
//! | 32 | u64 | n, the number of samples here |
//! | 40 | u64 | CRC-64/NVME of the 40 bytes above and of the table |
//! | 48 | u64 x 4 x n | the table: sample, offset in this file, length, CRC-64/NVME of its bytes |
//! | | | the bytes of the samples |
//!
//! All numbers are little-endian; samples ascend. A reader treats any other file as absent.

use std::sync::{Arc, Mutex, PoisonError};

use storage::{Key, Object, RangeRead, Storage, crc64};

use super::Identity;

const MAGIC: [u8; 8] = *b"FEEDLOG\x01";
const HEADER_BYTES: usize = 48;
const ENTRY_BYTES: usize = 32;

/// The largest valid table: a segment of 64 MiB has as many entries if samples have 32 bytes.
/// Bounds the allocation for a corrupt header.
const ENTRIES_MAX: u64 = 1 << 21;

/// Bytes read from a requested sample on, because the samples after it are needed next. Enough for
/// the full rate of any disk, and few files are open, so that it takes little memory.
const AHEAD_BYTES: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SegmentEntry {
    sample: u64,
    /// Offset in the file; until it is written, in the bytes of the samples.
    offset: u64,
    len: u64,
    crc64: u64,
}

/// Samples collected for a file.
#[derive(Debug, Default)]
pub(super) struct SegmentBuilder {
    entries: Vec<SegmentEntry>,
    bytes: Vec<u8>,
    header: Vec<u8>,
}

impl SegmentBuilder {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The size of the file.
    pub(super) fn file_bytes(&self) -> u64 {
        (HEADER_BYTES + self.entries.len() * ENTRY_BYTES + self.bytes.len()) as u64
    }

    /// The first sample and the last.
    pub(super) fn ends(&self) -> Option<(u64, u64)> {
        Some((self.entries.first()?.sample, self.entries.last()?.sample))
    }

    /// Adds a sample. The caller ensures that they ascend.
    pub(super) fn push(&mut self, sample: u64, bytes: &[u8]) {
        let (offset, len) = (self.bytes.len() as u64, bytes.len() as u64);
        self.entries.push(SegmentEntry { sample, offset, len, crc64: crc64(bytes) });
        self.bytes.extend_from_slice(bytes);
    }

    /// Removes all samples and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.bytes.clear();
    }

    /// Writes the file. It appears complete, or not at all.
    pub(super) fn write(
        &mut self,
        store: &dyn Storage,
        key: &Key,
        identity: &Identity,
    ) -> storage::Result<()> {
        let data_at = (HEADER_BYTES + self.entries.len() * ENTRY_BYTES) as u64;
        let header = &mut self.header;
        header.clear();
        header.extend_from_slice(&MAGIC);
        let count = self.entries.len() as u64;
        for number in [identity.crc64, identity.samples, identity.bytes, count, 0] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        for SegmentEntry { sample, offset, len, crc64 } in &self.entries {
            for number in [*sample, data_at + offset, *len, *crc64] {
                header.extend_from_slice(&number.to_le_bytes());
            }
        }
        let checksum = table_checksum(header);
        header[HEADER_BYTES - 8..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
        let mut upload = store.create(key, self.file_bytes())?;
        upload.write(&self.header)?;
        upload.write(&self.bytes)?;
        upload.finish().map(drop)
    }
}

/// A written file, with its table.
#[derive(Debug)]
pub(super) struct Segment {
    object: Arc<dyn Object>,
    entries: Vec<SegmentEntry>,
    ahead: Mutex<Ahead>,
}

/// A contiguous range of a file.
#[derive(Debug, Default)]
struct Ahead {
    offset: u64,
    bytes: Vec<u8>,
}

impl Segment {
    /// Opens a file; `None` if it is absent or invalid.
    pub(super) fn open(store: &dyn Storage, key: &Key, identity: &Identity) -> Option<Self> {
        let object = store.open(key).ok()?;
        let mut bytes = vec![0; HEADER_BYTES];
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }]).ok()?;
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let found = Identity { crc64: number(8), samples: number(16), bytes: number(24) };
        let count = number(32);
        if bytes[..8] != MAGIC || found != *identity || count > ENTRIES_MAX {
            return None;
        }
        let checksum = number(HEADER_BYTES - 8);
        let table_bytes = count as usize * ENTRY_BYTES; // fits: bounded above
        bytes.resize(HEADER_BYTES + table_bytes, 0);
        let table = &mut bytes[HEADER_BYTES..];
        object.read_many(&mut [RangeRead { offset: HEADER_BYTES as u64, buf: table }]).ok()?;
        if table_checksum(&bytes) != checksum {
            return None;
        }
        let numbers: &[[u8; 8]] = bytes[HEADER_BYTES..].as_chunks().0;
        let entries = numbers.as_chunks::<4>().0.iter().map(|entry| {
            let [sample, offset, len, crc64] = entry.map(u64::from_le_bytes);
            SegmentEntry { sample, offset, len, crc64 }
        });
        Some(Segment { entries: entries.collect(), object, ahead: Mutex::default() })
    }

    /// Fills `into` with a sample; false if it is absent or corrupt.
    pub(super) fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        let Ok(at) = self.entries.binary_search_by_key(&sample, |entry| entry.sample) else {
            return false;
        };
        let SegmentEntry { offset, len, crc64: expected, .. } = self.entries[at];
        len == into.len() as u64 && self.read(offset, into).is_some() && crc64(into) == expected
    }

    /// Fills `into`, from the read-ahead if that has it.
    fn read(&self, offset: u64, into: &mut [u8]) -> Option<()> {
        let ahead = &mut *self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        if ahead.get(offset, into.len()).is_none() {
            let left = self.object.len_bytes().checked_sub(offset)?;
            let len = AHEAD_BYTES.max(into.len() as u64).min(left);
            ahead.offset = offset;
            ahead.bytes.resize(len as usize, 0); // fits: 1 MiB, or a sample that is in memory
            let read = RangeRead { offset, buf: &mut ahead.bytes };
            if self.object.read_many(&mut [read]).is_err() {
                ahead.bytes.clear();
            }
        }
        into.copy_from_slice(ahead.get(offset, into.len())?);
        Some(())
    }
}

impl Ahead {
    fn get(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        self.bytes.get(start..start.checked_add(len)?)
    }
}

/// The checksum of a header and its table, without the checksum field.
fn table_checksum(bytes: &[u8]) -> u64 {
    let mut checksum = storage::Crc64::new();
    checksum.update(&bytes[..HEADER_BYTES - 8]);
    checksum.update(&bytes[HEADER_BYTES..]);
    checksum.value()
}
