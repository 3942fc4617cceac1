//! The lease: one writer per folder.
//!
//! A lease is an object with a unique name: `.lease-` and the [`ProcessIdentity`] of its owner. A
//! dead owner's lease can be deleted without a race, since no other lease will ever have that name.
//! Of several concurrent writers exactly one gets the lease: that is decided by its epoch.
//!
//! Processes of this machine are checked directly. For others, the lease is a [`Heartbeat`]:
//! without a new one for [`LivenessTimeouts::silence_max`] it is void. Its owner, if it was only
//! slow, is kept out from then on by the fence (see `fence.rs`).

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::liveness::fence::{Fence, label_of};
use crate::liveness::heartbeat::{Heartbeat, LivenessTimeouts, delete_if_exists, owner_of};
use crate::{Error, Result};
use storage::{Key, Liveness, ProcessIdentity, Storage};

/// Prefix of leases.
pub(crate) const LEASE: &str = ".lease-";

/// The right to write into a folder of checkpoints, released on drop.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<LeaseState>,
}

/// State shared by all leases of one [`Checkpoints`](crate::Checkpoints): they are represented by
/// one object, from the first lease taken to the last one dropped.
pub(crate) struct LeaseState {
    store: Arc<dyn Storage>,
    folder: Key,
    patience: LivenessTimeouts,
    held: Mutex<Held>,
    fence: Arc<Fence>,
}

#[derive(Default)]
struct Held {
    count: usize,
    heartbeat: Option<Heartbeat>,
    /// Objects that could not be deleted.
    undeleted: Vec<Key>,
    /// Whether another process held the lease before: what it has not committed is to be removed.
    has_predecessor: bool,
}

/// How often the folder is claimed while other processes claim it and release it.
const CLAIMS_MAX: usize = 16;

/// A lease of another process.
struct Other {
    key: Key,
    owner: Option<ProcessIdentity>,
}

impl fmt::Debug for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({})", self.store.display(&self.folder))
    }
}

impl LeaseState {
    pub(crate) fn new(
        store: Arc<dyn Storage>,
        folder: Key,
        patience: LivenessTimeouts,
    ) -> Arc<Self> {
        let fence = Fence::new(Arc::clone(&store), folder.clone());
        Arc::new(LeaseState { store, folder, patience, held: Mutex::default(), fence })
    }

    pub(crate) fn fence(&self) -> &Fence {
        &self.fence
    }

    /// Takes the lease of the folder and removes those of dead processes. May wait for the
    /// heartbeat timeout of a process of another machine.
    ///
    /// A lease that was lost is never taken again: the state that this process would write is not
    /// the successor's.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Lease> {
        let mut held = self.held();
        self.fence.fail_if_lost()?;
        if held.count == 0 {
            self.claim(&mut held)?;
        }
        held.count += 1;
        Ok(Lease { shared: Arc::clone(self) })
    }

    /// The same at the start of a change: checks in the store that a lease held before still is.
    pub(crate) fn take_for_change(self: &Arc<Self>) -> Result<Lease> {
        let mut held = self.held();
        self.fence.fail_if_lost()?;
        if held.count == 0 {
            self.claim(&mut held)?;
        } else {
            self.fence.check()?;
        }
        held.count += 1;
        Ok(Lease { shared: Arc::clone(self) })
    }

    /// Checks that the lease is still held, before an operation that cannot be rolled back.
    pub(crate) fn check(&self) -> Result<()> {
        self.fence.check()
    }

    /// Whether the unfinished work of earlier holders of the lease is still to be removed.
    pub(crate) fn has_predecessor(&self) -> bool {
        self.held().has_predecessor
    }

    /// Their unfinished work is removed.
    pub(crate) fn clear_predecessor(&self) {
        self.held().has_predecessor = false;
    }

    /// Whether the owner may write under the lease that is held: it is this process, or one of its
    /// family.
    pub(crate) fn admits(&self, owner: &ProcessIdentity) -> bool {
        owner.is_same_process(&ProcessIdentity::new()) || self.fence.is_of_family(owner)
    }

    fn claim(&self, held: &mut Held) -> Result<()> {
        let claimed = self.try_claim(held);
        if claimed.is_err() {
            self.release_or_warn(held);
        }
        claimed
    }

    /// In an order that lets exactly one of several processes succeed: see `fence.rs`.
    fn try_claim(&self, held: &mut Held) -> Result<()> {
        for _ in 0..CLAIMS_MAX {
            self.release(held)?;
            let newest = self.fence.newest()?;
            // Before the first write, so that nothing is written to a folder in use.
            held.has_predecessor |= self.wait_until_free()?;
            let owner = ProcessIdentity::new();
            let text = format!("{} writes here while this file exists\n", owner.label());
            let name = format!("{LEASE}{owner}");
            // It may exist although its creation fails.
            held.undeleted.push(self.folder.join(&name)?);
            let (beat, fence) = (self.patience.beat, Some(Arc::clone(&self.fence)));
            let heartbeat = Heartbeat::start(&self.store, &self.folder, name, text, beat, fence)?;
            held.undeleted.clear();
            held.heartbeat = Some(heartbeat);
            if self.fence.enter(newest.as_ref(), &owner)? {
                // That process may have died before it removed its work, or may be frozen just
                // before it commits it, on this machine as well: its lease can be deleted by hand.
                let before = newest.and_then(|newest| newest.owner);
                held.has_predecessor |= before.is_some_and(|before| !self.admits(&before));
                return Ok(());
            }
        }
        Err(Error::Held {
            object: self.store.display(&self.folder),
            holder: "several processes in turn".to_owned(),
            lease: self.store.display(&self.folder.join(LEASE)?),
        })
    }

    /// Removes the leases of dead processes. If the state of an owner cannot be determined, waits
    /// for a new heartbeat or the timeout. Returns whether any timed out.
    fn wait_until_free(&self) -> Result<bool> {
        let mut waiting_since = Instant::now();
        let mut has_timed_out = false;
        let mut first: Option<HashSet<Key>> = None;
        loop {
            let others = self.others()?;
            let is_known = |other: &&Other| {
                other.owner.as_ref().is_some_and(|owner| owner.life() != Liveness::Unknown)
            };
            // A name that is new since the first listing is a heartbeat, or the lease of a new
            // process.
            let is_new =
                |other: &&Other| first.as_ref().is_some_and(|first| !first.contains(&other.key));
            if let Some(other) = others.iter().find(|other| is_known(other) || is_new(other)) {
                return Err(self.held_by(other));
            }
            let Some(other) = others.first() else { return Ok(has_timed_out) };
            if first.is_none() {
                let (what, max) = (self.store.display(&other.key), self.patience.silence_max);
                log::info!("{what}: waiting up to {max:?} for a heartbeat of its owner");
            }
            if waiting_since.elapsed() >= self.patience.silence_max {
                let mut is_alive = false;
                for Other { key, .. } in &others {
                    let what = self.store.display(key);
                    match self.store.delete(key) {
                        Ok(()) => {}
                        // A heartbeat has replaced it, which a cached listing does not show yet.
                        Err(storage::Error::NotFound { .. }) => {
                            is_alive = true;
                            continue;
                        }
                        Err(error) => return Err(error.into()),
                    }
                    log::warn!(
                        "{what}: no heartbeat for {:.0?}; lease removed",
                        waiting_since.elapsed()
                    );
                    has_timed_out = true;
                }
                if is_alive {
                    (waiting_since, first) = (Instant::now(), None);
                    continue;
                }
            }
            first.get_or_insert_with(|| others.into_iter().map(|other| other.key).collect());
            std::thread::sleep(self.patience.beat / 4);
        }
    }

    /// The leases of other processes that are not known to be dead. Those of dead ones are removed.
    fn others(&self) -> Result<Vec<Other>> {
        let mut others = Vec::new();
        for name in self.store.list_names(&self.folder)? {
            let Some(text) = name.strip_prefix(LEASE) else { continue };
            let key = self.folder.join(&name)?;
            let owner = owner_of(text).0;
            if owner.as_ref().is_some_and(|owner| owner.life() == Liveness::Dead) {
                log::info!("{}: owner is dead; lease removed", self.store.display(&key));
                delete_if_exists(&*self.store, &key)?;
                continue;
            }
            if !owner.as_ref().is_some_and(|owner| self.fence.is_of_family(owner)) {
                others.push(Other { key, owner });
            }
        }
        Ok(others)
    }

    fn held_by(&self, other: &Other) -> Error {
        Error::Held {
            object: self.store.display(&self.folder),
            holder: label_of(other.owner.as_ref()),
            lease: self.store.display(&other.key),
        }
    }

    /// Deletes the objects. One that cannot be deleted is remembered and retried by the next claim,
    /// so that it does not keep this process itself out.
    fn release(&self, held: &mut Held) -> Result<()> {
        self.fence.leave();
        if let Some(heartbeat) = held.heartbeat.take() {
            held.undeleted.extend(heartbeat.stop()?);
        }
        while let Some(key) = held.undeleted.last() {
            delete_if_exists(&*self.store, key)?;
            held.undeleted.pop();
        }
        Ok(())
    }

    fn release_or_warn(&self, held: &mut Held) {
        if let Err(error) = self.release(held) {
            log::warn!("a released lease is not deleted yet: {error}");
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Fails if another process is known to have taken over the lease: the thread that writes
    /// heartbeats queries the store before each of them. This call does not, and is cheap enough
    /// for every step of a training run.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] names that process.
    pub fn check(&self) -> Result<()> {
        self.shared.fence.fail_if_lost()
    }

    /// Queries the store whether another process has taken over the lease.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] names that process; errors of the store.
    pub fn confirm(&self) -> Result<()> {
        self.shared.check()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Under the lock, so that the next claim does not find our leftover objects.
        let mut held = self.shared.held();
        held.count -= 1;
        if held.count == 0 {
            self.shared.release_or_warn(&mut held);
        }
    }
}
