//! Reads the checksums of a pair, and compares bytes with them.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use storage::{Crc64, Key, Map, Object, RangeRead, Storage, crc32c};

use crate::checksums::run_sum::sum_of_run;
use crate::checksums::{
    BLOCK_BYTES, FOOTER_BYTES, Footer, MAGIC, SUFFIX, VERSION, footer_crc64, u64_at,
};
use crate::mmididx::dataset::READ_BYTES;
use crate::mmididx::idx::{END_OF_FILE, end_at};
use crate::{Error, Result};

/// Blocks of a run, at most: 4 KiB, which stay in the L1 cache until they are decoded.
const RUN_BLOCKS: usize = 8;

/// In a store without files, an object of at most this size is read whole: every read costs a
/// request.
const MAP_BYTES: u64 = 1 << 20;

/// The block checksums of a `.bin` and its `.idx`, from the `.crc` beside them.
#[derive(Debug)]
pub struct BlockChecksums {
    /// The name of the `.crc`.
    file: String,
    footer: Footer,
    /// Where each segment of the `.bin` starts, and the number of its first block.
    segments: Vec<(u64, u64)>,
    bin_blocks: u64,
    object: Arc<dyn Object>,
    /// Of a file from the start; of other objects as soon as single blocks are requested.
    map: OnceLock<Map>,
}

/// Blocks in a row, at most 8, and the checksum of all their bytes: one long comparison costs less
/// than several short ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    /// Their bytes.
    pub len: u32,
    /// CRC-32C of those bytes.
    pub crc32c: u32,
}

/// A range of a file whose blocks are counted from its start.
#[derive(Clone, Copy, Debug)]
struct FileSegment {
    /// The number of blocks before it.
    first_block: u64,
    start: u64,
    end: u64,
}

/// The two files of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum File {
    Bin,
    Idx,
}

impl BlockChecksums {
    /// Opens `prefix.crc`; `None` if there is none. Its footer is verified; the checksums are not,
    /// because a wrong one refuses a good block and does not accept a bad one.
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
            let whole = object.map()?;
            whole.expect_table_lookups();
            _ = map.set(whole);
        }
        let corrupt = |offset: u64, found: String, expected: &str| {
            let (object, expected) = (file.clone(), expected.to_owned());
            Err(Error::Storage(storage::Error::Corrupt { object, offset, found, expected }))
        };
        let Some(footer_at) = len.checked_sub(FOOTER_BYTES as u64) else {
            return corrupt(len, END_OF_FILE.to_owned(), "a footer of 56 bytes");
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
            let found = format!("blocks of {block_bytes} bytes");
            return corrupt(footer_at + 12, found, "blocks of 512 bytes");
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
            return corrupt(footer_at + 32, found, "segments that fit in the file");
        };
        let mut starts = vec![0; (footer_at - sum_bytes) as usize]; // fits: within the file
        read(&*object, &map, sum_bytes, &mut starts)?;
        let (found, expected) = (footer_crc64(&starts, bytes), u64_at(bytes, 48));
        if found != expected {
            let found = format!("CRC-64 {found:016x} of the footer");
            let expected = format!("CRC-64 {expected:016x} as recorded in the footer");
            return corrupt(sum_bytes, found, &expected);
        }
        let Some((segments, bin_blocks)) = segments_of(&starts, footer.bin_bytes) else {
            let found = "segment starts that do not ascend or exceed it".to_owned();
            return corrupt(sum_bytes, found, "ascending segment starts below the .bin length");
        };
        let blocks = bin_blocks + footer.idx_bytes.div_ceil(BLOCK_BYTES);
        if 4 * u128::from(blocks) != u128::from(sum_bytes) {
            let found = format!("{sum_bytes} bytes of checksums");
            return corrupt(sum_bytes, found, &format!("4 bytes for each of {blocks} blocks"));
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

    /// Prefetches the checksums of blocks of the `.bin`, one byte offset for each, into the CPU
    /// caches. They are far apart in a large table, so each is a cache miss; here several misses
    /// overlap, later they would be serial.
    ///
    /// # Errors
    /// If the checksums cannot be read.
    ///
    /// # Panics
    /// If a byte is beyond the end of the `.bin`.
    pub fn prefetch(&self, bytes: impl Iterator<Item = u64>) -> storage::Result<()> {
        let map = self.whole()?;
        // fits: within the map
        let first = |at| map[4 * self.block_at(File::Bin, at).0 as usize];
        std::hint::black_box(bytes.map(first).fold(0, |all, byte| all ^ byte));
        Ok(())
    }

    /// Appends the blocks of a range of the `.bin` that [`Self::extent`] has returned, in runs.
    ///
    /// # Errors
    /// If the checksums cannot be read.
    ///
    /// # Panics
    /// If the range reaches beyond the end of the `.bin`.
    pub fn runs(&self, extent: Range<u64>, into: &mut Vec<BlockRun>) -> storage::Result<()> {
        self.whole()?;
        self.runs_in(File::Bin, extent, RUN_BLOCKS, into)
    }

    /// Compares bytes of the `.bin`, whose name is for messages, with the checksum of each of their
    /// blocks. The bytes are those of a range that [`Self::extent`] has returned.
    ///
    /// # Errors
    /// [`storage::Error::Corrupt`], with the offset of the first block that differs; if the
    /// checksums cannot be read.
    ///
    /// # Panics
    /// If the bytes reach beyond the end of the `.bin`.
    pub fn verify_bin(&self, name: &str, offset: u64, bytes: &[u8]) -> storage::Result<()> {
        self.verify(File::Bin, name, offset, bytes)
    }

    fn whole(&self) -> storage::Result<&Map> {
        if let Some(map) = self.map.get() {
            return Ok(map);
        }
        let map = self.object.map()?;
        map.expect_table_lookups();
        Ok(self.map.get_or_init(|| map))
    }

    pub(crate) fn extent_in(&self, file: File, range: Range<u64>) -> Range<u64> {
        if range.is_empty() {
            return range;
        }
        let start = self.block_at(file, range.start).1.start;
        start..self.block_at(file, range.end - 1).1.end
    }

    fn runs_in(
        &self,
        file: File,
        extent: Range<u64>,
        blocks_max: usize,
        into: &mut Vec<BlockRun>,
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
        let (mut at, mut sums) = (extent.start, sums.as_chunks().0);
        while at < extent.end {
            let end = self.segment_at(file, at).end.min(extent.end);
            let whole = ((end - at) / BLOCK_BYTES) as usize; // fits: of bytes in memory
            let (whole, rest) = sums.split_at(whole);
            into.extend(whole.chunks(blocks_max).map(|run| BlockRun {
                len: (run.len() as u64 * BLOCK_BYTES) as u32, // fits: 4096 at most
                crc32c: sum_of_run(run),
            }));
            sums = rest;
            let len = ((end - at) % BLOCK_BYTES) as u32; // fits: less than 512
            if len > 0 {
                into.push(BlockRun { len, crc32c: u32::from_le_bytes(rest[0]) });
                sums = &rest[1..];
            }
            at = end;
        }
        Ok(())
    }

    /// Compares the complete blocks in these bytes. `offset` is their position in the file, at the
    /// start of a block.
    pub(crate) fn verify(
        &self,
        file: File,
        name: &str,
        offset: u64,
        bytes: &[u8],
    ) -> storage::Result<()> {
        let range = offset..offset + bytes.len() as u64;
        let mut runs = Vec::new();
        self.runs_in(file, range.clone(), RUN_BLOCKS, &mut runs)?;
        if first_bad(&runs, bytes).is_none() {
            return Ok(());
        }
        runs.clear();
        self.runs_in(file, range, 1, &mut runs)?;
        match first_bad(&runs, bytes) {
            Some((at, found, expected)) => Err(bad_block(name, offset + at, found, expected)),
            None => Ok(()),
        }
    }

    /// Compares the blocks of a `.bin` that end at or before `end`: for a truncated file.
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

    /// Refuses files whose lengths are not those that the checksums cover.
    pub(crate) fn check_lengths(&self, bin: &dyn Object, idx: &dyn Object) -> Result<()> {
        let Footer { bin_bytes, idx_bytes, .. } = self.footer;
        for (object, expected) in [(bin, bin_bytes), (idx, idx_bytes)] {
            let found = object.len_bytes();
            if found != expected {
                return Err(Error::Storage(storage::Error::Corrupt {
                    object: object.display(),
                    offset: found.min(expected),
                    found: end_at(found.into(), expected.into()),
                    expected: format!(
                        "{expected} bytes as in {0} (hint: delete {0} if another program rewrote \
                         the dataset)",
                        self.file
                    ),
                }));
            }
        }
        Ok(())
    }

    /// Compares the checksums with the checksum over all of them.
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
            expected: format!("CRC-64 {:016x} as in the footer", self.footer.sums_crc64),
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

    /// The block of a byte: its index among all checksums, and its byte range.
    fn block_at(&self, file: File, at: u64) -> (u64, Range<u64>) {
        let FileSegment { first_block, start, end } = self.segment_at(file, at);
        let nth = (at - start) / BLOCK_BYTES;
        let block = start + nth * BLOCK_BYTES;
        (first_block + nth, block..(block + BLOCK_BYTES).min(end))
    }

    fn segment_at(&self, file: File, at: u64) -> FileSegment {
        let len = self.len_of(file);
        assert!(at < len, "byte {at} of a file of {len}");
        match file {
            File::Idx => FileSegment { first_block: self.bin_blocks, start: 0, end: len },
            File::Bin => {
                // The first segment begins with the file.
                let next = self.segments.partition_point(|&(start, _)| start <= at);
                let (start, first_block) = self.segments[next - 1];
                let end = self.segments.get(next).map_or(len, |&(end, _)| end);
                FileSegment { first_block, start, end }
            }
        }
    }
}

impl BlockRun {
    /// Whether bytes of the length of the run match its checksum.
    #[must_use]
    pub fn is_of(&self, bytes: &[u8]) -> bool {
        crc32c(bytes) == self.crc32c
    }
}

/// The first run that differs: its offset in the bytes, and the checksum that was computed.
fn first_bad(runs: &[BlockRun], bytes: &[u8]) -> Option<(u64, u32, BlockRun)> {
    let mut rest = bytes;
    for &run in runs {
        let (part, after) = rest.split_at(run.len as usize); // fits: 64 bits
        let found = crc32c(part);
        if found != run.crc32c {
            return Some(((bytes.len() - rest.len()) as u64, found, run));
        }
        rest = after;
    }
    None
}

/// The error for a block of a `.bin` or `.idx` that differs from its checksum.
fn bad_block(object: &str, offset: u64, found: u32, expected: BlockRun) -> storage::Error {
    let prefix = [".bin", ".idx"].iter().find_map(|suffix| object.strip_suffix(suffix));
    let prefix = prefix.unwrap_or(object);
    storage::Error::Corrupt {
        object: object.to_owned(),
        offset,
        found: format!("CRC-32C {found:08x} of a block of {} bytes", expected.len),
        expected: format!("CRC-32C {:08x} as in {prefix}{SUFFIX}", expected.crc32c),
    }
}

fn read(object: &dyn Object, map: &OnceLock<Map>, offset: u64, buf: &mut [u8]) -> Result<()> {
    match map.get() {
        // fits: within the map
        Some(map) => buf.copy_from_slice(&map[offset as usize..][..buf.len()]),
        None => object.read_many(&mut [RangeRead { offset, buf }])?,
    }
    Ok(())
}

/// The segments with the first block of each, and the number of blocks.
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
