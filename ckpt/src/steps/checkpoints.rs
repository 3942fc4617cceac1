use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::format::catalog::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, is_block_size};
use crate::liveness::lease;
use crate::plan::PlanCache;
use crate::read::checkpoint::{Checkpoint, Listing};
use crate::{Codec, Error, Lease, LivenessTimeouts, Result};
use storage::{Key, Storage};

/// The largest number of twelve decimal digits.
const STEP_MAX: u64 = 999_999_999_999;

/// How often the newest step is searched for while steps are added and deleted. A save takes longer
/// than one such search.
const ATTEMPTS_MAX: usize = 16;

/// A folder of checkpoints, one per step.
#[derive(Debug)]
pub struct Checkpoints {
    pub(crate) store: Arc<dyn Storage>,
    pub(crate) folder: Key,
    pub(crate) options: CheckpointOptions,
    /// Held during each change of the folder: the lease excludes other processes, not our threads.
    writing: Arc<Mutex<()>>,
    pub(crate) patience: LivenessTimeouts,
    pub(crate) plans: PlanCache,
    pub(crate) lease: Arc<lease::LeaseState>,
}

/// How checkpoints are written. Readers take the sizes from the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOptions {
    /// Bytes of tensors in one file. A larger tensor is split between rows. Small files cost
    /// metadata operations, large ones limit parallel writes. Default: 4 GiB. Minimum: 1.
    pub shard_bytes_max: u64,
    /// Bytes under one checksum. Reading a part of a tensor reads whole blocks, and each block
    /// takes 16 bytes of the manifest. A multiple of 4 KiB. Default: 4 MiB. Maximum: 64 MiB.
    pub block_bytes: u64,
    /// Files written, or batches of 16 MiB read, at the same time. More than a device can use slows
    /// it down. Default: 2. Minimum: 1.
    pub threads: usize,
    /// Staging buffer memory in total, at least two buffers of 8 MiB per file being written.
    /// Default: 256 MiB.
    pub staging_bytes_max: u64,
    /// Codec that packs tensors, for stores slower than the codec. Only this crate can read packed
    /// files. Default: none.
    #[serde(default)]
    pub codec: Option<Codec>,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        CheckpointOptions {
            shard_bytes_max: 4 << 30,
            block_bytes: 4 << 20,
            threads: 2,
            staging_bytes_max: 256 << 20,
            codec: None,
        }
    }
}

impl Checkpoints {
    /// The checkpoints in `folder`, which need not exist yet. This reads and writes nothing.
    #[must_use]
    pub fn open(store: Arc<dyn Storage>, folder: Key) -> Self {
        let (options, patience) = (CheckpointOptions::default(), LivenessTimeouts::default());
        let lease = lease::LeaseState::new(Arc::clone(&store), folder.clone(), patience);
        let (writing, plans) = (Arc::default(), PlanCache::default());
        Checkpoints { store, folder, options, writing, patience, plans, lease }
    }

    /// The same with other options.
    #[must_use]
    pub fn with_options(mut self, options: CheckpointOptions) -> Self {
        self.options = options;
        self
    }

    /// The same folder under the same lease, with other options. `store` is a layer over the
    /// store of this one, or that store itself.
    #[must_use]
    pub fn sharing_lease(&self, store: Arc<dyn Storage>, options: CheckpointOptions) -> Self {
        Checkpoints {
            store,
            folder: self.folder.clone(),
            options,
            writing: Arc::clone(&self.writing),
            patience: self.patience,
            plans: PlanCache::default(),
            lease: Arc::clone(&self.lease),
        }
    }

    /// The same with other heartbeat timeouts. All processes that write into the folder must use
    /// the same.
    ///
    /// # Panics
    /// If the heartbeat interval is longer than half the timeout.
    #[must_use]
    pub fn with_patience(mut self, patience: LivenessTimeouts) -> Self {
        assert!(
            patience.beat * 2 <= patience.silence_max,
            "timeout below two heartbeats: {patience:?}"
        );
        self.patience = patience;
        self.lease = lease::LeaseState::new(Arc::clone(&self.store), self.folder.clone(), patience);
        self
    }

    /// Excludes every other writer from the folder until this lease, and every other one returned
    /// by this call, is dropped. A trainer takes it at startup; otherwise each save takes its own.
    /// The lease of a process that died on this machine is ignored; for one of another machine,
    /// this waits up to [`LivenessTimeouts::silence_max`] for a heartbeat. If that process
    /// is alive after all, it changes nothing here any more.
    ///
    /// # Errors
    /// [`Error::Held`] names the process that holds the lease: of several concurrent callers
    /// exactly one gets it. [`Error::LeaseLost`] if a lease of this process was lost before.
    pub fn lock(&self) -> Result<Lease> {
        let lease = self.lease.take()?;
        self.evict_predecessors()?;
        Ok(lease)
    }

    /// The steps whose manifest agrees with their files, oldest first. A warning is logged for each
    /// other step.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn steps(&self) -> Result<Vec<u64>> {
        self.complete_in(&self.list_folder()?)
    }

    /// The newest step whose manifest agrees with its files; `None` if there is none. Newer
    /// incomplete or damaged steps are skipped with a warning that says why. No `latest` file is
    /// read.
    ///
    /// # Errors
    /// Errors of the store, for example that it cannot be read: falling back to an older step then
    /// would lose the work in between.
    pub fn newest(&self) -> Result<Option<Checkpoint>> {
        for _ in 0..ATTEMPTS_MAX {
            let there = self.listing()?;
            let names = self.named_steps()?;
            let mut is_all_well = true;
            let mut found = None;
            for &step in names.iter().rev() {
                found = self.open_if_complete(step, &there)?;
                if found.is_some() {
                    break;
                }
                is_all_well = false;
            }
            // A skipped step may have been deleted meanwhile because a newer one was saved.
            if is_all_well || self.named_steps()? == names {
                return Ok(found);
            }
        }
        let object = format!("a stable step in {}", self.store.display(&self.folder));
        Err(storage::Error::NotFound { object }.into())
    }

    /// Opens one step.
    ///
    /// # Errors
    /// [`Error::NoStep`] with the nearest existing steps; [`Error::BadManifest`],
    /// [`Error::Corrupt`] or [`storage::Error::NotFound`] within [`Error::Storage`] if it is
    /// damaged.
    pub fn open_step(&self, step: u64) -> Result<Checkpoint> {
        let mut similar = self.named_steps()?;
        if !similar.contains(&step) {
            similar.sort_by_key(|there| there.abs_diff(step));
            similar.truncate(5);
            let object = self.store.display(&self.folder.join(&step_name(step))?);
            return Err(Error::NoStep { object, similar });
        }
        self.open_named(step, &self.listing()?)
    }

    /// Waits until no other thread changes the folder, and excludes other processes.
    pub(crate) fn begin_change(&self) -> Result<(Lease, MutexGuard<'_, ()>)> {
        // A thread that panicked here left the same state as a crash, which readers tolerate.
        let alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let lease = self.lease.take_for_change()?;
        self.evict_predecessors()?;
        Ok((lease, alone))
    }

    /// Changes the folder. An error that follows from the loss of the lease, whose new owner
    /// removes unfinished work, is replaced by that loss.
    pub(crate) fn change<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _alone = self.begin_change()?;
        work().map_err(|error| match self.check_lease() {
            Err(lost @ Error::LeaseLost { .. }) => lost,
            _ => error,
        })
    }

    /// Fails if another process has taken over the lease.
    pub(crate) fn check_lease(&self) -> Result<()> {
        self.lease.check()
    }

    /// The steps that have a folder, complete or not, oldest first.
    pub(crate) fn named_steps(&self) -> Result<Vec<u64>> {
        // Ascending: names are sorted, and all steps have the same number of digits.
        Ok(self.names()?.iter().filter_map(|name| step_of(name)).collect())
    }

    /// All names directly in the folder.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        Ok(self.store.list_names(&self.folder)?)
    }

    /// Opens a step, unless it is damaged.
    pub(crate) fn open_if_complete(
        &self,
        step: u64,
        there: &Listing,
    ) -> Result<Option<Checkpoint>> {
        match self.open_named(step, there) {
            Ok(checkpoint) => Ok(Some(checkpoint)),
            Err(error @ Error::Uncommitted { .. }) => {
                log::debug!("step {step}: skipped: {error}");
                Ok(None)
            }
            Err(error) if error.is_damage() => {
                log::warn!("step {step} is incomplete; skipped: {error}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Opens a step whose folder is there.
    pub(crate) fn open_named(&self, step: u64, there: &Listing) -> Result<Checkpoint> {
        let folder = self.data_folder(step, there)?;
        Checkpoint::open(&self.store, folder, step, there, self.options.threads)
    }

    pub(crate) fn listing(&self) -> Result<Listing> {
        self.listing_of(&self.folder)
    }

    pub(crate) fn listing_of(&self, folder: &Key) -> Result<Listing> {
        let entries = self.store.list(folder)?;
        Ok(entries.into_iter().map(|entry| (entry.key, entry.bytes)).collect())
    }

    /// Rejects invalid steps and options.
    pub(crate) fn check_options(&self, step: u64) -> Result<()> {
        let bad = |reason: String| Err(Error::BadInput { object: format!("step {step}"), reason });
        let CheckpointOptions { shard_bytes_max, block_bytes, threads, .. } = self.options;
        if step > STEP_MAX {
            return bad(format!("expected a step of at most {STEP_MAX}"));
        }
        if shard_bytes_max == 0 {
            return bad("expected shard_bytes_max of at least 1, found 0".to_owned());
        }
        if !is_block_size(block_bytes) {
            return bad(format!(
                "expected block_bytes to be a multiple of {BLOCK_BYTES_MIN} and at most \
                 {BLOCK_BYTES_MAX}, found {block_bytes}"
            ));
        }
        if threads == 0 {
            return bad("expected threads of at least 1, found 0".to_owned());
        }
        Ok(())
    }
}

/// `step-000012000`.
pub(crate) fn step_name(step: u64) -> String {
    format!("step-{step:012}")
}

/// Parses the step from a folder name; `None` for all other names.
#[must_use]
pub fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let is_step = digits.len() == 12 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_step { digits.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_one_name() {
        for step in [0, 7, 12_000, STEP_MAX] {
            assert_eq!(step_of(&step_name(step)), Some(step));
        }
        for foreign in [
            "latest",
            "step-",
            "step-12",
            "step-0000000000001",
            "step--00000000001",
            "step-+00000000001",
        ] {
            assert_eq!(step_of(foreign), None, "{foreign}");
        }
    }
}
