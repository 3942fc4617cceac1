use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::fs::filesystem::FileSystem;
use crate::{Error, Result};

/// The name of an object that a crash may still lose: see
/// [`Upload::finish_deferred`](crate::Upload::finish_deferred). It is durable when
/// [`PendingDirSync::sync_all`] has returned.
#[derive(Debug)]
#[must_use = "a name that is not synced may be lost"]
pub struct PendingDirSync(Option<(Arc<dyn FileSystem>, PathBuf)>);

impl PendingDirSync {
    /// A name that is durable already.
    pub fn nothing() -> Self {
        PendingDirSync(None)
    }

    pub(crate) fn in_folder(disk: Arc<dyn FileSystem>, folder: PathBuf) -> Self {
        PendingDirSync(Some((disk, folder)))
    }

    /// Makes all these names durable: each folder that has any of them is synced once.
    ///
    /// # Errors
    /// Errors of the file system. Which names are durable is then unknown.
    pub fn sync_all(names: impl IntoIterator<Item = PendingDirSync>) -> Result<()> {
        let folders = names.into_iter().filter_map(|PendingDirSync(name)| name);
        let folders: BTreeMap<PathBuf, Arc<dyn FileSystem>> =
            folders.map(|(disk, folder)| (folder, disk)).collect();
        for (folder, disk) in folders {
            let failed = |e| Error::from_io("sync", folder.display().to_string(), e);
            disk.sync_dir(&folder).map_err(failed)?;
        }
        Ok(())
    }
}
