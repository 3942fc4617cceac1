//! Checkpoints: saved by several writers at once, into a file each or one shared file, and read by
//! all.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};

use anyhow::{Context as _, Result};
use ckpt::{CheckpointOptions, Checkpoints, Dtype, Group, TensorData, TensorRead};
use storage::Zeros;

use crate::bench::patterns::PatternRun;
use crate::bench::random::word;
use crate::bench::target::TargetFolder;
use crate::bench::workload::concurrent::{ProgressCounter, all_at_once};
use crate::bench::workload::reads::{fill, resident};
use crate::ui::timeout::StopSignal;

/// Data of the writers of this process: incompressible, and different for each. No two saves write
/// the same bytes, so that a deduplicating store must store all of them.
#[derive(Debug)]
pub struct WriterBuffers {
    parts: Vec<RwLock<Zeros>>,
    part_bytes: u64,
    seed: u64,
    /// Count of saves that were started.
    saves: AtomicU64,
}

/// A row of a tensor.
const ROW_BYTES: u64 = 4096;

/// Maximum bytes of a tensor: a matrix of a layer.
const TENSOR_BYTES: u64 = 64 << 20;

impl WriterBuffers {
    /// Divides `bytes` among the writers in complete rows, at least one row each.
    ///
    /// # Errors
    /// If memory cannot be allocated.
    pub fn new(bytes: u64, writers: usize, seed: u64) -> Result<Self> {
        let each = (bytes / writers.max(1) as u64 / ROW_BYTES).max(1) * ROW_BYTES;
        let part = |nth: u64| -> Result<RwLock<Zeros>> {
            let len = usize::try_from(each).context("cannot use --checkpoint")?;
            let mut memory =
                Zeros::try_new(len).context("cannot allocate memory for --checkpoint")?;
            fill(&mut memory, seed ^ (nth + 1), 0);
            Ok(RwLock::new(memory))
        };
        let parts = (0..writers.max(1) as u64).map(part).collect::<Result<_>>()?;
        Ok(WriterBuffers { parts, part_bytes: each, seed, saves: AtomicU64::new(0) })
    }

    /// Bytes of one writer.
    #[must_use]
    pub fn part_bytes(&self) -> u64 {
        self.part_bytes
    }

    fn writers(&self) -> usize {
        self.parts.len()
    }

    fn part(&self, nth: usize) -> RwLockReadGuard<'_, Zeros> {
        self.parts[nth].read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes every row, so that it differs from all earlier saves.
    fn renew(&self) {
        let save = word(self.seed, self.saves.fetch_add(1, Relaxed));
        for (nth, part) in self.parts.iter().enumerate() {
            let mut part = part.write().unwrap_or_else(PoisonError::into_inner);
            let seed = word(save, nth as u64);
            // fits: a page
            for (row, bytes) in part.chunks_mut(ROW_BYTES as usize).enumerate() {
                bytes[..8].copy_from_slice(&word(seed, row as u64).to_le_bytes());
            }
        }
    }
}

/// The tensors that `bytes` bytes are divided into: name and shape.
fn tensors(bytes: u64) -> Vec<(String, [u64; 2])> {
    let rows_max = TENSOR_BYTES / ROW_BYTES;
    let rows = bytes / ROW_BYTES;
    let count = rows.div_ceil(rows_max);
    let tensor = |nth| (format!("t{nth}"), [rows_max.min(rows - nth * rows_max), ROW_BYTES / 4]);
    (0..count).map(tensor).collect()
}

fn save(steps: &Checkpoints, step: u64, bytes: &[u8], wrote: &ProgressCounter) -> Result<()> {
    let tensors = tensors(bytes.len() as u64);
    let mut rest = bytes;
    let mut data = Vec::with_capacity(tensors.len());
    for (name, shape) in &tensors {
        let (bytes, later) = rest.split_at((shape[0] * ROW_BYTES) as usize); // fits: of memory
        rest = later;
        data.push(TensorData { name, group: Group::Model, dtype: Dtype::F32, shape, bytes });
    }
    steps.save_counted(step, &data, &[], ().into(), wrote)?;
    Ok(())
}

fn steps(place: &TargetFolder, folder: &str) -> Result<Checkpoints> {
    // Each writer is a rank with one file at a time.
    let options = CheckpointOptions { threads: 1, ..CheckpointOptions::default() };
    Ok(Checkpoints::open(Arc::clone(&place.store), place.key(folder)?).with_options(options))
}

/// Every writer saves its part as a separate checkpoint. All are removed at the end.
///
/// # Errors
/// The first error of a writer.
pub fn save_each(
    place: &TargetFolder,
    state: &WriterBuffers,
    member: usize,
    step: u64,
) -> Result<PatternRun> {
    let folder = |nth: usize| format!("save-{member}-{nth}");
    state.renew();
    let run = all_at_once(state.writers(), place, false, &|nth, wrote| {
        save(&steps(place, &folder(nth))?, step, &state.part(nth), wrote)?;
        Ok(state.part_bytes())
    });
    for nth in 0..state.writers() {
        place.store.delete_folder(&place.key(&folder(nth))?)?;
    }
    run
}

/// Saves until a stop signal is set; returns the bytes saved.
///
/// # Errors
/// As [`save_each`].
pub fn save_until(
    place: &TargetFolder,
    state: &WriterBuffers,
    member: usize,
    stop: &[&StopSignal],
) -> Result<u64> {
    let (mut bytes, mut step) = (0, 1);
    while !stop.iter().any(|stop| stop.is_set()) {
        bytes += save_each(place, state, member, step)?.bytes;
        step += 1;
    }
    Ok(bytes)
}

/// Writes the checkpoint that [`restore`] reads.
///
/// # Errors
/// If the store fails.
pub fn prepare_restore(place: &TargetFolder, state: &WriterBuffers) -> Result<()> {
    save(&steps(place, RESTORED)?, 1, &state.part(0), &ProgressCounter::default())
}

const RESTORED: &str = "restore";

/// Every reader reads all of one checkpoint.
///
/// # Errors
/// The first error of a reader.
pub fn restore(place: &TargetFolder, part_bytes: u64, readers: usize) -> Result<PatternRun> {
    let memory = |_| -> Result<Mutex<Zeros>> {
        let mut memory = Zeros::try_new(part_bytes as usize)?; // fits: it is in memory already
        // Every page is allocated before the measurement starts.
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        Ok(Mutex::new(memory))
    };
    let memory = (0..readers).map(memory).collect::<Result<Vec<_>>>()?;
    let resident = restored_resident(place)?;
    let mut run = all_at_once(readers, place, true, &|nth, read| {
        let mut memory = memory[nth].lock().unwrap_or_else(PoisonError::into_inner);
        let tensors = tensors(part_bytes);
        let mut rest: &mut [u8] = &mut memory;
        let mut reads = Vec::with_capacity(tensors.len());
        for (name, shape) in &tensors {
            // fits: of memory
            let (into, later) = rest.split_at_mut((shape[0] * ROW_BYTES) as usize);
            rest = later;
            reads.push(TensorRead { name, group: Group::Model, into });
        }
        steps(place, RESTORED)?.open_step(1)?.counted(read).read_tensors(reads)?;
        Ok(part_bytes)
    })?;
    run.more.extend(resident);
    Ok(run)
}

/// As [`resident`], of the longest file of the checkpoint that is read.
fn restored_resident(place: &TargetFolder) -> Result<Option<(String, f64)>> {
    if place.path(RESTORED).is_none() {
        return Ok(None);
    }
    let files = place.store.list(&place.key(RESTORED)?)?;
    let Some(longest) = files.iter().max_by_key(|file| file.bytes) else { return Ok(None) };
    Ok(resident(place, place.store.open(&longest.key)?.as_ref()))
}

/// The shared file.
const ONE: &str = "one.bin";

/// Path of the shared file on this machine.
#[must_use]
pub fn one_path(place: &TargetFolder) -> Option<PathBuf> {
    place.path(ONE)
}

/// Recreates the shared file. An object is created by its one writer instead.
///
/// # Errors
/// If a file cannot be created.
pub fn prepare_one(place: &TargetFolder, bytes: u64) -> Result<()> {
    match one_path(place) {
        None => remove_one(place),
        Some(path) => make(&path, bytes),
    }
}

/// Creates an empty file of `bytes` bytes, in place of an existing one.
fn make(path: &Path, bytes: u64) -> Result<()> {
    let named = || format!("cannot create {}", path.display());
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e).with_context(named),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    file.and_then(|file| file.set_len(bytes)).with_context(named)
}

/// Prefix of the names of the files that writers have each; a number follows.
const APART: &str = "apart.";

/// Path prefix of these files on this machine.
#[must_use]
pub fn apart_path(place: &TargetFolder) -> Option<PathBuf> {
    place.path(APART)
}

fn apart_paths(place: &TargetFolder, writers: usize) -> Result<Vec<PathBuf>> {
    let path = |nth| place.path(&format!("{APART}{nth}"));
    (0..writers)
        .map(path)
        .collect::<Option<_>>()
        .context("cannot write files: the target has no file paths")
}

/// Recreates the file of each writer.
///
/// # Errors
/// If a file cannot be created.
pub fn prepare_apart(place: &TargetFolder, state: &WriterBuffers) -> Result<()> {
    let paths = apart_paths(place, state.writers())?;
    paths.iter().try_for_each(|path| make(path, state.part_bytes()))
}

/// Every writer writes its own file and syncs it: only the bytes, unlike a checkpoint.
///
/// # Errors
/// The first error of a writer.
pub fn save_apart(place: &TargetFolder, state: &WriterBuffers) -> Result<PatternRun> {
    let paths = apart_paths(place, state.writers())?;
    let direct = place.store.profile().direct;
    state.renew();
    all_at_once(state.writers(), place, false, &|nth, wrote| {
        write_range(&paths[nth], &state.part(nth), 0, direct, wrote)
            .with_context(|| format!("cannot write {}", paths[nth].display()))?;
        Ok(state.part_bytes())
    })
}

fn remove_one(place: &TargetFolder) -> Result<()> {
    match place.store.delete(&place.key(ONE)?) {
        Err(storage::Error::NotFound { .. }) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Size of a writer's request: at least that of IOR and of most single-file checkpoints.
pub const CHUNK_BYTES: usize = 8 << 20;

/// Every writer writes its range of one file, and syncs it.
///
/// # Errors
/// The first error of a writer.
pub fn save_one(place: &TargetFolder, state: &WriterBuffers, member: usize) -> Result<PatternRun> {
    state.renew();
    match one_path(place) {
        Some(path) => {
            let direct = place.store.profile().direct;
            all_at_once(state.writers(), place, false, &|nth, wrote| {
                let first = (member * state.writers() + nth) as u64 * state.part_bytes();
                write_range(&path, &state.part(nth), first, direct, wrote)
                    .with_context(|| format!("cannot write {}", path.display()))?;
                Ok(state.part_bytes())
            })
        }
        // An object has one writer, which uploads its parts in parallel.
        None if member == 0 => all_at_once(1, place, false, &|_, wrote| {
            let bytes = state.part_bytes() * state.writers() as u64;
            let mut upload = place.store.create(&place.key(ONE)?, bytes)?;
            for nth in 0..state.writers() {
                for chunk in state.part(nth).chunks(CHUNK_BYTES) {
                    upload.write(chunk)?;
                    wrote.fetch_add(chunk.len() as u64, Relaxed);
                }
            }
            upload.finish()?;
            Ok(bytes)
        }),
        None => Ok(PatternRun::default()),
    }
}

/// Flags of `open(2)`, which differ by machine.
#[cfg(target_arch = "aarch64")]
const O_DIRECT: i32 = 0o200_000;
#[cfg(not(target_arch = "aarch64"))]
const O_DIRECT: i32 = 0o40_000;

fn write_range(
    path: &Path,
    bytes: &[u8],
    first: u64,
    direct: bool,
    wrote: &ProgressCounter,
) -> Result<()> {
    let flags = if direct { O_DIRECT } else { 0 };
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path)?;
    // Ranges start at a page and consist of rows of 4096 bytes, as direct I/O requires.
    for (nth, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        file.write_all_at(chunk, first + (nth * CHUNK_BYTES) as u64)?;
        wrote.fetch_add(chunk.len() as u64, Relaxed);
    }
    Ok(file.sync_all()?)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_saves_write_the_same_rows() {
        let state = WriterBuffers::new(8 * ROW_BYTES, 2, 7).unwrap();
        let mut seen = HashSet::new();
        for _ in 0..3 {
            for nth in 0..2 {
                let part = state.part(nth);
                let rows = part.chunks(ROW_BYTES as usize).map(<[u8]>::to_vec);
                assert!(rows.into_iter().all(|row| seen.insert(row)), "a row was seen before");
            }
            state.renew();
        }
        assert_eq!((seen.len(), state.part_bytes()), (3 * 8, 4 * ROW_BYTES));
    }
}
