//! Reads blocks and verifies each before it is returned. A block is read directly into the caller's
//! memory if the device can do that, otherwise by one copy, which also computes the checksum.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::parallel_io::{self, IoBuffer};
use crate::format::codec::Unpacker;
use crate::{Dtype, Error, Result};
use storage::{Crc64, Object, RangeRead, crc64};

/// Reads in flight per thread: four blocks of the default size, or that many bytes of small ones.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// Reads in one batch of small tensors: enough for every device queue.
const BATCH_READS_MAX: usize = 256;

/// Gap that is read along: up to this, unneeded bytes cost less than another request.
const GAP_BYTES_MAX: usize = 16 << 10;

/// Longest coalesced read: a longer one is not slower if split, and its parts are verified while
/// others are read.
const JOINED_BYTES_MAX: usize = 1 << 20;

/// Alignment of scratch space, enough for any device.
const PAGE_BYTES: usize = 4096;

/// Bytes copied and checksummed at a time.
const COPY_BYTES: usize = 256 << 10;

/// A block with its checksum, and its destination.
#[derive(Debug)]
pub(crate) struct ChecksumBlock<'a> {
    pub(crate) object: &'a dyn Object,
    pub(crate) offset: u64,
    pub(crate) crc64: u64,
    pub(crate) into: BlockDestination<'a>,
    /// Its packed form, if it is packed.
    pub(crate) packed: Option<PackedBlock>,
}

/// The stored form of a packed block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedBlock {
    pub(crate) dtype: Dtype,
    pub(crate) bytes: usize,
    pub(crate) crc64: u64,
}

impl ChecksumBlock<'_> {
    /// Bytes that are read for it.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.packed.map_or(self.into.len(), |packed| packed.bytes)
    }
}

/// Destination of a block.
#[derive(Debug)]
pub(crate) enum BlockDestination<'a> {
    /// The caller's buffer.
    Buffer(&'a mut [u8]),
    /// None: this many bytes are read only to be verified.
    Nowhere(usize),
    /// A visitor, after verification.
    Visitor { len: usize, visitor: &'a dyn Visitor, tag: [usize; 2] },
}

/// Receives blocks from scratch space, on the thread that read them.
pub(crate) trait Visitor: Sync + fmt::Debug {
    /// Receives a block; `at` is the tag of its request.
    fn visit(&self, at: [usize; 2], bytes: &[u8]);
}

impl BlockDestination<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            BlockDestination::Buffer(buf) => buf.len(),
            BlockDestination::Nowhere(len) | BlockDestination::Visitor { len, .. } => *len,
        }
    }
}

/// Reads and verifies all blocks. Blocks of one object should be adjacent, in the order of their
/// offsets. Each thread holds at most one batch; with more than one, there are twice as many as
/// `threads`.
pub(crate) fn fetch(blocks: Vec<ChecksumBlock<'_>>, threads: usize) -> Result<()> {
    fetch_counted(blocks, threads, &AtomicU64::new(0))
}

/// The same with progress: `verified_bytes` is incremented as blocks are verified.
pub(crate) fn fetch_counted(
    blocks: Vec<ChecksumBlock<'_>>,
    threads: usize,
    verified_bytes: &AtomicU64,
) -> Result<()> {
    let mut batches: Vec<Vec<ChecksumBlock<'_>>> = Vec::new();
    let mut bytes = 0;
    for block in blocks {
        let len = block.into.len();
        let joins = batches.last().is_some_and(|batch| {
            std::ptr::addr_eq(batch[0].object, block.object)
                && batch.len() < BATCH_READS_MAX
                && bytes + len <= BATCH_BYTES_MAX
        });
        if !joins {
            batches.push(Vec::new());
            bytes = 0;
        }
        bytes += len;
        batches.last_mut().expect("pushed above if there was none").push(block);
    }
    // While one of two threads waits for the device, the other computes checksums. A single thread
    // keeps the order.
    let threads = if threads > 1 { 2 * threads } else { threads };
    parallel_io::each(batches, threads, |batch, scratch| {
        let bytes: usize = batch.iter().map(ChecksumBlock::stored_bytes).sum();
        fetch_batch(batch, scratch)?;
        verified_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    })?;
    Ok(())
}

fn fetch_batch(batch: Vec<ChecksumBlock<'_>>, scratch: &mut IoBuffer) -> Result<()> {
    let object = batch[0].object;
    let align = object.memory_align();
    let mut reads = Vec::with_capacity(batch.len());
    let mut direct_sums = Vec::new();
    let mut joined: Vec<CoalescedRead> = Vec::new();
    let mut buffered = Vec::new();
    for block in batch {
        let len = block.stored_bytes();
        let ChecksumBlock { offset, crc64, into, packed, .. } = block;
        match into {
            BlockDestination::Buffer(buf)
                if packed.is_none() && phase_of(buf, offset).is_multiple_of(align) =>
            {
                reads.push(RangeRead { offset, buf });
                direct_sums.push(crc64);
            }
            into => {
                let at = CoalescedRead::add(&mut joined, offset, len);
                buffered.push((offset, crc64, at..at + len, into, packed));
            }
        }
    }
    let needed = joined.last().map_or(0, |last| last.place + last.len);
    let scratch = scratch.room(needed)?;
    let (mut rest, mut start) = (&mut *scratch, 0);
    for CoalescedRead { offset, len, place } in joined {
        let (_, from) = std::mem::take(&mut rest).split_at_mut(place - start);
        let (buf, after) = from.split_at_mut(len);
        reads.push(RangeRead { offset, buf });
        (rest, start) = (after, place + len);
    }
    object.read_many(&mut reads)?;
    for (read, expected) in reads.iter().zip(direct_sums) {
        check(object, read.offset, read.buf, crc64(read.buf), expected)?;
    }
    let mut unpacking = Unpacking::default();
    for (offset, expected, range, into, packed) in buffered {
        let bytes = &scratch[range];
        if let Some(packed) = packed {
            check(object, offset, bytes, crc64(bytes), packed.crc64)?;
            unpacking.unpack(object, offset, (bytes, packed.dtype), expected, into)?;
            continue;
        }
        match into {
            BlockDestination::Buffer(buf) => {
                check(object, offset, bytes, copy_and_sum(bytes, buf), expected)?;
            }
            BlockDestination::Nowhere(_) => check(object, offset, bytes, crc64(bytes), expected)?,
            BlockDestination::Visitor { visitor, tag: at, .. } => {
                check(object, offset, bytes, crc64(bytes), expected)?;
                visitor.visit(at, bytes);
            }
        }
    }
    Ok(())
}

/// Unpacks the blocks of a batch.
#[derive(Default)]
struct Unpacking {
    unpacker: Unpacker,
    /// A block without a caller's buffer.
    block: Vec<u8>,
}

impl Unpacking {
    fn unpack(
        &mut self,
        object: &dyn Object,
        offset: u64,
        (packed, dtype): (&[u8], Dtype),
        expected: u64,
        into: BlockDestination<'_>,
    ) -> Result<()> {
        self.block.resize(into.len(), 0);
        let (block, visitor) = match into {
            BlockDestination::Buffer(buf) => (buf, None),
            BlockDestination::Nowhere(_) => (self.block.as_mut_slice(), None),
            BlockDestination::Visitor { visitor, tag: at, .. } => {
                (self.block.as_mut_slice(), Some((visitor, at)))
            }
        };
        self.unpacker.unpack(dtype, packed, block).map_err(|found| Error::Corrupt {
            object: object.display(),
            offset,
            found,
            expected: format!("{} bytes of packed {dtype}", block.len()),
        })?;
        check(object, offset, block, crc64(block), expected)?;
        if let Some((visitor, at)) = visitor {
            visitor.visit(at, block);
        }
        Ok(())
    }
}

/// Difference of an address and an offset, modulo a page.
fn phase_of(buf: &[u8], offset: u64) -> usize {
    // fits: of the offset only the place in a page counts.
    (buf.as_ptr() as usize).wrapping_sub((offset % PAGE_BYTES as u64) as usize)
}

/// Copies bytes, and computes their checksum while they are cached.
fn copy_and_sum(from: &[u8], into: &mut [u8]) -> u64 {
    let mut sum = Crc64::new();
    for (from, into) in from.chunks(COPY_BYTES).zip(into.chunks_mut(COPY_BYTES)) {
        into.copy_from_slice(from);
        sum.update(from);
    }
    sum.value()
}

/// One read of several blocks, and of the bytes between them.
struct CoalescedRead {
    offset: u64,
    len: usize,
    /// Its place in the scratch space, with the same offset in a page.
    place: usize,
}

impl CoalescedRead {
    /// Adds a block to the last read, or to a new one. Returns its place in the scratch space.
    fn add(reads: &mut Vec<CoalescedRead>, offset: u64, len: usize) -> usize {
        let mut free = 0;
        if let Some(last) = reads.last_mut() {
            let gap = offset.checked_sub(last.offset + last.len as u64);
            let gap =
                gap.and_then(|gap| usize::try_from(gap).ok()).filter(|&gap| gap <= GAP_BYTES_MAX);
            if let Some(gap) = gap
                && last.len + gap + len <= JOINED_BYTES_MAX
            {
                let place = last.place + last.len + gap;
                last.len += gap + len;
                return place;
            }
            free = (last.place + last.len).next_multiple_of(PAGE_BYTES);
        }
        let place = free + (offset % PAGE_BYTES as u64) as usize; // fits: below a page
        reads.push(CoalescedRead { offset, len, place });
        place
    }
}

fn check(object: &dyn Object, offset: u64, bytes: &[u8], found: u64, expected: u64) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Corrupt {
        object: object.display(),
        offset,
        found: format!("CRC-64 {found:016x} of {} bytes", bytes.len()),
        expected: format!("CRC-64 {expected:016x} as in the manifest"),
    })
}
