//! Files written in place by one process while it lives: state that is on disk because memory
//! cannot hold it. Unlike an object, such a file exists before it is complete; an object, written
//! as a record, says which of its bytes are valid.

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
/// number of threads, as long as none of them writes what another reads or writes.
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
    /// object, and must not be written any more.
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
    place: Arc<StoreRoot>,
}

impl fmt::Debug for PosixInPlaceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PosixInPlaceFile({}, {} bytes)", self.object.name, self.object.len_bytes)
    }
}

impl PosixInPlaceFile {
    /// Creates one, with all its space. Its name is durable when this returns.
    pub(crate) fn create(place: Arc<StoreRoot>, key: &Key, len_bytes: u64) -> Result<Self> {
        let path = place.path(key);
        let name = path.display().to_string();
        place.make_folder(&folder_of(&path))?;
        let file = place.disk.create_sized(&path, len_bytes).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists { object: name.clone() },
            _ => Error::from_io("create", &name, e),
        })?;
        let make = || {
            file.lock()?;
            file.allocate(len_bytes)?;
            // Where space cannot be reserved the length is set all the same.
            file.set_len(len_bytes)?;
            place.disk.sync_dir(&folder_of(&path))
        };
        if let Err(e) = make() {
            // Best effort: a file of a slot without a record is removed by the next opening.
            let _ = place.disk.unlink(&path);
            let failed = Error::from_io("allocate", &name, e);
            return Err(no_space(&place, &path, len_bytes, failed));
        }
        Ok(PosixInPlaceFile { object: PosixObject { file, len_bytes, name }, place })
    }

    /// Creates one without a name, with all its space.
    pub(crate) fn create_unnamed(
        place: Arc<StoreRoot>,
        folder: &Key,
        len_bytes: u64,
    ) -> Result<Self> {
        let folder = place.path(folder);
        let name = format!("an unnamed file in {}", folder.display());
        place.make_folder(&folder)?;
        // It briefly has a name, by which a sweep finds it if this process dies in that moment.
        let path = folder.join(temp_names::name_for("unnamed", &place.disk.writer()));
        let make = || {
            let file = place.disk.create_sized(&path, len_bytes)?;
            place.disk.unlink(&path)?;
            file.allocate(len_bytes)?;
            file.set_len(len_bytes)?;
            Ok(file)
        };
        let file = make().map_err(|e| {
            let failed = Error::from_io("allocate", &name, e);
            no_space(&place, &path, len_bytes, failed)
        })?;
        Ok(PosixInPlaceFile { object: PosixObject { file, len_bytes, name }, place })
    }

    pub(crate) fn open(place: Arc<StoreRoot>, key: &Key) -> Result<Self> {
        let path = place.path(key);
        let name = path.display().to_string();
        let file = place.disk.reopen(&path).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => Error::Locked { object: name.clone() },
            _ => Error::from_io("open", &name, e),
        })?;
        let len_bytes = file.len_bytes().map_err(|e| Error::from_io("open", &name, e))?;
        Ok(PosixInPlaceFile { object: PosixObject { file, len_bytes, name }, place })
    }

    fn failed(&self, failure: TransferError) -> Error {
        let doing = format!("write {} bytes at byte {} of", failure.expected, failure.offset);
        let failed = Error::from_io(doing, &self.object.name, failure.into_io());
        no_space(&self.place, self.object.name.as_ref(), self.object.len_bytes, failed)
    }
}

/// Converts an error, with the byte counts if space ran out.
fn no_space(place: &StoreRoot, path: &Path, need_bytes: u64, failed: Error) -> Error {
    match failed {
        Error::NoSpace { object, .. } => {
            let free_bytes = place.disk.free_bytes(&folder_of(path)).ok().flatten();
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
        let (whole, end) = bytes.split_at(bytes.len() / ALIGN_BYTES * ALIGN_BYTES);
        for (offset, bytes) in [(offset, whole), (offset + whole.len() as u64, end)] {
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
pub(crate) fn share(
    place: &Arc<StoreRoot>,
    path: &Path,
    from: &std::fs::File,
    how: LinkMethod,
) -> Result<Option<PendingDirSync>> {
    let name = path.display().to_string();
    let folder = folder_of(path);
    place.make_folder(&folder)?;
    let shared = match how {
        LinkMethod::Name => syscalls::link(from, path),
        LinkMethod::Blocks => clone(place, path, from),
    };
    match shared {
        Ok(()) => Ok(Some(PendingDirSync::in_folder(Arc::clone(&place.disk), folder))),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(Error::Exists { object: name }),
        Err(e) if cannot(&e) => {
            log::debug!("{name}: {how:?} not linked: {e}");
            Ok(None)
        }
        Err(e) => Err(Error::from_io("link", name, e)),
    }
}

fn clone(place: &StoreRoot, path: &Path, from: &std::fs::File) -> io::Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let temporary = folder_of(path).join(temp_names::name_for(name, &place.disk.writer()));
    let file = place.disk.create_new(&temporary)?;
    let make = || {
        syscalls::clone_blocks(from, file.os_file().ok_or(io::ErrorKind::Unsupported)?)?;
        file.sync()?;
        place.disk.rename_new(&temporary, path)
    };
    make().inspect_err(|_| {
        // Best effort: a leftover is hidden, and swept when this process is gone.
        let _ = place.disk.unlink(&temporary);
    })
}

/// Another file system, one that has no such thing, too many names of one file, a sandbox.
fn cannot(e: &io::Error) -> bool {
    use libc::{EINVAL, EMLINK, ENOSYS, ENOTTY, EOPNOTSUPP, EPERM, EXDEV};
    let said = [EXDEV, EOPNOTSUPP, ENOTTY, EINVAL, EPERM, EMLINK, ENOSYS];
    e.kind() == io::ErrorKind::Unsupported || e.raw_os_error().is_some_and(|e| said.contains(&e))
}
