//! Reads the checksums of a pair, and compares bytes with them.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use storage::{Crc64, Key, Map, Object, RangeRead, Storage, crc32c};

use crate::checksums::{
    BLOCK_BYTES, FOOTER_BYTES, Footer, MAGIC, SUFFIX, VERSION, footer_crc64, u64_at,
};
use crate::mmididx::dataset::READ_BYTES;
use crate::{Error, Result};

/// An object of a store without files is read whole if it is not larger: it costs a request.
const MAP_BYTES: u64 = 1 << 20;

/// The block checksums of a `.bin` and its `.idx`, from the `.crc` beside them.
#[derive(Debug)]
pub struct BlockChecksums {
    /// The name of the `.crc`.
    file: String,
    footer: Footer,
    /// Where each segment of the `.bin` begins, and the first of its blocks.
    segments: Vec<(u64, u64)>,
    bin_blocks: u64,
    object: Arc<dyn Object>,
    /// Of a file from the start; of other objects when blocks of them are asked for one by one.
    map: OnceLock<Map>,
}

/// A block that a range of a file overlaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Bytes of it.
    pub len: u32,
    /// CRC-32C of them.
    pub crc32c: u32,
}

/// The first block that differs from its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadBlock {
    /// Its first byte, counted from the start of what was compared.
    pub offset: u64,
    /// CRC-32C of the bytes that were read.
    pub found: u32,
    /// The block as it should be.
    pub expected: Block,
}

/// The two files of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum File {
    Bin,
    Idx,
}

impl BlockChecksums {
    /// Opens `prefix.crc`; `None` if there is none. Its footer is verified; the checksums are not,
    /// as a wrong one refuses a good block and never passes a bad one.
    ///
    /// # Errors
    /// [`storage::Error::Corrupt`] for a file that is damaged or of another format;
    /// [`Error::Storage`].
    pub fn open(store: &dyn Storage, prefix: &Key) -> Result<Option<Arc<Self>>> {
        let object = match store.open(&prefix.with_suffix(SUFFIX)?) {
            Err(storage::Error::NotFound { .. }) => return Ok(None),
            other => other?,
        };
        let (file, len) = (object.display(), object.len_bytes());
        let map = OnceLock::new();
        if len > 0 && (object.file().is_some() || len <= MAP_BYTES) {
            _ = map.set(object.map()?);
        }
        let corrupt = |offset: u64, found: String, expected: &str| {
            let (object, expected) = (file.clone(), expected.to_owned());
            Err(Error::Storage(storage::Error::Corrupt { object, offset, found, expected }))
        };
        let Some(footer_at) = len.checked_sub(FOOTER_BYTES as u64) else {
            return corrupt(len, format!("a file of {len} bytes"), "a footer of 56 bytes");
        };
        let mut bytes = [0; FOOTER_BYTES];
        read(&*object, &map, footer_at, &mut bytes)?;
        let bytes = &bytes;
        let block_bytes = u64_at(bytes, 8) >> 32; // the upper half of what is there
        if bytes[..8] != MAGIC || bytes[8..12] != VERSION.to_le_bytes() {
            let found = format!("\"{}\"", bytes[..12].escape_ascii());
            return corrupt(footer_at, found, "\"FLBLKCRC\" and version 1");
        }
        if block_bytes != BLOCK_BYTES {
            return corrupt(footer_at + 12, format!("blocks of {block_bytes} bytes"), "4096");
        }
        let footer = Footer {
            bin_bytes: u64_at(bytes, 16),
            idx_bytes: u64_at(bytes, 24),
            segments: u64_at(bytes, 32),
            sums_crc64: u64_at(bytes, 40),
        };
        let segment_bytes = footer.segments.checked_mul(8);
        let Some(sum_bytes) = segment_bytes.and_then(|it| footer_at.checked_sub(it)) else {
            let found = format!("{} segments in a file of {len} bytes", footer.segments);
            return corrupt(footer_at + 32, found, "as many as the file has room for");
        };
        let mut starts = vec![0; (footer_at - sum_bytes) as usize]; // fits: within the file
        read(&*object, &map, sum_bytes, &mut starts)?;
        let (found, expected) = (footer_crc64(&starts, bytes), u64_at(bytes, 48));
        if found != expected {
            let found = format!("CRC-64 {found:016x} of the footer");
            return corrupt(sum_bytes, found, &format!("{expected:016x}, as it says itself"));
        }
        let Some((segments, bin_blocks)) = segments_of(&starts, footer.bin_bytes) else {
            let found = "starts of segments that do not ascend".to_owned();
            return corrupt(sum_bytes, found, "ascending starts below the bytes of the .bin");
        };
        let blocks = bin_blocks + footer.idx_bytes.div_ceil(BLOCK_BYTES);
        if 4 * u128::from(blocks) != u128::from(sum_bytes) {
            let found = format!("{sum_bytes} bytes of checksums");
            return corrupt(sum_bytes, found, &format!("4 for each of {blocks} blocks"));
        }
        Ok(Some(Arc::new(BlockChecksums { object, file, footer, segments, bin_blocks, map })))
    }

    /// Bytes of the `.bin`.
    #[must_use]
    pub fn bin_bytes(&self) -> u64 {
        self.footer.bin_bytes
    }

    /// The blocks that a range of the `.bin` overlaps: from the first byte of the first to the end
    /// of the last.
    ///
    /// # Panics
    /// If the range reaches beyond the end of the `.bin`.
    #[must_use]
    pub fn extent(&self, range: Range<u64>) -> Range<u64> {
        self.extent_in(File::Bin, range)
    }

    /// Appends the blocks of a range of the `.bin` that [`Self::extent`] has returned.
    ///
    /// # Errors
    /// If the checksums cannot be read.
    ///
    /// # Panics
    /// If the range reaches beyond the end of the `.bin`.
    pub fn blocks(&self, extent: Range<u64>, into: &mut Vec<Block>) -> storage::Result<()> {
        if self.map.get().is_none() {
            // Whoever was quicker has the same.
            _ = self.map.set(self.object.map()?);
        }
        self.blocks_in(File::Bin, extent, into)
    }

    pub(crate) fn extent_in(&self, file: File, range: Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range;
        }
        let start = self.block_at(file, range.start).1.start;
        start..self.block_at(file, range.end - 1).1.end
    }

    fn blocks_in(
        &self,
        file: File,
        extent: Range<u64>,
        into: &mut Vec<Block>,
    ) -> storage::Result<()> {
        if extent.is_empty() {
            return Ok(());
        }
        let [first, last] = [extent.start, extent.end - 1].map(|at| self.block_at(file, at).0);
        let mut read_sums = Vec::new();
        let sums = match self.map.get() {
            Some(map) => &map[4 * first as usize..], // fits: within the map
            None => {
                read_sums.resize(4 * (last + 1 - first) as usize, 0); // fits: of bytes in memory
                self.object
                    .read_many(&mut [RangeRead { offset: 4 * first, buf: &mut read_sums }])?;
                &read_sums[..]
            }
        };
        let mut at = extent.start;
        for sum in sums.as_chunks().0 {
            if at >= extent.end {
                break;
            }
            let end = self.block_at(file, at).1.end;
            let len = (end - at) as u32; // fits: 4096
            into.push(Block { len, crc32c: u32::from_le_bytes(*sum) });
            at = end;
        }
        Ok(())
    }

    /// Compares the blocks that lie in these bytes, which begin at `offset` of the file, as does a
    /// block.
    pub(crate) fn verify(
        &self,
        file: File,
        name: &str,
        offset: u64,
        bytes: &[u8],
    ) -> storage::Result<()> {
        let mut blocks = Vec::new();
        self.blocks_in(file, offset..offset + bytes.len() as u64, &mut blocks)?;
        verify_blocks(&blocks, bytes).map_err(|bad| bad.error(name, offset))
    }

    /// Compares the blocks of a `.bin` that lie whole before `end`: for one that was cut off.
    pub(crate) fn verify_before(&self, bin: &dyn Object, end: u64) -> Result<()> {
        let end = end.min(bin.len_bytes()).min(self.bin_bytes());
        let (mut at, mut buf) = (0, Vec::new());
        while at < end {
            let range = at..(at + READ_BYTES).min(end);
            let mut stop = self.extent(range.clone()).end;
            if stop > end {
                stop = self.block_at(File::Bin, range.end - 1).1.start;
            }
            if stop <= at {
                break;
            }
            buf.resize((stop - at) as usize, 0); // fits: 8 MiB and a block
            bin.read_many(&mut [RangeRead { offset: at, buf: &mut buf }])?;
            self.verify(File::Bin, &bin.display(), at, &buf)?;
            at = stop;
        }
        Ok(())
    }

    /// Refuses files of other lengths than these checksums are of.
    pub(crate) fn check_lengths(&self, bin: &dyn Object, idx: &dyn Object) -> Result<()> {
        let Footer { bin_bytes, idx_bytes, .. } = self.footer;
        for (object, expected) in [(bin, bin_bytes), (idx, idx_bytes)] {
            let found = object.len_bytes();
            if found != expected {
                return Err(Error::Storage(storage::Error::Corrupt {
                    object: object.display(),
                    offset: found.min(expected),
                    found: format!("a file of {found} bytes"),
                    expected: format!(
                        "{expected}, as {} says (hint: if the dataset was written again by another \
                         program, delete that file)",
                        self.file
                    ),
                }));
            }
        }
        Ok(())
    }

    /// Compares the checksums themselves with their own.
    ///
    /// # Errors
    /// [`storage::Error::Corrupt`].
    pub fn verify_self(&self) -> Result<()> {
        let mut sum = Crc64::new();
        self.for_each_sum(self.bin_blocks + self.footer.idx_bytes.div_ceil(BLOCK_BYTES), |sums| {
            sum.update(sums);
            Ok(())
        })?;
        let found = sum.value();
        if found == self.footer.sums_crc64 {
            return Ok(());
        }
        Err(Error::Storage(storage::Error::Corrupt {
            object: self.file.clone(),
            offset: 0,
            found: format!("CRC-64 {found:016x} of the checksums"),
            expected: format!("{:016x}, as its footer says", self.footer.sums_crc64),
        }))
    }

    pub(crate) fn segment_starts(&self) -> impl Iterator<Item = u64> {
        self.segments.iter().map(|&(start, _)| start)
    }

    /// Calls `visit` with the checksums of the `.bin`, four bytes each, many at a time.
    pub(crate) fn for_each_bin_sum(&self, visit: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.for_each_sum(self.bin_blocks, visit)
    }

    fn for_each_sum(&self, blocks: u64, mut visit: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (mut at, end) = (0, 4 * blocks);
        let mut buf = vec![0; end.min(READ_BYTES) as usize]; // fits: 8 MiB at most
        while at < end {
            let sums = &mut buf[..(end - at).min(READ_BYTES) as usize]; // fits: as above
            read(&*self.object, &self.map, at, sums)?;
            visit(sums)?;
            at += sums.len() as u64;
        }
        Ok(())
    }

    pub(crate) fn len_of(&self, file: File) -> u64 {
        match file {
            File::Bin => self.footer.bin_bytes,
            File::Idx => self.footer.idx_bytes,
        }
    }

    /// The block of a byte: its place among all checksums, and its bytes.
    fn block_at(&self, file: File, at: u64) -> (u64, Range<u64>) {
        let len = self.len_of(file);
        assert!(at < len, "byte {at} of a file of {len}");
        let (first, start, end) = match file {
            File::Idx => (self.bin_blocks, 0, len),
            File::Bin => {
                // The first segment begins with the file.
                let next = self.segments.partition_point(|&(start, _)| start <= at);
                let (start, first) = self.segments[next - 1];
                (first, start, self.segments.get(next).map_or(len, |&(end, _)| end))
            }
        };
        let nth = (at - start) / BLOCK_BYTES;
        let block = start + nth * BLOCK_BYTES;
        (first + nth, block..(block + BLOCK_BYTES).min(end))
    }
}

impl BadBlock {
    /// What it means for a `.bin` or `.idx` that was read from `offset` on.
    #[must_use]
    pub fn error(&self, object: &str, offset: u64) -> storage::Error {
        let BadBlock { offset: at, found, expected } = *self;
        let prefix = [".bin", ".idx"].iter().find_map(|suffix| object.strip_suffix(suffix));
        let prefix = prefix.unwrap_or(object);
        storage::Error::Corrupt {
            object: object.to_owned(),
            offset: offset + at,
            found: format!("CRC-32C {found:08x} of the {} bytes from there on", expected.len),
            expected: format!("{:08x}, as {prefix}{SUFFIX} says", expected.crc32c),
        }
    }
}

/// Compares bytes with the checksums of the blocks that they are.
///
/// # Errors
/// The first block that differs.
///
/// # Panics
/// If the blocks have other lengths than the bytes.
pub fn verify_blocks(blocks: &[Block], mut bytes: &[u8]) -> std::result::Result<(), BadBlock> {
    let len = bytes.len();
    for &expected in blocks {
        let (block, rest) = bytes.split_at(expected.len as usize); // fits: 64 bits
        let found = crc32c(block);
        if found != expected.crc32c {
            return Err(BadBlock { offset: (len - bytes.len()) as u64, found, expected });
        }
        bytes = rest;
    }
    assert!(bytes.is_empty(), "the blocks are all of the bytes");
    Ok(())
}

fn read(object: &dyn Object, map: &OnceLock<Map>, offset: u64, buf: &mut [u8]) -> Result<()> {
    match map.get() {
        // fits: within the map
        Some(map) => buf.copy_from_slice(&map[offset as usize..][..buf.len()]),
        None => object.read_many(&mut [RangeRead { offset, buf }])?,
    }
    Ok(())
}

/// The segments with the first block of each, and how many blocks there are.
fn segments_of(starts: &[u8], bin_bytes: u64) -> Option<(Vec<(u64, u64)>, u64)> {
    let starts: Vec<u64> = starts.chunks_exact(8).map(|start| u64_at(start, 0)).collect();
    let ends = starts.iter().skip(1).copied().chain([bin_bytes]);
    if starts.first().is_none_or(|&first| first != 0) {
        return (starts.is_empty() && bin_bytes == 0).then_some((Vec::new(), 0));
    }
    let (mut segments, mut blocks) = (Vec::with_capacity(starts.len()), 0_u64);
    for (&start, end) in starts.iter().zip(ends) {
        segments.push((start, blocks));
        blocks += end.checked_sub(start).filter(|&len| len > 0)?.div_ceil(BLOCK_BYTES);
    }
    Some((segments, blocks))
}
