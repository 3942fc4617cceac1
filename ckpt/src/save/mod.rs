//! A save: all files under a hidden name, made durable, then the manifest, then the rename.

pub(crate) mod commit_target;
mod follower;
pub(crate) mod joint;
mod latest;
pub(crate) mod rendezvous;
pub(crate) mod snapshot;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::base::save_control::SaveControl;
use crate::format::catalog::{Catalog, FORMAT, Meta, version_of};
use crate::plan::{PlanLimits, SavePlan};
use crate::read::checkpoint::MANIFEST;
use crate::save::commit_target::CommitTarget;
use crate::spec::{HeldRegion, TensorSpec};
use crate::write::staging::{PieceSource, Staging, WrittenStep, weight_index};
use crate::{Checkpoints, Dtype, Error, Group, PeakRate, Region, Result};
use storage::{ByteSize, FileEntry, Key, Manifest, Storage};

/// A tensor to be saved. The bytes are borrowed and written without a copy.
#[derive(Clone, Copy, Debug)]
pub struct TensorData<'a> {
    /// The parameter's name; the same in every group. Without `#`, which marks pieces.
    pub name: &'a str,
    /// The role of the tensor for the parameter.
    pub group: Group,
    /// Its elements, little-endian.
    pub dtype: Dtype,
    /// Elements along each axis; empty for a scalar.
    pub shape: &'a [u64],
    /// All elements, row-major.
    pub bytes: &'a [u8],
}

impl TensorData<'_> {
    pub(crate) fn spec(&self) -> TensorSpec {
        let &TensorData { name, group, dtype, shape, .. } = self;
        TensorSpec { name: name.to_owned(), group, dtype, shape: shape.to_vec() }
    }
}

/// Bytes that belong to no tensor, for example the state of a loader or a random generator, or a
/// configuration.
#[derive(Clone, Copy, Debug)]
pub struct Blob<'a> {
    /// A file name, without `/` and not hidden.
    pub name: &'a str,
    /// Its contents.
    pub bytes: &'a [u8],
}

/// What a save did, and how long it took. Its `Display` is a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveReport {
    /// The step.
    pub step: u64,
    /// Bytes written, without the manifest.
    pub bytes: u64,
    /// Files written, without the manifest.
    pub files: usize,
    /// Time to plan the layout and check the space.
    pub plan: Duration,
    /// Time to compute checksums and write.
    pub write: Duration,
    /// Time to make the files durable.
    pub sync: Duration,
    /// Time to write the manifest and publish the step.
    pub commit: Duration,
    /// The best write rate that `feedline ckpt bench` has measured on this device, if it has.
    pub peak_bytes_per_s: Option<u64>,
}

impl SaveReport {
    /// From the call to its return.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.plan + self.write + self.sync + self.commit
    }
}

impl fmt::Display for SaveReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SaveReport { step, bytes, files, plan, write, sync, commit, .. } = self;
        let rate = *bytes as f64 / self.total().as_secs_f64().max(1e-9);
        write!(f, "step {step}: {} in {files} files, {:.2} GB/s", ByteSize(*bytes), rate / 1e9)?;
        if let Some(peak) = self.peak_bytes_per_s {
            write!(f, ", {:.0} % of the device's peak", 100.0 * rate / peak as f64)?;
        }
        let [plan, write, sync, commit] = [plan, write, sync, commit].map(Duration::as_secs_f64);
        write!(f, " (plan {plan:.3} s, write {write:.3} s, sync {sync:.3} s, ")?;
        write!(f, "commit {commit:.3} s)")
    }
}

impl Checkpoints {
    /// Saves a step. On success the step is durably committed. On failure nothing of it is visible
    /// and all earlier steps are unchanged, with one exception: if the very last operation fails,
    /// the sync of the folder after the rename, the step may exist, and is then complete.
    ///
    /// `meta` is stored for the caller, and [`Checkpoint::meta`](crate::Checkpoint::meta) returns
    /// it. The files are a pure function of the arguments and the
    /// [`CheckpointOptions`](crate::CheckpointOptions).
    ///
    /// # Errors
    /// [`Error::StepExists`]; [`Error::BadInput`] for tensors that cannot be saved;
    /// [`Error::Held`]; [`storage::Error::NoSpace`] within [`Error::Storage`], before the first
    /// byte is written if the store knows its free space; other errors of the store.
    pub fn save(
        &self,
        step: u64,
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Result<SaveReport> {
        self.save_counted(step, tensors, blobs, meta, &Arc::default())
    }

    /// The same with progress: `wrote` is incremented by the bytes written, as they are written.
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    pub fn save_counted(
        &self,
        step: u64,
        tensors: &[TensorData<'_>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        wrote: &Arc<AtomicU64>,
    ) -> Result<SaveReport> {
        let started = Instant::now();
        self.check_options(step)?;
        let plan = self.plan_whole(tensors)?;
        let held: Vec<_> = tensors.iter().map(|tensor| tensor.bytes).collect();
        let pieces = plan.pieces_held(0, &held)?;
        let pieces = [PieceSource::Memory(&pieces)];
        let control = SaveControl::counting(Arc::clone(wrote));
        self.save_pieces(started, step, &plan, &pieces, blobs, meta, &control)
    }

    /// The plan of one writer that holds all tensors whole, cached.
    pub(crate) fn plan_whole(&self, tensors: &[TensorData<'_>]) -> Result<Arc<SavePlan>> {
        let specs: Vec<TensorSpec> = tensors.iter().map(TensorData::spec).collect();
        let whole = |(tensor, data): (usize, &TensorData<'_>)| HeldRegion {
            tensor,
            region: Region::whole(data.shape),
        };
        let held = [tensors.iter().enumerate().map(whole).collect()];
        self.plans.plan(&specs, &held, self.plan_limits())
    }

    /// Saves a step of which this process holds the parts of all writers of a plan: `held` has the
    /// bytes of each writer's regions.
    ///
    /// # Errors
    /// As [`Checkpoints::save`].
    ///
    /// # Panics
    /// If `held` does not have one entry per writer of the plan.
    pub fn save_plan(
        &self,
        step: u64,
        plan: &SavePlan,
        held: &[Vec<&[u8]>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
    ) -> Result<SaveReport> {
        assert_eq!(held.len(), plan.writers(), "each writer has its holdings");
        let started = Instant::now();
        let pieces = held.iter().enumerate().map(|(writer, held)| plan.pieces_held(writer, held));
        let pieces = pieces.collect::<Result<Vec<_>>>()?;
        let pieces: Vec<_> = pieces.iter().map(|pieces| PieceSource::Memory(pieces)).collect();
        self.save_pieces(started, step, plan, &pieces, blobs, meta, &SaveControl::default())
    }

    /// The plan limits that follow from the options.
    #[must_use]
    pub fn plan_limits(&self) -> PlanLimits {
        PlanLimits { shard_bytes_max: self.options.shard_bytes_max, ..PlanLimits::default() }
    }

    /// Saves the pieces of all writers, with progress and cancellation.
    #[expect(clippy::too_many_arguments, reason = "what is saved, and how it is watched")]
    pub(crate) fn save_pieces(
        &self,
        started: Instant,
        step: u64,
        plan: &SavePlan,
        pieces: &[PieceSource<'_>],
        blobs: &[Blob<'_>],
        meta: serde_json::Value,
        control: &SaveControl,
    ) -> Result<SaveReport> {
        self.check_options(step)?;
        check_blobs(blobs)?;
        check_meta(&meta)?;
        let index = weight_index(plan, self.options.codec);
        self.change(|| {
            let place = self.find_place(step)?;
            let size = |(writer, pieces): (usize, &PieceSource<'_>)| match pieces {
                PieceSource::Memory(_) => plan.bytes(writer),
                PieceSource::Files(_) => 0, // their space is already allocated
            };
            let sizes = pieces.iter().enumerate().map(size);
            let others =
                blobs.iter().map(|blob| blob.bytes.len()).chain(index.iter().map(Vec::len));
            let bytes = sizes.chain(others.map(|len| len as u64)).sum();
            check_space(&*self.store, &place.target, bytes, plan.chunks() as u64)?;
            let planned = Instant::now();

            let staging = Staging { steps: self, folder: &place.data, plan, pieces, control };
            let saved = staging.write(blobs, index.as_deref()).and_then(|written| {
                let (durable, sync, bytes) = (Instant::now(), written.sync, written.bytes());
                control.check()?;
                Ok((self.seal(step, &place, written, meta)?, durable, sync, bytes))
            });
            let (manifest, durable, sync, bytes) =
                saved.inspect_err(|_| self.abandon(&place.data))?;
            self.publish(&place, &manifest)?;
            self.note_latest(step, place.files());
            Ok(SaveReport {
                step,
                bytes,
                files: plan.all_shards().count() + blobs.len() + usize::from(index.is_some()),
                plan: planned - started,
                write: (durable - planned).saturating_sub(sync),
                sync,
                commit: durable.elapsed(),
                peak_bytes_per_s: PeakRate::of(&*self.store).map(|peak| peak.write_bytes_per_s),
            })
        })
    }

    /// Writes the manifest, after checking that readers accept it, and moves a damaged step out of
    /// the way.
    pub(crate) fn seal(
        &self,
        step: u64,
        place: &CommitTarget,
        written: WrittenStep,
        user: serde_json::Value,
    ) -> Result<FileEntry> {
        let WrittenStep { files, tensors, blobs, .. } = written;
        let block_bytes = self.options.block_bytes;
        let meta = Meta { step, block_bytes, tensors, blobs, user };
        let key = place.data.join(MANIFEST)?;
        let Catalog { meta, files, .. } = Catalog::of(meta, files, &self.store.display(&key))?;
        let version = version_of(&meta.tensors);
        let manifest = Manifest { format: FORMAT.to_owned(), version, files, meta };
        let sealed = manifest.write(&*self.store, &key)?;
        self.check_lease()?;
        self.set_aside(place)?;
        Ok(sealed)
    }
}

pub(crate) fn check_blobs(blobs: &[Blob<'_>]) -> Result<()> {
    let mut seen = HashSet::new();
    for blob in blobs {
        let bad = |reason: &str| {
            Err(Error::BadInput {
                object: format!("extra '{}'", blob.name),
                reason: reason.to_owned(),
            })
        };
        if blob.name.contains('/') || blob.name.starts_with('.') {
            return bad("expected a plain file name, not hidden and without '/'");
        }
        if blob.name.len() > BLOB_NAME_BYTES_MAX {
            return bad("expected a name of at most 200 bytes");
        }
        Key::new(blob.name)?;
        if !seen.insert(blob.name) {
            return bad("duplicate name");
        }
    }
    Ok(())
}

/// Larger data belongs in a blob.
const META_BYTES_MAX: usize = 64 << 20;

/// JSON parsers stop at a depth of 128, of which a manifest uses two.
const META_DEPTH_MAX: usize = 100;

/// Rejects metadata that would make the manifest unreadable, before the first byte is written.
pub(crate) fn check_meta(meta: &serde_json::Value) -> Result<()> {
    let bad =
        |reason: String| Err(Error::BadInput { object: "the meta of a step".to_owned(), reason });
    if is_deeper(meta, META_DEPTH_MAX) {
        return bad(format!("expected at most {META_DEPTH_MAX} levels of lists and objects"));
    }
    match serde_json::to_writer(SizeLimit(META_BYTES_MAX), meta) {
        Ok(()) => Ok(()),
        Err(_) => bad(format!(
            "expected at most {META_BYTES_MAX} bytes of JSON (hint: save larger data as a blob)"
        )),
    }
}

fn is_deeper(value: &serde_json::Value, most: usize) -> bool {
    use serde_json::Value::{Array, Object};
    let Some(most) = most.checked_sub(1) else {
        return matches!(value, Array(_) | Object(_));
    };
    match value {
        Array(list) => list.iter().any(|value| is_deeper(value, most)),
        Object(map) => map.values().any(|value| is_deeper(value, most)),
        _ => false,
    }
}

/// Counts down a budget of bytes, and discards the data.
struct SizeLimit(usize);

impl std::io::Write for SizeLimit {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::WriteZero)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// File systems allow 255 bytes, of which an unfinished upload needs some for its own name.
const BLOB_NAME_BYTES_MAX: usize = 200;

/// Checks the space for all bytes, the manifest, and file system overhead, before the first byte is
/// written: a disk that fills up halfway costs minutes, and may affect other processes.
pub(crate) fn check_space(
    store: &dyn Storage,
    target: &Key,
    bytes: u64,
    pieces: u64,
) -> Result<()> {
    // A piece takes about 700 bytes of the manifest.
    let need_bytes = bytes + bytes / 50 + (1 << 20) + 1024 * pieces;
    match store.free_bytes()? {
        Some(free) if free < need_bytes => {
            let (object, free_bytes) = (store.display(target), Some(free));
            Err(storage::Error::NoSpace { object, need_bytes, free_bytes }.into())
        }
        _ => Ok(()),
    }
}
