use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::format::catalog::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, is_block_size};
use crate::liveness::lease;
use crate::plan::PlanCache;
use crate::read::checkpoint::{Checkpoint, Listing};
use crate::{Codec, Error, Lease, LivenessTimeouts, Result};
use storage::{Key, Storage};

/// Twelve decimal digits hold it.
const STEP_MAX: u64 = 999_999_999_999;

/// So often steps may come and go while the newest is looked for. A save takes longer than a look.
const LOOKS_MAX: usize = 16;

/// A folder of checkpoints, one a step.
#[derive(Debug)]
pub struct Checkpoints {
    pub(crate) store: Arc<dyn Storage>,
    pub(crate) folder: Key,
    pub(crate) options: CheckpointOptions,
    /// Held by whatever changes the folder: the lease keeps other processes out, not our threads.
    writing: Mutex<()>,
    pub(crate) patience: LivenessTimeouts,
    pub(crate) plans: PlanCache,
    pub(crate) lease: Arc<lease::LeaseState>,
}

/// How checkpoints are written. Readers take the sizes from the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointOptions {
    /// Bytes of tensors in one file. A larger tensor is cut between rows. Small files cost metadata
    /// operations, large ones keep writers from working side by side. Default: 4 GiB. Minimum: 1.
    pub shard_bytes_max: u64,
    /// Bytes under one checksum. A read of a part of a tensor reads whole blocks, and every block
    /// takes 16 bytes of the manifest. A multiple of 4 KiB. Default: 4 MiB. Maximum: 64 MiB.
    pub block_bytes: u64,
    /// Files written, or batches of 16 MiB read, at the same time. More than a device can use
    /// slows it down. Default: 2. Minimum: 1.
    pub threads: usize,
    /// Memory for bytes on their way to the store, in all. Default: 256 MiB. At least two buffers
    /// of 8 MiB for each file that is being written.
    pub staging_bytes_max: u64,
    /// How tensors are packed, for stores that are slower than it. What is packed is read by this
    /// crate alone. Default: not at all.
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
    /// The checkpoints below `folder`, which need not exist yet. This reads and writes nothing.
    #[must_use]
    pub fn open(store: Arc<dyn Storage>, folder: Key) -> Self {
        let (options, patience) = (CheckpointOptions::default(), LivenessTimeouts::default());
        let lease = lease::LeaseState::new(Arc::clone(&store), folder.clone(), patience);
        let (writing, plans) = (Mutex::new(()), PlanCache::default());
        Checkpoints { store, folder, options, writing, patience, plans, lease }
    }

    /// The same with other options.
    #[must_use]
    pub fn with_options(mut self, options: CheckpointOptions) -> Self {
        self.options = options;
        self
    }

    /// The same with other patience for processes that are silent. All that write into the folder
    /// are to have the same.
    ///
    /// # Panics
    /// If the beat is longer than half the silence that counts as death.
    #[must_use]
    pub fn with_patience(mut self, patience: LivenessTimeouts) -> Self {
        assert!(patience.beat * 2 <= patience.silence_max, "no beat fits into {patience:?}");
        self.patience = patience;
        self.lease = lease::LeaseState::new(Arc::clone(&self.store), self.folder.clone(), patience);
        self
    }

    /// Keeps every other writer out of the folder until the lease, and every other that this gave,
    /// is dropped. A trainer takes it when it starts; without it every single save takes one for
    /// itself. The lease of a process that died on this machine counts for nothing; whether one of
    /// another machine still lives is found by waiting for a sign, for
    /// [`LivenessTimeouts::silence_max`] at most.
    ///
    /// # Errors
    /// [`Error::Held`] names the process that writes here. Of two writers that come at the same
    /// moment both may be refused.
    pub fn lock(&self) -> Result<Lease> {
        self.lease.take()
    }

    /// The steps whose manifest agrees with their files, the oldest first. A warning is logged for
    /// each of the others.
    ///
    /// # Errors
    /// What the store says.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut complete = Vec::new();
        let there = self.listing()?;
        for step in self.named_steps()? {
            if self.open_if_complete(step, &there)?.is_some() {
                complete.push(step);
            }
        }
        Ok(complete)
    }

    /// The newest step whose manifest agrees with its files; `None` if there is none. Newer ones
    /// that are incomplete or damaged are passed over with a warning that says why. No `latest`
    /// file is asked.
    ///
    /// # Errors
    /// What the store says, such as that it cannot be read: falling back to an older step then
    /// would lose the work in between.
    pub fn newest(&self) -> Result<Option<Checkpoint>> {
        for _ in 0..LOOKS_MAX {
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
            // What was passed over may have been deleted since, because a newer one had come.
            if is_all_well || self.named_steps()? == names {
                return Ok(found);
            }
        }
        let object = self.store.display(&self.folder);
        let object = format!("{object}: a step that stays while it is looked for");
        Err(storage::Error::NotFound { object }.into())
    }

    /// Opens one step.
    ///
    /// # Errors
    /// [`Error::NoStep`] tells which there are; [`Error::BadManifest`], [`Error::Corrupt`] or
    /// [`storage::Error::NotFound`] within [`Error::Storage`] what is wrong with it.
    pub fn open_step(&self, step: u64) -> Result<Checkpoint> {
        let mut near = self.named_steps()?;
        if !near.contains(&step) {
            near.sort_by_key(|there| there.abs_diff(step));
            near.truncate(5);
            let object = self.store.display(&self.folder.join(&step_name(step))?);
            return Err(Error::NoStep { object, near });
        }
        self.open_named(step, &self.listing()?)
    }

    /// Waits until no other thread changes the folder, and keeps other processes out.
    pub(crate) fn begin_change(&self) -> Result<(Lease, MutexGuard<'_, ()>)> {
        // A thread that panicked here left only what a crash leaves, and readers bear that.
        let alone = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((self.lease.take_for_change()?, alone))
    }

    /// Refuses to go on if another process took the lease for abandoned.
    pub(crate) fn check_lease(&self) -> Result<()> {
        self.lease.check()
    }

    /// The steps that have a folder, complete or not, the oldest first.
    pub(crate) fn named_steps(&self) -> Result<Vec<u64>> {
        // Ascending: names are sorted, and all steps have the same number of digits.
        Ok(self.names()?.iter().filter_map(|name| step_of(name)).collect())
    }

    /// All that is directly in the folder.
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
                log::debug!("step {step} is passed over: {error}");
                Ok(None)
            }
            Err(error) if error.is_damage() => {
                log::warn!("step {step} is not complete and is passed over: {error}");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn open_named(&self, step: u64, there: &Listing) -> Result<Checkpoint> {
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

    /// Refuses a step and options that no checkpoint can have.
    pub(crate) fn check_options(&self, step: u64) -> Result<()> {
        let bad = |reason: String| Err(Error::BadInput { object: format!("step {step}"), reason });
        let CheckpointOptions { shard_bytes_max, block_bytes, threads, .. } = self.options;
        if step > STEP_MAX {
            return bad(format!("a step is at most {STEP_MAX}"));
        }
        if shard_bytes_max == 0 {
            return bad("shard_bytes_max is 0; the least is 1".to_owned());
        }
        if !is_block_size(block_bytes) {
            let due = format!("a multiple of {BLOCK_BYTES_MIN}, at most {BLOCK_BYTES_MAX}");
            return bad(format!("block_bytes is {block_bytes}; due is {due}"));
        }
        if threads == 0 {
            return bad("threads is 0; the least is 1".to_owned());
        }
        Ok(())
    }
}

/// `step-000012000`.
pub(crate) fn step_name(step: u64) -> String {
    format!("step-{step:012}")
}

/// The step that a folder is named for; `None` for all other names.
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
