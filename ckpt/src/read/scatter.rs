//! Reads any regions of any tensors, independently of how they were saved.
//!
//! The unit of a read is a block, since a block has a checksum. All requests of a call are first
//! mapped to blocks, so that each block is read once, however many requests want parts of it. A
//! block that one request wants whole is read directly into the caller's memory; others pass
//! through scratch space, from which each request gets its elements.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::read::block_reader::{BlockDestination, ChecksumBlock, Visitor, fetch_counted};
use crate::read::checkpoint::{BlockSource, Checkpoint, blocks_of};
use crate::runs::each_run;
use crate::{Chunk, Dtype, Error, Group, Region, Result, TensorEntry, TensorSpec};
use storage::Object;

/// Open files at once: a process may open 1,024 by default, and needs others.
const FILES_OPEN_MAX: usize = 64;

/// Shorter blocks are copied, so that one request reads many of them.
const DIRECT_BYTES_MIN: u64 = 64 << 10;

/// A request to read a region of a tensor into `into`.
#[derive(Debug)]
pub struct RegionRequest<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// The group of the tensor.
    pub group: Group,
    /// The region of it.
    pub region: Region,
    /// What to fill: its elements, row-major.
    pub into: &'a mut [u8],
}

/// What a [`Checkpoint::read`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadReport {
    /// Bytes of all requests, counted once per request.
    pub wanted_bytes: u64,
    /// Bytes of the blocks read and verified for them, as stored.
    pub block_bytes: u64,
}

impl Checkpoint {
    /// Serves many requests at once: those of one process, or of all processes of a node, in which
    /// case each block is read once for all of them. Only the needed blocks are read, in file
    /// order, and all of them are verified.
    ///
    /// # Errors
    /// [`Error::NoTensor`]; [`Error::BadRequest`] for a region that is not within its tensor or a
    /// buffer of another length; [`Error::Corrupt`] with file and offset; or errors of the store.
    /// The buffers' contents are then unspecified.
    pub fn read(&self, wants: Vec<RegionRequest<'_>>) -> Result<ReadReport> {
        let mut report = ReadReport::default();
        let mut of_tensor: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let mut regions = Vec::with_capacity(wants.len());
        let mut buffers = Vec::with_capacity(wants.len());
        for (number, RegionRequest { name, group, region, into }) in wants.into_iter().enumerate() {
            let tensor = self.tensor(name, group)?;
            check_request(tensor, &region, into)?;
            report.wanted_bytes += into.len() as u64;
            of_tensor.entry(self.catalog.place(tensor)).or_default().push(number);
            regions.push(region.normal());
            buffers.push(into);
        }
        let block_bytes = self.block_bytes() as u64;
        let mut touched = Vec::new();
        for (place, numbers) in of_tensor {
            let tensor = &self.tensors()[place];
            for chunk in &tensor.chunks {
                touched.extend(ChunkUse::new(tensor, chunk, &numbers, &regions, block_bytes));
            }
        }
        touched.sort_by_key(|touched| (touched.chunk.file.as_str(), touched.chunk.offset));
        report.block_bytes = touched.iter().map(|touched| touched.bytes(block_bytes)).sum();
        let (directs, areas) = split_buffers(&touched, buffers, block_bytes);
        let scatter =
            BlockScatter { touched: &touched, areas: &areas, regions: &regions, block_bytes };
        self.read_touched(&scatter, directs)?;
        Ok(report)
    }

    /// Rejects a checkpoint of a model with other tensors. Groups of which the model has none are
    /// ignored, so that weights can be loaded alone.
    ///
    /// # Errors
    /// [`Error::OtherModel`] lists missing, extra and different tensors.
    pub fn check_against(&self, specs: &[TensorSpec]) -> Result<()> {
        let mut wanted = std::collections::HashSet::new();
        let (mut missing, mut different) = (Vec::new(), Vec::new());
        for spec in specs {
            wanted.insert((spec.group, spec.name.as_str()));
            match self.catalog.tensor(&spec.name, spec.group) {
                None => missing.push(spec.label()),
                Some(entry) if (entry.dtype, &entry.shape) != (spec.dtype, &spec.shape) => {
                    let (dtype, shape) = (entry.dtype, &entry.shape);
                    let expected = format!("expected {} {:?}", spec.dtype, spec.shape);
                    let label = spec.label();
                    different.push(format!("{label} ({expected}, found {dtype} {shape:?})"));
                }
                Some(_) => {}
            }
        }
        let extra: Vec<String> = self
            .tensors()
            .iter()
            .filter(|entry| specs.iter().any(|spec| spec.group == entry.group))
            .filter(|entry| !wanted.contains(&(entry.group, entry.name.as_str())))
            .map(TensorEntry::label)
            .collect();
        if missing.is_empty() && extra.is_empty() && different.is_empty() {
            return Ok(());
        }
        Err(Error::OtherModel { object: self.display(), missing, extra, different })
    }

    /// Reads the blocks of chunks, file after file.
    fn read_touched(&self, scatter: &BlockScatter<'_, '_>, directs: Vec<&mut [u8]>) -> Result<()> {
        let mut directs = directs.into_iter();
        let mut rest = scatter.touched;
        let mut first = 0;
        while !rest.is_empty() {
            let mut objects: Vec<(&str, Arc<dyn Object>)> = Vec::new();
            let mut count = 0;
            for touched in rest {
                if objects.last().is_none_or(|(path, _)| *path != touched.file()) {
                    if objects.len() == FILES_OPEN_MAX {
                        break;
                    }
                    objects.push((touched.file(), self.open_file(touched.file())?));
                }
                count += 1;
            }
            let mut blocks = Vec::new();
            let mut open = objects.iter().peekable();
            for (number, touched) in rest[..count].iter().enumerate() {
                while open.next_if(|(path, _)| *path != touched.file()).is_some() {}
                let (_, object) = open.peek().expect("opened above");
                touched.push_blocks(&**object, scatter, first + number, &mut directs, &mut blocks);
            }
            fetch_counted(blocks, self.threads, &self.read_bytes)?;
            rest = &rest[count..];
            first += count;
        }
        Ok(())
    }
}

fn check_request(tensor: &TensorEntry, region: &Region, into: &[u8]) -> Result<()> {
    let bad = |found: String, expected: String| {
        Err(Error::BadRequest { operation: "read", object: tensor.label(), found, expected })
    };
    if !region.is_within(&tensor.shape) {
        let pairs: Vec<[u64; 2]> = region.spans.iter().map(|&span| span.into()).collect();
        let found = match &region.flat {
            None => format!("box {pairs:?}"),
            Some(flat) => format!("elements {flat:?} of box {pairs:?}"),
        };
        return bad(found, format!("a box within {:?}", tensor.shape));
    }
    // fits: within a tensor whose bytes fit.
    let expected = region.count() * tensor.dtype.item_bytes();
    if into.len() as u64 != expected {
        let lens: Vec<u64> = region.spans.iter().map(|span| span.len).collect();
        let found = format!("a buffer of {} bytes", into.len());
        return bad(found, format!("{expected} bytes for {} of shape {lens:?}", tensor.dtype));
    }
    Ok(())
}

/// A chunk that some request needs.
#[derive(Debug)]
struct ChunkUse<'a> {
    chunk: &'a Chunk,
    region: Region,
    dtype: Dtype,
    item_bytes: u64,
    /// The requests that need it.
    requests: Vec<usize>,
    /// The use of each of its blocks.
    blocks: Vec<BlockUse>,
}

/// How a block is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockUse {
    /// It is not read.
    Unread,
    /// It is read directly into the buffer of one request, at this byte.
    Direct { request: usize, to: u64 },
    /// It is read, and its elements are copied to the requests that need them.
    Scattered,
}

impl<'a> ChunkUse<'a> {
    /// `None` if no request needs the chunk.
    fn new(
        tensor: &TensorEntry,
        chunk: &'a Chunk,
        wants: &[usize],
        regions: &[Region],
        block_bytes: u64,
    ) -> Option<Self> {
        // A range is narrowed to the rows that it touches: the box around it may have a million.
        let (region, dtype) = (chunk.region().normal(), tensor.dtype);
        let item_bytes = dtype.item_bytes();
        // fits: as many checksums are in memory.
        let blocks = vec![BlockUse::Unread; chunk.bytes.div_ceil(block_bytes) as usize];
        let mut touched =
            ChunkUse { chunk, region, dtype, item_bytes, requests: Vec::new(), blocks };
        for &want in wants {
            let mut is_needed = false;
            let Ok(()) = each_run(&touched.region, &regions[want], |run| {
                is_needed = true;
                let from = run.from * item_bytes;
                let range = from..from + run.len * item_bytes;
                use_blocks(&mut touched.blocks, chunk, block_bytes, &range, |at| {
                    BlockUse::Direct { request: want, to: run.to * item_bytes + (at - from) }
                });
                Ok::<(), Infallible>(())
            });
            if is_needed {
                touched.requests.push(want);
            }
        }
        (!touched.requests.is_empty()).then_some(touched)
    }

    /// Bytes of the blocks that are read, as they are stored.
    fn bytes(&self, block_bytes: u64) -> u64 {
        self.used(block_bytes).map(|(_, _, source)| source.stored_bytes()).sum()
    }

    /// The blocks that are read: number, use, and source.
    fn used(&self, block_bytes: u64) -> impl Iterator<Item = (usize, BlockUse, BlockSource)> + '_ {
        let sources = blocks_of(self.chunk, self.dtype, block_bytes);
        let all = self.blocks.iter().zip(sources).enumerate();
        let used = all.filter(|(_, (usage, _))| **usage != BlockUse::Unread);
        used.map(|(block, (usage, source))| (block, *usage, source))
    }

    fn file(&self) -> &'a str {
        &self.chunk.file
    }

    fn push_blocks<'b, 'd: 'b>(
        &self,
        object: &'b dyn Object,
        scatter: &'b BlockScatter<'_, '_>,
        number: usize,
        directs: &mut std::vec::IntoIter<&'d mut [u8]>,
        blocks: &mut Vec<ChecksumBlock<'b>>,
    ) {
        for (block, usage, source) in self.used(scatter.block_bytes) {
            let into = if usage == BlockUse::Scattered {
                let len = source.bytes as usize; // fits: at most 64 MiB
                BlockDestination::Visitor { len, visitor: scatter, tag: [number, block] }
            } else {
                BlockDestination::Buffer(
                    directs.next().expect("`split_buffers` made one for each direct block"),
                )
            };
            blocks.push(source.read(object, into));
        }
    }
}

fn block_range(chunk: &Chunk, block: usize, block_bytes: u64) -> Range<u64> {
    let start = block as u64 * block_bytes;
    start..(start + block_bytes).min(chunk.bytes)
}

/// Marks the blocks that contain these bytes of a chunk.
fn use_blocks(
    blocks: &mut [BlockUse],
    chunk: &Chunk,
    block_bytes: u64,
    range: &Range<u64>,
    direct: impl Fn(u64) -> BlockUse,
) {
    // fits: as many blocks are in memory.
    let numbers = range.start / block_bytes..range.end.div_ceil(block_bytes);
    let (first, end) = (numbers.start as usize, numbers.end as usize);
    for (number, usage) in blocks[first..end].iter_mut().enumerate() {
        let block = block_range(chunk, first + number, block_bytes);
        let is_whole = range.start <= block.start && block.end <= range.end;
        let is_direct = is_whole && block.end - block.start >= DIRECT_BYTES_MIN;
        *usage = match usage {
            BlockUse::Unread if is_direct => direct(block.start),
            _ => BlockUse::Scattered,
        };
    }
}

/// Part of a request's buffer that several blocks are copied into.
#[derive(Debug)]
struct ScatterArea<'a> {
    /// Its first byte within the buffer.
    start: u64,
    bytes: Mutex<&'a mut [u8]>,
}

/// Splits the buffers of all requests into the parts that blocks are read into directly, in block
/// order, and the areas between them, per request.
fn split_buffers<'a>(
    touched: &[ChunkUse<'_>],
    buffers: Vec<&'a mut [u8]>,
    block_bytes: u64,
) -> (Vec<&'a mut [u8]>, Vec<Vec<ScatterArea<'a>>>) {
    let mut of_want: Vec<Vec<(u64, u64, usize)>> = buffers.iter().map(|_| Vec::new()).collect();
    let mut count = 0;
    for touched in touched {
        for (_, usage, source) in touched.used(block_bytes) {
            if let BlockUse::Direct { request: want, to } = usage {
                of_want[want].push((to, source.bytes, count));
                count += 1;
            }
        }
    }
    let mut directs: Vec<(usize, &'a mut [u8])> = Vec::with_capacity(count);
    let mut areas = Vec::with_capacity(buffers.len());
    for (mut places, mut rest) in of_want.into_iter().zip(buffers) {
        places.sort_unstable();
        let mut between = Vec::new();
        let mut start = 0;
        for (to, len, number) in places {
            // fits: within a buffer.
            let (area, after) = rest.split_at_mut((to - start) as usize);
            let (direct, after) = after.split_at_mut(len as usize);
            if !area.is_empty() {
                between.push(ScatterArea { start, bytes: Mutex::new(area) });
            }
            directs.push((number, direct));
            (rest, start) = (after, to + len);
        }
        if !rest.is_empty() {
            between.push(ScatterArea { start, bytes: Mutex::new(rest) });
        }
        areas.push(between);
    }
    directs.sort_unstable_by_key(|(number, _)| *number);
    (directs.into_iter().map(|(_, direct)| direct).collect(), areas)
}

/// Copies the elements of blocks to the requests that need them.
#[derive(Debug)]
struct BlockScatter<'a, 'b> {
    touched: &'a [ChunkUse<'a>],
    /// Of each request.
    areas: &'a [Vec<ScatterArea<'b>>],
    regions: &'a [Region],
    block_bytes: u64,
}

impl Visitor for BlockScatter<'_, '_> {
    fn visit(&self, [number, block]: [usize; 2], bytes: &[u8]) {
        let touched = &self.touched[number];
        let item_bytes = touched.item_bytes;
        let range = block_range(touched.chunk, block, self.block_bytes);
        let region = touched.region.slice(range.start / item_bytes..range.end / item_bytes);
        for &want in &touched.requests {
            let areas = &self.areas[want];
            let mut held = None;
            let Ok(()) = each_run(&region, &self.regions[want], |run| {
                let to = run.to * item_bytes;
                // Bytes adjacent in a block and in the buffer are in one area.
                let place = areas.partition_point(|area| area.start <= to) - 1;
                if held.as_ref().is_none_or(|(before, _)| *before != place) {
                    // One lock at a time, so no thread waits for two.
                    drop(held.take());
                    let bytes = areas[place].bytes.lock().unwrap_or_else(PoisonError::into_inner);
                    held = Some((place, bytes));
                }
                if let Some((_, area)) = &mut held {
                    // fits: within a block, and within a buffer.
                    let (from, len) = ((run.from * item_bytes) as usize, run.len * item_bytes);
                    let (to, len) = ((to - areas[place].start) as usize, len as usize);
                    area[to..to + len].copy_from_slice(&bytes[from..from + len]);
                }
                Ok::<(), Infallible>(())
            });
        }
    }
}
