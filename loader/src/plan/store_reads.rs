//! The reads of one store for a round: its requests, and where their bytes are copied or kept.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use indexed::{BlockChecksums, BlockRun};
use storage::{Buffer, BufferPool, Object, RangeRead, drop_cached};

use crate::PieceRef;
use crate::plan::round::{Limits, PieceLocation};

/// A contiguous range read in one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The file, as an index into [`crate::SampleOrder::sources`].
    pub file: u32,
    /// First byte.
    pub offset_bytes: u64,
    /// How many.
    pub len_bytes: u64,
    /// Which of [`StoreReads::copies`] are filled from it.
    pub copies: Range<usize>,
    /// Which of [`StoreReads::runs`] it consists of; none if it is not verified.
    pub runs: Range<usize>,
}

/// Bytes of an extent that belong to a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScatterCopy {
    /// First byte, counted from the start of the extent.
    pub from: usize,
    /// How many.
    pub len: usize,
    /// First byte in [`StoreReads::bytes`].
    pub to: usize,
}

/// The reads of one store for a round.
#[derive(Debug, Default)]
pub struct StoreReads {
    /// Ascending by file and offset, disjoint.
    pub extents: Vec<Extent>,
    /// Of all extents.
    pub copies: Vec<ScatterCopy>,
    /// The blocks of the extents that are verified, with their checksums.
    pub runs: Vec<BlockRun>,
    /// The bytes of the samples, piece after piece in sample order, except those kept in their read
    /// buffers. Never shrinks: it may be longer than this round needs.
    pub bytes: Vec<u8>,
    /// The extents whose buffers are kept; empty if none is.
    kept: Vec<Option<KeptExtent>>,
    pub(crate) round: u64,
    pub(crate) store: usize,
    /// Bytes that this round uses.
    pub(super) used: usize,
    /// The size of its buffers if all of them are kept; `None` where that is not worth it.
    kept_bytes: Option<u64>,
    /// Extents submitted to the store.
    pub(crate) submitted: usize,
    /// Extents not yet completed.
    pub(crate) pending: usize,
    pub(crate) deadline: Option<Instant>,
    /// The files of the extents, ascending.
    pub(crate) read_files: Vec<ReadFile>,
    /// The first error, and all extents that failed.
    pub(crate) failure: Option<storage::Error>,
    pub(crate) failed: Vec<usize>,
}

/// A file that extents are read from.
#[derive(Debug)]
pub(crate) struct ReadFile {
    /// As [`Extent::file`].
    pub(crate) number: u32,
    pub(crate) object: Arc<dyn Object>,
    /// If its blocks are verified.
    pub(crate) checksums: Option<Arc<BlockChecksums>>,
}

/// An extent whose bytes stay in the buffer that they were read into.
#[derive(Debug)]
struct KeptExtent {
    buffer: Buffer,
    /// The range of the buffer that is the extent.
    data: Range<usize>,
    /// How many of its bytes and of its runs of blocks were verified, from its start.
    verified: usize,
    verified_runs: usize,
}

/// Bytes of a file that a sample needs, no more than one request reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceRead {
    pub(super) store: usize,
    pub(super) file: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) to: usize,
    /// The piece that it belongs to, as an index into the pieces of the round.
    pub(super) piece: usize,
}

impl PieceRead {
    fn end(&self) -> u64 {
        self.offset + self.len
    }

    fn range(&self) -> Range<u64> {
        self.offset..self.end()
    }
}

impl StoreReads {
    /// Copies the bytes of an extent to its samples.
    ///
    /// # Panics
    /// If the length is not that of the extent.
    pub fn scatter(&mut self, extent: usize, bytes: &[u8]) {
        self.make_room();
        let Extent { len_bytes, copies, .. } = &self.extents[extent];
        assert_eq!(bytes.len() as u64, *len_bytes, "a reader returns the requested length");
        for &ScatterCopy { from, len, to } in &self.copies[copies.clone()] {
            self.bytes[to..to + len].copy_from_slice(&bytes[from..from + len]);
        }
    }

    /// Compares the bytes of an extent that is not kept with the checksums of its blocks.
    ///
    /// # Errors
    /// [`storage::Error::Corrupt`], with the first block that differs.
    pub(crate) fn verify(&self, extent: usize, bytes: &[u8]) -> storage::Result<()> {
        let Extent { file, offset_bytes, ref runs, .. } = self.extents[extent];
        let mut rest = bytes;
        let is_good = self.runs[runs.clone()].iter().all(|run| {
            let (part, after) = rest.split_at(run.len as usize); // fits: 4096 at most
            rest = after;
            run.is_of(part)
        });
        if is_good { Ok(()) } else { self.file(file).verify(offset_bytes, bytes) }
    }

    /// As [`StoreReads::verify`]; bytes that differ are read again.
    ///
    /// # Errors
    /// [`storage::Error::Corrupt`] if they differ again; errors of that read.
    pub(crate) fn verify_or_reread(&self, extent: usize, bytes: &mut [u8]) -> storage::Result<()> {
        if self.verify(extent, bytes).is_ok() {
            return Ok(());
        }
        let Extent { file, offset_bytes, .. } = self.extents[extent];
        self.file(file).verify_or_reread(offset_bytes, bytes)
    }

    /// Whether to keep the bytes of its extents in their read buffers: the buffers, which are whole
    /// pages and include unneeded bytes, take no more than 1.5 times the bytes of the samples.
    #[must_use]
    pub fn is_worth_keeping(&self) -> bool {
        self.kept_bytes.is_some()
    }

    /// Bytes that it holds in memory.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.kept_bytes.unwrap_or(self.used as u64)
    }

    /// Keeps the buffer of an extent: its samples are then read and verified in place. `data` is
    /// the range of the buffer that is the extent.
    ///
    /// # Panics
    /// If the length is not that of the extent.
    pub fn keep(&mut self, extent: usize, buffer: Buffer, data: Range<usize>) {
        let expected = self.extents[extent].len_bytes;
        assert_eq!(data.len() as u64, expected, "a reader returns the requested length");
        self.kept.resize_with(self.extents.len(), || None);
        let kept = KeptExtent { buffer, data, verified: 0, verified_runs: 0 };
        self.kept[extent] = Some(kept);
    }

    /// Verifies the blocks of a piece that are in kept buffers. They are verified just before they
    /// are decoded, so that the cores read them from memory once.
    pub(super) fn verify_kept(
        &mut self,
        piece: &PieceRef,
        location: &PieceLocation,
    ) -> storage::Result<()> {
        if self.kept.is_empty() || self.runs.is_empty() {
            return Ok(());
        }
        let (mut offset, end) = (piece.offset_bytes, piece.offset_bytes + piece.len_bytes);
        let mut nth = location.extent;
        while offset < end {
            let Extent { offset_bytes, len_bytes, .. } = self.extents[nth];
            let extent_end = offset_bytes + len_bytes;
            // fits: within an extent
            self.verify_until(nth, (end.min(extent_end) - offset_bytes) as usize)?;
            (offset, nth) = (extent_end, nth + 1);
        }
        Ok(())
    }

    /// Verifies the blocks of a kept extent that begin before `until` and were not verified yet.
    fn verify_until(&mut self, nth: usize, until: usize) -> storage::Result<()> {
        let Some(Some(kept)) = self.kept.get_mut(nth) else { return Ok(()) };
        let extent = &self.extents[nth];
        for run in &self.runs[extent.runs.clone()][kept.verified_runs..] {
            if kept.verified >= until {
                break;
            }
            let (start, len) = (kept.data.start + kept.verified, run.len as usize); // fits: 4096
            let bytes = &mut kept.buffer[start..start + len];
            if !run.is_of(bytes) {
                let offset = extent.offset_bytes + kept.verified as u64;
                file_of(&self.read_files, extent.file).verify_or_reread(offset, bytes)?;
            }
            (kept.verified, kept.verified_runs) = (kept.verified + len, kept.verified_runs + 1);
        }
        Ok(())
    }

    /// Frees the kept buffers.
    pub(crate) fn release(&mut self) {
        self.kept.clear();
    }

    /// The bytes of a sample that is in these reads alone and starts at `start`, if they are
    /// contiguous.
    pub(super) fn run(&self, start: usize, pieces: &[PieceRef], extent: usize) -> Option<&[u8]> {
        let len: u64 = pieces.iter().map(|piece| piece.len_bytes).sum();
        let len = len as usize; // fits: it is in memory
        if len == 0 {
            return Some(&[]);
        }
        if self.kept.is_empty() {
            return Some(&self.bytes[start..start + len]);
        }
        let follows = |pair: &[PieceRef]| {
            let end = pair[0].offset_bytes + pair[0].len_bytes;
            pair[0].file == pair[1].file && end == pair[1].offset_bytes
        };
        let kept = self.kept_extent(extent).filter(|_| pieces.windows(2).all(follows))?;
        // fits: an extent begins at or before the first byte of what is cut from it
        let from = (pieces.first()?.offset_bytes - self.extents[extent].offset_bytes) as usize;
        kept.get(from..from + len)
    }

    /// Appends the bytes of a piece, wherever they are. A piece that was cut continues at the start
    /// of the next extent.
    pub(super) fn append(&self, piece: &PieceRef, location: &PieceLocation, into: &mut Vec<u8>) {
        let mut at = location.start;
        let end = at + piece.len_bytes as usize; // fits: it is in memory
        if self.kept.is_empty() && at < end {
            return into.extend_from_slice(&self.bytes[at..end]);
        }
        let (mut offset, mut nth) = (piece.offset_bytes, location.extent);
        while at < end {
            let Extent { offset_bytes, len_bytes, .. } = self.extents[nth];
            let from = (offset - offset_bytes) as usize; // fits: within an extent, as is the next
            let len = (end - at).min(len_bytes as usize - from);
            into.extend_from_slice(match self.kept_extent(nth) {
                Some(kept) => &kept[from..from + len],
                None => &self.bytes[at..at + len],
            });
            (at, offset, nth) = (at + len, offset + len as u64, nth + 1);
        }
    }

    fn kept_extent(&self, extent: usize) -> Option<&[u8]> {
        let KeptExtent { buffer, data, .. } = self.kept.get(extent)?.as_ref()?;
        Some(&buffer[data.clone()])
    }

    pub(super) fn clear(&mut self) {
        self.release();
        self.extents.clear();
        self.copies.clear();
        self.runs.clear();
        self.read_files.clear();
        self.failed.clear();
        (self.used, self.submitted, self.pending) = (0, 0, 0);
        (self.deadline, self.failure, self.kept_bytes) = (None, None, None);
    }

    /// The bytes of its samples.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used as u64
    }

    /// The file of an extent.
    pub(crate) fn file(&self, number: u32) -> &ReadFile {
        file_of(&self.read_files, number)
    }

    /// Files that its extents are in, each once, ascending.
    pub(crate) fn files(&self) -> impl Iterator<Item = u32> {
        let mut last = None;
        let files = self.extents.iter().map(|extent| extent.file);
        files.filter(move |&file| last.replace(file) != Some(file))
    }

    /// Adds room for `len` bytes; returns where it starts.
    pub(super) fn grow(&mut self, len: usize) -> usize {
        let start = self.used;
        self.used += len;
        start
    }

    /// Old bytes need not be cleared: every byte of a round is overwritten.
    pub(super) fn make_room(&mut self) {
        if self.bytes.len() < self.used {
            self.bytes.resize(self.used, 0);
        }
    }

    pub(super) fn complete(&mut self, round: u64, store: usize) {
        (self.round, self.store, self.pending) = (round, store, self.extents.len());
        let buffers = self.extents.iter().map(|extent| BufferPool::bytes_of(extent.len_bytes));
        let buffers = buffers.sum::<u64>();
        let is_worth = buffers > 0 && 2 * buffers <= 3 * self.used as u64;
        self.kept_bytes = is_worth.then_some(buffers);
    }

    /// Coalesces the chunks of one file, which are sorted, into extents: of whole blocks, where
    /// those have checksums.
    pub(super) fn cut(
        &mut self,
        chunks: &[PieceRead],
        limits: &Limits,
        checksums: Option<&BlockChecksums>,
        locations: &mut [PieceLocation],
    ) -> storage::Result<()> {
        let first_extent = self.extents.len();
        let mut rest = chunks;
        while let Some(first) = rest.first() {
            let Range { start, mut end } = whole_blocks(checksums, first.range());
            let mut count = 1;
            while let Some(next) = rest.get(count) {
                let next = whole_blocks(checksums, next.range());
                if next.start > end.saturating_add(limits.gap_bytes) {
                    break;
                }
                end = end.max(next.end);
                count += 1;
            }
            let (run, after) = rest.split_at(count);
            self.cut_run(run, start..end, limits.extent_bytes_max, checksums, locations);
            rest = after;
        }
        if let Some(checksums) = checksums {
            let extents = &mut self.extents[first_extent..];
            checksums.prefetch(extents.iter().map(|extent| extent.offset_bytes))?;
            for extent in extents {
                let bytes = extent.offset_bytes..extent.offset_bytes + extent.len_bytes;
                let first = self.runs.len();
                checksums.runs(bytes, &mut self.runs)?;
                extent.runs = first..self.runs.len();
            }
        }
        Ok(())
    }

    /// A run that is too long for one request is cut at multiples of the longest one, so that no
    /// sector is read twice; or else at the start of the block that such a cut is in.
    fn cut_run(
        &mut self,
        run: &[PieceRead],
        bytes: Range<u64>,
        extent_bytes_max: u64,
        checksums: Option<&BlockChecksums>,
        locations: &mut [PieceLocation],
    ) {
        let mut first = 0;
        let mut start = bytes.start;
        while start < bytes.end {
            let next_cut = (start / extent_bytes_max + 1) * extent_bytes_max;
            let fits = bytes.end - start <= extent_bytes_max;
            let end = if fits {
                bytes.end
            } else {
                let cut = whole_blocks(checksums, next_cut..next_cut + 1);
                let most = start + extent_bytes_max;
                match whole_blocks(checksums, most..most + 1).start {
                    // Not a request for one block alone.
                    last if cut.start <= start && last > start => last,
                    _ if cut.start <= start => cut.end,
                    _ => cut.start,
                }
            };
            while run[first].end() <= start {
                first += 1;
            }
            self.add_extent(&run[first..], start..end, checksums, locations);
            start = end;
        }
    }

    /// Adds an extent for the chunks in a range of a run, from the first of their bytes to the
    /// last, or of their blocks. The range consists of whole blocks.
    fn add_extent(
        &mut self,
        run: &[PieceRead],
        bytes: Range<u64>,
        checksums: Option<&BlockChecksums>,
        locations: &mut [PieceLocation],
    ) {
        let within = |chunk: &&PieceRead| chunk.offset < bytes.end;
        let cut = |chunk: &PieceRead| chunk.offset.max(bytes.start)..chunk.end().min(bytes.end);
        let wanted = || run.iter().take_while(within).filter(|chunk| !cut(chunk).is_empty());
        let Some(start) = wanted().map(|chunk| cut(chunk).start).min() else { return };
        let end = wanted().map(|chunk| cut(chunk).end).max().unwrap_or(start);
        let Range { start, end } = whole_blocks(checksums, start..end);
        let first = self.copies.len();
        for chunk in wanted() {
            let part = cut(chunk);
            let location = &mut locations[chunk.piece];
            if part.start == chunk.offset && chunk.to == location.start {
                location.extent = self.extents.len();
            }
            self.copies.push(ScatterCopy {
                from: (part.start - start) as usize,   // fits: within an extent
                len: (part.end - part.start) as usize, // fits: as above
                to: chunk.to + (part.start - chunk.offset) as usize, // fits: it is in memory
            });
        }
        let copies = first..self.copies.len();
        let (file, len_bytes) = (run[0].file, end - start);
        self.extents.push(Extent { file, offset_bytes: start, len_bytes, copies, runs: 0..0 });
    }
}

impl ReadFile {
    /// Compares bytes with the checksums of their blocks, if it has any.
    fn verify(&self, offset: u64, bytes: &[u8]) -> storage::Result<()> {
        let name = || self.object.display();
        let verify = |it: &Arc<BlockChecksums>| it.verify_bin(&name(), offset, bytes);
        self.checksums.as_ref().map_or(Ok(()), verify)
    }

    /// Reads bytes that differ from their checksums again: memory or a network may have failed, and
    /// not the store.
    fn verify_or_reread(&self, offset: u64, bytes: &mut [u8]) -> storage::Result<()> {
        let Err(error) = self.verify(offset, bytes) else { return Ok(()) };
        log::warn!("{error}; retrying the read");
        drop_cached(&*self.object, offset, bytes.len());
        self.object.read_many(&mut [RangeRead { offset, buf: &mut *bytes }])?;
        self.verify(offset, bytes)
    }
}

fn file_of(files: &[ReadFile], number: u32) -> &ReadFile {
    &files[files.partition_point(|file| file.number < number)]
}

/// The blocks that a range overlaps; without checksums the range itself.
fn whole_blocks(checksums: Option<&BlockChecksums>, range: Range<u64>) -> Range<u64> {
    match checksums {
        Some(checksums) => checksums.extent(range),
        None => range,
    }
}

pub(super) fn reserve<T>(list: &mut Vec<T>, most: usize) {
    if list.capacity() < most {
        list.reserve_exact(most + most / 4 - list.len());
    }
}
