//! Saves an offloaded state: its files become files of a checkpoint.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde_json::Value;

use super::form::{FileForm, StateLayout};
use super::generation::{CompleteGeneration, entry};
use super::{Offload, PublishMethod, StateBacking};
use crate::base::parallel_io::{self, IoBuffer};
use crate::base::save_control::SaveControl;
use crate::write::staging::{PieceSource, PreparedFiles};
use crate::{Blob, Checkpoints, Chunk, Error, JointSaveOptions, Result, SaveReport};
use storage::{ByteSize, FileEntry, InPlaceFile, Key, LinkMethod, Object, PendingDirSync};

/// The files of a generation that is durable.
#[derive(Debug)]
struct ReadyFiles {
    form: Arc<StateLayout>,
    generation: Arc<CompleteGeneration>,
    block_bytes: u64,
    prefer: PublishMethod,
    /// The method used and the bytes of each file.
    methods: Mutex<Vec<(PublishMethod, u64)>>,
}

impl Checkpoints {
    /// Saves a state on a disk: its files become files of the step by a hard link, otherwise by a
    /// reflink, otherwise by a copy, which is verified. Only copies need new checksums. The current
    /// [`Offload::generation`] is saved; it is made durable first.
    ///
    /// Each file uses its cheapest available method: at most one of several disks also has the
    /// checkpoints. Returns the most expensive method used; all are logged. `together` is as for
    /// [`Checkpoints::save_together`] if the plan has several writers; this process is then the
    /// writer with the state's rank.
    ///
    /// # Errors
    /// As [`Checkpoints::save`]; [`Error::BadInput`] for a state in memory, whose bytes
    /// [`Offload::held`] returns, for another block length than these checkpoints have, and for
    /// packed checkpoints.
    ///
    /// # Panics
    /// If the plan has several writers and `together` is `None`.
    pub fn save_offloaded(
        &self,
        step: u64,
        state: &mut Offload,
        blobs: &[Blob<'_>],
        meta: Value,
        together: Option<&JointSaveOptions<'_>>,
    ) -> Result<(SaveReport, PublishMethod)> {
        let started = Instant::now();
        let plan = Arc::clone(&state.form.plan);
        let ready = self.ready(step, state).inspect_err(|error| {
            if let Some(together) = together {
                self.decline(step, &plan, together, error);
            }
        })?;
        let report = match together {
            Some(together) if plan.writers() > 1 => {
                self.save_files_together(step, &plan, &ready, blobs, meta, together)?
            }
            _ => {
                assert_eq!(plan.writers(), 1, "several writers save together");
                let pieces = [PieceSource::Files(&ready)];
                self.save_pieces(
                    started,
                    step,
                    &plan,
                    &pieces,
                    blobs,
                    meta,
                    &SaveControl::default(),
                )?
            }
        };
        let methods = ready.methods();
        for same in methods.chunk_by(|(a, _), (b, _)| a == b) {
            let (method, count) = (same[0].0, same.len());
            let bytes = ByteSize(same.iter().map(|(_, bytes)| bytes).sum());
            log::info!("step {step}: {count} files of optimizer state, {bytes}, added by {method}");
        }
        // A rank may have nothing to save.
        Ok((report, methods.last().map_or(ready.prefer, |(most_expensive, _)| *most_expensive)))
    }

    fn ready(&self, step: u64, state: &mut Offload) -> Result<ReadyFiles> {
        let bad = |reason: String| {
            Err(Error::BadInput { object: format!("optimizer state as step {step}"), reason })
        };
        let prefer = state.options.prefer;
        let StateBacking::Disk(disk) = &mut state.backing else {
            return bad("expected a state on disk, found one in memory".to_owned());
        };
        let (block_bytes, expected) = (disk.block_bytes(), self.options.block_bytes);
        if block_bytes != expected {
            let found = block_bytes;
            return bad(format!("expected block_bytes {expected} as in the step, found {found}"));
        }
        if let Some(codec) = self.options.codec {
            return bad(format!("expected codec {} as in the step, found none", codec.name()));
        }
        let form = Arc::clone(disk.form());
        let Some(generation) = disk.settled()? else {
            return bad("not initialized (hint: fill or load it first)".to_owned());
        };
        generation.slot.check_there()?;
        Ok(ReadyFiles { form, generation, block_bytes, prefer, methods: Mutex::default() })
    }
}

impl ReadyFiles {
    /// The methods used, the cheapest first.
    fn methods(&self) -> Vec<(PublishMethod, u64)> {
        let mut methods = self.methods.lock().unwrap_or_else(PoisonError::into_inner).clone();
        methods.sort_unstable();
        methods
    }

    /// Makes one file part of a folder.
    fn put_one(
        &self,
        steps: &Checkpoints,
        key: &Key,
        (file, work): (&FileForm, &dyn InPlaceFile),
    ) -> Result<(FileEntry, Vec<Chunk>, PendingDirSync)> {
        let (entry, chunks) = entry(&self.form, file, &self.generation.sums, self.block_bytes);
        let object: &dyn Object = work;
        for (method, share) in
            [(PublishMethod::Link, LinkMethod::Name), (PublishMethod::Clone, LinkMethod::Blocks)]
        {
            if method >= self.prefer
                && let Some(name) = steps.store.link(key, object, share)?
            {
                self.record_method(method, entry.bytes);
                return Ok((entry, chunks, name));
            }
        }
        let mut upload = steps.store.create(key, entry.bytes)?;
        upload.write_from(object, 0..entry.bytes, Some(entry.crc64))?;
        let (copied, name) = upload.finish_deferred()?;
        self.record_method(PublishMethod::Copy, entry.bytes);
        if (copied.bytes, copied.crc64) != (entry.bytes, entry.crc64) {
            return Err(Error::Corrupt {
                object: work.display(),
                offset: 0,
                found: format!("CRC-64 {:016x} of {} bytes", copied.crc64, copied.bytes),
                expected: format!(
                    "CRC-64 {:016x} of {} bytes as written",
                    entry.crc64, entry.bytes
                ),
            });
        }
        Ok((entry, chunks, name))
    }

    fn record_method(&self, method: PublishMethod, bytes: u64) {
        self.methods.lock().unwrap_or_else(PoisonError::into_inner).push((method, bytes));
    }
}

/// Files that are added to a checkpoint at the same time.
const COPIES_MAX: usize = 8;

impl PreparedFiles for ReadyFiles {
    fn put(&self, steps: &Checkpoints, folder: &Key) -> Result<Vec<(FileEntry, Vec<Chunk>)>> {
        let files = self.form.files.iter().zip(&self.generation.slot.files);
        let saved = files.filter(|(file, _)| file.is_saved).collect();
        let put = |(file, work): (&FileForm, &Arc<dyn InPlaceFile>), _: &mut IoBuffer| {
            self.put_one(steps, &folder.join(&file.name)?, (file, &**work))
        };
        // Copies from several disks run in parallel.
        let threads = self.form.plan.folders().min(COPIES_MAX);
        let mut parts = Vec::new();
        let mut names = Vec::new();
        for (entry, chunks, name) in parallel_io::each(saved, threads, put)? {
            parts.push((entry, chunks));
            names.push(name);
        }
        PendingDirSync::sync_all(names)?;
        Ok(parts)
    }
}
