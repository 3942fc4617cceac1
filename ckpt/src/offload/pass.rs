//! A pass over the state on a disk, tile by tile: read, compute, write.
//!
//! `depth` threads each process one tile at a time through all three stages, in their own memory.
//! While some wait for the device, others compute. Tiles share no page of any file, so their order
//! does not matter.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::adamw::{AdamWRow, Factors};
use super::form::{ROLES, Segment, StateLayout, Tile, tile_bytes_max};
use super::generation::{CompleteGeneration, Sums};
use super::slot::GenerationFiles;
use crate::base::parallel_io::{self, IoBuffer};
use crate::format::safetensors::ALIGN_BYTES;
use crate::{Dtype, Result};
use storage::{Crc64, RangeRead, Width, Zeros, crc64};

/// Bytes of an array that are verified, updated and checksummed again while they are cached.
const ROW_BYTES: usize = 64 << 10;

/// Memory for tiles, reused by every pass.
#[derive(Debug)]
pub(super) struct Buffers {
    role_bytes: usize,
    idle: Mutex<Vec<Zeros>>,
}

impl Buffers {
    pub(super) fn new(block_bytes: usize) -> Self {
        let role_bytes = tile_bytes_max(block_bytes).next_multiple_of(ALIGN_BYTES as usize);
        Buffers { role_bytes, idle: Mutex::default() }
    }

    /// Memory of a tile.
    pub(super) fn tile_bytes(&self) -> usize {
        self.role_bytes * ROLES
    }

    fn take(&self) -> Result<Zeros> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(idle) => Ok(idle),
            None => Ok(Zeros::try_new(self.tile_bytes())
                .map_err(|e| storage::Error::from_io("allocate", "memory for a tile", e))?),
        }
    }

    fn give(&self, buffer: Zeros) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }
}

/// Source, destination and memory of a pass.
#[derive(Debug)]
pub(super) struct TilePipeline<'a> {
    pub(super) form: &'a StateLayout,
    /// The generation that tiles are read from; `None` if they are not read.
    pub(super) from: Option<&'a CompleteGeneration>,
    /// Roles that are read, from the first on.
    pub(super) roles: usize,
    /// The files that tiles are written to.
    pub(super) into: Option<&'a GenerationFiles>,
    pub(super) buffers: &'a Buffers,
    pub(super) depth: usize,
}

/// A tile's memory, by segment.
pub(super) type Parts<'b> = Vec<[&'b mut [u8]; ROLES]>;

impl TilePipeline<'_> {
    /// Processes every tile. `work` gets the memory of its segments and their arguments, and
    /// returns the checksums of what is to be written, which are passed to `sums`.
    pub(super) fn run<T: Send>(
        &self,
        tiles: Vec<(Tile, T)>,
        sums: &mut Sums,
        work: impl Fn(&Tile, Parts<'_>, T) -> Result<Vec<[u64; ROLES]>> + Sync,
    ) -> Result<()> {
        let process = |(tile, own): (Tile, T), _: &mut IoBuffer| {
            let mut buffer = self.buffers.take()?;
            let (weights, rest) = buffer.split_at_mut(self.buffers.role_bytes);
            let (exp_avgs, exp_avg_sqs) = rest.split_at_mut(self.buffers.role_bytes);
            let mut roles = [weights, exp_avgs, exp_avg_sqs];
            self.read(&tile, &mut roles)?;
            let done = work(&tile, parts(&tile, roles.each_mut().map(|role| &mut **role)), own)?;
            self.write(&tile, &mut roles)?;
            self.buffers.give(buffer);
            Ok((tile.segments, done))
        };
        for (segments, done) in parallel_io::each(tiles, self.depth, process)? {
            for (Segment { param, block, .. }, crc64) in segments.into_iter().zip(done) {
                for (own, crc64) in sums[param].iter_mut().zip(crc64) {
                    if own.len() <= block {
                        own.resize(block + 1, 0);
                    }
                    own[block] = crc64;
                }
            }
        }
        Ok(())
    }

    /// The bytes of a role of a tile, to the end of its last page or of the file.
    fn len(&self, tile: &Tile, role: usize) -> usize {
        let place = tile.places[role];
        let whole = tile.bytes.next_multiple_of(ALIGN_BYTES as usize);
        let left = self.form.files[place.file].bytes - place.offset;
        whole.min(usize::try_from(left).unwrap_or(usize::MAX))
    }

    fn read(&self, tile: &Tile, roles: &mut [&mut [u8]; ROLES]) -> Result<()> {
        let Some(CompleteGeneration { slot, .. }) = self.from else { return Ok(()) };
        // Reads of one file are submitted together.
        let mut files: BTreeMap<usize, Vec<RangeRead<'_>>> = BTreeMap::new();
        for (role, buf) in roles.iter_mut().enumerate().take(self.roles) {
            let place = tile.places[role];
            let buf = &mut buf[..self.len(tile, role)];
            files.entry(place.file).or_default().push(RangeRead { offset: place.offset, buf });
        }
        for (file, mut reads) in files {
            slot.files[file].read_many(&mut reads)?;
        }
        Ok(())
    }

    fn write(&self, tile: &Tile, roles: &mut [&mut [u8]; ROLES]) -> Result<()> {
        let Some(slot) = self.into else { return Ok(()) };
        for (role, buf) in roles.iter_mut().enumerate() {
            let ends = tile.segments.iter().map(|segment| segment.tile_offset + segment.len);
            let begins = tile.segments.iter().skip(1).map(|segment| segment.tile_offset);
            let len = self.len(tile, role);
            for (end, begin) in ends.zip(begins.chain([len])) {
                buf[end..begin].fill(0);
            }
            let place = tile.places[role];
            slot.files[place.file].write_at(place.offset, &buf[..len])?;
        }
        Ok(())
    }
}

/// The memory of a tile's segments.
fn parts<'b>(tile: &Tile, roles: [&'b mut [u8]; ROLES]) -> Parts<'b> {
    let (mut rest, mut begin) = (roles, 0);
    let cut = |segment: &Segment| {
        let (skip, len) = (segment.tile_offset - begin, segment.len);
        begin = segment.tile_offset + len;
        let own = std::mem::take(&mut rest).map(|role| role[skip..].split_at_mut(len));
        let [(weights, a), (exp_avgs, b), (exp_avg_sqs, c)] = own;
        rest = [a, b, c];
        [weights, exp_avgs, exp_avg_sqs]
    };
    tile.segments.iter().map(cut).collect()
}

/// The checksums of segments that were filled.
pub(super) fn sums(parts: &Parts<'_>) -> Vec<[u64; ROLES]> {
    parts.iter().map(|part| part.each_ref().map(|role| crc64(role))).collect()
}

/// The caller's data for one segment of an update.
#[derive(Debug)]
pub(super) struct SegmentInputs<'a> {
    pub(super) grads: &'a [u8],
    pub(super) grad_dtype: Dtype,
    pub(super) copy: &'a mut [u8],
    pub(super) copy_dtype: Dtype,
    pub(super) factors: Factors,
}

/// Updates a segment. Returns the checksums of the old and of the new bytes.
pub(super) fn update(
    state: [&mut [u8]; ROLES],
    inputs: SegmentInputs<'_>,
    width: Width,
) -> [[u64; ROLES]; 2] {
    let SegmentInputs { grads, grad_dtype, copy, copy_dtype, factors } = inputs;
    let mut before: [Crc64; ROLES] = std::array::from_fn(|_| Crc64::new());
    let mut after: [Crc64; ROLES] = std::array::from_fn(|_| Crc64::new());
    // fits: 2 or 4
    let row_bytes = |dtype: Dtype| ROW_BYTES / 4 * dtype.item_bytes() as usize;
    let mut copies = copy.chunks_mut(row_bytes(copy_dtype));
    let [weights, exp_avgs, exp_avg_sqs] = state.map(|role| role.chunks_mut(ROW_BYTES));
    let rows = weights.zip(exp_avgs).zip(exp_avg_sqs).zip(grads.chunks(row_bytes(grad_dtype)));
    for (((weights, exp_avgs), exp_avg_sqs), grads) in rows {
        let mut state = [weights, exp_avgs, exp_avg_sqs];
        before.iter_mut().zip(&state).for_each(|(sum, role)| sum.update(role));
        let [weights, exp_avgs, exp_avg_sqs] = state.each_mut().map(|role| &mut **role);
        let copy = copies.next().unwrap_or_default();
        let row = AdamWRow { weights, exp_avgs, exp_avg_sqs, grads, grad_dtype, copy, copy_dtype };
        row.update(&factors, width);
        after.iter_mut().zip(&state).for_each(|(sum, role)| sum.update(role));
    }
    [before, after].map(|sums| sums.map(|sum| sum.value()))
}
