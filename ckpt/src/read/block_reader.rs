//! Reads of blocks, each checked against its checksum before anybody sees it. A block comes
//! straight into the caller's memory where the device can put it there, else by one copy, with
//! which it is summed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::parallel_io::{self, IoBuffer};
use crate::format::codec::Unpacker;
use crate::{Dtype, Error, Result};
use storage::{Crc64, Object, RangeRead, crc64};

/// Reads in flight per thread: four blocks of the default size, or that many bytes of small ones.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// Small tensors in one batch: enough for every queue a device has.
const BATCH_READS_MAX: usize = 256;

/// Reading so much that nobody wants costs less than another request does.
const GAP_BYTES_MAX: usize = 16 << 10;

/// A longer read is not slower for being cut, and then its parts are checked while others come.
const JOINED_BYTES_MAX: usize = 1 << 20;

/// What scratch space is aligned to: as much as any device asks of memory.
const PAGE_BYTES: usize = 4096;

/// What is copied and summed at a time.
const COPY_BYTES: usize = 256 << 10;

/// Bytes with a checksum of their own, and where they go.
#[derive(Debug)]
pub(crate) struct ChecksumBlock<'a> {
    pub(crate) object: &'a dyn Object,
    pub(crate) offset: u64,
    pub(crate) crc64: u64,
    pub(crate) into: BlockDestination<'a>,
    /// How it is stored, if it is not as it is.
    pub(crate) packed: Option<PackedBlock>,
}

/// What is stored of a block that is packed.
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

/// Where a block goes.
#[derive(Debug)]
pub(crate) enum BlockDestination<'a> {
    /// To the caller.
    Buffer(&'a mut [u8]),
    /// Nowhere: so many bytes are read to be checked only.
    Nowhere(usize),
    /// To a visitor, after they have been checked.
    Visitor { len: usize, visitor: &'a dyn Visitor, tag: [usize; 2] },
}

/// Who takes blocks from scratch space, on whatever thread read them.
pub(crate) trait Visitor: Sync + fmt::Debug {
    /// Takes a block; `at` is what was said of it when it was asked for.
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

/// Reads and checks all blocks. Blocks of one object should stand together, in the order of their
/// offsets. Each thread holds at most one batch; beyond one, there are twice as many as `threads`.
pub(crate) fn fetch(blocks: Vec<ChecksumBlock<'_>>, threads: usize) -> Result<()> {
    fetch_counted(blocks, threads, &AtomicU64::new(0))
}

/// The same for somebody who watches: to `came` is added what was read and is whole.
pub(crate) fn fetch_counted(
    blocks: Vec<ChecksumBlock<'_>>,
    threads: usize,
    came: &AtomicU64,
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
    // While one of two waits for the device, the other sums. One alone keeps the order.
    let threads = if threads > 1 { 2 * threads } else { threads };
    parallel_io::each(batches, threads, |batch, scratch| {
        let bytes: usize = batch.iter().map(ChecksumBlock::stored_bytes).sum();
        fetch_batch(batch, scratch)?;
        came.fetch_add(bytes as u64, Ordering::Relaxed);
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
    let mut held = Vec::new();
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
                held.push((offset, crc64, at..at + len, into, packed));
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
    for (read, due) in reads.iter().zip(direct_sums) {
        check(object, read.offset, read.buf, crc64(read.buf), due)?;
    }
    let mut unpacking = Unpacking::default();
    for (offset, due, range, into, packed) in held {
        let bytes = &scratch[range];
        if let Some(packed) = packed {
            check(object, offset, bytes, crc64(bytes), packed.crc64)?;
            unpacking.unpack(object, offset, (bytes, packed.dtype), due, into)?;
            continue;
        }
        match into {
            BlockDestination::Buffer(buf) => {
                check(object, offset, bytes, copy_and_sum(bytes, buf), due)?;
            }
            BlockDestination::Nowhere(_) => check(object, offset, bytes, crc64(bytes), due)?,
            BlockDestination::Visitor { visitor, tag: at, .. } => {
                check(object, offset, bytes, crc64(bytes), due)?;
                visitor.visit(at, bytes);
            }
        }
    }
    Ok(())
}

/// What unpacks the blocks of a batch.
#[derive(Default)]
struct Unpacking {
    unpacker: Unpacker,
    /// A block that goes to nobody's buffer.
    block: Vec<u8>,
}

impl Unpacking {
    fn unpack(
        &mut self,
        object: &dyn Object,
        offset: u64,
        (packed, dtype): (&[u8], Dtype),
        due: u64,
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
            expected: format!("{} bytes of {dtype}, packed", block.len()),
        })?;
        check(object, offset, block, crc64(block), due)?;
        if let Some((visitor, at)) = visitor {
            visitor.visit(at, block);
        }
        Ok(())
    }
}

/// How far an address and an offset are from lying to a page in the same way.
fn phase_of(buf: &[u8], offset: u64) -> usize {
    // fits: of the offset only the place in a page counts.
    (buf.as_ptr() as usize).wrapping_sub((offset % PAGE_BYTES as u64) as usize)
}

/// Sums bytes while they are in the cache that the copy left them in.
fn copy_and_sum(from: &[u8], into: &mut [u8]) -> u64 {
    let mut sum = Crc64::new();
    for (from, into) in from.chunks(COPY_BYTES).zip(into.chunks_mut(COPY_BYTES)) {
        into.copy_from_slice(from);
        sum.update(from);
    }
    sum.value()
}

/// One read of several blocks, and of what lies between them.
struct CoalescedRead {
    offset: u64,
    len: usize,
    /// In the scratch space, to a page as the offset is to one.
    place: usize,
}

impl CoalescedRead {
    /// Adds a block to the last read, or to a new one. Gives its place in the scratch space.
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

fn check(object: &dyn Object, offset: u64, bytes: &[u8], got: u64, due: u64) -> Result<()> {
    if got == due {
        return Ok(());
    }
    Err(Error::Corrupt {
        object: object.display(),
        offset,
        found: format!("CRC-64 {got:016x} of {} bytes", bytes.len()),
        expected: format!("{due:016x} by the manifest"),
    })
}
