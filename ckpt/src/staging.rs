//! The files of a step, streamed from the caller's memory into a hidden folder.

use crate::catalog::{BlobEntry, block_count, join_blocks, merge_parts};
use crate::commit::Part;
use crate::control::Control;
use crate::plan::{SavePlan, Shard};
use crate::shard::ALIGN_BYTES;
use crate::{Blob, Checkpoints, Chunk, Error, Group, Result, TensorEntry, parallel};
use storage::{FileEntry, Key, crc64, crc64_join, write_all};

/// Where the bytes lie that belong to no tensor.
pub(crate) const EXTRA: &str = "extra";

/// What stands between two tensors, of which the second begins at a page.
const ZEROS: [u8; ALIGN_BYTES as usize] = [0; ALIGN_BYTES as usize];

/// The hidden folder that is being filled.
#[derive(Debug)]
pub(crate) struct Staging<'a> {
    pub(crate) steps: &'a Checkpoints,
    pub(crate) folder: &'a Key,
    pub(crate) plan: &'a SavePlan,
    /// What each writer holds.
    pub(crate) held: &'a [Vec<&'a [u8]>],
    pub(crate) control: &'a Control,
}

impl Staging<'_> {
    /// Writes all files of all writers, and makes them durable.
    pub(crate) fn write(&self, blobs: &[Blob<'_>], index: Option<&[u8]>) -> Result<Written> {
        let mut jobs: Vec<(&Shard, &[&[u8]])> = Vec::new();
        for (writer, held) in self.held.iter().enumerate() {
            jobs.extend(self.plan.shards(writer).iter().map(|shard| (shard, held.as_slice())));
        }
        let work =
            |(shard, held): (&Shard, &[&[u8]]), _: &mut Vec<u8>| self.write_shard(shard, held);
        let mut written = parallel::each(jobs, self.steps.options.threads, work)?.into_iter();
        let count = |writer| self.plan.shards(writer).len();
        let parts = (0..self.plan.writers())
            .map(|writer| written.by_ref().take(count(writer)).collect())
            .collect();
        let (mut files, tensors) = merge_parts(self.plan, parts)?;
        if let Some(index) = index {
            files.push(self.write_file(INDEX, index)?);
        }
        let mut blob_entries = Vec::new();
        for blob in blobs {
            let file = format!("{EXTRA}/{}", blob.name);
            files.push(self.write_file(&file, blob.bytes)?);
            blob_entries.push(BlobEntry { name: blob.name.to_owned(), file });
        }
        Ok(Written { files, tensors, blobs: blob_entries })
    }

    /// Writes the files of one writer, and makes them durable.
    pub(crate) fn write_part(
        &self,
        writer: usize,
        held: &[&[u8]],
        blobs: &[Blob<'_>],
    ) -> Result<Part> {
        let jobs: Vec<&Shard> = self.plan.shards(writer).iter().collect();
        let work = |shard: &Shard, _: &mut Vec<u8>| self.write_shard(shard, held);
        let shards = parallel::each(jobs, self.steps.options.threads, work)?;
        let write = |blob: &Blob<'_>| {
            let file = format!("{EXTRA}/{}", blob.name);
            let entry = self.write_file(&file, blob.bytes)?;
            Ok((entry, BlobEntry { name: blob.name.to_owned(), file }))
        };
        let blobs = blobs.iter().map(write).collect::<Result<_>>()?;
        Ok(Part { shards, blobs })
    }

    /// Writes the file by which other tools find the weights, if there can be one.
    pub(crate) fn write_index(&self) -> Result<Option<FileEntry>> {
        let index = weight_index(self.plan);
        index.map(|index| self.write_file(INDEX, &index)).transpose()
    }

    fn write_file(&self, path: &str, bytes: &[u8]) -> Result<FileEntry> {
        let entry = write_all(&*self.steps.store, &self.folder.join(path)?, bytes)?;
        Ok(FileEntry { path: path.to_owned(), ..entry })
    }

    /// Streams one file, and sums each block while it is warm in the cache.
    fn write_shard(&self, shard: &Shard, held: &[&[u8]]) -> Result<(FileEntry, Vec<Chunk>)> {
        let store = &*self.steps.store;
        let key = self.folder.join(&shard.file)?;
        let mut upload = store.create(&key, shard.bytes())?;
        upload.write(&shard.header)?;
        let mut offset = shard.header.len() as u64;
        let mut sum = crc64(&shard.header);
        let mut chunks = Vec::with_capacity(shard.pieces.len());
        let block_bytes = self.steps.options.block_bytes;
        for piece in &shard.pieces {
            let gap = &ZEROS[..(piece.offset - offset) as usize]; // fits: less than a page
            upload.write(gap)?;
            sum = crc64_join(sum, crc64(gap), gap.len() as u64);
            let bytes = &held[piece.holding][piece.bytes.clone()];
            let mut blocks = Vec::new();
            for block in bytes.chunks(block_bytes as usize) {
                // fits: at most 64 MiB
                blocks.push(crc64(block));
                upload.write(block)?;
                self.control.wrote(block.len() as u64)?;
            }
            let len = bytes.len() as u64;
            let joined = join_blocks(&blocks, len, block_bytes);
            blocks.truncate(block_count(len, block_bytes) as usize); // fits: no more than there are
            sum = crc64_join(sum, joined, len);
            chunks.push(Chunk {
                file: shard.file.clone(),
                offset: piece.offset,
                bytes: len,
                crc64: joined,
                blocks,
                spans: piece.region.spans.clone(),
                flat: piece.region.flat_span(),
            });
            offset = piece.offset + len;
        }
        let entry = upload.finish()?;
        if (entry.bytes, entry.crc64) != (offset, sum) {
            // What was stored is not what was handed over: memory, or a tensor that changed.
            return Err(Error::Corrupt {
                what: store.display(&key),
                offset: 0,
                got: format!("CRC-64 {:016x} of {} bytes stored", entry.crc64, entry.bytes),
                due: format!("{sum:016x} of {offset}, as they were handed over"),
            });
        }
        Ok((FileEntry { path: shard.file.clone(), ..entry }, chunks))
    }
}

/// What stands in the staging folder.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) blobs: Vec<BlobEntry>,
}

/// The file by which other tools find the weights.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Which file has which weight, as other tools expect it; `None` if there are no weights, or one is
/// cut, which those tools cannot read.
pub(crate) fn weight_index(plan: &SavePlan) -> Option<Vec<u8>> {
    let mut files = serde_json::Map::new();
    let mut total_bytes = 0;
    for shard in plan.all_shards() {
        for piece in &shard.pieces {
            let spec = &plan.specs()[piece.tensor];
            if spec.group != Group::Model {
                continue;
            }
            if plan.pieces(piece.tensor) > 1 {
                return None;
            }
            files.insert(spec.name.clone(), shard.file.clone().into());
            total_bytes += piece.bytes.len();
        }
    }
    if files.is_empty() {
        return None;
    }
    files.sort_keys();
    let index =
        serde_json::json!({ "metadata": { "total_size": total_bytes }, "weight_map": files });
    Some(format!("{index:#}\n").into_bytes())
}
