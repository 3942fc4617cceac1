//! Saves derived tensors as a step.

use std::time::{Duration, Instant};

use super::import::Import;
use super::made::{DerivedTensor, unfit};
use super::write::{ConvertLimits, OutFile, ProgressFn, WriteJob, check, lay_out};
use crate::format::catalog::{BlobEntry, CHUNKS_MAX};
use crate::plan::{self, FAMILIES};
use crate::write::staging::{EXTRA, INDEX, WrittenStep};
use crate::{Blob, Checkpoints, Group, PeakRate, Result, SaveReport, TensorEntry};
use storage::{FileEntry, write_all};

impl Checkpoints {
    /// Saves the tensors of an import as a step, as [`Checkpoints::save`] does with those in
    /// memory, with at most the memory of [`ConvertLimits`]. `progress` is called for every band.
    ///
    /// # Errors
    /// As [`Checkpoints::save`]; [`Error::Unfit`](crate::Error::Unfit) for tensors that cannot be
    /// derived; and errors of reading the source.
    pub fn save_made(
        &self,
        step: u64,
        import: &Import,
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        bounds: ConvertLimits,
        progress: ProgressFn<'_>,
    ) -> Result<SaveReport> {
        let started = Instant::now();
        let Import { source, made, .. } = import;
        self.check_options(step)?;
        crate::save::check_blobs(blobs)?;
        check(made, source)?;
        if made.len() > CHUNKS_MAX {
            let expected = format!("at most {CHUNKS_MAX} tensors");
            return Err(unfit(source.display(), made.len().to_string(), &expected));
        }
        let files = lay_out_step(made, bounds)?;
        let codec = self.options.codec;
        let index = weight_index(made, &files).filter(|_| codec.is_none());
        self.change(|| {
            let place = self.find_place(step)?;
            let extra = blobs.iter().map(|blob| blob.bytes.len() as u64).sum::<u64>();
            let data = files.iter().map(|file| file.bytes(made)).sum::<u64>();
            let bytes = data + extra + index.as_ref().map_or(0, |index| index.len() as u64);
            crate::save::check_space(&*self.store, &place.target, bytes, made.len() as u64)?;
            let planned = Instant::now();

            let job = WriteJob {
                store: &*self.store,
                folder: &place.data,
                source,
                made,
                block_bytes: self.options.block_bytes,
                codec,
                bounds,
                progress,
            };
            let saved =
                self.write_made(&job, &files, blobs, index.as_deref()).and_then(|written| {
                    let (durable, bytes) = (Instant::now(), written.bytes());
                    Ok((self.seal(step, &place, written, meta)?, durable, bytes))
                });
            let (manifest, durable, bytes) = saved.inspect_err(|_| self.abandon(&place.data))?;
            self.publish(&place, &manifest)?;
            self.note_latest(step, place.files());
            Ok(SaveReport {
                step,
                bytes,
                files: files.len() + blobs.len() + usize::from(index.is_some()),
                plan: planned - started,
                write: durable - planned,
                sync: Duration::ZERO, // each file was synced as it was written
                commit: durable.elapsed(),
                peak_bytes_per_s: PeakRate::of(&*self.store).map(|peak| peak.write_bytes_per_s),
            })
        })
    }

    fn write_made(
        &self,
        job: &WriteJob<'_>,
        files: &[OutFile],
        blobs: &[Blob<'_>],
        index: Option<&[u8]>,
    ) -> Result<WrittenStep> {
        let written = job.write(files)?;
        let mut tensors: Vec<Option<TensorEntry>> = vec![None; job.made.len()];
        let mut entries = Vec::new();
        for (file, (entry, chunks)) in files.iter().zip(written) {
            entries.push(entry);
            for (&place, chunk) in file.members.iter().zip(chunks) {
                let made = &job.made[place];
                tensors[place] = Some(TensorEntry {
                    name: made.name.clone(),
                    group: made.group,
                    dtype: made.dtype,
                    shape: made.shape.clone(),
                    chunks: vec![chunk],
                });
            }
        }
        let write = |path: &str, bytes: &[u8]| -> Result<FileEntry> {
            let entry = write_all(job.store, &job.folder.join(path)?, bytes)?;
            Ok(FileEntry { path: path.to_owned(), ..entry })
        };
        if let Some(index) = index {
            entries.push(write(INDEX, index)?);
        }
        let mut blob_entries = Vec::new();
        for blob in blobs {
            let file = format!("{EXTRA}/{}", blob.name);
            entries.push(write(&file, blob.bytes)?);
            blob_entries.push(BlobEntry { name: blob.name.to_owned(), file });
        }
        let tensors = tensors.into_iter().flatten().collect();
        Ok(WrittenStep { files: entries, tensors, blobs: blob_entries, sync: Duration::ZERO })
    }
}

/// Weights in separate files, then the optimizer's tensors, as in every save.
fn lay_out_step(made: &[DerivedTensor], bounds: ConvertLimits) -> Result<Vec<OutFile>> {
    let mut files = Vec::new();
    for (number, family) in FAMILIES.into_iter().enumerate() {
        let groups = Group::ALL.into_iter().filter(|group| plan::family(*group) == number);
        let members: Vec<usize> = groups
            .flat_map(|group| (0..made.len()).filter(move |&place| made[place].group == group))
            .collect();
        let name = |number, count| format!("{family}-{number:05}-of-{count:05}.safetensors");
        files.extend(lay_out(made, members.into_iter(), bounds.shard_bytes_max, name)?);
    }
    Ok(files)
}

/// The index of weights and their files for other tools; `None` if there are no weights.
pub(crate) fn weight_index(made: &[DerivedTensor], files: &[OutFile]) -> Option<Vec<u8>> {
    let mut map = serde_json::Map::new();
    let mut total = 0;
    for file in files {
        for &place in file.members.iter().filter(|&&place| made[place].group == Group::Model) {
            map.insert(made[place].name.clone(), file.name.clone().into());
            total += made[place].bytes();
        }
    }
    if map.is_empty() {
        return None;
    }
    map.sort_keys();
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
    Some(format!("{index:#}\n").into_bytes())
}
