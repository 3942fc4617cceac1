//! One writer a folder.
//!
//! A lease is an object with a name of its own, `.lease-` and its [`Owner`]. A writer creates one
//! and then looks for others: of two that come at once at least one sees the other, whatever the
//! order of their steps, and gives way. A dead owner's lease can be deleted without a race, for no
//! other lease will ever have that name.

use std::sync::Arc;

use crate::owner::{Life, Owner};
use crate::{Error, Result};
use storage::{Key, Storage, write_all};

const PREFIX: &str = ".lease-";

/// The right to write into a folder of checkpoints; given up when dropped.
#[derive(Debug)]
pub struct Lease {
    store: Arc<dyn Storage>,
    key: Key,
}

impl Lease {
    /// Takes the lease of `folder`, and removes those of processes that are dead.
    pub(crate) fn take(store: &Arc<dyn Storage>, folder: &Key) -> Result<Self> {
        // Looked for first, so that a folder in use is not even written to.
        check_free(&**store, folder, "")?;
        let owner = Owner::new();
        let key = folder.join(&format!("{PREFIX}{owner}"))?;
        let text = format!("{} writes here while this file exists\n", owner.label());
        write_all(&**store, &key, text.as_bytes())?;
        let lease = Lease { store: Arc::clone(store), key };
        check_free(&*lease.store, folder, lease.key.name())?;
        Ok(lease)
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

impl Drop for Lease {
    fn drop(&mut self) {
        if let Err(error) = forget(&*self.store, &self.key) {
            log::warn!("the lease stays until this process ends: {error}");
        }
    }
}
