//! Opens and checks the targets, and removes the files of the benchmark from them.
//!
//! Everything written to a target is in one folder of it, which has a unique name. Only
//! [`TargetFolder::key`] makes names in it, and a [`Key`] cannot leave its folder.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::{fs, io};

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use storage::simulate::Simulation;
use storage::{ByteSize, Key, Location, Storage};

use super::measure::counters::CounterSource;

/// Prefix of the folder in each target; a unique id follows.
pub const FOLDER: &str = "feedline-bench-";

/// A folder of a target, as this process sees it.
#[derive(Debug)]
pub struct TargetFolder {
    /// Name in outputs.
    pub name: String,
    /// URL from the command line.
    pub url: String,
    /// The target.
    pub store: Arc<dyn Storage>,
    /// Source of the count of moved bytes.
    pub witness: CounterSource,
    /// The model, if the target is simulated.
    pub simulation: Option<Arc<Simulation>>,
    folder: Key,
    path: Option<PathBuf>,
    /// Whether the folder may contain files.
    has_files: AtomicBool,
}

/// Opens the store of a URL, behind the model if there is one. Every measured store is opened here.
///
/// # Errors
/// As [`storage::open_url`].
pub fn open_target(url: &str, model: Option<&Arc<Simulation>>) -> Result<Arc<dyn Storage>> {
    let store = storage::open_url(url)?;
    Ok(match model {
        Some(model) => model.wrap(store),
        None => store,
    })
}

impl TargetFolder {
    /// Opens a folder of an existing target. Nothing is written yet.
    ///
    /// # Errors
    /// If the target is not a folder, or `/etc/fstab` names a mount for it that is not mounted.
    pub fn open(
        name: &str,
        url: &str,
        simulation: Option<Arc<Simulation>>,
        id: &str,
    ) -> Result<Self> {
        let path = Location::new(url).local_path().map(Path::to_owned);
        if let Some(path) = &path {
            check_folder(url, path)?;
        }
        let store = open_target(url, simulation.as_ref())?;
        if let Some(path) = &path {
            check_mounted(url, path, &store.profile().mount_point)?;
        }
        let witness = CounterSource::of(&store.profile().file_system);
        let folder = Key::new(format!("{FOLDER}{id}"))?;
        let (name, url) = (name.to_owned(), url.to_owned());
        // Access by path would bypass the model.
        let path = path.filter(|_| simulation.is_none());
        let has_files = AtomicBool::new(false);
        Ok(TargetFolder { name, url, store, witness, simulation, folder, path, has_files })
    }

    /// Opens the target again, as another process would.
    ///
    /// # Errors
    /// As [`open_target`].
    pub fn reopen(&self) -> Result<Arc<dyn Storage>> {
        open_target(&self.url, self.simulation.as_ref())
    }

    /// The name of something in the folder.
    ///
    /// # Errors
    /// As [`Key::join`].
    pub fn key(&self, name: &str) -> storage::Result<Key> {
        self.folder.join(name)
    }

    /// Its path on this machine, if it is a file.
    #[must_use]
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.path_of(&self.key(name).ok()?)
    }

    /// The same for one of its keys.
    #[must_use]
    pub fn path_of(&self, key: &Key) -> Option<PathBuf> {
        Some(self.path.as_ref()?.join(key.as_str()))
    }

    /// Name of the folder in messages.
    #[must_use]
    pub fn folder(&self) -> String {
        self.store.display(&self.folder)
    }

    /// Creates the folder, and checks that files can be written.
    ///
    /// # Errors
    /// If nothing can be written, or less than `need_bytes` is free.
    pub fn begin(&self, need_bytes: u64) -> Result<()> {
        let about = b"Test files of `feedline bench`. Delete the folder if none is running.\n";
        let store = self.store.as_ref();
        // Nothing is written to a target that cannot be listed, because it could not be removed.
        let listed = self.store.list_names(&self.folder);
        listed.map_err(|error| self.with_hint(error)).context("cannot list its folder")?;
        self.has_files.store(true, Relaxed);
        let written = self.key("about.txt").and_then(|key| storage::write_all(store, &key, about));
        written.map_err(|error| self.with_hint(error)).context("cannot create a folder in it")?;
        if let Some(free) = self.store.free_bytes()? {
            ensure!(
                free >= need_bytes,
                "expected {} of free space, found {} (hint: lower --bytes, --checkpoint or \
                 --files)",
                ByteSize(need_bytes),
                ByteSize(free)
            );
        }
        Ok(())
    }

    /// Whether files may have been written to the folder.
    #[must_use]
    pub fn may_have_files(&self) -> bool {
        self.has_files.load(Relaxed)
    }

    /// Removes the folder and all in it.
    ///
    /// # Errors
    /// If the store cannot delete it.
    pub fn remove(&self) -> Result<()> {
        self.store.delete_folder(&self.folder).map_err(|error| self.with_hint(error))
    }

    /// An error of the store, with a hint.
    #[must_use]
    pub fn with_hint(&self, error: storage::Error) -> Error {
        let may_write = "use a folder of it that you may write to";
        let hint = match &error {
            storage::Error::Denied { .. } => may_write,
            storage::Error::Io { source, .. } if is_read_only(source) => may_write,
            storage::Error::NoSpace { .. } => "lower --bytes, --checkpoint or --files",
            _ => return Error::new(error),
        };
        anyhow!("{error} (hint: {hint})")
    }
}

fn is_read_only(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ReadOnlyFilesystem
}

/// Refuses a path that is not a folder: without the mount, the benchmark would create a folder of
/// that name on the system's disk and measure that disk.
pub(crate) fn check_folder(url: &str, path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => bail!("cannot use {url}: expected a folder, found a file"),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            bail!("cannot use {url}: no such folder (hint: mount it, or create it first)")
        }
        Err(e) if e.raw_os_error() == Some(NOT_CONNECTED) => {
            bail!(
                "cannot use {url}: {e} (hint: the process of this FUSE mount has ended; unmount it \
                 and mount it again)"
            )
        }
        Err(e) => Err(Error::new(storage::Error::from_io("stat", url, e))),
    }
}

/// `ENOTCONN`, the error of every call on a FUSE mount whose process has died.
const NOT_CONNECTED: i32 = 107;

/// Refuses an absent mount: an empty mount point looks like any other folder, and the benchmark
/// would measure the disk below it.
fn check_mounted(url: &str, path: &Path, mount_point: &str) -> Result<()> {
    let table = fs::read_to_string("/etc/fstab").unwrap_or_default();
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if let Some((point, kind)) = not_mounted(&table, &path, mount_point) {
        bail!(
            "cannot use {url}: {point} ({kind} in /etc/fstab) is not mounted, so files would go to \
             {mount_point} (hint: mount {point})"
        );
    }
    Ok(())
}

/// The entry of `fstab(5)` that should be mounted above a path, below the current mount point.
#[must_use]
pub fn not_mounted(table: &str, path: &Path, mount_point: &str) -> Option<(String, String)> {
    let entries = table.lines().filter(|line| !line.trim_start().starts_with('#'));
    let entries = entries.filter_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        Some((words.next()?, words.next()?))
    });
    let above = entries.filter(|(point, _)| point.starts_with('/') && path.starts_with(point));
    let nearest = above.max_by_key(|(point, _)| point.len())?;
    let is_there = Path::new(mount_point).starts_with(nearest.0) || mount_point.is_empty();
    (!is_there).then(|| (nearest.0.to_owned(), nearest.1.to_owned()))
}
