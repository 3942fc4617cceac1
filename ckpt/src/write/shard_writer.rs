//! Writes files of many parts at the speed of the device.
//!
//! The space of all files is allocated before the first byte is written. A few are filled in
//! parallel, each from its own staging buffers: a block is copied and checksummed while it is
//! cached, and written in the background. When all are full they are made durable in one go,
//! because a device and a journal take the same for one file as for many; and last, once, their
//! folders.

use std::time::{Duration, Instant};

use crate::base::parallel_io::{self, IoBuffer};
use crate::base::save_control::SaveControl;
use crate::format::catalog::{PACKED_MAGIC, packed_path};
use crate::format::chunk_writer::{ChunkSums, ChunkWriter};
use crate::format::safetensors::ALIGN_BYTES;
use crate::plan::{PlannedChunk, Shard};
use crate::spec::TensorSpec;
use crate::{CheckpointOptions, Codec, Dtype, Error, Result};
use storage::{FileEntry, Key, PendingDirSync, Storage, Upload, crc64_join};

/// Files with allocated space that are not durable yet. A process may open 1,024 by default, an
/// upload holds two, and others are needed as well.
const FILES_OPEN_MAX: usize = 64;

/// Files made durable at the same time. Their journal commits merge; 16 waiting threads cost
/// nothing.
const SYNCS_MAX: usize = 16;

/// Writes files into a folder that is not visible yet.
#[derive(Debug)]
pub(crate) struct ShardWriter<'a> {
    pub(crate) store: &'a dyn Storage,
    pub(crate) folder: &'a Key,
    pub(crate) options: CheckpointOptions,
    pub(crate) summing: Checksums,
    pub(crate) control: &'a SaveControl,
}

/// Whether checksums are computed. For a checkpoint they always are; a benchmark measures the
/// difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checksums {
    On,
    Off,
}

/// A file to be written.
#[derive(Debug)]
pub(crate) struct FileJob<'a> {
    /// Below the folder.
    pub(crate) path: String,
    pub(crate) header: &'a [u8],
    pub(crate) parts: Vec<FilePart<'a>>,
    /// How the parts are packed, if they are.
    pub(crate) codec: Option<Codec>,
}

/// Bytes with checksums of their own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilePart<'a> {
    /// Offset in the file, after all earlier parts. A gap is less than a page and filled with
    /// zeros. Packed parts are stored without gaps instead.
    pub(crate) offset: u64,
    pub(crate) dtype: Dtype,
    pub(crate) bytes: &'a [u8],
}

/// The padding before a part that begins at a page.
const ZEROS: [u8; ALIGN_BYTES as usize] = [0; ALIGN_BYTES as usize];

impl<'a> FileJob<'a> {
    /// The shards of a writer with these bytes of their pieces, one after the other.
    pub(crate) fn of_shards(
        shards: &'a [Shard],
        specs: &[TensorSpec],
        pieces: &[&'a [u8]],
        codec: Option<Codec>,
    ) -> Vec<Self> {
        let mut pieces = pieces.iter();
        let part = |(piece, bytes): (&PlannedChunk, &&'a [u8])| {
            let (offset, dtype) = (piece.offset, specs[piece.tensor].dtype);
            FilePart { offset, dtype, bytes }
        };
        let job = |shard: &'a Shard| {
            let (path, header): (_, &[u8]) = match codec {
                None => (shard.file.clone(), &shard.header),
                Some(_) => (packed_path(&shard.file), PACKED_MAGIC),
            };
            let parts = shard.pieces.iter().zip(pieces.by_ref()).map(part).collect();
            FileJob { path, header, parts, codec }
        };
        shards.iter().map(job).collect()
    }

    /// A file of bytes that belong to no tensor.
    pub(crate) fn of_bytes(path: String, bytes: &'a [u8]) -> Self {
        FileJob { path, header: bytes, parts: Vec::new(), codec: None }
    }

    /// Its length; a packed file may be shorter.
    fn bytes_max(&self, block_bytes: u64) -> u64 {
        let header = self.header.len() as u64;
        if let Some(codec) = self.codec {
            let most = |part: &FilePart<'_>| {
                codec.bytes_max(part.dtype, part.bytes.len() as u64, block_bytes)
            };
            return header + self.parts.iter().map(most).sum::<u64>();
        }
        self.parts.last().map_or(header, |part| part.offset + part.bytes.len() as u64)
    }
}

/// A file that is durable.
#[derive(Debug)]
pub(crate) struct WrittenFile {
    pub(crate) file: FileEntry,
    /// One for each part.
    pub(crate) sums: Vec<ChunkSums>,
}

/// A file that has all its bytes.
struct Filled {
    upload: Box<dyn Upload>,
    path: String,
    /// Its length and its checksum, by its parts.
    expected: (u64, u64),
    sums: Vec<ChunkSums>,
}

impl ShardWriter<'_> {
    /// Writes all files, and makes them and their names durable. Returns them in the order of the
    /// jobs, and the total sync time, counted after each batch of files had all its bytes. After an
    /// error some of them may exist.
    pub(crate) fn write(&self, jobs: &[FileJob<'_>]) -> Result<(Vec<WrittenFile>, Duration)> {
        let mut written = Vec::with_capacity(jobs.len());
        let mut names = Vec::with_capacity(jobs.len());
        let mut syncing = Duration::ZERO;
        for batch in jobs.chunks(FILES_OPEN_MAX) {
            let begin = |job| Ok((job, self.begin(job)?));
            let started = batch.iter().map(begin).collect::<Result<Vec<_>>>()?;
            let fill = |(job, upload), _: &mut IoBuffer| self.fill(job, upload);
            let filled = parallel_io::each(started, self.options.threads, fill)?;
            let full = Instant::now();
            let finished = parallel_io::each(filled, SYNCS_MAX, |file, _| self.finish(file))?;
            for (file, name) in finished {
                written.push(file);
                names.push(name);
            }
            syncing += full.elapsed();
        }
        let full = Instant::now();
        PendingDirSync::sync_all(names)?;
        Ok((written, syncing + full.elapsed()))
    }

    fn begin(&self, job: &FileJob<'_>) -> Result<Box<dyn Upload>> {
        let bytes_max = job.bytes_max(self.options.block_bytes);
        let mut upload = self.store.create(&self.folder.join(&job.path)?, bytes_max)?;
        upload.stage_in(self.options.staging_bytes_max / self.options.threads as u64);
        Ok(upload)
    }

    fn fill(&self, job: &FileJob<'_>, mut upload: Box<dyn Upload>) -> Result<Filled> {
        let block_bytes = self.options.block_bytes;
        let mut sum = upload.write_with_crc(job.header)?;
        let mut sums = Vec::with_capacity(job.parts.len());
        let mut writer = ChunkWriter::new(block_bytes, job.codec, self.summing);
        for FilePart { offset, dtype, bytes } in &job.parts {
            if job.codec.is_none() {
                // fits: less than a page
                let gap = &ZEROS[..(offset - upload.len_bytes()) as usize];
                sum = crc64_join(sum, upload.write_with_crc(gap)?, gap.len() as u64);
            }
            writer.begin(&*upload);
            for block in bytes.chunks(block_bytes as usize) {
                // fits: at most 64 MiB
                writer.write(&mut *upload, *dtype, block)?;
                self.control.wrote(block.len() as u64)?;
            }
            let part = writer.end(&mut *upload, *dtype)?;
            let (stored_bytes, stored_crc64) = part.stored();
            sum = crc64_join(sum, stored_crc64, stored_bytes);
            sums.push(part);
        }
        upload.flush()?;
        let expected = (upload.len_bytes(), sum);
        Ok(Filled { upload, path: job.path.clone(), expected, sums })
    }

    fn finish(&self, filled: Filled) -> Result<(WrittenFile, PendingDirSync)> {
        let Filled { upload, path, expected, sums } = filled;
        let (entry, name) = upload.finish_deferred()?;
        if self.summing == Checksums::On && (entry.bytes, entry.crc64) != expected {
            // A store that computes its own checksum received other bytes: a memory error, or a
            // tensor that changed.
            return Err(Error::Corrupt {
                object: self.store.display(&self.folder.join(&path)?),
                offset: 0,
                found: format!("CRC-64 {:016x} of {} bytes", entry.crc64, entry.bytes),
                expected: format!("CRC-64 {:016x} of {} bytes as written", expected.1, expected.0),
            });
        }
        Ok((WrittenFile { file: FileEntry { path, ..entry }, sums }, name))
    }
}
