//! The file system of this machine as a [`FileSystem`].

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::api::settings::{FileAddress, IoSettings};
use crate::base::pending_call::PendingCall;
use crate::base::temp_names;
use crate::fs::detect;
use crate::fs::filesystem::{DirEntry, FileSystem, FsFile, Stat, folder_of};
use crate::fs::stripe_policy::StripePolicy;
use crate::io::batch::BatchEngine;
use crate::io::direct;
use crate::io::pread::{self, share};
use crate::io::transfer::{PIECE_BYTES, Transfer, TransferError};
use crate::io::uring_batch::SubmitMode;
use crate::sys::aligned_buffer::{ALIGN_BYTES, AlignedBuffer, BUF_BYTES};
use crate::sys::{mapped, syscalls};
use crate::{Liveness, Map, ProcessIdentity, Profile, RangeRead};

/// Reads from this size on use direct I/O: half a transfer. Smaller ones gain from cached pages,
/// larger ones would evict pages that are used more often.
const DIRECT_READ_BYTES_MIN: usize = 512 << 10;

/// Buffers of a file written concurrently: 16 MiB, which carry 7 GB/s up to 2.3 ms of latency, for
/// each file being written.
const WRITERS: usize = 2;

/// A buffer has room for a window at any offset within a block.
const WINDOW_BYTES: usize = BUF_BYTES - ALIGN_BYTES;

#[derive(Debug)]
pub(crate) struct OsFileSystem {
    profile: Profile,
    settings: IoSettings,
    shared: Arc<SharedIo>,
    /// Whether the file system knows `RENAME_NOREPLACE`, once tested.
    renames_exclusively: OnceLock<bool>,
}

/// Shared by the open files of one file system.
#[derive(Debug)]
struct SharedIo {
    engine: BatchEngine,
    /// Turned off permanently when the file system refuses direct I/O.
    direct: AtomicBool,
}

impl OsFileSystem {
    pub(crate) fn new(address: &FileAddress) -> crate::Result<Self> {
        let profile = Profile::detect(&address.path, address.settings)?;
        // If a ring was requested for a file system whose submission may block, requests start on
        // kernel threads, so that 64 of them wait concurrently and not one after the other.
        let inline = matches!(profile.file_system.as_str(), "ext4" | "xfs" | "btrfs" | "f2fs");
        let start = if inline { SubmitMode::Inline } else { SubmitMode::Punted };
        // Copies in memory are no faster with more threads, which cost time to start.
        let in_memory = matches!(profile.file_system.as_str(), "tmpfs" | "ramfs");
        let threads_max = if in_memory { 1 } else { pread::THREADS_MAX };
        let engine = BatchEngine::new(profile.engine, start, threads_max);
        let shared = SharedIo { engine, direct: AtomicBool::new(profile.direct) };
        let settings = detect::with_environment(address.settings);
        let renames_exclusively = OnceLock::new();
        Ok(OsFileSystem { profile, settings, shared: Arc::new(shared), renames_exclusively })
    }

    fn file(&self, file: File, path: &Path, writable: bool) -> Arc<dyn FsFile> {
        let (path, shared) = (path.into(), Arc::clone(&self.shared));
        Arc::new(OsFile { file, path, writable, direct: OnceLock::new(), shared })
    }

    /// Looks a name up, and once more if the client may have cached its absence. An NFS client
    /// caches for 30 s or more (`acdirmin`) that a name does not exist, even if another client
    /// creates it.
    fn lookup<T>(&self, path: &Path, attempt: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match attempt() {
            Err(e) if is_absent(&e) && self.caches_absent_names() => {
                revalidate(&folder_of(path));
                attempt()
            }
            outcome => outcome,
        }
    }

    fn caches_absent_names(&self) -> bool {
        self.profile.file_system == "nfs"
    }
}

/// A call that the watchdog reports if the file system does not complete it.
fn pending(operation: &'static str, path: &Path) -> PendingCall {
    PendingCall::start(operation, path.display().to_string())
}

/// Makes the NFS client revalidate a folder with its server, and the parents that it caches as
/// absent: opening a folder does that.
fn revalidate(folder: &Path) {
    let is_missing = matches!(File::open(folder), Err(e) if is_absent(&e));
    let parent = folder_of(folder);
    if is_missing && parent != folder {
        revalidate(&parent);
        // If it fails, the lookup in it fails too and reports it.
        let _ = File::open(folder);
    }
}

fn is_absent(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::NotFound
}

impl FileSystem for OsFileSystem {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn FsFile>> {
        let _call = pending("open", path);
        // Without O_NONBLOCK, opening a named pipe would wait for a writer.
        let mut options = OpenOptions::new();
        let options = options.read(true).custom_flags(libc::O_NONBLOCK);
        let file = self.lookup(path, || options.open(path))?;
        let meta = file.metadata()?;
        if meta.is_dir() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        if !meta.is_file() {
            let reason = "expected a regular file, found a device, socket or pipe";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        syscalls::advise_random(&file);
        Ok(self.file(file, path, false))
    }

    fn create_new(&self, path: &Path) -> io::Result<Arc<dyn FsFile>> {
        let _call = pending("create", path);
        Ok(self.file(new_file().open(path)?, path, true))
    }

    fn create_sized(&self, path: &Path, len_bytes_max: u64) -> io::Result<Arc<dyn FsFile>> {
        let _call = pending("create", path);
        let stripes = StripePolicy::for_len(len_bytes_max);
        if self.profile.file_system == "lustre"
            && let Some(stripes) = stripes
            && let Some(file) = stripes.create(path, &new_file())?
        {
            return Ok(self.file(file, path, true));
        }
        self.create_new(path)
    }

    fn reopen(&self, path: &Path) -> io::Result<Arc<dyn FsFile>> {
        let _call = pending("open", path);
        let open = self.lookup(path, || OpenOptions::new().read(true).write(true).open(path))?;
        let ours = open.metadata()?;
        let file = self.file(open, path, true);
        file.lock()?;
        // Its writer may have finished or removed it before it released the lock: the locked file
        // is then another object, or none.
        if self.caches_absent_names() {
            revalidate(&folder_of(path));
        }
        let named = fs::metadata(path)?;
        match (named.dev(), named.ino()) == (ours.dev(), ours.ino()) {
            true => Ok(file),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let _call = pending("stat", path);
        let meta = self.lookup(path, || fs::metadata(path))?;
        Ok(match meta.file_type() {
            kind if kind.is_file() => Stat::File { len_bytes: meta.len() },
            kind if kind.is_dir() => Stat::Folder,
            _ => Stat::Other,
        })
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        let _call = pending("rename", from);
        match syscalls::rename_noreplace(from, to) {
            Err(e) if lacks_rename_noreplace(&e) => rename_new_fallback(from, to),
            outcome => outcome,
        }
    }

    fn renames_exclusively(&self, folder: &Path) -> io::Result<bool> {
        if let Some(&known) = self.renames_exclusively.get() {
            return Ok(known);
        }
        let _call = pending("rename a file in", folder);
        let name = || folder.join(temp_names::name_for("rename", &self.writer()));
        let (from, to) = (name(), name());
        drop(OpenOptions::new().write(true).create_new(true).open(&from)?);
        let renamed = syscalls::rename_noreplace(&from, &to);
        fs::remove_file(if renamed.is_ok() { &to } else { &from })?;
        let found = match renamed {
            Ok(()) => true,
            Err(e) if lacks_rename_noreplace(&e) => false,
            Err(e) => return Err(e),
        };
        Ok(*self.renames_exclusively.get_or_init(|| found))
    }

    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()> {
        let _call = pending("rename", from);
        fs::rename(from, to)
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        let _call = pending("delete", path);
        self.lookup(path, || fs::remove_file(path))
    }

    fn mkdir(&self, path: &Path) -> io::Result<()> {
        let _call = pending("create", path);
        fs::create_dir(path)
    }

    fn rmdir(&self, path: &Path) -> io::Result<()> {
        let _call = pending("delete", path);
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let _call = pending("sync", path);
        match File::open(path)?.sync_all() {
            // Some FUSE and network file systems do not support it: their entries are durable when
            // the call that made them returns, or cannot be made durable.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            outcome => outcome,
        }
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let _call = pending("list", path);
        let mut names = Vec::new();
        for entry in self.lookup(path, || fs::read_dir(path))? {
            let entry = entry?;
            let Ok(text) = entry.file_name().into_string() else { continue };
            match entry.file_type() {
                Ok(kind) => names.push(DirEntry { text, is_folder: kind.is_dir() }),
                // NFS does not list the type with the name, and the file was removed before its
                // type was read.
                Err(e) if is_absent(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(names)
    }

    fn free_bytes(&self, path: &Path) -> io::Result<Option<u64>> {
        let _call = pending("stat", path);
        let nearest = path.ancestors().find(|p| !p.as_os_str().is_empty() && p.exists());
        Ok(syscalls::file_system(nearest.unwrap_or(Path::new(".")))?.free_bytes)
    }

    fn writer(&self) -> ProcessIdentity {
        ProcessIdentity::new()
    }

    fn is_alive(&self, writer: &ProcessIdentity) -> bool {
        writer.life() != Liveness::Dead
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn settings(&self) -> Option<IoSettings> {
        Some(self.settings)
    }
}

fn lacks_rename_noreplace(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINVAL | libc::ENOSYS))
}

fn new_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    options
}

/// For file systems that do not know `RENAME_NOREPLACE`: FUSE, NFS, older Lustre.
fn rename_new_fallback(from: &Path, to: &Path) -> io::Result<()> {
    if fs::symlink_metadata(from)?.is_dir() {
        // A plain rename replaces at most an empty folder, so nothing can be lost.
        return match fs::symlink_metadata(to) {
            Ok(_) => Err(io::Error::from_raw_os_error(libc::EEXIST)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
            Err(e) => Err(e),
        };
    }
    match fs::hard_link(from, to) {
        // If the server's reply was lost and the client repeated the request, the existing link is
        // this writer's: no other process links to a temporary file.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !is_same_file(from, to) => Err(e),
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
        _ => {
            if let Err(e) = fs::remove_file(from) {
                log::warn!(
                    "{}: temporary name not removed; it remains a hard link of {}: {e}",
                    from.display(),
                    to.display()
                );
            }
            Ok(())
        }
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    let inode = |path| fs::symlink_metadata(path).map(|meta| (meta.dev(), meta.ino()));
    matches!((inode(a), inode(b)), (Ok(a), Ok(b)) if a == b)
}

#[derive(Debug)]
struct OsFile {
    file: File,
    /// Its path when it was opened, for messages.
    path: Box<Path>,
    writable: bool,
    /// The same file, reopened for direct I/O; `None` if that fails.
    direct: OnceLock<Option<Direct>>,
    shared: Arc<SharedIo>,
}

/// A file opened for direct I/O.
#[derive(Debug)]
struct Direct {
    file: File,
    /// Required alignment of memory, in bytes.
    memory_align: usize,
}

impl FsFile for OsFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<(), TransferError> {
        let _call = pending("read", &self.path);
        let is_big = |read: &RangeRead<'_>| read.buf.len() >= DIRECT_READ_BYTES_MIN;
        let direct = if reads.iter().any(is_big) { self.direct() } else { None };
        let Some(direct) = direct else {
            return self.shared.engine.transfer(&self.file, &mut Transfer::of_reads(reads));
        };
        let (big, small): (Vec<_>, Vec<_>) = reads.iter_mut().partition(|read| is_big(read));
        self.read_cached(small)?;
        let (mut in_place, bounced): (Vec<_>, Vec<_>) =
            big.into_iter().partition(|read| direct::fits(read, direct.memory_align));
        for reads in in_place.chunks_mut(direct::READS_MAX) {
            self.read_in_place(direct, reads)?;
        }
        self.read_bounced(direct, bounced)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TransferError> {
        let _call = pending("write", &self.path);
        let is_aligned = |value: usize| value.is_multiple_of(ALIGN_BYTES);
        let aligned = is_aligned(bytes.as_ptr() as usize)
            && is_aligned(bytes.len())
            && offset.is_multiple_of(ALIGN_BYTES as u64);
        if aligned && let Some(direct) = self.direct() {
            let mut pieces = Transfer::of_write(offset, bytes, ALIGN_BYTES);
            match self.shared.engine.transfer(&direct.file, &mut pieces) {
                Err(failure) if failure.errno() == Some(libc::EINVAL) => {
                    self.shared.disable_direct("the file system refused a direct write");
                }
                outcome => return outcome,
            }
        }
        self.shared.engine.transfer(&self.file, &mut Transfer::of_write(offset, bytes, 1))
    }

    fn writers(&self) -> usize {
        WRITERS
    }

    fn memory_align(&self) -> usize {
        self.direct().map_or(1, |direct| direct.memory_align)
    }

    fn is_direct(&self) -> bool {
        self.direct().is_some()
    }

    fn lock(&self) -> io::Result<()> {
        match self.file.try_lock() {
            Err(TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(TryLockError::Error(e)) => {
                // Lustre without the mount option flock, and some FUSE file systems.
                log::warn!("file locks are not supported; a second writer is not detected: {e}");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn allocate(&self, len_bytes: u64) -> io::Result<()> {
        let _call = pending("reserve space for", &self.path);
        loop {
            match syscalls::allocate(&self.file, len_bytes) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                    return Ok(());
                }
                outcome => return outcome,
            }
        }
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.file.set_len(len_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        let _call = pending("sync", &self.path);
        self.file.sync_all()
    }

    fn map(&self, len_bytes: u64) -> io::Result<Map> {
        mapped::map(&self.file, len_bytes)
    }

    fn names(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.nlink())
    }

    fn os_file(&self) -> Option<&File> {
        Some(&self.file)
    }
}

impl OsFile {
    fn direct(&self) -> Option<&Direct> {
        if !self.shared.direct.load(Ordering::Relaxed) {
            return None;
        }
        self.direct.get_or_init(|| self.open_direct()).as_ref()
    }

    /// Reopens an open file by its descriptor, so that it is the same file even if its name was
    /// replaced.
    fn open_direct(&self) -> Option<Direct> {
        let align = syscalls::direct_align(&self.file);
        if align.is_some_and(|align| align.is_none() || align.most() as usize > ALIGN_BYTES) {
            return None;
        }
        let memory_align = align.map_or(ALIGN_BYTES, |align| align.memory as usize);
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let mut options = OpenOptions::new();
        options.read(true).write(self.writable).custom_flags(libc::O_DIRECT);
        match options.open(&path) {
            Ok(file) => Some(Direct { file, memory_align }),
            Err(e) => {
                self.shared.disable_direct(&e.to_string());
                None
            }
        }
    }

    fn read_cached(&self, reads: Vec<&mut RangeRead<'_>>) -> Result<(), TransferError> {
        let reads =
            reads.into_iter().map(|RangeRead { offset, buf }| RangeRead { offset: *offset, buf });
        let mut reads: Vec<RangeRead<'_>> = reads.collect();
        self.shared.engine.transfer(&self.file, &mut Transfer::of_reads(&mut reads))
    }

    fn read_in_place(
        &self,
        direct: &Direct,
        reads: &mut [&mut RangeRead<'_>],
    ) -> Result<(), TransferError> {
        match direct::read(&self.shared.engine, &direct.file, reads) {
            Err(failure) if failure.errno() == Some(libc::EINVAL) => {
                self.shared.disable_direct("the file system refused a direct read");
                self.read_cached(reads.iter_mut().map(|read| &mut **read).collect())
            }
            outcome => outcome,
        }
    }

    /// Direct reads, in windows of a buffer. Two threads alternate, so that one waits for the
    /// device while the other copies: with one thread the device would idle for a sixth of the
    /// time.
    fn read_bounced(
        &self,
        direct: &Direct,
        reads: Vec<&mut RangeRead<'_>>,
    ) -> Result<(), TransferError> {
        let windows = reads.into_iter().flat_map(|read| {
            let first = read.offset;
            let windows = read.buf.chunks_mut(WINDOW_BYTES).enumerate();
            windows
                .map(move |(i, buf)| RangeRead { offset: first + (i * WINDOW_BYTES) as u64, buf })
        });
        let mut windows: Vec<RangeRead<'_>> = windows.collect();
        let threads = windows.len().min(2);
        share(&mut windows, threads, AlignedBuffer::take, |bounce, window| {
            self.read_window(&direct.file, bounce, window)
        })
    }

    /// Reads complete blocks into an aligned buffer, and copies the requested bytes out.
    fn read_window(
        &self,
        direct: &File,
        bounce: &mut AlignedBuffer,
        window: &mut RangeRead<'_>,
    ) -> Result<(), TransferError> {
        let skip = (window.offset % ALIGN_BYTES as u64) as usize; // fits: less than ALIGN_BYTES
        let start = window.offset - skip as u64;
        let needed = skip + window.buf.len();
        let chunks = bounce[..needed.next_multiple_of(ALIGN_BYTES)].chunks_mut(PIECE_BYTES);
        let pieces = chunks.enumerate().map(|(i, chunk)| {
            let first = i * PIECE_BYTES;
            Transfer::read(start + first as u64, chunk).direct(ALIGN_BYTES, needed - first)
        });
        match self.shared.engine.transfer(direct, &mut pieces.collect::<Vec<_>>()) {
            Err(failure) if failure.errno() == Some(libc::EINVAL) => {
                self.shared.disable_direct("the file system refused a direct read");
                let window = std::slice::from_mut(window);
                self.shared.engine.transfer(&self.file, &mut Transfer::of_reads(window))
            }
            outcome => {
                outcome?;
                window.buf.copy_from_slice(&bounce[skip..needed]);
                Ok(())
            }
        }
    }
}

impl SharedIo {
    fn disable_direct(&self, why: &str) {
        if self.direct.swap(false, Ordering::Relaxed) {
            log::warn!("large transfers use buffered I/O from now on: {why}");
        }
    }
}
