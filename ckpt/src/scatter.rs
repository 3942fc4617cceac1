use crate::checkpoint::block_crc64;
use crate::fetch::{Block, Target, fetch};
use crate::{Chunk, Result};
use storage::Object;

/// Scratch space for a read that takes parts of blocks: at least one block, or this much.
const SCRATCH_BYTES: u64 = 16 << 20;

/// Reads parts of a chunk into places of the caller's buffer. The parts come in the order of their
/// bytes in the chunk. Whole blocks are read, so that all can be checked, and held back until there
/// are enough of them to keep a device busy.
#[derive(Debug)]
pub(crate) struct Scatter<'a> {
    object: &'a dyn Object,
    chunk: &'a Chunk,
    block_bytes: u64,
    threads: usize,
    into: &'a mut [u8],
    scratch: Vec<u8>,
    blocks: Vec<u64>,
    parts: Vec<Part>,
}

/// Bytes of a block that are wanted.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// First byte in the scratch space.
    from: usize,
    /// First byte in the caller's buffer.
    to: usize,
    len: usize,
}

impl<'a> Scatter<'a> {
    pub(crate) fn new(
        object: &'a dyn Object,
        chunk: &'a Chunk,
        block_bytes: u64,
        threads: usize,
        into: &'a mut [u8],
    ) -> Self {
        let (scratch, blocks, parts) = (Vec::new(), Vec::new(), Vec::new());
        Scatter { object, chunk, block_bytes, threads, into, scratch, blocks, parts }
    }

    /// Wants `len` bytes at `from` of the chunk, at `to` of the buffer.
    pub(crate) fn add(&mut self, mut from: u64, mut to: u64, mut len: u64) -> Result<()> {
        while len > 0 {
            let block = from / self.block_bytes;
            if self.blocks.last() != Some(&block) {
                let blocks_max = (SCRATCH_BYTES / self.block_bytes).max(1);
                if self.blocks.len() as u64 == blocks_max {
                    self.flush()?;
                }
                self.blocks.push(block);
            }
            let at = from % self.block_bytes;
            let now = len.min(self.block_bytes - at);
            let slot = (self.blocks.len() as u64 - 1) * self.block_bytes;
            // fits: within the scratch space, and within the caller's buffer.
            let part = Part { from: (slot + at) as usize, to: to as usize, len: now as usize };
            self.parts.push(part);
            (from, to, len) = (from + now, to + now, len - now);
        }
        Ok(())
    }

    /// Reads what is still held back.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        let len_of = |block: u64| {
            // fits: at most a block, and blocks are at most 64 MiB.
            self.block_bytes.min(self.chunk.bytes - block * self.block_bytes) as usize
        };
        let block_bytes = self.block_bytes as usize; // fits: at most 64 MiB
        self.scratch.resize(self.blocks.len() * block_bytes, 0);
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (&block, slot) in self.blocks.iter().zip(self.scratch.chunks_mut(block_bytes)) {
            blocks.push(Block {
                object: self.object,
                offset: self.chunk.offset + block * self.block_bytes,
                crc64: block_crc64(self.chunk, block as usize), // fits: an index of a vector
                into: Target::Buffer(&mut slot[..len_of(block)]),
            });
        }
        fetch(blocks, self.threads)?;
        for Part { from, to, len } in self.parts.drain(..) {
            self.into[to..to + len].copy_from_slice(&self.scratch[from..from + len]);
        }
        self.blocks.clear();
        Ok(())
    }
}
