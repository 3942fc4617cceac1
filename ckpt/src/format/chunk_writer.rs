//! Writes blocks to a file, with checksums, packed if a codec is set.

use crate::format::catalog::{Packed, StoredBlock, block_count, join_blocks};
use crate::format::codec::Packer;
use crate::write::shard_writer::Checksums;
use crate::{Chunk, Codec, Dtype, Region, Result};
use storage::{Upload, crc64};

/// The manifest entry of written bytes.
#[derive(Debug)]
pub(crate) struct ChunkSums {
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) crc64: u64,
    /// The checksums of the blocks, if there are several.
    pub(crate) blocks: Vec<u64>,
    pub(crate) packed: Option<Packed>,
}

impl ChunkSums {
    /// Bytes as they are stored, and their checksum.
    pub(crate) fn stored(&self) -> (u64, u64) {
        self.packed.as_ref().map_or((self.bytes, self.crc64), Packed::sum)
    }

    /// The chunk that was written.
    pub(crate) fn chunk(self, file: &str, region: &Region) -> Chunk {
        let ChunkSums { offset, bytes, crc64, blocks, packed } = self;
        let (file, spans, flat) = (file.to_owned(), region.spans.clone(), region.flat_span());
        Chunk { file, offset, bytes, crc64, blocks, spans, flat, packed }
    }
}

/// Writes the chunks of files, one after the other, in pieces of any length.
pub(crate) struct ChunkWriter {
    block_bytes: usize,
    codec: Option<Codec>,
    summing: Checksums,
    packer: Packer,
    /// The packed form of the current block.
    packed: Vec<u8>,
    /// The start of an incomplete block.
    partial_block: Vec<u8>,
    offset: u64,
    bytes: u64,
    sums: Vec<u64>,
    stored: Vec<StoredBlock>,
}

impl ChunkWriter {
    pub(crate) fn new(block_bytes: u64, codec: Option<Codec>, summing: Checksums) -> Self {
        ChunkWriter {
            block_bytes: block_bytes as usize, // fits: at most 64 MiB
            codec,
            summing,
            packer: Packer::default(),
            packed: Vec::new(),
            partial_block: Vec::new(),
            offset: 0,
            bytes: 0,
            sums: Vec::new(),
            stored: Vec::new(),
        }
    }

    /// Begins a chunk at the current end of the upload.
    pub(crate) fn begin(&mut self, upload: &dyn Upload) {
        (self.offset, self.bytes) = (upload.len_bytes(), 0);
    }

    /// Writes some of the chunk's bytes.
    pub(crate) fn write(
        &mut self,
        upload: &mut dyn Upload,
        dtype: Dtype,
        mut bytes: &[u8],
    ) -> Result<()> {
        while !bytes.is_empty() {
            let room = self.block_bytes - self.partial_block.len();
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            bytes = rest;
            if now.len() == self.block_bytes {
                self.write_block(upload, dtype, now)?;
                continue;
            }
            self.partial_block.extend_from_slice(now);
            if self.partial_block.len() == self.block_bytes {
                self.end_block(upload, dtype)?;
            }
        }
        Ok(())
    }

    /// Ends the chunk.
    pub(crate) fn end(&mut self, upload: &mut dyn Upload, dtype: Dtype) -> Result<ChunkSums> {
        if !self.partial_block.is_empty() {
            self.end_block(upload, dtype)?;
        }
        let (bytes, block_bytes) = (self.bytes, self.block_bytes as u64);
        let mut blocks = std::mem::take(&mut self.sums);
        let crc64 = join_blocks(&blocks, bytes, block_bytes);
        blocks.truncate(block_count(bytes, block_bytes) as usize); // fits: no more than there are
        let stored = std::mem::take(&mut self.stored);
        let packed = self.codec.map(|codec| Packed { codec, blocks: stored });
        Ok(ChunkSums { offset: self.offset, bytes, crc64, blocks, packed })
    }

    fn end_block(&mut self, upload: &mut dyn Upload, dtype: Dtype) -> Result<()> {
        let mut block = std::mem::take(&mut self.partial_block);
        self.write_block(upload, dtype, &block)?;
        block.clear();
        self.partial_block = block;
        Ok(())
    }

    fn write_block(&mut self, upload: &mut dyn Upload, dtype: Dtype, block: &[u8]) -> Result<()> {
        self.bytes += block.len() as u64;
        if self.codec.is_none() {
            self.sums.push(match self.summing {
                Checksums::On => upload.write_with_crc(block)?,
                Checksums::Off => upload.write_with_known_crc(block, 0).map(|()| 0)?,
            });
            return Ok(());
        }
        self.sums.push(crc64(block));
        self.packer.pack(dtype, block, &mut self.packed);
        let crc64 = upload.write_with_crc(&self.packed)?;
        let bytes = self.packed.len() as u32; // fits: a block is at most 64 MiB
        self.stored.push(StoredBlock { bytes, crc64 });
        Ok(())
    }
}
