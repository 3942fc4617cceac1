//! Copies the files of a step to the second store, as they are or packed.

use std::collections::HashMap;

use crate::format::catalog::{Catalog, PACKED_MAGIC, Placed, packed_path};
use crate::format::chunk_writer::ChunkWriter;
use crate::liveness::heartbeat::delete_if_exists;
use crate::read::block_reader::{BlockDestination, fetch};
use crate::read::checkpoint::{Checkpoint, blocks_of};
use crate::save::check_space;
use crate::write::shard_writer::Checksums;
use crate::write::staging::INDEX;
use crate::{Chunk, Codec, Drain, Error, Result, TensorEntry};
use storage::{Crc64, FileEntry, Key, Manifest, RangeRead, Upload};

/// Large enough for direct I/O. One buffer here, plus those of an upload.
const READ_BYTES: usize = 8 << 20;

impl Drain {
    /// Copies the missing files, packed if so configured, and updates the manifest accordingly.
    /// Returns the number of bytes that existed already.
    pub(super) fn copy_files(
        &self,
        source: &Checkpoint,
        staging: &Key,
        manifest: &mut Manifest,
    ) -> Result<u64> {
        let to = &*self.to.store;
        for folder in folders_of(source, staging)? {
            to.remove_orphans(&folder)?;
        }
        let there = self.to.listing_of(staging)?;
        let jobs = self.jobs(source);
        let bytes: u64 = jobs.iter().map(|job| job.file.bytes).sum();
        let mut remaining = Vec::new();
        let mut resumed = 0;
        for (place, job) in jobs.iter().enumerate() {
            let key = staging.join(&job.path())?;
            let existing_bytes = there.get(&key).copied();
            if job.codec.is_none() && existing_bytes == Some(job.file.bytes) {
                resumed += job.file.bytes;
                continue;
            }
            if job.codec.is_none() {
                // A truncated file. Where a record commits, this may be the folder of a damaged
                // step, which is then repaired.
                delete_if_exists(to, &key)?;
            }
            remaining.push((place, key, existing_bytes));
        }
        check_space(to, staging, bytes - resumed, source.tensors().len() as u64)?;
        self.control.set_bytes(resumed);
        let mut files: Vec<FileEntry> = jobs.iter().map(|job| job.file.clone()).collect();
        let mut tensors = source.tensors().to_vec();
        for (place, key, existing_bytes) in remaining {
            let job = &jobs[place];
            let Some(codec) = job.codec else {
                self.copy(source, job.file, &key)?;
                continue;
            };
            let (file, is_there) =
                self.pack(source, job, codec, &key, existing_bytes, &mut tensors)?;
            resumed += if is_there { job.file.bytes } else { 0 };
            files[place] = file;
        }
        if self.to.options.codec.is_some() {
            // The index names the unpacked files, which do not exist here.
            let is_listed = |file: &FileEntry| file.path != INDEX;
            manifest.files = files.into_iter().filter(is_listed).collect();
            manifest.meta["tensors"] =
                serde_json::to_value(tensors).expect("strings, numbers and lists always serialize");
            Catalog::new(manifest.clone(), &to.display(staging))?;
        }
        Ok(resumed)
    }

    /// The files to copy, and how.
    fn jobs<'a>(&self, source: &'a Checkpoint) -> Vec<CopyJob<'a>> {
        let mut chunks: HashMap<&str, Vec<Placed<'_>>> = HashMap::new();
        for (file, placed) in source.catalog.by_file() {
            chunks.insert(&file.path, placed);
        }
        let job = |file: &'a FileEntry| {
            let chunks = chunks.remove(file.path.as_str()).unwrap_or_default();
            let is_plain = chunks.first().is_some_and(|placed| placed.chunk.packed.is_none());
            let codec = self.to.options.codec.filter(|_| is_plain);
            CopyJob { file, chunks, codec }
        };
        let is_wanted = |file: &&FileEntry| self.to.options.codec.is_none() || file.path != INDEX;
        source.catalog.files.iter().filter(is_wanted).map(job).collect()
    }

    fn copy(&self, source: &Checkpoint, file: &FileEntry, key: &Key) -> Result<()> {
        let object = source.open_file(&file.path)?;
        let mut upload = self.to.store.create(key, file.bytes)?;
        let mut buf = vec![0; READ_BYTES.min(usize::try_from(file.bytes).unwrap_or(READ_BYTES))];
        let mut sum = Crc64::new();
        let mut offset = 0;
        while offset < file.bytes {
            // fits: at most the buffer
            let len = (file.bytes - offset).min(buf.len() as u64) as usize;
            self.wait_for_rate_limit(len as u64)?;
            object.read_many(&mut [RangeRead { offset, buf: &mut buf[..len] }])?;
            sum.update(&buf[..len]);
            upload.write(&buf[..len])?;
            offset += len as u64;
            self.control.wrote(len as u64)?;
        }
        // Before it becomes visible, so that an existing file need not be read again.
        if sum.value() != file.crc64 {
            return Err(Error::Corrupt {
                object: object.display(),
                offset: 0,
                found: format!("CRC-64 {:016x} of {} bytes", sum.value(), file.bytes),
                expected: format!("CRC-64 {:016x} as in the manifest", file.crc64),
            });
        }
        upload.finish()?;
        Ok(())
    }

    /// Packs the chunks of a file into a new file, and updates `tensors`. A packed file that exists
    /// is not written again: packing is deterministic.
    fn pack(
        &self,
        source: &Checkpoint,
        job: &CopyJob<'_>,
        codec: Codec,
        key: &Key,
        there: Option<u64>,
        tensors: &mut [TensorEntry],
    ) -> Result<(FileEntry, bool)> {
        let path = packed_path(&job.file.path);
        if let Some(bytes) = there {
            let mut sink = ChecksumSink { bytes: 0, sum: Crc64::new() };
            let chunks = self.pack_chunks(source, job, codec, &mut sink)?;
            if sink.bytes == bytes {
                put_chunks(source, job, chunks, tensors);
                let crc64 = sink.sum.value();
                return Ok((FileEntry { path, bytes, crc64 }, true));
            }
            delete_if_exists(&*self.to.store, key)?;
        }
        let most = |placed: &Placed<'_>| {
            codec.bytes_max(placed.tensor.dtype, placed.chunk.bytes, source.block_bytes() as u64)
        };
        let bytes_max = PACKED_MAGIC.len() as u64 + job.chunks.iter().map(most).sum::<u64>();
        let mut upload = self.to.store.create(key, bytes_max)?;
        let chunks = self.pack_chunks(source, job, codec, &mut *upload)?;
        let entry = upload.finish()?;
        put_chunks(source, job, chunks, tensors);
        Ok((FileEntry { path, ..entry }, false))
    }

    fn pack_chunks(
        &self,
        source: &Checkpoint,
        job: &CopyJob<'_>,
        codec: Codec,
        upload: &mut dyn Upload,
    ) -> Result<Vec<Chunk>> {
        let object = source.open_file(&job.file.path)?;
        let block_bytes = source.block_bytes() as u64;
        let path = packed_path(&job.file.path);
        let mut writer = ChunkWriter::new(block_bytes, Some(codec), Checksums::On);
        let mut block = Vec::new();
        let mut chunks = Vec::with_capacity(job.chunks.len());
        upload.write(PACKED_MAGIC)?;
        for Placed { tensor, chunk, .. } in &job.chunks {
            writer.begin(upload);
            for part in blocks_of(chunk, tensor.dtype, block_bytes) {
                block.resize(part.bytes as usize, 0); // fits: at most 64 MiB
                fetch(vec![part.read(&*object, BlockDestination::Buffer(&mut block))], 1)?;
                let before = upload.len_bytes();
                writer.write(upload, tensor.dtype, &block)?;
                self.wait_for_rate_limit(upload.len_bytes() - before)?;
                self.control.wrote(part.bytes)?;
            }
            chunks.push(writer.end(upload, tensor.dtype)?.chunk(&path, &chunk.region()));
        }
        Ok(chunks)
    }
}

/// A file to be copied.
struct CopyJob<'a> {
    file: &'a FileEntry,
    /// Its chunks.
    chunks: Vec<Placed<'a>>,
    /// The codec that packs it, if any.
    codec: Option<Codec>,
}

impl CopyJob<'_> {
    /// Its path in the second store.
    fn path(&self) -> String {
        self.codec.map_or_else(|| self.file.path.clone(), |_| packed_path(&self.file.path))
    }
}

/// Updates the locations of chunks.
fn put_chunks(
    source: &Checkpoint,
    job: &CopyJob<'_>,
    new_chunks: Vec<Chunk>,
    tensors: &mut [TensorEntry],
) {
    for (placed, chunk) in job.chunks.iter().zip(new_chunks) {
        tensors[source.catalog.place(placed.tensor)].chunks[placed.k] = chunk;
    }
}

/// Counts bytes and computes their checksum.
#[derive(Debug)]
struct ChecksumSink {
    bytes: u64,
    sum: Crc64,
}

impl Upload for ChecksumSink {
    fn write(&mut self, bytes: &[u8]) -> storage::Result<()> {
        self.bytes += bytes.len() as u64;
        self.sum.update(bytes);
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        self.bytes
    }

    fn finish(self: Box<Self>) -> storage::Result<FileEntry> {
        Ok(FileEntry { path: String::new(), bytes: self.bytes, crc64: self.sum.value() })
    }
}

/// The staging folder and those below it.
fn folders_of(source: &Checkpoint, staging: &Key) -> Result<Vec<Key>> {
    let mut folders = vec![staging.clone()];
    for file in &source.catalog.files {
        if let Some((folder, _)) = file.path.rsplit_once('/') {
            folders.push(staging.join(folder)?);
        }
    }
    folders.dedup();
    Ok(folders)
}
