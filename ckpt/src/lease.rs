//! One writer a folder.
//!
//! A lease is an object with a name of its own, `.lease-` and its [`Owner`]. A writer creates one
//! and then looks for others: of two that come at once at least one sees the other, whatever the
//! order of their steps, and gives way. A dead owner's lease can be deleted without a race, for no
//! other lease will ever have that name.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Error, Result};
use storage::{Key, Storage, write_all};
use storage::{Life, Owner};

const PREFIX: &str = ".lease-";

/// The right to write into a folder of checkpoints; given up when dropped.
#[derive(Debug)]
pub struct Lease {
    shared: Arc<Shared>,
}

/// What all leases of one [`Checkpoints`](crate::Checkpoints) share: the one object that stands for
/// them, from the first that is taken to the last that is dropped.
pub(crate) struct Shared {
    store: Arc<dyn Storage>,
    folder: Key,
    held: Mutex<Held>,
}

#[derive(Default)]
struct Held {
    count: usize,
    object: Option<Key>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({})", self.store.display(&self.folder))
    }
}

impl Shared {
    pub(crate) fn new(store: Arc<dyn Storage>, folder: Key) -> Arc<Self> {
        Arc::new(Shared { store, folder, held: Mutex::default() })
    }

    /// Takes the lease of the folder, and removes those of processes that are dead.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Lease> {
        let mut held = self.held();
        if held.count == 0 {
            self.claim(&mut held)?;
        }
        held.count += 1;
        Ok(Lease { shared: Arc::clone(self) })
    }

    fn claim(&self, held: &mut Held) -> Result<()> {
        self.release(held)?;
        // Looked for first, so that a folder in use is not even written to.
        check_free(&*self.store, &self.folder, "")?;
        let owner = Owner::new();
        let key = self.folder.join(&format!("{PREFIX}{owner}"))?;
        let text = format!("{} writes here while this file exists\n", owner.label());
        held.object = Some(key.clone());
        let written = write_all(&*self.store, &key, text.as_bytes()).map_err(Error::from);
        let claimed = written.and_then(|_| check_free(&*self.store, &self.folder, key.name()));
        if claimed.is_err() {
            self.release_or_warn(held);
        }
        claimed
    }

    /// Deletes the object. If that fails it is remembered, and the next claim tries again: it must
    /// not keep ourselves out.
    fn release(&self, held: &mut Held) -> Result<()> {
        if let Some(key) = &held.object {
            forget(&*self.store, key)?;
        }
        held.object = None;
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
        // Within the lock, so that whoever takes it next does not meet what is left of ours.
        let mut held = self.shared.held();
        held.count -= 1;
        if held.count == 0 {
            self.shared.release_or_warn(&mut held);
        }
    }
}

fn check_free(store: &dyn Storage, folder: &Key, own: &str) -> Result<()> {
    for name in store.names(folder)? {
        let Some(text) = name.strip_prefix(PREFIX).filter(|_| name != own) else { continue };
        let key = folder.join(&name)?;
        let owner = Owner::parse(text);
        if owner.as_ref().is_some_and(|owner| owner.life() == Life::Dead) {
            log::info!("{}: its process is gone, removed", store.display(&key));
            forget(store, &key)?;
            continue;
        }
        return Err(Error::Held {
            what: store.display(folder),
            holder: owner.map_or_else(|| "an unknown process".to_owned(), |owner| owner.label()),
            lease: store.display(&key),
        });
    }
    Ok(())
}

/// Deletes a lease that somebody else may be deleting at the same time.
fn forget(store: &dyn Storage, key: &Key) -> Result<()> {
    match store.delete(key) {
        Err(storage::Error::NotFound { .. }) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
