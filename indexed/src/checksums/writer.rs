//! Writes the checksums of a pair while the pair is written.

use std::sync::Arc;

use storage::{Crc32c, Crc64, FileEntry, Key, Storage, Upload, crc32c};

use crate::checksums::table::BlockChecksums;
use crate::checksums::{BLOCK_BYTES, Footer, SUFFIX};
use crate::mmididx::dataset::for_each_chunk;
use crate::{IndexedDataset, Result};

/// Size of the writes.
const WRITE_BYTES: usize = 1 << 16;

/// Writes `prefix.crc` for a pair without one, from another program or from an old version: its
/// current bytes are trusted. The pair is read a second time and compared with the checksums, so
/// that an error in a read is not recorded. Returns the sums of the three files, in the order in
/// which a manifest lists them.
///
/// # Errors
/// As [`IndexedDataset::open`], which checks the pair first; [`crate::Error::Storage`], also if the
/// file exists. It is absent then, or another writer made it.
pub fn write_checksums(store: &Arc<dyn Storage>, prefix: &Key) -> Result<[FileEntry; 3]> {
    let dataset = IndexedDataset::open(store, prefix)?;
    let mut checksums = ChecksumWriter::begin(store.as_ref(), prefix)?;
    let mut idx_sums = IdxSums::default();
    for_each_chunk(dataset.bin().as_ref(), |bytes| checksums.bin(bytes))?;
    for_each_chunk(dataset.idx(), |bytes| {
        idx_sums.update(bytes);
        Ok(())
    })?;
    let (key, upload) = checksums.end(idx_sums)?;
    let crc = upload.finish()?;
    match sums_of(store, prefix) {
        Ok([bin, idx]) => Ok([bin, idx, crc]),
        Err(error) => {
            store.delete(&key)?;
            Err(error)
        }
    }
}

/// The sums of a `.bin` and an `.idx`, whose blocks are verified if there are checksums.
///
/// # Errors
/// As [`IndexedDataset::open`].
pub fn sums_of(store: &Arc<dyn Storage>, prefix: &Key) -> Result<[FileEntry; 2]> {
    let report = IndexedDataset::open(store, prefix)?.check()?;
    let entry = |suffix: &str, bytes, crc64| {
        let path = prefix.with_suffix(suffix)?.name().to_owned();
        Ok::<_, crate::Error>(FileEntry { path, bytes, crc64 })
    };
    Ok([
        entry(".bin", report.bin_bytes, report.bin_crc64)?,
        entry(".idx", report.idx_bytes, report.idx_crc64)?,
    ])
}

/// The checksums of a stream, block by block.
#[derive(Debug, Default)]
pub(crate) struct BlockSums {
    /// CRC-32C of the current block so far.
    current: Crc32c,
    current_bytes: u64,
    /// All bytes so far.
    bytes: u64,
}

impl BlockSums {
    /// Appends bytes, and calls `each` with the checksum of every block that they complete.
    pub(crate) fn update(&mut self, mut bytes: &[u8], mut each: impl FnMut(u32)) {
        self.bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = BLOCK_BYTES - self.current_bytes;
            let (part, rest) = bytes.split_at(bytes.len().min(room as usize)); // fits: 512
            bytes = rest;
            if part.len() as u64 == BLOCK_BYTES {
                each(crc32c(part));
                continue;
            }
            self.current.update(part);
            self.current_bytes += part.len() as u64;
            if self.current_bytes == BLOCK_BYTES {
                self.end(&mut each);
            }
        }
    }

    /// Ends the current block, if it has bytes: the next byte starts another.
    pub(crate) fn end(&mut self, mut each: impl FnMut(u32)) {
        if self.current_bytes > 0 {
            each(std::mem::take(&mut self.current).value());
            self.current_bytes = 0;
        }
    }
}

/// A `.crc` being written. It is invisible before the upload that [`ChecksumWriter::end`] returns
/// is finished.
#[derive(Debug)]
pub(crate) struct ChecksumWriter {
    key: Key,
    upload: Box<dyn Upload>,
    pending: Vec<u8>,
    sums_crc64: Crc64,
    bin: BlockSums,
    /// Where the segments of the `.bin` start.
    segments: Vec<u64>,
}

impl ChecksumWriter {
    /// # Errors
    /// [`crate::Error::Storage`], also if the file exists.
    pub(crate) fn begin(store: &dyn Storage, prefix: &Key) -> Result<Self> {
        let key = prefix.with_suffix(SUFFIX)?;
        let upload = store.create(&key, 0)?;
        let (pending, sums_crc64) = (Vec::new(), Crc64::new());
        let (bin, segments) = (BlockSums::default(), Vec::new());
        Ok(ChecksumWriter { key, upload, pending, sums_crc64, bin, segments })
    }

    /// The next bytes of the `.bin`.
    pub(crate) fn bin(&mut self, bytes: &[u8]) -> Result<()> {
        if self.segments.is_empty() && !bytes.is_empty() {
            self.segments.push(0);
        }
        let pending = &mut self.pending;
        self.bin.update(bytes, |sum| pending.extend_from_slice(&sum.to_le_bytes()));
        self.write_pending(WRITE_BYTES)
    }

    /// The next byte of the `.bin` starts a segment.
    pub(crate) fn begin_segment(&mut self) {
        let pending = &mut self.pending;
        self.bin.end(|sum| pending.extend_from_slice(&sum.to_le_bytes()));
        let start = self.bin.bytes;
        // An empty segment is not recorded.
        if self.segments.last() != Some(&start) {
            self.segments.push(start);
        }
    }

    /// Appends the whole `.bin` of another pair by copying its checksums.
    pub(crate) fn carry(&mut self, source: &BlockChecksums) -> Result<()> {
        self.begin_segment();
        let base = self.bin.bytes;
        self.segments.pop();
        self.segments.extend(source.segment_starts().map(|start| base + start));
        source.for_each_bin_sum(|sums| {
            self.pending.extend_from_slice(sums);
            self.write_pending(WRITE_BYTES)
        })?;
        self.bin.bytes += source.bin_bytes();
        Ok(())
    }

    /// Writes the remaining parts: the checksums of the `.idx` and the footer.
    pub(crate) fn end(mut self, mut idx: IdxSums) -> Result<(Key, Box<dyn Upload>)> {
        idx.running.end(|sum| idx.sums.push(sum));
        let pending = &mut self.pending;
        self.bin.end(|sum| pending.extend_from_slice(&sum.to_le_bytes()));
        if self.segments.last() == Some(&self.bin.bytes) {
            self.segments.pop();
        }
        pending.extend(idx.sums.iter().flat_map(|sum| sum.to_le_bytes()));
        self.write_pending(1)?;
        let segments: Vec<u8> =
            self.segments.iter().flat_map(|start| start.to_le_bytes()).collect();
        let footer = Footer {
            bin_bytes: self.bin.bytes,
            idx_bytes: idx.running.bytes,
            segments: self.segments.len() as u64,
            sums_crc64: self.sums_crc64.value(),
        };
        self.upload.write(&segments)?;
        self.upload.write(&footer.encode(&segments))?;
        Ok((self.key, self.upload))
    }

    fn write_pending(&mut self, bytes_min: usize) -> Result<()> {
        if self.pending.len() >= bytes_min {
            self.sums_crc64.update(&self.pending);
            self.upload.write(&self.pending)?;
            self.pending.clear();
        }
        Ok(())
    }
}

/// The checksums of a whole `.idx`: 1/128 of its size.
#[derive(Debug, Default)]
pub(crate) struct IdxSums {
    running: BlockSums,
    sums: Vec<u32>,
}

impl IdxSums {
    /// The next bytes of the `.idx`.
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        let sums = &mut self.sums;
        self.running.update(bytes, |sum| sums.push(sum));
    }
}
