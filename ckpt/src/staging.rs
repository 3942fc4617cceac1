//! The files of a step, streamed from the caller's memory into a hidden folder.

use crate::catalog::{BlobEntry, block_count, join_blocks};
use crate::plan::Shard;
use crate::{Blob, Checkpoints, Chunk, Error, Group, Result, TensorData, TensorEntry, parallel};
use storage::{FileEntry, Key, crc64, crc64_join, write_all};

/// Where the bytes lie that belong to no tensor.
const EXTRA: &str = "extra";

/// The hidden folder that is being filled.
#[derive(Debug)]
pub(crate) struct Staging<'a> {
    pub(crate) steps: &'a Checkpoints,
    pub(crate) folder: &'a Key,
    pub(crate) tensors: &'a [TensorData<'a>],
}

impl Staging<'_> {
    /// Writes all files, and makes them durable.
    pub(crate) fn write(
        &self,
        shards: &[Shard],
        blobs: &[Blob<'_>],
        index: Option<&[u8]>,
    ) -> Result<Written> {
        let jobs: Vec<&Shard> = shards.iter().collect();
        let written =
            parallel::each(jobs, self.steps.options.threads, |shard, _| self.write_shard(shard))?;
        let mut files = Vec::new();
        let mut chunks: Vec<Vec<(usize, Chunk)>> =
            self.tensors.iter().map(|_| Vec::new()).collect();
        for (shard, (file, in_file)) in shards.iter().zip(written) {
            files.push(file);
            for (piece, chunk) in shard.pieces.iter().zip(in_file) {
                chunks[piece.tensor].push((piece.k, chunk));
            }
        }
        let entry = |(tensor, mut chunks): (&TensorData<'_>, Vec<(usize, Chunk)>)| {
            chunks.sort_by_key(|(k, _)| *k);
            TensorEntry {
                name: tensor.name.to_owned(),
                group: tensor.group,
                dtype: tensor.dtype,
                shape: tensor.shape.to_vec(),
                chunks: chunks.into_iter().map(|(_, chunk)| chunk).collect(),
            }
        };
        let tensors = self.tensors.iter().zip(chunks).map(entry).collect();
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

    fn write_file(&self, path: &str, bytes: &[u8]) -> Result<FileEntry> {
        let entry = write_all(&*self.steps.store, &self.folder.join(path)?, bytes)?;
        Ok(FileEntry { path: path.to_owned(), ..entry })
    }

    /// Streams one file, and sums each block while it is warm in the cache.
    fn write_shard(&self, shard: &Shard) -> Result<(FileEntry, Vec<Chunk>)> {
        let store = &*self.steps.store;
        let key = self.folder.join(&shard.file)?;
        let mut upload = store.create(&key, shard.bytes())?;
        upload.write(&shard.header)?;
        let mut offset = shard.header.len() as u64;
        let mut sum = crc64(&shard.header);
        let mut chunks = Vec::with_capacity(shard.pieces.len());
        let block_bytes = self.steps.options.block_bytes;
        for piece in &shard.pieces {
            let bytes = &self.tensors[piece.tensor].bytes[piece.bytes.clone()];
            let mut blocks = Vec::new();
            for block in bytes.chunks(block_bytes as usize) {
                // fits: at most 64 MiB
                blocks.push(crc64(block));
                upload.write(block)?;
            }
            let len = bytes.len() as u64;
            let joined = join_blocks(&blocks, len, block_bytes);
            blocks.truncate(block_count(len, block_bytes) as usize); // fits: no more than there are
            sum = crc64_join(sum, joined, len);
            let (file, spans) = (shard.file.clone(), piece.spans.clone());
            chunks.push(Chunk { file, offset, bytes: len, crc64: joined, blocks, spans });
            offset += len;
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
const INDEX: &str = "model.safetensors.index.json";

/// Which file has which weight, as other tools expect it; `None` if there are no weights, or one is
/// cut, which those tools cannot read.
pub(crate) fn weight_index(tensors: &[TensorData<'_>], shards: &[Shard]) -> Option<Vec<u8>> {
    let mut files = serde_json::Map::new();
    let mut total_bytes = 0;
    for shard in shards {
        for piece in &shard.pieces {
            let tensor = &tensors[piece.tensor];
            if tensor.group != Group::Model {
                continue;
            }
            if piece.bytes.len() < tensor.bytes.len() {
                return None;
            }
            files.insert(tensor.name.to_owned(), shard.file.clone().into());
            total_bytes += tensor.bytes.len();
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
