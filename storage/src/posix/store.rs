//! [`Storage`] on a file system. An object is written under a temporary name, made durable, renamed
//! to a name that must be free, and its folder made durable; `upload` does that. This module opens,
//! lists, publishes and deletes existing objects.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::api::settings::FileAddress;
use crate::base::temp_names;
use crate::fs::filesystem::{FileSystem, FsFile, Stat, folder_of};
use crate::fs::os_filesystem::OsFileSystem;
use crate::io::transfer::TransferError;
use crate::posix::durable_dirs::DurableDirs;
use crate::posix::in_place_file::PosixInPlaceFile;
use crate::posix::{in_place_file, upload};
use crate::reader::file_backend::{FileBackend, default_depth};
use crate::reader::in_flight::InFlightReader;
use crate::reader::worker_pool::WorkerPool;
use crate::sys::syscalls;
use crate::{
    Error, InPlaceFile, Key, LinkMethod, Map, Object, ObjectMeta, PendingDirSync, ProcessIdentity,
    Profile, RangeRead, Reader, ReaderOptions, Result, ResumableUpload, Storage, SyncPoint, Upload,
};

pub(crate) fn open(address: &FileAddress) -> Result<Arc<dyn Storage>> {
    Ok(Arc::new(Posix::new(Arc::new(OsFileSystem::new(address)?), address.path.clone())))
}

/// A folder of a file system as a store.
#[derive(Clone, Debug)]
pub(crate) struct Posix(pub(crate) Arc<StoreRoot>);

/// The root of a store, shared with its uploads.
#[derive(Debug)]
pub(crate) struct StoreRoot {
    pub(crate) disk: Arc<dyn FileSystem>,
    root: PathBuf,
    folders: DurableDirs,
}

impl Posix {
    pub(crate) fn new(disk: Arc<dyn FileSystem>, root: PathBuf) -> Self {
        Posix(Arc::new(StoreRoot { disk, root, folders: DurableDirs::default() }))
    }

    fn disk(&self) -> &dyn FileSystem {
        &*self.0.disk
    }

    fn stat(&self, key: &Key) -> Result<Option<Stat>> {
        match self.disk().stat(&self.0.path(key)) {
            Ok(stat) => Ok(Some(stat)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::from_io("stat", self.display(key), e)),
        }
    }

    fn list_into(&self, folder: &Key, out: &mut Vec<ObjectMeta>) -> Result<()> {
        for name in self.0.read_dir(folder)? {
            let key = folder.join(&name.text)?;
            if name.is_folder {
                self.list_into(&key, out)?;
            } else if let Some(Stat::File { len_bytes }) = self.stat(&key)? {
                out.push(ObjectMeta { key, bytes: len_bytes });
            }
        }
        Ok(())
    }

    /// Removes the temporary files and half-deleted folders of some writers. Returns their names.
    fn remove_temporaries(
        &self,
        folder: &Key,
        is_orphan: impl Fn(&ProcessIdentity) -> bool,
    ) -> Result<Vec<String>> {
        let path = self.0.path(folder);
        let failed = |e| Error::from_io("clean", self.display(folder), e);
        let mut removed_names = Vec::new();
        for name in or_none(self.disk().read_dir(&path)).map_err(failed)? {
            let Some(writer) = temp_names::writer_of(&name.text) else { continue };
            if !is_orphan(&writer) {
                continue;
            }
            let leftover = path.join(&name.text);
            let removed = match name.is_folder {
                true => self.0.remove_tree(&leftover),
                false => self.disk().unlink(&leftover),
            };
            match removed {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {} // another process removed it
                // NFS and FUSE: a reader has a file in it open.
                Err(e) if is_in_use(&e) => {
                    log::debug!("{}: in use, not removed: {e}", show(&leftover));
                }
                Err(e) => return Err(failed(e)),
                Ok(()) => removed_names.push(name.text),
            }
        }
        if !removed_names.is_empty() {
            self.disk().sync_dir(&path).map_err(failed)?;
        }
        removed_names.sort();
        Ok(removed_names)
    }
}

impl Storage for Posix {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let name = self.display(key);
        let failed = |e| Error::from_io("open", &name, e);
        let file = self.disk().open(&self.0.path(key)).map_err(failed)?;
        let len_bytes = file.len_bytes().map_err(failed)?;
        Ok(Arc::new(PosixObject { file, len_bytes, name }))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.0.refuse_temporary(key)?;
        if self.stat(key)?.is_some() {
            return Err(Error::Exists { object: self.display(key) });
        }
        Ok(Box::new(upload::PosixUpload::start(Arc::clone(&self.0), key, len_bytes_max)?))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        let mut entries = Vec::new();
        self.list_into(folder, &mut entries)?;
        entries.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(entries)
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        Ok(self.0.read_dir(folder)?.into_iter().map(|name| name.text).collect())
    }

    fn delete(&self, key: &Key) -> Result<()> {
        let path = self.0.path(key);
        let failed = |e| Error::from_io("delete", self.display(key), e);
        self.disk().unlink(&path).map_err(failed)?;
        self.disk().sync_dir(&folder_of(&path)).map_err(failed)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.0.refuse_temporary(target)?;
        let (from, to) = (self.0.path(staged), self.0.path(target));
        let failed = |e| Error::from_io("publish", self.display(staged), e);
        match self.stat(staged)? {
            Some(Stat::Folder) => {}
            Some(_) => return Err(failed(io::Error::from_raw_os_error(libc::ENOTDIR))),
            None => return Err(Error::NotFound { object: self.display(staged) }),
        }
        self.0.make_folder(&folder_of(&to))?;
        self.0.folders.forget(&from);
        self.disk().rename_new(&from, &to).map_err(|e| match e.kind() {
            io::ErrorKind::AlreadyExists => Error::Exists { object: self.display(target) },
            _ => failed(e),
        })?;
        let synced = self.0.sync_both(&to, &from);
        if synced.is_err() {
            // A folder that is not durable is not published. If the rename cannot be undone either,
            // the next reader finds the folder complete, as after a crash at this point.
            let _ = self.disk().rename_new(&to, &from);
        }
        synced.map_err(failed)
    }

    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        let path = self.0.path(folder);
        self.0.make_folder(&path)?;
        let probed = self.disk().renames_exclusively(&path);
        probed.map_err(|e| Error::from_io("rename", format!("a file in {}", show(&path)), e))
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.0.refuse_temporary(key)?;
        let path = self.0.path(key);
        let folder = folder_of(&path);
        self.0.make_folder(&folder)?;
        let temporary = folder.join(temp_names::name_for(key.name(), &self.disk().writer()));
        let written = self.disk().create_new(&temporary).and_then(|file| {
            file.write(0, bytes).map_err(TransferError::into_io)?;
            // Otherwise a crash may leave an empty file at the name, neither the old nor the new
            // object.
            file.sync()?;
            self.disk().rename_over(&temporary, &path)
        });
        written.map_err(|e| {
            let _ = self.disk().unlink(&temporary);
            Error::from_io("replace", self.display(key), e)
        })
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        let failed = |e| Error::from_io("sync", self.display(folder), e);
        self.disk().sync_dir(&self.0.path(folder)).map_err(failed)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        if *folder == Key::root() {
            let reason = "the root folder of a store is never deleted";
            return Err(Error::BadKey { key: String::new(), reason });
        }
        let path = self.0.path(folder);
        let failed = |e| Error::from_io("delete", self.display(folder), e);
        match self.stat(folder)? {
            None => return Ok(()),
            Some(Stat::Folder) => {}
            Some(_) => return Err(failed(io::Error::from_raw_os_error(libc::ENOTDIR))),
        }
        self.0.folders.forget(&path);
        // The folder is first renamed, in one step, to a name that a sweep recognises; then its
        // content is deleted.
        let trash =
            folder_of(&path).join(temp_names::name_for(folder.name(), &self.disk().writer()));
        self.disk().rename_new(&path, &trash).map_err(failed)?;
        self.disk().sync_dir(&folder_of(&path)).map_err(failed)?;
        match self.0.remove_tree(&trash) {
            // NFS and FUSE keep files that a reader has open. The name is free already; a sweep
            // removes the rest once the reader and this process have ended.
            Err(e) if is_in_use(&e) => {
                log::warn!("{}: not removed while a reader has it open: {e}", show(&trash));
                Ok(())
            }
            outcome => outcome.map_err(failed),
        }
    }

    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        let path = self.0.path(folder);
        self.0.folders.forget(&path);
        let removed = self.disk().rmdir(&path);
        match removed.and_then(|()| self.disk().sync_dir(&folder_of(&path))) {
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty
                ) =>
            {
                Ok(())
            }
            outcome => outcome.map_err(|e| Error::from_io("delete", self.display(folder), e)),
        }
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        let root = &self.0.root;
        self.disk()
            .free_bytes(root)
            .map_err(|e| Error::from_io("stat", root.display().to_string(), e))
    }

    fn display(&self, key: &Key) -> String {
        self.0.path(key).display().to_string()
    }

    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        self.remove_temporaries(folder, |writer| !self.disk().is_alive(writer))
    }

    fn remove_orphans_of(&self, folder: &Key, writer: &ProcessIdentity) -> Result<Vec<String>> {
        self.remove_temporaries(folder, |other| other.is_same_process(writer))
    }

    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        self.0.refuse_temporary(key)?;
        if self.stat(key)?.is_some() {
            return Err(Error::Exists { object: self.display(key) });
        }
        Ok(Box::new(upload::PosixUpload::start_resumable(Arc::clone(&self.0), key)?))
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        self.resume_with(key, &mut |_| Ok(from))
    }

    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        Ok(Box::new(upload::PosixUpload::resume(Arc::clone(&self.0), key, find)?))
    }

    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let path = self.0.draft_path(key);
        let failed = |e| Error::from_io("open", show(&path), e);
        let file = self.disk().open(&path).map_err(failed)?;
        let len_bytes = file.len_bytes().map_err(failed)?;
        Ok(Arc::new(PosixObject { file, len_bytes, name: show(&path) }))
    }

    fn discard(&self, key: &Key) -> Result<()> {
        let path = self.0.draft_path(key);
        let failed = |e| Error::from_io("delete", show(&path), e);
        match self.disk().unlink(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            outcome => outcome.map_err(failed)?,
        }
        self.disk().sync_dir(&folder_of(&path)).map_err(failed)
    }

    fn create_in_place(&self, key: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.0.refuse_temporary(key)?;
        Ok(Arc::new(PosixInPlaceFile::create(Arc::clone(&self.0), key, len_bytes)?))
    }

    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        Ok(Arc::new(PosixInPlaceFile::open(Arc::clone(&self.0), key)?))
    }

    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        Ok(Arc::new(PosixInPlaceFile::create_unnamed(Arc::clone(&self.0), folder, len_bytes)?))
    }

    fn link(
        &self,
        key: &Key,
        from: &dyn Object,
        how: LinkMethod,
    ) -> Result<Option<PendingDirSync>> {
        self.0.refuse_temporary(key)?;
        match from.file() {
            Some(from) => in_place_file::link(&self.0, &self.0.path(key), from, how),
            None => Ok(None),
        }
    }

    fn reader(&self, options: &ReaderOptions) -> Result<Box<dyn Reader>> {
        let depth = options.depth_or(default_depth(&self.profile().file_system));
        let slots_max = depth + options.orphans_max;
        Ok(match self.disk().settings() {
            Some(settings) => {
                let backend = FileBackend::new(settings, slots_max, &options.pool);
                Box::new(InFlightReader::new(backend, depth, options))
            }
            None => Box::new(InFlightReader::new(WorkerPool::new(slots_max), depth, options)),
        })
    }

    fn reader_group(&self) -> Option<String> {
        let settings = self.disk().settings()?;
        let device = std::fs::metadata(&self.0.root).ok()?.dev();
        Some(format!("device {device}, {settings:?}"))
    }

    fn profile(&self) -> &Profile {
        self.disk().profile()
    }
}

impl StoreRoot {
    pub(crate) fn path(&self, key: &Key) -> PathBuf {
        if *key == Key::root() { self.root.clone() } else { self.root.join(key.as_str()) }
    }

    pub(crate) fn draft_path(&self, key: &Key) -> PathBuf {
        folder_of(&self.path(key)).join(temp_names::draft_name(key.name()))
    }

    /// Creates a folder durably. Returns the folders created.
    pub(crate) fn make_folder(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let failed = |(path, e): (PathBuf, _)| Error::from_io("create", show(&path), e);
        self.folders.make(&*self.disk, &self.root, folder).map_err(failed)
    }

    pub(crate) fn forget_folder(&self, folder: &Path) {
        self.folders.forget(folder);
    }

    pub(crate) fn unmake_folders(&self, made: &[PathBuf]) {
        self.folders.unmake(&*self.disk, made);
    }

    fn refuse_temporary(&self, key: &Key) -> Result<()> {
        let hidden = key.as_str().split('/').any(temp_names::is_hidden);
        let reason = "the form is reserved for temporary files, which listings hide";
        if hidden { Err(Error::BadKey { key: key.to_string(), reason }) } else { Ok(()) }
    }

    /// The entries of a folder, without temporary names, sorted. An absent folder is empty.
    fn read_dir(&self, folder: &Key) -> Result<Vec<crate::fs::filesystem::DirEntry>> {
        let path = self.path(folder);
        let read = or_none(self.disk.read_dir(&path));
        let mut names = read.map_err(|e| Error::from_io("list", show(&path), e))?;
        names.retain(|name| !temp_names::is_hidden(&name.text));
        names.sort_by(|a, b| a.text.cmp(&b.text));
        Ok(names)
    }

    fn sync_both(&self, a: &Path, b: &Path) -> io::Result<()> {
        let (a, b) = (folder_of(a), folder_of(b));
        self.disk.sync_dir(&a)?;
        if a == b { Ok(()) } else { self.disk.sync_dir(&b) }
    }

    /// Removes a folder and all in it. Links are removed, not followed.
    fn remove_tree(&self, folder: &Path) -> io::Result<()> {
        for name in self.disk.read_dir(folder)? {
            let path = folder.join(&name.text);
            let removed = match name.is_folder {
                true => self.remove_tree(&path),
                false => self.disk.unlink(&path),
            };
            // NFS deletes the files that it keeps for open handles when those are closed.
            removed
                .or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })?;
        }
        self.disk.rmdir(folder)
    }
}

fn is_in_use(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::ResourceBusy)
}

fn or_none<T>(read: io::Result<Vec<T>>) -> io::Result<Vec<T>> {
    match read {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

pub(crate) struct PosixObject {
    pub(crate) file: Arc<dyn FsFile>,
    pub(crate) len_bytes: u64,
    pub(crate) name: String,
}

impl fmt::Debug for PosixObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PosixObject({}, {} bytes)", self.name, self.len_bytes)
    }
}

impl Object for PosixObject {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        for read in &*reads {
            let expected = read.buf.len() as u64;
            let found = self.len_bytes.saturating_sub(read.offset).min(expected);
            if found < expected {
                let (object, offset, len_bytes) = (self.name.clone(), read.offset, self.len_bytes);
                return Err(Error::ShortRead { object, offset, found, expected, len_bytes });
            }
        }
        let failed = |failure: TransferError| failure.of_read(&self.name, self.len_bytes);
        self.file.read_many(reads).map_err(failed)
    }

    fn map(&self) -> Result<Map> {
        let why = match self.file.map(self.len_bytes) {
            Ok(map) => return Ok(map),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                return Err(Error::from_io("map", &self.name, e));
            }
            Err(e) => e,
        };
        log::debug!("{}: not mapped but read: {why}", self.name);
        let too_big = |_| Error::from_io("map", &self.name, io::ErrorKind::OutOfMemory.into());
        let mut bytes = vec![0; usize::try_from(self.len_bytes).map_err(too_big)?];
        self.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
        Ok(Map::owned(bytes))
    }

    fn display(&self) -> String {
        self.name.clone()
    }

    fn version(&self) -> Option<String> {
        let meta = self.file()?.metadata().ok()?;
        Some(format!("ctime {}.{:09}", meta.ctime(), meta.ctime_nsec()))
    }

    fn advise_random(&self) {
        self.file().into_iter().for_each(syscalls::advise_random);
    }

    fn memory_align(&self) -> usize {
        self.file.memory_align()
    }

    fn file(&self) -> Option<&std::fs::File> {
        self.file.os_file()
    }
}
