//! Reads of blocks, each checked against its checksum before anybody sees it.

use crate::{Error, Result, parallel};
use storage::{Object, Read, crc64};

/// Reads in flight per thread: four blocks of the default size, or that many bytes of small ones.
const BATCH_BYTES_MAX: usize = 16 << 20;

/// Small tensors in one batch: enough for every queue a device has.
const BATCH_READS_MAX: usize = 256;

/// Bytes with a checksum of their own, and where they go.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    pub(crate) object: &'a dyn Object,
    pub(crate) offset: u64,
    pub(crate) crc64: u64,
    pub(crate) into: Target<'a>,
}

/// Where a block goes.
#[derive(Debug)]
pub(crate) enum Target<'a> {
    /// To the caller.
    Buffer(&'a mut [u8]),
    /// Nowhere: so many bytes are read to be checked only.
    Nowhere(usize),
}

impl Target<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Target::Buffer(buf) => buf.len(),
            Target::Nowhere(len) => *len,
        }
    }
}

/// Reads and checks all blocks. Blocks of one object should stand together, in the order of their
/// offsets. Each thread holds at most one batch.
pub(crate) fn fetch(blocks: Vec<Block<'_>>, threads: usize) -> Result<()> {
    let mut batches: Vec<Vec<Block<'_>>> = Vec::new();
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
    parallel::each(batches, threads, fetch_batch)?;
    Ok(())
}

fn fetch_batch(batch: Vec<Block<'_>>, scratch: &mut Vec<u8>) -> Result<()> {
    let object = batch[0].object;
    let spare = |block: &Block<'_>| match block.into {
        Target::Buffer(_) => 0,
        Target::Nowhere(len) => len,
    };
    scratch.resize(batch.iter().map(spare).sum(), 0);
    let mut rest = scratch.as_mut_slice();
    let mut reads = Vec::with_capacity(batch.len());
    let mut sums = Vec::with_capacity(batch.len());
    for block in batch {
        let buf = match block.into {
            Target::Buffer(buf) => buf,
            Target::Nowhere(len) => {
                let (buf, after) = rest.split_at_mut(len);
                rest = after;
                buf
            }
        };
        reads.push(Read { offset: block.offset, buf });
        sums.push(block.crc64);
    }
    object.read_many(&mut reads)?;
    for (read, due) in reads.iter().zip(sums) {
        let got = crc64(read.buf);
        if got != due {
            return Err(Error::Corrupt {
                what: object.display(),
                offset: read.offset,
                got: format!("CRC-64 {got:016x} of {} bytes", read.buf.len()),
                due: format!("{due:016x} by the manifest"),
            });
        }
    }
    Ok(())
}
