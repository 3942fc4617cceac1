//! Files written in place by one process while it lives: state that is on disk because memory
//! cannot hold it. Unlike an object, such a file exists before it is complete; a separate object,
//! the record, lists which of its bytes are valid.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::base::temp_names;
use crate::fs::filesystem::folder_of;
use crate::io::transfer::TransferError;
use crate::posix::store::{PosixObject, StoreRoot};
use crate::sys::aligned_buffer::ALIGN_BYTES;
use crate::sys::syscalls;
use crate::{Error, Key, Map, Object, PendingDirSync, RangeRead, Result};

/// A file of a fixed length that its owner writes in place. Bytes are read and written by any
/// number of threads, as long as no range is written while another thread reads or writes it.
pub trait InPlaceFile: Object {
    /// Writes all bytes. No request is in flight when it returns. Ranges that start and end at
    /// multiples of 4096, in memory and in the file, use direct I/O.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`].
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()>;

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// [`Error::Io`]. Everything since the last sync must then be written again, to another file.
    fn sync(&self) -> Result<()>;

    /// The number of hard links: zero if the file was removed, more than one if it is also an
    /// object and must no longer be written.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn names(&self) -> Result<u64>;
}

/// How [`Storage::link`](crate::Storage::link) shares the bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkMethod {
    /// The file gets a second name, and must never be written again.
    Name,
    /// Another file shares the blocks; the file system copies them on write (`FICLONE`).
    Blocks,
}

/// An in-place file of a file system.
pub(crate) struct PosixInPlaceFile {
    object: PosixObject,
    root: Arc<StoreRoot>,
}

impl fmt::Debug for PosixInPlaceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PosixInPlaceFile({}, {} bytes)", self.object.name, self.object.len_bytes)
    }
}

impl PosixInPlaceFile {
    /// Creates one, with all its space. Its name is durable when this returns.
    pub(crate) fn create(root: Arc<StoreRoot>, key: &Key, len_bytes: u64) -> Result<Self> {
        let path = root.path(key);
        let name = path.display().to_string();
        root.make_folder(&folder_of(&path))?;
        let file = root.disk.create_sized(&path, len_bytes).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists { object: name.clone() },
            _ => Error::from_io("create", &name, e),
        })?;
        let make = || {
            file.lock()?;
            file.allocate(len_bytes)?;
            // The length is set even where space cannot be reserved.
            file.set_len(len_bytes)?;
            root.disk.sync_dir(&folder_of(&path))
        };
        if let Err(e) = make() {
            // Best effort: a leftover file without a record is removed when its owner next opens
            // its files.
            let _ = root.disk.unlink(&path);
            let failed = Error::from_io("allocate", &name, e);
            return Err(no_space(&root, &path, len_bytes, failed));
        }
        Ok(PosixInPlaceFile { object: PosixObject { file, len_bytes, name }, root })
    }

    /// Creates one without a name, with all its space.
    pub(crate) fn create_unnamed(
        root: Arc<StoreRoot>,
        folder: &Key,
        len_bytes: u64,
    ) -> Result<Self> {
        let folder = root.path(folder);
        let name = format!("an unnamed file in {}", folder.display());
        root.make_folder(&folder)?;
        // It briefly has a name, by which a sweep finds it if this process dies at that moment.
        let path = folder.join(temp_names::name_for("unnamed", &root.disk.writer()));
        let make = || {
            let file = root.disk.create_sized(&path, len_bytes)?;
            root.disk.unlink(&path)?;
            file.allocate(len_bytes)?;
            file.set_len(len_bytes)?;
            Ok(file)
        };
        let file = make().map_err(|e| {
            let failed = Error::from_io("allocate", &name, e);
            no_space(&root, &path, len_bytes, failed)
        })?;
        Ok(PosixInPlaceFile { object: PosixObject { file, len_bytes, name }, root })
    }

    pub(crate) fn open(root: Arc<StoreRoot>, key: &Key) -> Result<Self> {
        let path = root.path(key);
        let name = path.display().to_string();
        let file = root.disk.reopen(&path).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => Error::Locked { object: name.clone() },
            _ => Error::from_io("open", &name, e),
        })?;
        let len_bytes = file.len_bytes().map_err(|e| Error::from_io("open", &name, e))?;
        Ok(PosixInPlaceFile { object: PosixObject { file, len_bytes, name }, root })
    }

    fn failed(&self, failure: TransferError) -> Error {
        let operation = format!("write {} bytes at byte {} of", failure.expected, failure.offset);
        let failed = Error::from_io(operation, &self.object.name, failure.into_io());
        no_space(&self.root, self.object.name.as_ref(), self.object.len_bytes, failed)
    }
}

/// Converts an error, with the byte counts if space ran out.
fn no_space(root: &StoreRoot, path: &Path, need_bytes: u64, failed: Error) -> Error {
    match failed {
        Error::NoSpace { object, .. } => {
            let free_bytes = root.disk.free_bytes(&folder_of(path)).ok().flatten();
            Error::NoSpace { object, need_bytes, free_bytes }
        }
        other => other,
    }
}

impl Object for PosixInPlaceFile {
    fn len_bytes(&self) -> u64 {
        self.object.len_bytes
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        self.object.read_many(reads)
    }

    fn map(&self) -> Result<Map> {
        self.object.map()
    }

    fn display(&self) -> String {
        self.object.display()
    }

    fn memory_align(&self) -> usize {
        self.object.memory_align()
    }

    fn file(&self) -> Option<&std::fs::File> {
        self.object.file()
    }
}

impl InPlaceFile for PosixInPlaceFile {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let expected = bytes.len() as u64;
        if offset.checked_add(expected).is_none_or(|end| end > self.object.len_bytes) {
            let object = self.object.name.clone();
            let found = format!("a write of {expected} bytes");
            let expected = format!("a write within {} bytes", self.object.len_bytes);
            return Err(Error::Corrupt { object, offset, found, expected });
        }
        // The end of a file need not be block-aligned, and uses buffered I/O.
        let (aligned, end) = bytes.split_at(bytes.len() / ALIGN_BYTES * ALIGN_BYTES);
        for (offset, bytes) in [(offset, aligned), (offset + aligned.len() as u64, end)] {
            if !bytes.is_empty() {
                self.object.file.write(offset, bytes).map_err(|failure| self.failed(failure))?;
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let failed = |e| Error::from_io("sync", &self.object.name, e);
        self.object.file.sync().map_err(failed)
    }

    fn names(&self) -> Result<u64> {
        let failed = |e| Error::from_io("stat", &self.object.name, e);
        self.object.file.names().map_err(failed)
    }
}

/// Creates the object `path` from the bytes of a file. `None` if this file system or these two
/// files do not support that.
pub(crate) fn link(
    root: &Arc<StoreRoot>,
    path: &Path,
    from: &std::fs::File,
    how: LinkMethod,
) -> Result<Option<PendingDirSync>> {
    let name = path.display().to_string();
    let folder = folder_of(path);
    root.make_folder(&folder)?;
    let linked = match how {
        LinkMethod::Name => syscalls::link(from, path),
        LinkMethod::Blocks => clone(root, path, from),
    };
    match linked {
        Ok(()) => Ok(Some(PendingDirSync::in_folder(Arc::clone(&root.disk), folder))),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(Error::Exists { object: name }),
        Err(e) if is_unsupported(&e) => {
            log::debug!("{name}: {how:?} not linked: {e}");
            Ok(None)
        }
        Err(e) => Err(Error::from_io("link", name, e)),
    }
}

fn clone(root: &StoreRoot, path: &Path, from: &std::fs::File) -> io::Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let temporary = folder_of(path).join(temp_names::name_for(name, &root.disk.writer()));
    let file = root.disk.create_new(&temporary)?;
    let make = || {
        syscalls::clone_blocks(from, file.os_file().ok_or(io::ErrorKind::Unsupported)?)?;
        file.sync()?;
        root.disk.rename_new(&temporary, path)
    };
    make().inspect_err(|_| {
        // Best effort: a leftover is hidden, and a sweep removes it after this process has ended.
        let _ = root.disk.unlink(&temporary);
    })
}

/// Whether an error means another file system, a missing feature, too many hard links, or a
/// sandbox.
fn is_unsupported(e: &io::Error) -> bool {
    use libc::{EINVAL, EMLINK, ENOSYS, ENOTTY, EOPNOTSUPP, EPERM, EXDEV};
    let errnos = [EXDEV, EOPNOTSUPP, ENOTTY, EINVAL, EPERM, EMLINK, ENOSYS];
    e.kind() == io::ErrorKind::Unsupported || e.raw_os_error().is_some_and(|e| errnos.contains(&e))
}
