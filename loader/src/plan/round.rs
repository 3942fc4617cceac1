//! Turns the order of future samples into requests: pure, no clock and no reading.
//!
//! A sample is cut from one or more documents, each somewhere else in some file. The pieces of all
//! samples of a [`PrefetchRound`] are sorted by file offset and coalesced where they touch or
//! nearly do, so that a device sees few, ascending requests. Each request knows where its bytes go.
//! A round has one [`StoreReads`] per store, so that stores do not wait for each other.

use std::ops::Range;
use std::sync::Arc;

use indexed::BlockChecksums;

pub(crate) use crate::plan::store_reads::ReadFile;
pub use crate::plan::store_reads::{Extent, ScatterCopy, StoreReads};

use crate::plan::sample_cache::SampleCache;
use crate::plan::store_reads::{PieceRead, reserve};
use crate::{Error, PieceRef, Result, Sample, SampleOrder, SampleOrigin};

/// Where a piece is: its store, its start in the bytes of the store's [`StoreReads`], and the
/// extent that has its first byte, or `usize::MAX` if it needs none.
#[derive(Clone, Copy, Debug)]
pub(super) struct PieceLocation {
    store: usize,
    pub(super) start: usize,
    pub(super) extent: usize,
}

/// Where a sample of a round is.
#[derive(Clone, Debug)]
struct SampleSlot {
    number: u64,
    origin: SampleOrigin,
    pieces: Range<usize>,
    len: usize,
    /// The store reads that have all of it, and where, unless several have a part.
    whole: Option<(usize, usize)>,
}

/// Consecutive batches whose requests are planned together.
#[derive(Debug, Default)]
pub struct PrefetchRound {
    /// One for each store, and one for samples found in the cache. `None` while a worker has it.
    pub store_reads: Vec<Option<Box<StoreReads>>>,
    pub(crate) number: u64,
    samples: Vec<SampleSlot>,
    pieces: Vec<PieceRef>,
    /// Where each piece is.
    locations: Vec<PieceLocation>,
    /// The first sample of each batch, and where it ends in `samples`.
    batches: Vec<(u64, usize)>,
    chunks: Vec<PieceRead>,
    /// The error if the round could not be planned.
    pub(crate) failure: Option<Error>,
}

/// Sizes of the largest round so far: later rounds reserve as much and allocate nothing more.
#[derive(Debug, Default)]
pub(crate) struct RoundCapacity {
    samples: usize,
    pieces: usize,
    batches: usize,
    chunks: usize,
    /// Extents, copies, bytes and runs of blocks for each store.
    store_reads: Vec<[usize; 4]>,
}

/// Request limits for a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest gap of unneeded bytes to read in order to save one request.
    pub gap_bytes: u64,
    /// Longer runs are cut at multiples of this.
    pub extent_bytes_max: u64,
}

/// What a round is planned for.
#[derive(Clone, Copy, Debug)]
pub struct PlanContext<'a> {
    /// The order of all samples.
    pub order: &'a dyn SampleOrder,
    /// The store of each of its files.
    pub store_of: &'a [usize],
    /// The limits of each store.
    pub limits: &'a [Limits],
    /// The local cache, if there is one.
    pub sample_cache: Option<&'a dyn SampleCache>,
    /// Whether to read whole blocks, where they have checksums, so that they can be verified.
    pub verify: bool,
}

impl Limits {
    /// Defaults for a kind of store.
    ///
    /// A request to an object store costs about as much as 256 KiB; its latency is hidden by others
    /// in flight. On a parallel file system 16 KiB of unneeded bytes cost less than a request. On a
    /// local disk coalescing gains only what both requests would read anyway by alignment.
    #[must_use]
    pub fn of(profile: &storage::Profile) -> Self {
        match profile.kind() {
            "s3" => Limits { gap_bytes: 256 << 10, extent_bytes_max: 8 << 20 },
            "ext4" | "xfs" | "btrfs" | "f2fs" => {
                Limits { gap_bytes: profile.align_bytes.into(), extent_bytes_max: 1 << 20 }
            }
            _ => Limits { gap_bytes: 16 << 10, extent_bytes_max: 1 << 20 },
        }
    }
}

impl PlanContext<'_> {
    pub(crate) fn checksums(&self, file: u32) -> Option<&Arc<BlockChecksums>> {
        let source = &self.order.sources()[file as usize]; // fits: 64 bits
        // Checksums of another length belong to another file.
        let of_file = |it: &&Arc<BlockChecksums>| it.bin_bytes() == source.len_bytes;
        source.checksums.as_ref().filter(|_| self.verify).filter(of_file)
    }
}

impl PrefetchRound {
    /// Plans some batches, each a run of samples, reusing the memory of the round.
    ///
    /// # Errors
    /// Errors of the order for a sample; those of reading checksums.
    pub fn fill(
        &mut self,
        context: &PlanContext<'_>,
        batches: impl Iterator<Item = Range<u64>>,
    ) -> Result<()> {
        self.clear(context.limits.len());
        for samples in batches {
            let first = samples.start;
            for sample in samples {
                self.add(context, sample)?;
            }
            self.batches.push((first, self.samples.len()));
        }
        self.chunks.sort_unstable_by_key(|chunk| (chunk.store, chunk.file, chunk.offset));
        let mut rest = &self.chunks[..];
        while let Some(first) = rest.first() {
            let (store, file) = (first.store, first.file);
            let count = rest.partition_point(|chunk| (chunk.store, chunk.file) <= (store, file));
            let (of_file, after) = rest.split_at(count);
            let reads = self.store_reads[store]
                .as_mut()
                .expect("all store reads are present while planning");
            let checksums = context.checksums(file).map(Arc::as_ref);
            reads.cut(of_file, &context.limits[store], checksums, &mut self.locations)?;
            rest = after;
        }
        for (store, reads) in self.store_reads.iter_mut().flatten().enumerate() {
            reads.complete(self.number, store);
        }
        Ok(())
    }

    /// How many batches it has.
    #[must_use]
    pub fn batch_count(&self) -> usize {
        self.batches.len()
    }

    /// The first sample of a batch of it, and how many it has.
    #[must_use]
    pub fn batch(&self, nth: usize) -> (u64, usize) {
        let (first, end) = self.batches[nth];
        (first, end - self.batch_start(nth))
    }

    /// Bytes of all its samples.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.samples.iter().map(|sample| sample.len as u64).sum()
    }

    /// Approximate memory of the round: the bytes of its samples, and its tables. All store reads
    /// must have returned.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let a_piece = size_of::<PieceRef>() + size_of::<PieceRead>() + size_of::<PieceLocation>();
        let known = self.samples.len() * size_of::<SampleSlot>() + self.pieces.len() * a_piece;
        let store_reads = self.store_reads.iter().flatten().map(|reads| reads.memory_bytes());
        store_reads.sum::<u64>() + known as u64
    }

    /// Verifies the bytes of a sample that are still in their read buffers.
    pub(crate) fn verify_kept(&mut self, batch: usize, row: usize) -> storage::Result<()> {
        let slot = &self.samples[self.batch_start(batch) + row];
        for nth in slot.pieces.clone() {
            let location = &self.locations[nth];
            let reads =
                self.store_reads[location.store].as_mut().expect("all store reads have returned");
            reads.verify_kept(&self.pieces[nth], location)?;
        }
        Ok(())
    }

    /// One sample, once all store reads have returned with their bytes. `scratch` is for samples
    /// that are not contiguous in memory, because several stores or several requests have parts.
    #[must_use]
    pub fn sample<'a>(&'a self, batch: usize, row: usize, scratch: &'a mut Vec<u8>) -> Sample<'a> {
        let slot = &self.samples[self.batch_start(batch) + row];
        let pieces = &self.pieces[slot.pieces.clone()];
        let locations = &self.locations[slot.pieces.clone()];
        let reads =
            |store: usize| self.store_reads[store].as_ref().expect("all store reads have returned");
        let first = locations.first().map_or(usize::MAX, |location| location.extent);
        let run = slot.whole.and_then(|(store, start)| reads(store).run(start, pieces, first));
        let bytes = match run {
            Some(bytes) => bytes,
            None => {
                scratch.clear();
                let each = pieces.iter().zip(locations);
                each.for_each(|(piece, location)| {
                    reads(location.store).append(piece, location, scratch);
                });
                scratch
            }
        };
        Sample { number: slot.number, origin: slot.origin, pieces, bytes }
    }

    /// The error if bytes of a sample are missing. It is taken: later calls return `None`.
    pub(crate) fn failure(&mut self, batch: usize, row: usize) -> Option<storage::Error> {
        let slot = &self.samples[self.batch_start(batch) + row];
        for nth in slot.pieces.clone() {
            let PieceLocation { store, start, .. } = self.locations[nth];
            let end = start + self.pieces[nth].len_bytes as usize; // fits: it is in memory
            let reads = self.store_reads[store].as_mut().expect("all store reads have returned");
            let missing = |copy: &ScatterCopy| copy.to < end && start < copy.to + copy.len;
            let copies = |&extent: &usize| &reads.copies[reads.extents[extent].copies.clone()];
            if reads.failed.iter().flat_map(copies).any(missing) {
                return reads.failure.take();
            }
        }
        None
    }

    /// Reserves as much as the largest round had, and a quarter more.
    pub(crate) fn reserve(&mut self, sizes: &RoundCapacity) {
        reserve(&mut self.samples, sizes.samples);
        reserve(&mut self.pieces, sizes.pieces);
        reserve(&mut self.locations, sizes.pieces);
        reserve(&mut self.batches, sizes.batches);
        reserve(&mut self.chunks, sizes.chunks);
        self.store_reads.resize_with(sizes.store_reads.len(), Option::default);
        for (reads, &[extents, copies, bytes, runs]) in
            self.store_reads.iter_mut().zip(&sizes.store_reads)
        {
            let reads = reads.get_or_insert_default();
            reserve(&mut reads.extents, extents);
            reserve(&mut reads.copies, copies);
            reserve(&mut reads.bytes, bytes);
            reserve(&mut reads.runs, runs);
        }
    }

    /// Raises `sizes` to those of this round, where they are smaller.
    pub(crate) fn measure(&self, sizes: &mut RoundCapacity) {
        sizes.samples = sizes.samples.max(self.samples.len());
        sizes.pieces = sizes.pieces.max(self.pieces.len());
        sizes.batches = sizes.batches.max(self.batches.len());
        sizes.chunks = sizes.chunks.max(self.chunks.len());
        sizes.store_reads.resize(self.store_reads.len(), [0; 4]);
        for (most, reads) in sizes.store_reads.iter_mut().zip(self.store_reads.iter().flatten()) {
            let lens = [reads.extents.len(), reads.copies.len(), reads.used, reads.runs.len()];
            *most = std::array::from_fn(|nth| most[nth].max(lens[nth]));
        }
    }

    /// Frees the kept read buffers: all samples are copied into batches.
    pub(crate) fn release(&mut self) {
        self.store_reads.iter_mut().flatten().for_each(|reads| reads.release());
    }

    /// Whether a sample was found in the cache.
    pub(crate) fn was_cached(&self, batch: usize, row: usize) -> bool {
        let slot = &self.samples[self.batch_start(batch) + row];
        slot.whole.is_some_and(|(store, _)| store + 1 == self.store_reads.len())
    }

    fn batch_start(&self, nth: usize) -> usize {
        if nth == 0 { 0 } else { self.batches[nth - 1].1 }
    }

    fn clear(&mut self, stores: usize) {
        self.store_reads.resize_with(stores + 1, Option::default); // and one for the cache
        for reads in &mut self.store_reads {
            reads.get_or_insert_default().clear();
        }
        self.samples.clear();
        self.pieces.clear();
        self.locations.clear();
        self.batches.clear();
        self.chunks.clear();
    }

    fn add(&mut self, context: &PlanContext<'_>, number: u64) -> Result<()> {
        let first = self.pieces.len();
        context.order.pieces(number, &mut self.pieces)?;
        let mut len = 0;
        for piece in &self.pieces[first..] {
            check(context, number, piece)?;
            len += piece.len_bytes as usize; // fits: within files of this machine's memory
        }
        let pieces = first..self.pieces.len();
        let origin = context.order.origin(number);
        let whole = match self.find_cached(context, number, len) {
            Some(start) => {
                let store = context.limits.len();
                self.locations
                    .resize(pieces.end, PieceLocation { store, start, extent: usize::MAX });
                Some((store, start))
            }
            None => self.place(context, pieces.clone()),
        };
        self.samples.push(SampleSlot { number, origin, pieces, len, whole });
        Ok(())
    }

    /// Places each piece in the store reads of its store, and cuts it into chunks.
    fn place(&mut self, context: &PlanContext<'_>, pieces: Range<usize>) -> Option<(usize, usize)> {
        let mut whole = None;
        let mut several = false;
        for nth in pieces {
            let PieceRef { file, offset_bytes, len_bytes } = self.pieces[nth];
            let store = context.store_of[file as usize];
            let reads = self.store_reads[store]
                .as_mut()
                .expect("all store reads are present while planning");
            let start = reads.grow(len_bytes as usize); // fits: checked by the caller
            self.locations.push(PieceLocation { store, start, extent: usize::MAX });
            several |= whole.get_or_insert((store, start)).0 != store;
            let chunk_max = context.limits[store].extent_bytes_max;
            let mut done = 0;
            while done < len_bytes {
                let len = chunk_max.min(len_bytes - done);
                let (offset, to) = (offset_bytes + done, start + done as usize);
                self.chunks.push(PieceRead { store, file, offset, len, to, piece: nth });
                done += len;
            }
        }
        if several { None } else { whole.or(Some((0, 0))) }
    }

    fn find_cached(&mut self, context: &PlanContext<'_>, number: u64, len: usize) -> Option<usize> {
        let cache = context.sample_cache?;
        let reads =
            self.store_reads[context.limits.len()].as_mut().expect("all store reads are present");
        let start = reads.grow(len);
        reads.make_room();
        let found = cache.find(number, &mut reads.bytes[start..start + len]);
        if !found {
            reads.used = start;
        }
        found.then_some(start)
    }
}

/// Sixteen million tokens of four bytes are far beyond any context: an index with more is invalid,
/// and must not size an allocation.
const SAMPLE_BYTES_MAX: u64 = 64 << 20;

fn check(context: &PlanContext<'_>, sample: u64, piece: &PieceRef) -> Result<()> {
    let source = context.order.sources().get(piece.file as usize); // fits: 64 bits
    let file_bytes = source.map_or(0, |source| source.len_bytes);
    let end = piece.offset_bytes.checked_add(piece.len_bytes);
    if end.is_some_and(|end| end <= file_bytes) && piece.len_bytes <= SAMPLE_BYTES_MAX {
        return Ok(());
    }
    Err(Error::PieceOutside { order: context.order.name(), sample, piece: *piece, file_bytes })
}
