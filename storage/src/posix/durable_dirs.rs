//! Creates folders durably.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::fs::filesystem::{FileSystem, folder_of};

/// Folders below a root whose own entries are known to be durable. An object is no more durable
/// than its parent folders, and syncing them each time would cost a device flush for each.
#[derive(Debug, Default)]
pub(crate) struct DurableDirs(Mutex<HashSet<PathBuf>>);

/// Folders remembered: far more than a run has checkpoints. At the limit the set is cleared, which
/// costs a few flushes.
const KNOWN_MAX: usize = 4096;

/// An error, and its folder.
pub(crate) type Failed = (PathBuf, io::Error);

impl DurableDirs {
    /// Creates `folder` and its parents durably. Returns those created, outermost first; if it
    /// fails, it removes them.
    pub(crate) fn make(
        &self,
        disk: &dyn FileSystem,
        root: &Path,
        folder: &Path,
    ) -> Result<Vec<PathBuf>, Failed> {
        let mut made = Vec::new();
        let outcome = self.make_into(&mut made, disk, root, folder);
        if outcome.is_err() {
            self.unmake(disk, &made);
        }
        outcome.map(|()| made)
    }

    fn make_into(
        &self,
        made: &mut Vec<PathBuf>,
        disk: &dyn FileSystem,
        root: &Path,
        folder: &Path,
    ) -> Result<(), Failed> {
        let mut ancestors: Vec<&Path> = folder.ancestors().collect();
        ancestors.retain(|path| !path.as_os_str().is_empty());
        for path in ancestors.into_iter().rev() {
            // The root and its parents need only exist: if they existed before, their durability is
            // not this store's concern, and they may not even be readable.
            let is_below_root = path != root && path.starts_with(root);
            if self.known().contains(path) || (!is_below_root && disk.stat(path).is_ok()) {
                continue;
            }
            let failed = |e| (path.to_owned(), e);
            match disk.mkdir(path) {
                Ok(()) => made.push(path.to_owned()),
                // The process that created it may not have made it durable yet.
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed(e)),
            }
            disk.sync_dir(&folder_of(path)).map_err(failed)?;
            let mut known = self.known();
            if known.len() >= KNOWN_MAX {
                known.clear();
            }
            known.insert(path.to_owned());
        }
        Ok(())
    }

    /// Forgets a folder and all in it, before it is renamed or removed.
    pub(crate) fn forget(&self, folder: &Path) {
        self.known().retain(|path| !path.starts_with(folder));
    }

    /// Removes the folders that an upload created and left empty. Those that others use stay.
    pub(crate) fn unmake(&self, disk: &dyn FileSystem, made: &[PathBuf]) {
        for folder in made.iter().rev() {
            self.forget(folder);
            if disk.rmdir(folder).is_err() {
                return;
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
