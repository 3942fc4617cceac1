//! The file-system operations that the protocol in `posix` is made of. `os_filesystem` has the real
//! ones; `testing` has implementations that fail and lose power on demand, so that the tested code
//! is the code that runs.

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

    /// Makes a file that was not there, for writing.
    fn create_new(&self, path: &Path) -> io::Result<Arc<dyn FsFile>>;

    /// The same, of a file that will have so many bytes at most: where a file's place depends on
    /// its length, it is found here. Zero if that is not known.
    fn create_sized(&self, path: &Path, len_bytes_max: u64) -> io::Result<Arc<dyn FsFile>> {
        let _ = len_bytes_max;
        self.create_new(path)
    }

    /// Opens a file to go on writing it. Nobody else may until it is closed: `EWOULDBLOCK`, where
    /// the file system can tell.
    fn reopen(&self, path: &Path) -> io::Result<Arc<dyn FsFile>>;

    /// What a path is, links followed.
    fn stat(&self, path: &Path) -> io::Result<Stat>;

    /// Renames a file or folder, never over anything: `EEXIST`.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Whether `rename_new` of a folder is one operation in this folder, found by trying.
    fn renames_exclusively(&self, folder: &Path) -> io::Result<bool>;

    /// Renames a file over another.
    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    fn unlink(&self, path: &Path) -> io::Result<()>;

    /// Makes one folder.
    fn mkdir(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty folder.
    fn rmdir(&self, path: &Path) -> io::Result<()>;

    /// Makes all changes of a folder's entries durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// The names in a folder that are UTF-8, in no order.
    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Bytes that may still be written, if the file system keeps count. The path need not exist.
    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>>;

    /// Who writes here, anew at every call: the mark of our temporary files.
    fn writer(&self) -> ProcessIdentity;

    /// Whether a writer still runs. One of another machine does, as far as we can tell.
    fn is_alive(&self, writer: &ProcessIdentity) -> bool;

    fn profile(&self) -> &Profile;

    /// How its files are to be read, if they are files of this machine.
    fn wishes(&self) -> Option<IoSettings> {
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

    /// Threads that should write it at the same time: while one of them waits for the last of its
    /// requests, the device has those of another.
    fn writers(&self) -> usize {
        1
    }

    /// As [`crate::Object::memory_align`].
    fn memory_align(&self) -> usize {
        1
    }

    /// Whether what is written through [`FsFile::write`] goes around the page cache.
    fn is_direct(&self) -> bool {
        false
    }

    /// Keeps others from opening it by [`FileSystem::reopen`] until it is closed, where the file
    /// system can: `EWOULDBLOCK` if another has done so.
    fn lock(&self) -> io::Result<()>;

    /// Gives the file its length and its space, if the file system can; it may then only be short
    /// of space by its own fault.
    fn allocate(&self, len_bytes: u64) -> io::Result<()>;

    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Makes content and length durable. After a failure nothing may be assumed of what was
    /// written, also if a second call succeeds.
    fn sync(&self) -> io::Result<()>;

    fn map(&self, len_bytes: u64) -> io::Result<Map>;

    /// How many names it has.
    fn names(&self) -> io::Result<u64>;

    /// The file, if the kernel of this machine has it.
    fn os_file(&self) -> Option<&File> {
        None
    }
}

/// What is at a path.
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

/// The folder that a path is in.
pub(crate) fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        Some(_) => PathBuf::from("."),
        None => path.to_owned(),
    }
}
