//! An open file of a reader: its descriptors, alignment, mount and layout; one read of it in whole
//! blocks; and one of bytes that are in the page cache.

use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::api::settings::{IoSettings, Setting};
use crate::fs::mount::{Mount, ReadMethod};
use crate::fs::placement::Layout;
use crate::io::transfer::{NextStep, TransferErrorKind, TransferProgress};
use crate::reader::in_flight::{BackendCompletion, BackendRead};
use crate::sys::aligned_buffer::ALIGN_BYTES;
use crate::sys::syscalls::{self, PAGE_BYTES};
use crate::{Error, IoEngine, Object, Result};

#[derive(Debug)]
pub(crate) struct OpenFile {
    /// Unique, also among files of the same object.
    pub(crate) id: u64,
    object: Arc<dyn Object>,
    identity: Identity,
    /// Reopened by path after an error.
    again: Option<File>,
    /// Opened for direct I/O.
    direct: Option<File>,
    /// Alignment of direct reads, in bytes.
    align: usize,
    pub(crate) mount: Arc<Mount>,
    pub(crate) layout: Layout,
    /// Whether to look for its bytes in the page cache. Turned off for good by the first error.
    asks_cache: AtomicBool,
}

/// Whether all bytes of a range of a file are in the page cache.
pub(crate) type CacheQuery = fn(&File, u64, usize) -> io::Result<bool>;

/// Queries the kernel, without reading anything.
pub(crate) fn is_cached(file: &File, offset: u64, len: usize) -> io::Result<bool> {
    let len = len as u64;
    let pages = (offset + len).div_ceil(PAGE_BYTES) - offset / PAGE_BYTES;
    Ok(syscalls::cached_pages(file, offset, len)? == pages)
}

/// The identity of a file, which survives a stale handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    len_bytes: u64,
    /// Modification time: objects are written once.
    written: (i64, i64),
}

impl Identity {
    fn of(meta: &Metadata) -> Self {
        let written = (meta.mtime(), meta.mtime_nsec());
        Identity { device: meta.dev(), inode: meta.ino(), len_bytes: meta.len(), written }
    }
}

impl OpenFile {
    /// Examines the file of an object, and opens it as the settings say. Blocks if its file system
    /// does.
    pub(crate) fn open(object: &Arc<dyn Object>, file: &File, wishes: IoSettings) -> Result<Self> {
        let failed = |e| Error::from_io("stat", object.display(), e);
        let mount = Mount::of(file).map_err(failed)?;
        let identity = Identity::of(&file.metadata().map_err(failed)?);
        Self::with(object, file, None, identity, mount, wishes).map_err(failed)
    }

    /// Opens the file of an object by its path, and verifies that it is still the same file, by
    /// `known` or by the object's own handle. A handle is stale when its file was replaced, so if
    /// neither can tell, the result is the stale error.
    pub(crate) fn reopen(
        object: &Arc<dyn Object>,
        known: Option<&OpenFile>,
        wishes: IoSettings,
    ) -> Result<Self> {
        let failed = |e| Error::from_io("open", object.display(), e);
        let ask = || Some(Identity::of(&object.file()?.metadata().ok()?));
        let Some(due) = known.map(|known| known.identity).or_else(ask) else {
            return Err(Error::Stale { operation: "open".to_owned(), object: object.display() });
        };
        let file = File::open(object.display()).map_err(failed)?;
        let identity = Identity::of(&file.metadata().map_err(failed)?);
        let len_then = object.len_bytes();
        if identity != due || identity.len_bytes != len_then {
            let (what, len_now) = (object.display(), Some(identity.len_bytes));
            return Err(Error::Changed { object: what, offset: 0, len_then, len_now });
        }
        let mount = Mount::of(&file).map_err(failed)?;
        let again = file.try_clone().map_err(failed)?;
        Self::with(object, &file, Some(again), identity, mount, wishes).map_err(failed)
    }

    fn with(
        object: &Arc<dyn Object>,
        file: &File,
        again: Option<File>,
        identity: Identity,
        mount: Arc<Mount>,
        wishes: IoSettings,
    ) -> io::Result<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        syscalls::advise_random(file);
        let told = syscalls::direct_align(file).map(|align| align.most() as usize);
        let align = told.filter(|&align| align > 0).unwrap_or(ALIGN_BYTES);
        let can = told != Some(0) && align <= ALIGN_BYTES && align.is_power_of_two();
        let direct = match wishes.direct {
            Setting::Only(false) => None,
            _ if !can || ladder(&mount, wishes).all(|way| !way.is_direct()) => None,
            _ => open_direct(file, &mount),
        };
        let layout = Layout::of(file, &mount.file_system);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let object = Arc::clone(object);
        // Who sets direct I/O wants the bytes of the device.
        let asks_cache = AtomicBool::new(wishes.direct != Setting::Only(true));
        Ok(OpenFile { id, object, identity, again, direct, align, mount, layout, asks_cache })
    }

    /// Copies the bytes from the page cache if all of them are there, and otherwise returns the
    /// read. It waits for no device, and a read that misses leaves nothing in the cache.
    ///
    /// The query comes first because a buffered read that misses starts to read the pages, also
    /// with `RWF_NOWAIT`. Where the kernel does not know the query, or the file system that flag
    /// (network file systems, FUSE), all reads of the file bypass the cache.
    pub(crate) fn read_cached(
        &self,
        mut load: BackendRead,
        query: CacheQuery,
    ) -> std::result::Result<BackendCompletion, BackendRead> {
        if !self.asks_cache.load(Ordering::Relaxed) {
            return Err(load);
        }
        let (file, len) = (self.file(ReadMethod::ThreadsCached), load.len);
        let came = match query(file, load.offset, len) {
            Ok(true) => syscalls::read_cached_at(file, &mut load.buf[..len], load.offset),
            Ok(false) => return Err(load),
            Err(e) => Err(e),
        };
        match came {
            Ok(count) if count == len => {
                let (slot, buf, moved_bytes) = (load.slot, load.buf, len as u64);
                let (data, outcome) = (0..len, Ok(()));
                Ok(BackendCompletion { slot, buf, data, moved_bytes, short_reads: 0, outcome })
            }
            // The kernel evicted a page meanwhile, or the file was truncated.
            Ok(_) => Err(load),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Err(load),
            Err(e) => {
                self.asks_cache.store(false, Ordering::Relaxed);
                log::debug!("{}: reads bypass the page cache: {e}", load.object.display());
                Err(load)
            }
        }
    }

    /// The best read method available for this file.
    pub(crate) fn way(&self, wishes: IoSettings) -> ReadMethod {
        let usable = |way: &ReadMethod| self.direct.is_some() || !way.is_direct();
        ladder(&self.mount, wishes).find(usable).unwrap_or(ReadMethod::ThreadsCached)
    }

    /// The best method for a thread.
    pub(crate) fn way_of_threads(&self, wishes: IoSettings) -> ReadMethod {
        match &self.direct {
            Some(_)
                if wishes.direct != Setting::Only(false)
                    && !self.mount.is_refused(ReadMethod::ThreadsDirect) =>
            {
                ReadMethod::ThreadsDirect
            }
            _ => ReadMethod::ThreadsCached,
        }
    }

    pub(crate) fn file(&self, way: ReadMethod) -> &File {
        match &self.direct {
            Some(direct) if way.is_direct() => direct,
            _ => self.again.as_ref().or(self.object.file()).expect("opened from a file"),
        }
    }

    pub(crate) fn align(&self, way: ReadMethod) -> usize {
        if way.is_direct() { self.align } else { 1 }
    }

    /// Reads by `pread`, on this thread, by the best method that works.
    pub(crate) fn read(&self, mut load: BackendRead, wishes: IoSettings) -> BackendCompletion {
        loop {
            let way = self.way_of_threads(wishes);
            let mut transfer = AlignedRead::new(&load, self.align(way));
            let cause = match self.carry(&mut load, &mut transfer, way) {
                Ok(()) => return transfer.done(load, Ok(())),
                Err(cause) => cause,
            };
            match cause {
                TransferErrorKind::Io(e)
                    if is_refusal(&e, way) && way != ReadMethod::ThreadsCached =>
                {
                    self.mount.refuse(way, &e);
                }
                cause => {
                    let error = self.error(&load, cause);
                    return transfer.done(load, Err(error));
                }
            }
        }
    }

    fn carry(
        &self,
        load: &mut BackendRead,
        transfer: &mut AlignedRead,
        way: ReadMethod,
    ) -> Carried<()> {
        let file = self.file(way);
        loop {
            let (offset, range) = transfer.rest();
            let came = file.read_at(&mut load.buf[range.clone()], offset);
            if transfer.advance(came)? == NextStep::Done {
                if !way.is_direct() && self.mount.spares_cache() {
                    syscalls::advise_done(file, offset, range.len());
                }
                return Ok(());
            }
        }
    }

    /// The error of a failed read. Asks the file system where the file ended.
    pub(crate) fn error(&self, load: &BackendRead, cause: TransferErrorKind) -> Error {
        let object = load.object.display();
        match cause {
            TransferErrorKind::Io(e) => {
                let operation = format!("read {} bytes at byte {} of", load.len, load.offset);
                Error::from_io(operation, object, e)
            }
            TransferErrorKind::End => {
                let len_now =
                    self.file(ReadMethod::ThreadsCached).metadata().ok().map(|meta| meta.len());
                let len_then = load.object.len_bytes();
                Error::Changed { object, offset: load.offset, len_then, len_now }
            }
        }
    }
}

/// The result of a transfer, or why it stopped.
type Carried<T> = std::result::Result<T, TransferErrorKind>;

/// Drops bytes of an object from the page cache, so that the next read of them is from the device:
/// for bytes that are not as they should be. A hint, without effect on objects that are no files.
pub fn drop_cached(object: &dyn Object, offset: u64, len: usize) {
    if let Some(file) = object.file() {
        syscalls::advise_done(file, offset, len);
    }
}

/// Reopens an open file by its descriptor, so that it is the same file even if its name was
/// replaced.
fn open_direct(file: &File, mount: &Mount) -> Option<File> {
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = File::options();
    match options.read(true).custom_flags(libc::O_DIRECT).open(same) {
        Ok(file) => Some(file),
        Err(e) => {
            // Running out of descriptors says nothing about the mount.
            if is_refusal(&e, ReadMethod::ThreadsDirect) {
                mount.refuse(ReadMethod::RingDirect, &e);
                mount.refuse(ReadMethod::ThreadsDirect, &e);
            }
            None
        }
    }
}

/// The read methods that the mount and the settings allow, best first.
pub(crate) fn ladder(mount: &Mount, wishes: IoSettings) -> impl Iterator<Item = ReadMethod> {
    let kind = mount.file_system.as_str();
    let in_memory = matches!(kind, "tmpfs" | "ramfs");
    // Without asynchronous buffered reads, a ring blocks a kernel thread for each. Direct reads do
    // not, unless the file system is a daemon that serves one at a time.
    let network = matches!(kind, "lustre" | "ceph" | "nfs" | "nfs4" | "gpfs" | "beegfs");
    let (inline, asked) = (mount.inline, wishes.engine);
    let liked = move |way: ReadMethod| match way {
        ReadMethod::RingDirect => inline || network,
        ReadMethod::RingCached => inline,
        ReadMethod::ThreadsDirect => !in_memory,
        ReadMethod::ThreadsCached => true,
    };
    let granted = move |way: ReadMethod| {
        let engine = match asked {
            Setting::Auto => liked(way),
            Setting::Only(IoEngine::Ring) => true,
            Setting::Only(IoEngine::Pread) => !way.is_ring(),
        };
        let direct = match wishes.direct {
            Setting::Auto => !way.is_direct() || !in_memory,
            Setting::Only(wish) => wish || !way.is_direct(),
        };
        engine && direct
    };
    let left = ReadMethod::ALL.map(|way| (way, granted(way) && !mount.is_refused(way)));
    left.into_iter().filter(|(_, left)| *left).map(|(way, _)| way)
}

/// Errors of sandboxes, old kernels and file systems without the operation; never I/O errors.
pub(crate) fn is_refusal(e: &io::Error, way: ReadMethod) -> bool {
    match e.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => true,
        Some(libc::EPERM | libc::EACCES) => way.is_ring(),
        // The alignment is not enough, whatever the file system reported.
        Some(libc::EINVAL) => way.is_direct(),
        // Postponed until the retries were spent: threads may block instead.
        _ => way.is_ring() && e.kind() == io::ErrorKind::WouldBlock,
    }
}

/// One read in whole blocks, and its progress.
#[derive(Debug)]
pub(crate) struct AlignedRead {
    start: u64,
    skip: usize,
    /// Bytes to request.
    span: usize,
    progress: TransferProgress,
    moved_bytes: u64,
    short_reads: u32,
}

impl AlignedRead {
    pub(crate) fn new(load: &BackendRead, align: usize) -> Self {
        let skip = (load.offset % align as u64) as usize; // fits: less than align
        let due = skip + load.len;
        let span = due.next_multiple_of(align);
        assert!(span <= load.buf.len(), "the buffer has room for the blocks of its read");
        let (start, progress) = (load.offset - skip as u64, TransferProgress::new(due, align));
        AlignedRead { start, skip, span, progress, moved_bytes: 0, short_reads: 0 }
    }

    /// The rest to read: the file offset, and the range of the buffer.
    pub(crate) fn rest(&self) -> (u64, Range<usize>) {
        let done = self.progress.done();
        (self.start + done as u64, done..self.span)
    }

    pub(crate) fn advance(&mut self, came: io::Result<usize>) -> Carried<NextStep> {
        self.moved_bytes += came.as_ref().map_or(0, |&count| count as u64);
        let step = self.progress.advance(came)?;
        self.short_reads += u32::from(step == NextStep::Again);
        Ok(step)
    }

    pub(crate) fn done(self, load: BackendRead, outcome: Result<()>) -> BackendCompletion {
        let data = if outcome.is_ok() { self.skip..self.skip + load.len } else { 0..0 };
        let AlignedRead { moved_bytes, short_reads, .. } = self;
        BackendCompletion {
            slot: load.slot,
            buf: load.buf,
            data,
            moved_bytes,
            short_reads,
            outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::{Map, RangeRead};

    /// An object with a stale handle.
    #[derive(Debug)]
    struct Stale(PathBuf, u64);

    impl Object for Stale {
        fn len_bytes(&self) -> u64 {
            self.1
        }

        fn read_many(&self, _: &mut [RangeRead<'_>]) -> Result<()> {
            Err(Error::Stale { operation: "read".to_owned(), object: self.display() })
        }

        fn map(&self) -> Result<Map> {
            Ok(Map::owned(Vec::new()))
        }

        fn display(&self) -> String {
            self.0.display().to_string()
        }
    }

    #[test]
    fn a_ring_that_only_puts_off_is_refused_and_data_errors_are_not() {
        let put_off = io::Error::new(io::ErrorKind::WouldBlock, "also after 32 retries");
        assert!(
            is_refusal(&put_off, ReadMethod::RingCached)
                && !is_refusal(&put_off, ReadMethod::ThreadsCached)
        );
        let broken = io::Error::from_raw_os_error(libc::EIO);
        assert!(ReadMethod::ALL.into_iter().all(|way| !is_refusal(&broken, way)));
    }

    /// A replaced file of the same length was once taken for the original if the old handle was
    /// stale; and it is stale because the file was replaced.
    #[test]
    fn a_stale_handle_does_not_lead_to_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(path(name), bytes).unwrap();
        write("a", b"the one");
        write("b", b"another");
        let object: Arc<dyn Object> = Arc::new(Stale(path("a"), 7));
        let wishes = IoSettings::default();
        let open = |at: &Path| OpenFile::open(&object, &File::open(at).unwrap(), wishes).unwrap();
        let known = open(&path("a"));
        assert!(OpenFile::reopen(&object, Some(&known), wishes).is_ok());
        let untold = OpenFile::reopen(&object, None, wishes);
        assert!(matches!(untold, Err(Error::Stale { .. })), "{untold:?}");
        fs::rename(path("b"), path("a")).unwrap();
        let changed = OpenFile::reopen(&object, Some(&known), wishes);
        assert!(matches!(changed, Err(Error::Changed { .. })), "{changed:?}");
    }
}
