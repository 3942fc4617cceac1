//! The lease: one writer per folder.
//!
//! A lease is an object with a unique name: `.lease-` and the [`ProcessIdentity`] of its owner. A
//! writer creates one and then looks for others. Of two concurrent writers at least one sees the
//! other, whatever the order of their operations, and gives up. A dead owner's lease can be deleted
//! without a race, since no other lease will ever have that name.
//!
//! Processes of this machine are checked directly. For others, the lease is a [`Heartbeat`]:
//! without a new one for [`LivenessTimeouts::silence_max`] it is void. Its owner, if it was only
//! slow, detects that before it commits anything.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::liveness::heartbeat::{Heartbeat, LivenessTimeouts, forget, maker_of};
use crate::{Error, Result};
use storage::{Key, Liveness, ProcessIdentity, Storage};

const PREFIX: &str = ".lease-";

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
    /// Processes that may write here beside this one.
    family: Mutex<Vec<ProcessIdentity>>,
}

#[derive(Default)]
struct Held {
    count: usize,
    pulse: Option<Heartbeat>,
    /// Objects that could not be deleted.
    left: Vec<Key>,
}

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
        let (held, family) = (Mutex::default(), Mutex::default());
        Arc::new(LeaseState { store, folder, patience, held, family })
    }

    /// Permits another process to write beside this one.
    pub(crate) fn admit(&self, process: ProcessIdentity) {
        self.family().push(process);
    }

    /// Whether `owner` is a process that may write beside this one.
    pub(crate) fn is_of_family(&self, owner: &ProcessIdentity) -> bool {
        self.family().iter().any(|one| one.is_same_process(owner))
    }

    fn family(&self) -> MutexGuard<'_, Vec<ProcessIdentity>> {
        self.family.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lease of the folder and removes those of dead processes. May wait for the
    /// heartbeat timeout of a process of another machine.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Lease> {
        let mut held = self.held();
        if held.count == 0 {
            self.claim(&mut held)?;
        }
        held.count += 1;
        Ok(Lease { shared: Arc::clone(self) })
    }

    /// The same at the start of a change, when no other change is in progress: a lease lost through
    /// missed heartbeats is claimed again. A change that began under the old lease must not end
    /// under the new one.
    pub(crate) fn take_for_change(self: &Arc<Self>) -> Result<Lease> {
        let mut held = self.held();
        if held.count == 0 || !self.is_ours(&held)? {
            self.claim(&mut held)?;
        }
        held.count += 1;
        Ok(Lease { shared: Arc::clone(self) })
    }

    /// Checks that the lease is still held, before an operation that cannot be rolled back.
    pub(crate) fn check(&self) -> Result<()> {
        let lost = || Error::LeaseLost { object: self.store.display(&self.folder) };
        self.is_ours(&self.held())?.then_some(()).ok_or_else(lost)
    }

    fn is_ours(&self, held: &Held) -> Result<bool> {
        let Some(pulse) = held.pulse.as_ref().filter(|pulse| !pulse.is_lost()) else {
            return Ok(false);
        };
        // A listing that races with a renewal may miss both the old heartbeat and the new one.
        for _ in 0..2 {
            let names = self.store.list_names(&self.folder)?;
            if names.iter().any(|name| maker_of(name).1 == pulse.name()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn claim(&self, held: &mut Held) -> Result<()> {
        self.release(held)?;
        // Checked first, so that a folder in use is not even written to.
        self.wait_until_free()?;
        let owner = ProcessIdentity::new();
        let text = format!("{} writes here while this file exists\n", owner.label());
        let name = format!("{PREFIX}{owner}");
        // It may exist although its creation fails.
        held.left.push(self.folder.join(&name)?);
        let beat = self.patience.beat;
        let begun = Heartbeat::start(&self.store, &self.folder, name.clone(), text, beat);
        let claimed = begun.and_then(|pulse| {
            held.left.clear();
            held.pulse = Some(pulse);
            match self.others(&name)?.first() {
                Some(other) => Err(self.held_by(other)),
                None => Ok(()),
            }
        });
        if claimed.is_err() {
            self.release_or_warn(held);
        }
        claimed
    }

    /// Removes the leases of dead processes. If the state of an owner cannot be determined, waits
    /// for a new heartbeat or the timeout.
    fn wait_until_free(&self) -> Result<()> {
        let begun = Instant::now();
        let mut first: Option<HashSet<Key>> = None;
        loop {
            let others = self.others("")?;
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
            let Some(other) = others.first() else { return Ok(()) };
            if first.is_none() {
                let (what, max) = (self.store.display(&other.key), self.patience.silence_max);
                log::info!("{what}: waiting up to {max:?} for a sign of life of its owner");
            }
            if begun.elapsed() >= self.patience.silence_max {
                for Other { key, .. } in &others {
                    let what = self.store.display(key);
                    log::warn!("{what}: no sign of life for {:.0?}, removed", begun.elapsed());
                    forget(&*self.store, key)?;
                }
            }
            first.get_or_insert_with(|| others.into_iter().map(|other| other.key).collect());
            std::thread::sleep(self.patience.beat / 4);
        }
    }

    /// The leases of other processes that are not known to be dead. Those of dead ones are removed.
    fn others(&self, own: &str) -> Result<Vec<Other>> {
        let mut others = Vec::new();
        for name in self.store.list_names(&self.folder)? {
            let Some(text) = name.strip_prefix(PREFIX) else { continue };
            if !own.is_empty() && maker_of(&name).1 == own {
                continue;
            }
            let key = self.folder.join(&name)?;
            let owner = maker_of(text).0;
            if owner.as_ref().is_some_and(|owner| owner.life() == Liveness::Dead) {
                log::info!("{}: its process is gone, removed", self.store.display(&key));
                forget(&*self.store, &key)?;
                continue;
            }
            if !owner.as_ref().is_some_and(|owner| self.is_of_family(owner)) {
                others.push(Other { key, owner });
            }
        }
        Ok(others)
    }

    fn held_by(&self, other: &Other) -> Error {
        let label = other.owner.as_ref().map(ProcessIdentity::label);
        Error::Held {
            object: self.store.display(&self.folder),
            holder: label.unwrap_or_else(|| "an unknown process".to_owned()),
            lease: self.store.display(&other.key),
        }
    }

    /// Deletes the objects. One that cannot be deleted is remembered and retried by the next claim,
    /// so that it does not keep this process itself out.
    fn release(&self, held: &mut Held) -> Result<()> {
        if let Some(pulse) = held.pulse.take() {
            held.left.extend(pulse.stop()?);
        }
        while let Some(key) = held.left.last() {
            forget(&*self.store, key)?;
            held.left.pop();
        }
        Ok(())
    }

    fn release_or_warn(&self, held: &mut Held) {
        if let Err(error) = self.release(held) {
            log::warn!("a lease that is no longer needed stays for now: {error}");
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
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
