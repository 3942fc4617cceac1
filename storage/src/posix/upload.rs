//! The protocol that creates an object: temporary name, space, content, fsync, exclusive rename,
//! fsync of the folder. If a step fails, no file is left.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::{io, mem};

use crate::base::temp_names;
use crate::fs::filesystem::{FsFile, folder_of};
use crate::io::transfer::{TransferError, TransferErrorKind};
use crate::posix::kernel_copy;
use crate::posix::store::{PosixObject, StoreRoot};
use crate::posix::write_behind::{BUFFERS_MIN, WriteBehind};
use crate::sys::aligned_buffer::BUF_BYTES;
use crate::{
    Crc64, Error, FileEntry, Key, Object, PendingDirSync, Result, ResumableUpload, SyncPoint,
    Upload, crc64_join,
};

/// Objects up to this size are written by one buffered call, larger ones by direct I/O: a
/// checkpoint would evict the data set from the page cache, and its `fsync` would take seconds
/// instead of milliseconds.
const SMALL_BYTES_MAX: usize = 256 << 10;

/// Times that the folder may vanish, by another writer's failed upload, between its creation and
/// that of a file in it.
const FOLDER_RETRIES_MAX: usize = 16;

/// An object being written.
pub(crate) struct PosixUpload {
    root: Arc<StoreRoot>,
    /// `None` once it is closed.
    file: Option<Arc<dyn FsFile>>,
    content: UploadBuffer,
    /// The temporary path, and the final one.
    temporary: PathBuf,
    path: PathBuf,
    /// Its name in messages.
    name: String,
    file_name: String,
    /// Folders created for it.
    made: Vec<PathBuf>,
    /// Length of the file as last set by this upload.
    allocated: u64,
    /// The most write-behind buffers.
    buffers_max: usize,
    len_bytes: u64,
    len_bytes_max: u64,
    /// The sync point that this writer resumed from.
    resumed: SyncPoint,
    /// Checksum of the bytes after that.
    crc: Crc64,
    on_drop: OnDrop,
    state: UploadState,
}

/// What a drop does with the file of an unfinished upload.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnDrop {
    Removed,
    /// The upload is resumable. Its name is durable from the first sync on.
    Kept {
        named: bool,
    },
}

enum UploadBuffer {
    Small(Vec<u8>),
    Large(WriteBehind),
    /// All bytes are written, or the upload was dropped.
    Flushed,
}

enum UploadState {
    Open,
    /// With the first error.
    Poisoned(String),
    Finished,
}

impl fmt::Debug for PosixUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PosixUpload({}, {} bytes so far)", self.name, self.len_bytes)
    }
}

impl PosixUpload {
    pub(crate) fn start(root: Arc<StoreRoot>, key: &Key, len_bytes_max: u64) -> Result<Self> {
        let path = root.path(key);
        let name = path.display().to_string();
        let folder = folder_of(&path);
        let free_bytes = root.disk.free_bytes(&folder).ok().flatten();
        if let Some(free) = free_bytes
            && free < len_bytes_max
        {
            return Err(Error::NoSpace { object: name, need_bytes: len_bytes_max, free_bytes });
        }
        let (made, temporary, file) = create_temporary(&root, &path, key.name(), len_bytes_max)?;
        let mut upload = PosixUpload::new(root, key, file, temporary);
        upload.made = made;
        upload.len_bytes_max = len_bytes_max;
        if len_bytes_max > SMALL_BYTES_MAX as u64 {
            let allocate = upload.file().allocate(len_bytes_max);
            allocate.map_err(|e| upload.failed("allocate", e))?;
            upload.allocated = len_bytes_max;
        }
        Ok(upload)
    }

    pub(crate) fn start_resumable(root: Arc<StoreRoot>, key: &Key) -> Result<Self> {
        let path = root.draft_path(key);
        root.make_folder(&folder_of(&path))?;
        let failed = |e| Error::from_io("create", path.display().to_string(), e);
        let file = root.disk.create_new(&path).map_err(failed)?;
        file.lock().map_err(|e| locked(&path, e))?;
        let mut upload = PosixUpload::new(root, key, Arc::clone(&file), path);
        let large = WriteBehind::start(file, BUFFERS_MIN);
        upload.content = UploadBuffer::Large(large.map_err(|e| upload.failed("create", e))?);
        // An upload that fails to start leaves no file: it is kept only from here on.
        upload.on_drop = OnDrop::Kept { named: false };
        Ok(upload)
    }

    /// `find` returns the sync point; it is called once no other process can write the file.
    pub(crate) fn resume(
        root: Arc<StoreRoot>,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Self> {
        let path = root.draft_path(key);
        let failed = |e| Error::from_io("resume", path.display().to_string(), e);
        let file = root.disk.reopen(&path).map_err(|e| locked(&path, e))?;
        let len_bytes = file.len_bytes().map_err(failed)?;
        let name = path.display().to_string();
        let from = find(&PosixObject { file: Arc::clone(&file), len_bytes, name })?;
        if len_bytes < from.bytes {
            return Err(Error::Corrupt {
                object: path.display().to_string(),
                offset: len_bytes,
                found: "end of file".to_owned(),
                expected: format!("the synced {} bytes", from.bytes),
            });
        }
        file.set_len(from.bytes).map_err(failed)?;
        let mut upload = PosixUpload::new(root, key, Arc::clone(&file), path);
        upload.on_drop = OnDrop::Kept { named: false };
        (upload.resumed, upload.len_bytes) = (from, from.bytes);
        let large = WriteBehind::resume(&file, from.bytes, BUFFERS_MIN);
        upload.content =
            UploadBuffer::Large(large.map_err(|failure| upload.write_failed(failure))?);
        Ok(upload)
    }

    fn new(root: Arc<StoreRoot>, key: &Key, file: Arc<dyn FsFile>, temporary: PathBuf) -> Self {
        let path = root.path(key);
        PosixUpload {
            file: Some(file),
            content: UploadBuffer::Small(Vec::new()),
            temporary,
            name: path.display().to_string(),
            path,
            file_name: key.name().to_owned(),
            made: Vec::new(),
            allocated: 0,
            buffers_max: BUFFERS_MIN,
            len_bytes: 0,
            len_bytes_max: 0,
            resumed: SyncPoint::default(),
            crc: Crc64::new(),
            on_drop: OnDrop::Removed,
            state: UploadState::Open,
            root,
        }
    }

    /// Checksum of all bytes, with those of earlier writers.
    fn crc64(&self) -> u64 {
        let SyncPoint { bytes, crc64 } = self.resumed;
        crc64_join(crc64, self.crc.value(), self.len_bytes - bytes)
    }

    fn sync_content(&mut self) -> Result<()> {
        if let UploadBuffer::Large(large) = &mut self.content {
            let flushed = large.flush();
            flushed.map_err(|failure| self.write_failed(failure))?;
        }
        self.file().sync().map_err(|e| self.failed("sync", e))?;
        if self.on_drop == (OnDrop::Kept { named: false }) {
            let synced = self.root.disk.sync_dir(&folder_of(&self.temporary));
            synced.map_err(|e| self.failed("sync the folder of", e))?;
            self.on_drop = OnDrop::Kept { named: true };
        }
        Ok(())
    }

    fn check_state(&self) -> Result<()> {
        match &self.state {
            UploadState::Poisoned(first) => {
                Err(Error::Poisoned { object: self.name.clone(), first: first.clone() })
            }
            UploadState::Open | UploadState::Finished => Ok(()),
        }
    }

    fn file(&self) -> &Arc<dyn FsFile> {
        self.file.as_ref().expect("open until all is written and synced")
    }

    /// Appends bytes, and computes their checksum unless it is known.
    fn append(&mut self, bytes: &[u8], known_crc64: Option<u64>) -> Result<()> {
        let offset = self.len_bytes;
        let joined = known_crc64.map(|crc64| crc64_join(self.crc64(), crc64, bytes.len() as u64));
        self.len_bytes += bytes.len() as u64;
        if let UploadBuffer::Small(small) = &mut self.content {
            if small.len() + bytes.len() <= SMALL_BYTES_MAX {
                small.extend_from_slice(bytes);
                match joined {
                    Some(crc64) => self.restart_crc(crc64),
                    None => self.crc.update(bytes),
                }
                return Ok(());
            }
            let small = mem::take(small);
            let mut large =
                WriteBehind::start(Arc::clone(self.file()), self.buffers_max).map_err(|e| {
                    Error::from_io("start", format!("a thread to write {}", self.name), e)
                })?;
            // The checksum has these bytes already.
            let copied = large.copy(&small);
            self.content = UploadBuffer::Large(large);
            copied.map_err(|failure| self.write_failed(failure))?;
        }
        if let UploadBuffer::Flushed = self.content {
            let large = WriteBehind::resume(self.file(), offset, self.buffers_max);
            self.content =
                UploadBuffer::Large(large.map_err(|failure| self.write_failed(failure))?);
        }
        let UploadBuffer::Large(large) = &mut self.content else {
            unreachable!("large since above")
        };
        let pushed = match known_crc64 {
            Some(_) => large.copy(bytes),
            None => large.push(bytes, &mut self.crc),
        };
        pushed.map_err(|failure| self.write_failed(failure))?;
        joined.into_iter().for_each(|crc64| self.restart_crc(crc64));
        Ok(())
    }

    /// Starts a new checksum after all bytes so far, whose checksum is `crc64`.
    fn restart_crc(&mut self, crc64: u64) {
        (self.resumed, self.crc) = (SyncPoint { bytes: self.len_bytes, crc64 }, Crc64::new());
    }

    /// Runs a step that changes the upload; after the first failure all later steps fail.
    fn attempt<T>(&mut self, step: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.check_state()?;
        step(self).inspect_err(|e| self.state = UploadState::Poisoned(e.to_string()))
    }

    /// Appends by a copy within the kernel where possible, else by reading.
    fn copy(&mut self, object: &dyn Object, range: &Range<u64>, crc64: Option<u64>) -> Result<()> {
        let len = range.end.saturating_sub(range.start);
        let (crc64_b, from) = match (crc64, object.file()) {
            (Some(crc64), Some(from))
                if len > SMALL_BYTES_MAX as u64
                    && kernel_copy::may_share(self.root.disk.profile()) =>
            {
                (crc64, from)
            }
            _ => return kernel_copy::read_and_write(self, object, range, crc64),
        };
        self.len_bytes_max = self.len_bytes_max.max(self.len_bytes + len);
        self.flush_content()?;
        let Some(to) = self.file().os_file() else {
            return kernel_copy::read_and_write(self, object, range, crc64);
        };
        let may_continue = |bytes| object.copied(bytes);
        let copied = kernel_copy::copy_range(from, range, to, self.len_bytes, &may_continue);
        self.allocated = u64::MAX; // it may have grown past its end
        if copied.map_err(|e| self.failed(&format!("copy {} to", object.display()), e))? < len {
            // The part already copied is overwritten with the same bytes.
            return kernel_copy::read_and_write(self, object, range, crc64);
        }
        let crc64 = crc64_join(self.crc64(), crc64_b, len);
        self.len_bytes += len;
        self.restart_crc(crc64);
        Ok(())
    }

    /// Writes all bytes still in buffers.
    fn flush_content(&mut self) -> Result<()> {
        let written = match mem::replace(&mut self.content, UploadBuffer::Flushed) {
            UploadBuffer::Small(small) => self.file().write(0, &small).map(|()| small.len() as u64),
            // The last block is padded.
            UploadBuffer::Large(large) => large.finish(),
            UploadBuffer::Flushed => Ok(0),
        };
        let end = written.map_err(|failure| self.write_failed(failure))?;
        self.allocated = self.allocated.max(end);
        Ok(())
    }

    fn mark_finished(&mut self) -> FileEntry {
        self.state = UploadState::Finished;
        let path = mem::take(&mut self.file_name);
        FileEntry { path, bytes: self.len_bytes, crc64: self.crc64() }
    }

    /// Makes all bytes durable under the final name, which a crash may still lose.
    fn rename_to_final(&mut self) -> Result<()> {
        self.flush_content()?;
        if self.allocated != self.len_bytes {
            let cut = self.file().set_len(self.len_bytes);
            cut.map_err(|e| self.failed("truncate", e))?;
        }
        let synced = self.file().sync();
        synced.map_err(|e| self.failed("sync", e))?;
        self.file = None;
        let named = self.root.disk.rename_new(&self.temporary, &self.path);
        named.map_err(|e| self.failed("rename", e))
    }

    /// Makes all bytes and the final name durable.
    fn commit(&mut self) -> Result<()> {
        self.rename_to_final()?;
        let disk = &*self.root.disk;
        if let Err(e) = disk.sync_dir(&folder_of(&self.path)) {
            // Visible but perhaps not durable breaks the contract, so the name is undone. A
            // resumable upload gets its hidden name back: its writer resumes from it.
            let _ = match self.on_drop {
                OnDrop::Removed => disk.unlink(&self.path),
                OnDrop::Kept { .. } => disk.rename_new(&self.path, &self.temporary),
            };
            return Err(self.failed("sync the folder of", e));
        }
        Ok(())
    }

    fn write_failed(&self, failure: TransferError) -> Error {
        let TransferError { offset, expected, cause, .. } = failure;
        let source = match cause {
            TransferErrorKind::Io(source) => source,
            TransferErrorKind::End => io::ErrorKind::WriteZero.into(),
        };
        self.failed(&format!("write {expected} bytes at byte {offset} of"), source)
    }

    /// Converts an error, with the byte counts if space ran out.
    fn failed(&self, operation: &str, e: io::Error) -> Error {
        match Error::from_io(operation, &self.name, e) {
            Error::NoSpace { object, .. } => {
                let need_bytes = self.len_bytes_max.max(self.len_bytes);
                let folder = folder_of(&self.path);
                let free_bytes = self.root.disk.free_bytes(&folder).ok().flatten();
                Error::NoSpace { object, need_bytes, free_bytes }
            }
            other => other,
        }
    }
}

impl Upload for PosixUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.attempt(|upload| upload.append(bytes, None))
    }

    fn write_with_crc(&mut self, bytes: &[u8]) -> Result<u64> {
        self.attempt(|upload| {
            upload.restart_crc(upload.crc64());
            upload.append(bytes, None)?;
            Ok(upload.crc.value())
        })
    }

    fn write_with_known_crc(&mut self, bytes: &[u8], crc64: u64) -> Result<()> {
        self.attempt(|upload| upload.append(bytes, Some(crc64)))
    }

    fn write_from(
        &mut self,
        object: &dyn Object,
        range: Range<u64>,
        crc64: Option<u64>,
    ) -> Result<()> {
        self.attempt(|upload| upload.copy(object, &range, crc64))
    }

    fn stage_in(&mut self, bytes_max: u64) {
        let buffers = bytes_max / BUF_BYTES as u64;
        self.buffers_max = usize::try_from(buffers).unwrap_or(usize::MAX);
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn flush(&mut self) -> Result<()> {
        self.attempt(|upload| {
            upload.flush_content()?;
            // Sync a buffered file now: its pages reach the disk while other files are still being
            // written.
            if upload.file().is_direct() {
                return Ok(());
            }
            upload.file().sync().map_err(|e| upload.failed("sync", e))
        })
    }

    fn finish(mut self: Box<Self>) -> Result<FileEntry> {
        self.check_state()?;
        self.commit()?;
        Ok(self.mark_finished())
    }

    fn finish_deferred(mut self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        self.check_state()?;
        self.rename_to_final()?;
        let disk = Arc::clone(&self.root.disk);
        Ok((self.mark_finished(), PendingDirSync::in_folder(disk, folder_of(&self.path))))
    }
}

impl ResumableUpload for PosixUpload {
    fn sync(&mut self) -> Result<SyncPoint> {
        self.attempt(PosixUpload::sync_content)?;
        Ok(SyncPoint { bytes: self.len_bytes, crc64: self.crc64() })
    }
}

impl Drop for PosixUpload {
    fn drop(&mut self) {
        if matches!(self.state, UploadState::Finished) {
            return;
        }
        self.content = UploadBuffer::Flushed; // waits for writes in flight
        if matches!(self.on_drop, OnDrop::Kept { .. }) {
            return;
        }
        // NFS and FUSE keep a file that is unlinked while it is open, under a name of their own.
        self.file = None;
        // Best effort: a file that cannot be removed is hidden, and a sweep removes it after this
        // process has ended.
        let _ = self.root.disk.unlink(&self.temporary);
        self.root.unmake_folders(&self.made);
    }
}

fn locked(path: &std::path::Path, e: io::Error) -> Error {
    let object = path.display().to_string();
    match e.kind() {
        io::ErrorKind::WouldBlock => Error::Locked { object },
        _ => Error::from_io("open", object, e),
    }
}

type Created = (Vec<PathBuf>, PathBuf, Arc<dyn FsFile>);

fn create_temporary(
    root: &StoreRoot,
    path: &std::path::Path,
    name: &str,
    len_bytes_max: u64,
) -> Result<Created> {
    let folder = folder_of(path);
    let mut made = Vec::new();
    let mut tries = 0;
    loop {
        made.extend(root.make_folder(&folder)?);
        let temporary = folder.join(temp_names::name_for(name, &root.disk.writer()));
        match root.disk.create_sized(&temporary, len_bytes_max) {
            Ok(file) => return Ok((made, temporary, file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound && tries < FOLDER_RETRIES_MAX => {
                root.forget_folder(&folder);
                tries += 1;
            }
            Err(e) => {
                root.unmake_folders(&made);
                return Err(Error::from_io("create", path.display().to_string(), e));
            }
        }
    }
}
