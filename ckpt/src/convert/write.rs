//! Made tensors into safetensors files, a band at a time.

use std::cmp::Reverse;

use super::made::{Made, Scratch};
use super::source::Source;
use crate::catalog::{block_count, join_blocks};
use crate::shard::{self, Entry};
use crate::spec::{TensorSpec, check_specs};
use crate::{Chunk, Error, Result, bands, parallel, region};
use storage::{Crc64, FileEntry, Key, Storage, crc64, crc64_join};

/// How much is held and written at a time.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Bytes of tensors in one file; a larger tensor has one of its own. Default: 4 GiB.
    pub shard_bytes_max: u64,
    /// The most that all buffers together take. A matrix that is transposed and larger than a
    /// quarter of a thread's share is read more than once. Default: 1 GiB. Minimum: 1 MiB.
    pub memory_bytes: u64,
    /// Files written side by side. Default: 2.
    pub threads: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Bounds { shard_bytes_max: 4 << 30, memory_bytes: 1 << 30, threads: 2 }
    }
}

/// Hears how many more bytes are written; several threads tell.
pub type Tell<'a> = &'a (dyn Fn(u64) + Sync);

/// Bands of tensors that are read as they lie; more would not be faster.
const BAND_BYTES: u64 = 16 << 20;

/// A tensor passes through so many buffers: as read, turned, as another type, as a band.
const BUFFERS: u64 = 4;

/// One safetensors file to be written.
#[derive(Debug)]
pub(crate) struct OutFile {
    pub(crate) name: String,
    header: Vec<u8>,
    /// Which tensors, in the order of their bytes.
    pub(crate) members: Vec<usize>,
}

impl OutFile {
    /// Its length.
    pub(crate) fn bytes(&self, made: &[Made]) -> u64 {
        let data: u64 = self.members.iter().map(|&place| made[place].bytes()).sum();
        self.header.len() as u64 + data
    }
}

/// Refuses recipes of which no step and no folder of files can be made.
pub(crate) fn check(made: &[Made], source: &Source) -> Result<()> {
    let spec = |made: &Made| TensorSpec {
        name: made.name.clone(),
        group: made.group,
        dtype: made.dtype,
        shape: made.shape.clone(),
    };
    check_specs(&made.iter().map(spec).collect::<Vec<_>>())?;
    made.iter().try_for_each(|made| made.check(source))
}

/// Divides tensors among files in their order, as many as fit, and writes the headers. `name` has
/// the number of a file, from 1, and of all files.
pub(crate) fn lay_out(
    made: &[Made],
    members: impl Iterator<Item = usize>,
    shard_bytes_max: u64,
    name: impl Fn(usize, usize) -> String,
) -> Result<Vec<OutFile>> {
    let mut files: Vec<Vec<usize>> = Vec::new();
    let mut data = 0;
    for place in members {
        let bytes = made[place].bytes();
        if files.is_empty() || data + bytes > shard_bytes_max && data > 0 {
            files.push(Vec::new());
            data = 0;
        }
        files.last_mut().expect("pushed above if there was none").push(place);
        data += bytes;
    }
    let count = files.len();
    let seal = |(number, members)| seal(name(number, count), members, made);
    (1..).zip(files).map(seal).collect()
}

fn seal(name: String, mut members: Vec<usize>, made: &[Made]) -> Result<OutFile> {
    let entry_name = |place: usize| made[place].group.entry_name(&made[place].name, None);
    members
        .sort_by_cached_key(|&place| (Reverse(made[place].dtype.item_bytes()), entry_name(place)));
    let mut end = 0;
    let entry = |&place: &usize| {
        let begin = end;
        end += made[place].bytes();
        Entry {
            name: entry_name(place),
            dtype: made[place].dtype,
            shape: made[place].shape.clone(),
            data_offsets: [begin, end],
        }
    };
    let entries: Vec<Entry> = members.iter().map(entry).collect();
    let header = shard::header(&entries)?;
    Ok(OutFile { name, header, members })
}

/// Where files are written, and of what.
pub(crate) struct Job<'a> {
    pub(crate) store: &'a dyn Storage,
    pub(crate) folder: &'a Key,
    pub(crate) source: &'a Source,
    pub(crate) made: &'a [Made],
    pub(crate) block_bytes: u64,
    pub(crate) bounds: Bounds,
    pub(crate) tell: Tell<'a>,
}

impl Job<'_> {
    /// Writes all files, and makes them durable. Beside each its chunks, in the order of members.
    pub(crate) fn write(&self, files: &[OutFile]) -> Result<Vec<(FileEntry, Vec<Chunk>)>> {
        let jobs: Vec<&OutFile> = files.iter().collect();
        parallel::each(jobs, self.bounds.threads.max(1), |file, _| self.write_file(file))
    }

    fn write_file(&self, file: &OutFile) -> Result<(FileEntry, Vec<Chunk>)> {
        let key = self.folder.join(&file.name)?;
        let mut upload = self.store.create(&key, file.bytes(self.made))?;
        upload.write(&file.header)?;
        let mut offset = file.header.len() as u64;
        let mut sum = crc64(&file.header);
        let (mut band_bytes, mut scratch) = (Vec::new(), Scratch::default());
        let mut chunks = Vec::with_capacity(file.members.len());
        for &place in &file.members {
            let made = &self.made[place];
            let mut sums = BlockSums::new(self.block_bytes);
            for band in bands(&made.shape, made.dtype.item_bytes(), self.band_bytes_max(made)) {
                let items: u64 = band.iter().map(|span| span.len).product();
                // fits: a part of the memory that buffers may take
                band_bytes.resize((items * made.dtype.item_bytes()) as usize, 0);
                made.read(self.source, &band, &mut band_bytes, &mut scratch)?;
                sums.add(&band_bytes);
                upload.write(&band_bytes)?;
                (self.tell)(band_bytes.len() as u64);
            }
            let (crc64, blocks) = sums.finish(made.bytes());
            sum = crc64_join(sum, crc64, made.bytes());
            chunks.push(Chunk {
                file: file.name.clone(),
                offset,
                bytes: made.bytes(),
                crc64,
                blocks,
                spans: region::whole(&made.shape),
                flat: None,
            });
            offset += made.bytes();
        }
        let entry = upload.finish()?;
        if (entry.bytes, entry.crc64) != (offset, sum) {
            return Err(Error::Corrupt {
                what: self.store.display(&key),
                offset: 0,
                got: format!("CRC-64 {:016x} of {} bytes stored", entry.crc64, entry.bytes),
                due: format!("{sum:016x} of {offset}, as they were handed over"),
            });
        }
        Ok((FileEntry { path: file.name.clone(), ..entry }, chunks))
    }

    fn band_bytes_max(&self, made: &Made) -> u64 {
        let share = self.bounds.memory_bytes / self.bounds.threads.max(1) as u64 / BUFFERS;
        // A band is counted as it comes out, and what it is made of may have wider elements.
        let (to, from) = (made.dtype.item_bytes(), made.item_bytes_max(self.source));
        let share = share.max(1 << 16) / from.div_ceil(to).max(1);
        if made.is_turned() { share } else { share.min(BAND_BYTES) }
    }
}

/// Sums of blocks of a stream that comes in pieces of any length.
struct BlockSums {
    block_bytes: u64,
    /// Of the block that is being filled.
    current: Crc64,
    filled: u64,
    blocks: Vec<u64>,
}

impl BlockSums {
    fn new(block_bytes: u64) -> Self {
        BlockSums { block_bytes, current: Crc64::new(), filled: 0, blocks: Vec::new() }
    }

    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.block_bytes - self.filled;
            // fits: a length
            let (now, rest) = bytes.split_at(room.min(bytes.len() as u64) as usize);
            self.current.update(now);
            self.filled += now.len() as u64;
            if self.filled == self.block_bytes {
                self.close();
            }
            bytes = rest;
        }
    }

    fn close(&mut self) {
        let full = std::mem::replace(&mut self.current, Crc64::new());
        self.blocks.push(full.value());
        self.filled = 0;
    }

    /// The sum of all, and those of the blocks if there are several.
    fn finish(mut self, bytes: u64) -> (u64, Vec<u64>) {
        if self.filled > 0 {
            self.close();
        }
        let joined = join_blocks(&self.blocks, bytes, self.block_bytes);
        // fits: no more than there are
        self.blocks.truncate(block_count(bytes, self.block_bytes) as usize);
        (joined, self.blocks)
    }
}
