//! The files of a step, streamed from the caller's memory into a hidden folder.

use std::fmt;
use std::time::Duration;

use crate::base::save_control::SaveControl;
use crate::format::catalog::{BlobEntry, merge_parts};
use crate::format::chunk_writer::ChunkSums;
use crate::plan::{PlannedChunk, SavePlan, Shard};
use crate::save::rendezvous::WriterOutput;
use crate::write::shard_writer::{Checksums, FileJob, ShardWriter, WrittenFile};
use crate::{Blob, Checkpoints, Chunk, Codec, Group, Result, TensorEntry};
use storage::{FileEntry, Key};

/// Folder of the blobs.
pub(crate) const EXTRA: &str = "extra";

/// Source of the bytes of one writer's files.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PieceSource<'a> {
    /// These bytes, piece by piece.
    Memory(&'a [&'a [u8]]),
    /// Existing files.
    Files(&'a dyn PreparedFiles),
}

/// Existing files with the bytes that a writer is to write.
pub(crate) trait PreparedFiles: fmt::Debug + Sync {
    /// Makes them files of a folder, durably. Returns them in the order of the plan, with the
    /// chunks of each.
    fn put(&self, steps: &Checkpoints, folder: &Key) -> Result<Vec<(FileEntry, Vec<Chunk>)>>;
}

/// The hidden folder that is being filled.
#[derive(Debug)]
pub(crate) struct Staging<'a> {
    pub(crate) steps: &'a Checkpoints,
    pub(crate) folder: &'a Key,
    pub(crate) plan: &'a SavePlan,
    /// Of each writer.
    pub(crate) pieces: &'a [PieceSource<'a>],
    pub(crate) control: &'a SaveControl,
}

impl Staging<'_> {
    /// Writes all files of all writers, and makes them durable.
    pub(crate) fn write(&self, blobs: &[Blob<'_>], index: Option<&[u8]>) -> Result<WrittenStep> {
        let mut jobs = Vec::new();
        for (writer, pieces) in self.pieces.iter().enumerate() {
            jobs.extend(self.shard_jobs(writer, *pieces));
        }
        jobs.extend(index.map(|bytes| FileJob::of_bytes(INDEX.to_owned(), bytes)));
        let (blob_jobs, blobs) = blob_jobs(blobs);
        jobs.extend(blob_jobs);
        let (written, sync) = self.engine().write(&jobs)?;
        let mut written = written.into_iter();
        let mut parts = Vec::with_capacity(self.plan.writers());
        for (writer, pieces) in self.pieces.iter().enumerate() {
            parts.push(self.shards(writer, *pieces, written.by_ref())?);
        }
        let (mut files, tensors) = merge_parts(self.plan, self.steps.options.codec, parts)?;
        files.extend(written.map(|file| file.file));
        Ok(WrittenStep { files, tensors, blobs, sync })
    }

    /// Writes the files of one writer, and makes them durable.
    pub(crate) fn write_part(
        &self,
        writer: usize,
        pieces: PieceSource<'_>,
        blobs: &[Blob<'_>],
    ) -> Result<WriterOutput> {
        let mut jobs = self.shard_jobs(writer, pieces);
        let (blob_jobs, blobs) = blob_jobs(blobs);
        jobs.extend(blob_jobs);
        let mut written = self.engine().write(&jobs)?.0.into_iter();
        let shards = self.shards(writer, pieces, written.by_ref())?;
        let blobs = written.zip(blobs).map(|(file, blob)| (file.file, blob)).collect();
        Ok(WriterOutput { shards, blobs })
    }

    /// Writes the file by which other tools find the weights, if there can be one.
    pub(crate) fn write_index(&self) -> Result<Option<FileEntry>> {
        let index = weight_index(self.plan, self.steps.options.codec);
        let Some(index) = index else { return Ok(None) };
        let job = FileJob::of_bytes(INDEX.to_owned(), &index);
        Ok(self.engine().write(&[job])?.0.pop().map(|file| file.file))
    }

    fn shard_jobs<'b>(&'b self, writer: usize, pieces: PieceSource<'b>) -> Vec<FileJob<'b>> {
        let PieceSource::Memory(pieces) = pieces else { return Vec::new() };
        let (plan, codec) = (self.plan, self.steps.options.codec);
        FileJob::of_shards(plan.shards(writer), plan.specs(), pieces, codec)
    }

    /// The manifest entries of a writer's files, of which those from memory were written.
    fn shards(
        &self,
        writer: usize,
        pieces: PieceSource<'_>,
        written: impl Iterator<Item = WrittenFile>,
    ) -> Result<Vec<(FileEntry, Vec<Chunk>)>> {
        match pieces {
            PieceSource::Files(files) => files.put(self.steps, self.folder),
            PieceSource::Memory(_) => {
                let shards = self.plan.shards(writer).iter().zip(written);
                Ok(shards.map(|(shard, file)| Self::entry(shard, file)).collect())
            }
        }
    }

    /// The manifest entry of a shard.
    fn entry(shard: &Shard, written: WrittenFile) -> (FileEntry, Vec<Chunk>) {
        let WrittenFile { file, sums } = written;
        let chunk =
            |(piece, sums): (&PlannedChunk, ChunkSums)| sums.chunk(&file.path, &piece.region);
        let chunks = shard.pieces.iter().zip(sums).map(chunk).collect();
        (file, chunks)
    }

    fn engine(&self) -> ShardWriter<'_> {
        let (store, options) = (&*self.steps.store, self.steps.options);
        let (folder, control) = (self.folder, self.control);
        ShardWriter { store, folder, options, summing: Checksums::On, control }
    }
}

fn blob_jobs<'a>(blobs: &[Blob<'a>]) -> (Vec<FileJob<'a>>, Vec<BlobEntry>) {
    let of_blob = |blob: &Blob<'a>| {
        let file = format!("{EXTRA}/{}", blob.name);
        let entry = BlobEntry { name: blob.name.to_owned(), file: file.clone() };
        (FileJob::of_bytes(file, blob.bytes), entry)
    };
    blobs.iter().map(of_blob).unzip()
}

/// The contents of the staging folder.
#[derive(Debug)]
pub(crate) struct WrittenStep {
    pub(crate) files: Vec<FileEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) blobs: Vec<BlobEntry>,
    /// How long it took to make the files durable.
    pub(crate) sync: Duration,
}

impl WrittenStep {
    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// The file by which other tools find the weights.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Which file has which weight, as other tools expect it; `None` if there are no weights, or they
/// are packed, or one is cut, which those tools cannot read.
pub(crate) fn weight_index(plan: &SavePlan, codec: Option<Codec>) -> Option<Vec<u8>> {
    if codec.is_some() {
        return None;
    }
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
