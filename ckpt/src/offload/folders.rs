//! The folders of a rank's state, one per disk: their locks and owner marks.
//!
//! All files of a generation have one record, in the first folder, so disks cannot disagree about
//! which generation is complete. But folders can be passed in another order, or one can belong to
//! another state. So each folder has a mark with its owner and its number.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, thread};

use serde::{Deserialize, Serialize};

use super::form::StateLayout;
use crate::{Error, Result};
use storage::{InPlaceFile, Key, Location, Manifest, Storage};

/// Locked while a process has the folder open.
const LOCK: &str = "lock";

/// Some file systems do not store empty files.
const LOCK_BYTES: u64 = 4096;

/// The name of the mark.
const MARK: &str = "owner";

const FORMAT: &str = "feedline-offload-owner";
const VERSION: u32 = 1;

/// A folder for the state of one rank.
#[derive(Clone, Debug)]
pub struct Folder {
    /// Where it is.
    pub store: Arc<dyn Storage>,
    /// Its name there.
    pub key: Key,
}

impl Folder {
    /// The folder with this key in the store of a URL. The folder that the URL names must exist: if
    /// it does not, its disk is probably not mounted, and the state would be on the disk below.
    ///
    /// # Errors
    /// [`Error::BadState`] for a missing folder; [`Error::Storage`] for a URL that cannot be used.
    pub fn open(url: &str, key: &Key) -> Result<Self> {
        let store = storage::open_url(url)?;
        let object = store.display(&Key::root());
        // Only file systems have paths.
        let Some(path) = Location::new(url).local_path().map(Path::to_owned) else {
            return Ok(Folder { store, key: key.clone() });
        };
        let found = match std::fs::metadata(path) {
            Ok(about) if about.is_dir() => None,
            Ok(_) => Some("a file"),
            Err(error) if error.kind() == ErrorKind::NotFound => Some("none"),
            Err(error) => return Err(storage::Error::from_io("stat", object, error).into()),
        };
        match found {
            None => Ok(Folder { store, key: key.clone() }),
            Some(found) => Err(Error::BadState {
                operation: "offload to",
                object,
                reason: format!(
                    "expected a folder, found {found} (hint: mount the disk, or create the folder \
                     with mkdir)"
                ),
            }),
        }
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.store.display(&self.key))
    }
}

/// Contents of a folder's mark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FolderOwner {
    owner: String,
    rank: usize,
    disk: usize,
    disks: usize,
}

impl FolderOwner {
    /// `None` if the folder has no mark.
    fn read(Folder { store, key }: &Folder) -> Result<Option<Self>> {
        let key = key.join(MARK)?;
        let Manifest { format, version, meta, .. } = match Manifest::read(&**store, &key) {
            Err(storage::Error::NotFound { .. }) => return Ok(None),
            mark => mark?,
        };
        let mark = serde_json::from_value(meta).ok().filter(|_| format == FORMAT);
        mark.filter(|_| version == VERSION).map(Some).ok_or_else(|| Error::BadManifest {
            object: store.display(&key),
            place: "format and version".to_owned(),
            found: format!("{format} {version}"),
            expected: format!("{FORMAT} {VERSION} with its fields"),
        })
    }

    fn write(&self, Folder { store, key }: &Folder) -> Result<()> {
        let meta = serde_json::to_value(self).expect("strings and numbers always serialize");
        let (format, files) = (FORMAT.to_owned(), Vec::new());
        let mark = Manifest { format, version: VERSION, files, meta };
        mark.write(&**store, &key.join(MARK)?)?;
        Ok(())
    }
}

impl fmt::Display for FolderOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FolderOwner { owner, rank, disk, disks } = self;
        write!(f, "disk {disk} of {disks} of rank {rank} of '{owner}'")
    }
}

/// Locks folders for a state, while the returned locks live. Folders of another state are rejected,
/// before any of them is marked.
pub(super) fn claim(
    folders: &[Folder],
    owner: &str,
    form: &StateLayout,
) -> Result<Vec<Arc<dyn InPlaceFile>>> {
    if folders.len() != form.plan.folders() {
        let (expected, found) = (form.plan.folders(), folders.len());
        let reason = format!("expected {expected} folders as in the plan, found {found}");
        let object = "optimizer state on disk".to_owned();
        return Err(Error::BadState { operation: "open", object, reason });
    }
    let locks = folders.iter().map(lock).collect::<Result<_>>()?;
    let mut unmarked = Vec::new();
    for (disk, folder) in folders.iter().enumerate() {
        let (rank, disks) = (form.rank, folders.len());
        let expected = FolderOwner { owner: owner.to_owned(), rank, disk, disks };
        match FolderOwner::read(folder)? {
            None => unmarked.push((folder, expected)),
            Some(found) if found == expected => {}
            Some(found) => {
                return Err(Error::BadManifest {
                    object: folder.to_string(),
                    place: MARK.to_owned(),
                    found: found.to_string(),
                    expected: expected.to_string(),
                });
            }
        }
    }
    for (folder, mark) in unmarked {
        mark.write(folder)?;
    }
    Ok(locks)
}

/// Locks a folder against other processes.
fn lock(folder: &Folder) -> Result<Arc<dyn InPlaceFile>> {
    // A process that only checks the owner holds the lock for microseconds.
    match retry_while_locked(LOCK_TRIES_MAX, || open_lock(folder)) {
        Err(storage::Error::NotFound { .. }) => {
            let Folder { store, key } = folder;
            Ok(store.create_in_place(&key.join(LOCK)?, LOCK_BYTES)?)
        }
        lock => Ok(lock?),
    }
}

/// A tenth of a second in total.
const LOCK_TRIES_MAX: usize = 5;

/// Opens a file that another process may lock briefly: tries `tries_max` times, 25 ms apart.
pub(super) fn retry_while_locked(
    tries_max: usize,
    open: impl Fn() -> storage::Result<Arc<dyn InPlaceFile>>,
) -> storage::Result<Arc<dyn InPlaceFile>> {
    for _ in 1..tries_max {
        match open() {
            Err(storage::Error::Locked { .. }) => thread::sleep(Duration::from_millis(25)),
            opened => return opened,
        }
    }
    open()
}

fn open_lock(Folder { store, key }: &Folder) -> storage::Result<Arc<dyn InPlaceFile>> {
    store.open_in_place(&key.join(LOCK)?)
}

/// A folder that is marked as part of a rank's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OwnedFolder {
    /// Where it is.
    pub folder: String,
    /// The owner of the state, as passed when it was opened.
    pub owner: String,
    /// Its rank.
    pub rank: usize,
    /// The number of its disk, counted from 0.
    pub disk: usize,
    /// The number of its disks.
    pub disks: usize,
    /// Bytes of all files there. Removal does not free those that a checkpoint has too.
    pub bytes: u64,
    /// Whether a process has it open.
    pub is_open: bool,
}

/// The folders in `store` that are marked as part of a rank's state, and whether a process has them
/// open. The check locks each for a moment.
///
/// # Errors
/// Errors of the store.
pub fn marked(store: &Arc<dyn Storage>) -> Result<Vec<OwnedFolder>> {
    let mut all = Vec::new();
    for (folder, mark) in marks(store)? {
        let Folder { store, key } = &folder;
        let bytes = store.list(key)?.iter().map(|entry| entry.bytes).sum();
        let is_open = matches!(open_lock(&folder), Err(storage::Error::Locked { .. }));
        let FolderOwner { owner, rank, disk, disks } = mark;
        let folder = folder.to_string();
        all.push(OwnedFolder { folder, owner, rank, disk, disks, bytes, is_open });
    }
    Ok(all)
}

/// Removes orphaned state: those folders in `store` that are marked as this owner's, and as of a
/// rank at or beyond `ranks`. Folders that a process has open, or without a mark, are retained.
/// Returns the removed folders.
///
/// # Errors
/// Errors of the store.
pub fn sweep(store: &Arc<dyn Storage>, owner: &str, ranks: usize) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for (folder, mark) in marks(store)? {
        if mark.owner != owner || mark.rank < ranks {
            continue;
        }
        // Held until the folder is removed. Another rank may do the same concurrently.
        match open_lock(&folder) {
            Err(storage::Error::Locked { .. } | storage::Error::NotFound { .. }) => continue,
            lock => {
                let _lock = lock?;
                folder.store.delete_folder(&folder.key)?;
            }
        }
        removed.push(folder.to_string());
    }
    Ok(removed)
}

/// The folders with a mark. One that cannot be read is skipped, since its owner is unknown.
fn marks(store: &Arc<dyn Storage>) -> Result<Vec<(Folder, FolderOwner)>> {
    let names = match store.list_names(&Key::root()) {
        Err(storage::Error::NotFound { .. }) => return Ok(Vec::new()),
        names => names?,
    };
    let folder = |key| Folder { store: Arc::clone(store), key };
    let folders = names.into_iter().filter_map(|name| Key::new(name).ok().map(folder));
    let marked = |folder: Folder| {
        let mark = FolderOwner::read(&folder).ok()??;
        Some((folder, mark))
    };
    Ok(folders.filter_map(marked).collect())
}
