//! The file-system operations that the protocol in `posix` uses. `os_filesystem` has the real ones;
//! `testing` has implementations with fault injection and simulated power loss, so that tests run
//! the real protocol.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

use crate::api::settings::IoSettings;
use crate::io::transfer::TransferError;
use crate::{Map, ProcessIdentity, Profile, RangeRead};

/// A file system. Paths are absolute or below the root that the store was opened with.
pub(crate) trait FileSystem: fmt::Debug + Send + Sync {
    /// Opens a regular file for reading; a folder is refused with `EISDIR`.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn FsFile>>;

    /// Creates a file for writing; it must not exist.
    fn create_new(&self, path: &Path) -> io::Result<Arc<dyn FsFile>>;

    /// As [`FileSystem::create_new`], with an upper bound of the file's length, on which its
    /// striping may depend. Zero if unknown.
    fn create_sized(&self, path: &Path, len_bytes_max: u64) -> io::Result<Arc<dyn FsFile>> {
        let _ = len_bytes_max;
        self.create_new(path)
    }

    /// Opens a file to continue writing it, with an exclusive lock: `EWOULDBLOCK` if another
    /// process has it, where the file system supports locks.
    fn reopen(&self, path: &Path) -> io::Result<Arc<dyn FsFile>>;

    /// The type of a path, links followed.
    fn stat(&self, path: &Path) -> io::Result<Stat>;

    /// Renames a file or folder without replacing anything: `EEXIST`.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Whether `rename_new` of a folder is atomic in this folder; tested with a file.
    fn renames_exclusively(&self, folder: &Path) -> io::Result<bool>;

    /// Renames a file, replacing another.
    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn unlink(&self, path: &Path) -> io::Result<()>;

    /// Creates one folder.
    fn mkdir(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn rmdir(&self, path: &Path) -> io::Result<()>;

    /// Makes all changes of a folder's entries durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// The UTF-8 names in a folder, in no particular order.
    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Bytes that may still be written, if the file system keeps count. The path need not exist.
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>>;

    /// A new identity of this writer at every call, for temporary names.
    fn writer(&self) -> ProcessIdentity;

    /// Whether a writer still runs. One on another machine counts as running.
    fn is_alive(&self, writer: &ProcessIdentity) -> bool;

    fn profile(&self) -> &Profile;

    /// The read settings for its files, if they are files of this machine.
    fn settings(&self) -> Option<IoSettings> {
        None
    }
}

/// An open file.
pub(crate) trait FsFile: fmt::Debug + Send + Sync {
    fn len_bytes(&self) -> io::Result<u64>;

    /// Fills every buffer. Nothing is in flight when it returns.
    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<(), TransferError>;

    /// Writes all bytes. Nothing is in flight when it returns.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TransferError>;

    /// The number of threads to write it with: while one waits for the last of its requests, the
    /// device processes those of another.
    fn writers(&self) -> usize {
        1
    }

    /// As [`crate::Object::memory_align`].
    fn memory_align(&self) -> usize {
        1
    }

    /// Whether [`FsFile::write`] uses direct I/O.
    fn is_direct(&self) -> bool {
        false
    }

    /// Locks it against [`FileSystem::reopen`] until it is closed, where the file system supports
    /// locks: `EWOULDBLOCK` if it is locked already.
    fn lock(&self) -> io::Result<()>;

    /// Sets the file's length and reserves its space, where the file system supports that.
    fn allocate(&self, len_bytes: u64) -> io::Result<()>;

    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Makes content and length durable. After a failure the written bytes must be assumed lost,
    /// even if a second call succeeds.
    fn sync(&self) -> io::Result<()>;

    fn map(&self, len_bytes: u64) -> io::Result<Map>;

    /// The number of its hard links.
    fn names(&self) -> io::Result<u64>;

    /// The file, if it is a file of this machine.
    fn os_file(&self) -> Option<&File> {
        None
    }
}

/// The type of a directory entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stat {
    File {
        len_bytes: u64,
    },
    Folder,
    /// A device, a socket or a pipe.
    Other,
}

/// One name in a folder.
#[derive(Clone, Debug)]
pub(crate) struct DirEntry {
    pub(crate) text: String,
    /// A folder itself, not a link to one.
    pub(crate) is_folder: bool,
}

/// The parent folder of a path.
pub(crate) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        Some(_) => PathBuf::from("."),
        None => path.to_owned(),
    }
}
