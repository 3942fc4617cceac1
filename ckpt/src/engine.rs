//! Files of many parts, written at the speed of the device.
//!
//! The space of all files is taken before the first byte of any. A few are filled at the same time,
//! each from staging buffers of its own: a block is copied and summed while it is in the cache, and
//! written behind the copy. When all are full they are made durable together, because a device and
//! a journal ask the same for one file as for many; and last, once, the folders that have them.

use std::time::{Duration, Instant};

use crate::catalog::{block_count, join_blocks};
use crate::control::Control;
use crate::plan::{Piece, Shard};
use crate::shard::ALIGN_BYTES;
use crate::{Error, Options, Result, parallel};
use storage::{FileEntry, Key, Storage, Unsynced, Upload, crc64_join};

/// Files that have their space and are not durable yet. A process may open 1,024 unless it is told
/// otherwise, an upload holds two, and others want some as well.
const FILES_OPEN_MAX: usize = 64;

/// Files that are made durable at the same time. Their journal commits join; 16 threads that wait
/// cost nothing.
const SYNCS_MAX: usize = 16;

/// Writes files into a folder that nobody looks into yet.
#[derive(Debug)]
pub(crate) struct Engine<'a> {
    pub(crate) store: &'a dyn Storage,
    pub(crate) folder: &'a Key,
    pub(crate) options: Options,
    pub(crate) summing: Summing,
    pub(crate) control: &'a Control,
}

/// Whether what is written is summed. A checkpoint's files always are; a benchmark looks at the
/// difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Summing {
    On,
    Off,
}

/// A file to be written.
#[derive(Debug)]
pub(crate) struct Job<'a> {
    /// Below the folder.
    pub(crate) path: String,
    pub(crate) header: &'a [u8],
    pub(crate) parts: Vec<Part<'a>>,
}

/// Bytes with checksums of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    /// Where in the file, after all parts before it. Zeros fill a gap, which is less than a page.
    pub(crate) offset: u64,
    pub(crate) bytes: &'a [u8],
}

/// What stands between two parts, of which the second begins at a page.
const ZEROS: [u8; ALIGN_BYTES as usize] = [0; ALIGN_BYTES as usize];

impl<'a> Job<'a> {
    /// The shards of a writer that has these bytes of their pieces, one after the other.
    pub(crate) fn of_shards(shards: &'a [Shard], pieces: &[&'a [u8]]) -> Vec<Self> {
        let mut pieces = pieces.iter();
        let part = |(piece, bytes): (&Piece, &&'a [u8])| Part { offset: piece.offset, bytes };
        let job = |shard: &'a Shard| Job {
            path: shard.file.clone(),
            header: &shard.header,
            parts: shard.pieces.iter().zip(pieces.by_ref()).map(part).collect(),
        };
        shards.iter().map(job).collect()
    }

    /// A file of bytes that belong to no tensor.
    pub(crate) fn of_bytes(path: String, bytes: &'a [u8]) -> Self {
        Job { path, header: bytes, parts: Vec::new() }
    }

    pub(crate) fn bytes(&self) -> u64 {
        let end = |part: &Part<'_>| part.offset + part.bytes.len() as u64;
        self.parts.last().map_or(self.header.len() as u64, end)
    }
}

/// A file that is durable.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) file: FileEntry,
    /// One for each part.
    pub(crate) sums: Vec<Sums>,
}

/// The checksums of a part.
#[derive(Debug)]
pub(crate) struct Sums {
    pub(crate) crc64: u64,
    /// Those of its blocks, if it is longer than one.
    pub(crate) blocks: Vec<u64>,
}

/// A file that has all its bytes.
struct Filled {
    upload: Box<dyn Upload>,
    path: String,
    /// Its length and its checksum, by its parts.
    due: (u64, u64),
    sums: Vec<Sums>,
}

impl Engine<'_> {
    /// Writes all files, and makes them and their names durable. Gives them in the order of the
    /// jobs, and how long it took after each wave of them had all its bytes. After an error there
    /// may be some of them.
    pub(crate) fn write(&self, jobs: &[Job<'_>]) -> Result<(Vec<Written>, Duration)> {
        let mut written = Vec::with_capacity(jobs.len());
        let mut names = Vec::with_capacity(jobs.len());
        let mut syncing = Duration::ZERO;
        for wave in jobs.chunks(FILES_OPEN_MAX) {
            let begin = |job| Ok((job, self.begin(job)?));
            let begun = wave.iter().map(begin).collect::<Result<Vec<_>>>()?;
            let fill = |(job, upload), _: &mut Vec<u8>| self.fill(job, upload);
            let filled = parallel::each(begun, self.options.threads, fill)?;
            let full = Instant::now();
            let finished = parallel::each(filled, SYNCS_MAX, |file, _| self.finish(file))?;
            for (file, name) in finished {
                written.push(file);
                names.push(name);
            }
            syncing += full.elapsed();
        }
        let full = Instant::now();
        Unsynced::sync_all(names)?;
        Ok((written, syncing + full.elapsed()))
    }

    fn begin(&self, job: &Job<'_>) -> Result<Box<dyn Upload>> {
        let mut upload = self.store.create(&self.folder.join(&job.path)?, job.bytes())?;
        upload.stage_in(self.options.staging_bytes_max / self.options.threads as u64);
        Ok(upload)
    }

    fn fill(&self, job: &Job<'_>, mut upload: Box<dyn Upload>) -> Result<Filled> {
        let mut sum = self.write_block(&mut *upload, job.header)?;
        let mut sums = Vec::with_capacity(job.parts.len());
        for Part { offset, bytes } in &job.parts {
            let gap = &ZEROS[..(offset - upload.len_bytes()) as usize]; // fits: less than a page
            sum = crc64_join(sum, self.write_block(&mut *upload, gap)?, gap.len() as u64);
            let part_sums = self.write_part(&mut *upload, bytes)?;
            sum = crc64_join(sum, part_sums.crc64, bytes.len() as u64);
            sums.push(part_sums);
        }
        upload.settle()?;
        Ok(Filled { upload, path: job.path.clone(), due: (job.bytes(), sum), sums })
    }

    fn write_part(&self, upload: &mut dyn Upload, part: &[u8]) -> Result<Sums> {
        let block_bytes = self.options.block_bytes;
        let mut blocks = Vec::with_capacity(part.len() / block_bytes as usize + 1);
        for block in part.chunks(block_bytes as usize) {
            // fits: at most 64 MiB
            blocks.push(self.write_block(upload, block)?);
            self.control.wrote(block.len() as u64)?;
        }
        let len = part.len() as u64;
        let crc64 = join_blocks(&blocks, len, block_bytes);
        blocks.truncate(block_count(len, block_bytes) as usize); // fits: no more than there are
        Ok(Sums { crc64, blocks })
    }

    fn write_block(&self, upload: &mut dyn Upload, block: &[u8]) -> Result<u64> {
        Ok(match self.summing {
            Summing::On => upload.write_summed(block)?,
            Summing::Off => upload.write_given(block, 0).map(|()| 0)?,
        })
    }

    fn finish(&self, filled: Filled) -> Result<(Written, Unsynced)> {
        let Filled { upload, path, due, sums } = filled;
        let (entry, name) = upload.finish_in_folder()?;
        if self.summing == Summing::On && (entry.bytes, entry.crc64) != due {
            // A store that sums for itself has seen other bytes: memory, or a tensor that changed.
            return Err(Error::Corrupt {
                what: self.store.display(&self.folder.join(&path)?),
                offset: 0,
                got: format!("CRC-64 {:016x} of {} bytes stored", entry.crc64, entry.bytes),
                due: format!("{:016x} of {}, as they were handed over", due.1, due.0),
            });
        }
        Ok((Written { file: FileEntry { path, ..entry }, sums }, name))
    }
}
