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
use crate::sys::syscalls;
use crate::{Error, IoEngine, Object, Result};

#[derive(Debug)]
pub(crate) struct OpenFile {
    /// Unique, also among files of the same object.
    pub(crate) id: u64,
    object: Arc<dyn Object>,
    identity: Identity,
    /// Reopened by path after an error.
    reopened: Option<File>,
    /// Opened for direct I/O.
    direct: Option<File>,
    /// Alignment of direct reads, in bytes.
    align: usize,
    pub(crate) mount: Arc<Mount>,
    pub(crate) layout: Layout,
    /// Whether reads try the page cache first. Turned off permanently by the first error.
    tries_cache: AtomicBool,
}

/// Whether all bytes of a range of a file are in the page cache.
pub(crate) type CacheQuery = fn(&File, u64, usize) -> io::Result<bool>;

/// Queries the kernel, without reading anything.
pub(crate) fn is_cached(file: &File, offset: u64, len: usize) -> io::Result<bool> {
    let (len, page_bytes) = (len as u64, syscalls::page_bytes());
    let pages = (offset + len).div_ceil(page_bytes) - offset / page_bytes;
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
    pub(crate) fn open(
        object: &Arc<dyn Object>,
        file: &File,
        settings: IoSettings,
    ) -> Result<Self> {
        let failed = |e| Error::from_io("stat", object.display(), e);
        let mount = Mount::of(file).map_err(failed)?;
        let identity = Identity::of(&file.metadata().map_err(failed)?);
        Self::with(object, file, None, identity, mount, settings).map_err(failed)
    }

    /// Opens the file of an object by its path, and verifies that it is still the same file, by
    /// `known` or by the object's own handle. A handle is stale when its file was replaced, so if
    /// neither identifies the file, the result is the stale error.
    pub(crate) fn reopen(
        object: &Arc<dyn Object>,
        known: Option<&OpenFile>,
        settings: IoSettings,
    ) -> Result<Self> {
        let failed = |e| Error::from_io("open", object.display(), e);
        let of_handle = || Some(Identity::of(&object.file()?.metadata().ok()?));
        let Some(expected) = known.map(|known| known.identity).or_else(of_handle) else {
            return Err(Error::Stale { operation: "open".to_owned(), object: object.display() });
        };
        let file = File::open(object.display()).map_err(failed)?;
        let identity = Identity::of(&file.metadata().map_err(failed)?);
        let len_then = object.len_bytes();
        if identity != expected || identity.len_bytes != len_then {
            let (object_name, len_now) = (object.display(), Some(identity.len_bytes));
            return Err(Error::Changed { object: object_name, offset: 0, len_then, len_now });
        }
        let mount = Mount::of(&file).map_err(failed)?;
        let reopened = file.try_clone().map_err(failed)?;
        Self::with(object, &file, Some(reopened), identity, mount, settings).map_err(failed)
    }

    fn with(
        object: &Arc<dyn Object>,
        file: &File,
        reopened: Option<File>,
        identity: Identity,
        mount: Arc<Mount>,
        settings: IoSettings,
    ) -> io::Result<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        syscalls::advise_random(file);
        let reported = syscalls::direct_align(file).map(|align| align.most() as usize);
        let align = reported.filter(|&align| align > 0).unwrap_or(ALIGN_BYTES);
        let can = reported != Some(0) && align <= ALIGN_BYTES && align.is_power_of_two();
        let direct = match settings.direct {
            Setting::Only(false) => None,
            _ if !can || methods(&mount, settings).all(|method| !method.is_direct()) => None,
            _ => open_direct(file, &mount),
        };
        let layout = Layout::of(file, &mount.file_system);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let object = Arc::clone(object);
        // A user who sets direct I/O wants the bytes of the device.
        let tries_cache = AtomicBool::new(settings.direct != Setting::Only(true));
        Ok(OpenFile { id, object, identity, reopened, direct, align, mount, layout, tries_cache })
    }

    /// Copies the bytes from the page cache if all of them are there, and otherwise returns the
    /// read. It waits for no device, and a miss adds nothing to the cache.
    ///
    /// The query precedes the read because a buffered read that misses starts to read the pages,
    /// also with `RWF_NOWAIT`. Where the kernel does not know the query, or the file system that
    /// flag (network file systems, FUSE), all reads of the file bypass the cache.
    pub(crate) fn read_cached(
        &self,
        mut request: BackendRead,
        query: CacheQuery,
    ) -> std::result::Result<BackendCompletion, BackendRead> {
        if !self.tries_cache.load(Ordering::Relaxed) {
            return Err(request);
        }
        let (file, len) = (self.file(ReadMethod::ThreadsCached), request.len);
        let result = match query(file, request.offset, len) {
            Ok(true) => syscalls::read_cached_at(file, &mut request.buf[..len], request.offset),
            Ok(false) => return Err(request),
            Err(e) => Err(e),
        };
        match result {
            Ok(count) if count == len => {
                let (slot, buf, moved_bytes) = (request.slot, request.buf, len as u64);
                let (data, outcome) = (0..len, Ok(()));
                Ok(BackendCompletion { slot, buf, data, moved_bytes, short_reads: 0, outcome })
            }
            // The kernel evicted a page meanwhile, or the file was truncated.
            Ok(_) => Err(request),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Err(request),
            Err(e) => {
                self.tries_cache.store(false, Ordering::Relaxed);
                log::debug!("{}: reads bypass the page cache: {e}", request.object.display());
                Err(request)
            }
        }
    }

    /// The best read method available for this file.
    pub(crate) fn method(&self, settings: IoSettings) -> ReadMethod {
        let usable = |method: &ReadMethod| self.direct.is_some() || !method.is_direct();
        methods(&self.mount, settings).find(usable).unwrap_or(ReadMethod::ThreadsCached)
    }

    /// The best method for a thread.
    pub(crate) fn thread_method(&self, settings: IoSettings) -> ReadMethod {
        match &self.direct {
            Some(_)
                if settings.direct != Setting::Only(false)
                    && !self.mount.is_refused(ReadMethod::ThreadsDirect) =>
            {
                ReadMethod::ThreadsDirect
            }
            _ => ReadMethod::ThreadsCached,
        }
    }

    pub(crate) fn file(&self, method: ReadMethod) -> &File {
        match &self.direct {
            Some(direct) if method.is_direct() => direct,
            _ => self.reopened.as_ref().or(self.object.file()).expect("opened from a file"),
        }
    }

    pub(crate) fn align(&self, method: ReadMethod) -> usize {
        if method.is_direct() { self.align } else { 1 }
    }

    /// Reads by `pread`, on this thread, by the best method that works.
    pub(crate) fn read(&self, mut request: BackendRead, settings: IoSettings) -> BackendCompletion {
        loop {
            let method = self.thread_method(settings);
            let mut transfer = AlignedRead::new(&request, self.align(method));
            let cause = match self.run_transfer(&mut request, &mut transfer, method) {
                Ok(()) => return transfer.done(request, Ok(())),
                Err(cause) => cause,
            };
            match cause {
                TransferErrorKind::Io(e)
                    if is_refusal(&e, method) && method != ReadMethod::ThreadsCached =>
                {
                    self.mount.refuse(method, &e);
                }
                cause => {
                    let error = self.error(&request, cause);
                    return transfer.done(request, Err(error));
                }
            }
        }
    }

    fn run_transfer(
        &self,
        request: &mut BackendRead,
        transfer: &mut AlignedRead,
        method: ReadMethod,
    ) -> Carried<()> {
        let file = self.file(method);
        loop {
            let (offset, range) = transfer.rest();
            let result = file.read_at(&mut request.buf[range.clone()], offset);
            if transfer.advance(result)? == NextStep::Done {
                if !method.is_direct() && self.mount.uses_dontcache() {
                    syscalls::advise_done(file, offset, range.len());
                }
                return Ok(());
            }
        }
    }

    /// The error of a failed read. Queries the file system for the current length.
    pub(crate) fn error(&self, request: &BackendRead, cause: TransferErrorKind) -> Error {
        let object = request.object.display();
        match cause {
            TransferErrorKind::Io(e) => {
                let operation = format!("read {} bytes at byte {} of", request.len, request.offset);
                Error::from_io(operation, object, e)
            }
            TransferErrorKind::End => {
                let len_now =
                    self.file(ReadMethod::ThreadsCached).metadata().ok().map(|meta| meta.len());
                let len_then = request.object.len_bytes();
                Error::Changed { object, offset: request.offset, len_then, len_now }
            }
        }
    }
}

/// The result of a transfer, or why it stopped.
type Carried<T> = std::result::Result<T, TransferErrorKind>;

/// Drops bytes of an object from the page cache, so that the next read of them is from the device:
/// for corrupt bytes. A hint, without effect on objects that are no files.
pub fn drop_cached(object: &dyn Object, offset: u64, len: usize) {
    if let Some(file) = object.file() {
        syscalls::advise_done(file, offset, len);
    }
}

/// Reopens an open file by its descriptor, so that it is the same file even if its name was
/// replaced.
fn open_direct(file: &File, mount: &Mount) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = File::options();
    match options.read(true).custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => Some(file),
        Err(e) => {
            // Running out of descriptors is no property of the mount.
            if is_refusal(&e, ReadMethod::ThreadsDirect) {
                mount.refuse(ReadMethod::RingDirect, &e);
                mount.refuse(ReadMethod::ThreadsDirect, &e);
            }
            None
        }
    }
}

/// The read methods that the mount and the settings allow, best first.
pub(crate) fn methods(mount: &Mount, settings: IoSettings) -> impl Iterator<Item = ReadMethod> {
    let kind = mount.file_system.as_str();
    let in_memory = matches!(kind, "tmpfs" | "ramfs");
    // Without asynchronous buffered reads, a ring blocks a kernel thread for each. Direct reads do
    // not, unless the file system is a daemon that serves one at a time.
    let network = matches!(kind, "lustre" | "ceph" | "nfs" | "nfs4" | "gpfs" | "beegfs");
    let (inline, requested) = (mount.inline, settings.engine);
    let preferred = move |method: ReadMethod| match method {
        ReadMethod::RingDirect => inline || network,
        ReadMethod::RingCached => inline,
        ReadMethod::ThreadsDirect => !in_memory,
        ReadMethod::ThreadsCached => true,
    };
    let allowed = move |method: ReadMethod| {
        let engine = match requested {
            Setting::Auto => preferred(method),
            Setting::Only(IoEngine::Ring) => true,
            Setting::Only(IoEngine::Pread) => !method.is_ring(),
        };
        let direct = match settings.direct {
            Setting::Auto => !method.is_direct() || !in_memory,
            Setting::Only(direct) => direct || !method.is_direct(),
        };
        engine && direct
    };
    let usable =
        ReadMethod::ALL.map(|method| (method, allowed(method) && !mount.is_refused(method)));
    usable.into_iter().filter(|(_, usable)| *usable).map(|(method, _)| method)
}

/// Errors of sandboxes, old kernels and file systems without the operation; never I/O errors.
pub(crate) fn is_refusal(e: &io::Error, method: ReadMethod) -> bool {
    match e.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => true,
        Some(libc::EPERM | libc::EACCES) => method.is_ring(),
        // The alignment is insufficient, whatever the file system reported.
        Some(libc::EINVAL) => method.is_direct(),
        // Postponed until the retries were exhausted: threads may block instead.
        _ => method.is_ring() && e.kind() == io::ErrorKind::WouldBlock,
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
    pub(crate) fn new(request: &BackendRead, align: usize) -> Self {
        let skip = (request.offset % align as u64) as usize; // fits: less than align
        let needed = skip + request.len;
        let span = needed.next_multiple_of(align);
        assert!(span <= request.buf.len(), "the buffer has room for the blocks of its read");
        let (start, progress) =
            (request.offset - skip as u64, TransferProgress::new(needed, align));
        AlignedRead { start, skip, span, progress, moved_bytes: 0, short_reads: 0 }
    }

    /// The rest to read: the file offset, and the range of the buffer.
    pub(crate) fn rest(&self) -> (u64, Range<usize>) {
        let done = self.progress.done();
        (self.start + done as u64, done..self.span)
    }

    pub(crate) fn advance(&mut self, result: io::Result<usize>) -> Carried<NextStep> {
        self.moved_bytes += result.as_ref().map_or(0, |&count| count as u64);
        let step = self.progress.advance(result)?;
        self.short_reads += u32::from(step == NextStep::Again);
        Ok(step)
    }

    pub(crate) fn done(self, request: BackendRead, outcome: Result<()>) -> BackendCompletion {
        let data = if outcome.is_ok() { self.skip..self.skip + request.len } else { 0..0 };
        let AlignedRead { moved_bytes, short_reads, .. } = self;
        BackendCompletion {
            slot: request.slot,
            buf: request.buf,
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
    fn postponed_ring_reads_are_refusals_and_io_errors_are_not() {
        let postponed = io::Error::new(io::ErrorKind::WouldBlock, "also after 32 retries");
        assert!(
            is_refusal(&postponed, ReadMethod::RingCached)
                && !is_refusal(&postponed, ReadMethod::ThreadsCached)
        );
        let broken = io::Error::from_raw_os_error(libc::EIO);
        assert!(ReadMethod::ALL.into_iter().all(|method| !is_refusal(&broken, method)));
    }

    /// A replaced file of the same length was once taken for the original if the old handle was
    /// stale; and a handle is stale because its file was replaced.
    #[test]
    fn a_stale_handle_is_not_reopened_as_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let write = |name: &str, bytes: &[u8]| fs::write(path(name), bytes).unwrap();
        write("a", b"the one");
        write("b", b"another");
        let object: Arc<dyn Object> = Arc::new(Stale(path("a"), 7));
        let settings = IoSettings::default();
        let open = |at: &Path| OpenFile::open(&object, &File::open(at).unwrap(), settings).unwrap();
        let known = open(&path("a"));
        assert!(OpenFile::reopen(&object, Some(&known), settings).is_ok());
        let unidentified = OpenFile::reopen(&object, None, settings);
        assert!(matches!(unidentified, Err(Error::Stale { .. })), "{unidentified:?}");
        fs::rename(path("b"), path("a")).unwrap();
        let changed = OpenFile::reopen(&object, Some(&known), settings);
        assert!(matches!(changed, Err(Error::Changed { .. })), "{changed:?}");
    }
}
