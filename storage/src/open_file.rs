//! A file that a reader reads: its descriptors, its alignment, its mount and its layout; and one
//! read of it, in terms of whole blocks.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::buf::ALIGN_BYTES;
use crate::flying::{Done, Load};
use crate::layout::Layout;
use crate::mount::{Mount, Way};
use crate::piece::{Cause, Progress, Step};
use crate::url::{Wish, Wishes};
use crate::{Engine, Error, Object, Result, sys};

#[derive(Debug)]
pub(crate) struct OpenFile {
    /// Told from every other, also of the same object.
    pub(crate) id: u64,
    object: Arc<dyn Object>,
    /// Opened anew, by its path, after an error.
    again: Option<File>,
    /// Opened to go around the page cache.
    direct: Option<File>,
    /// What direct reads are aligned to, in bytes.
    align: usize,
    pub(crate) mount: Arc<Mount>,
    pub(crate) layout: Layout,
}

impl OpenFile {
    /// Looks at the file of an object, and opens it as the wishes ask. Blocks if its file system
    /// does.
    pub(crate) fn open(object: &Arc<dyn Object>, file: &File, wishes: Wishes) -> Result<Self> {
        let failed = |e| Error::from_io("look at", object.display(), e);
        let mount = Mount::of(file).map_err(failed)?;
        Self::with(object, file, None, mount, wishes).map_err(failed)
    }

    /// Opens the file of an object by its path, and makes sure that it is the one it was.
    pub(crate) fn reopen(object: &Arc<dyn Object>, wishes: Wishes) -> Result<Self> {
        let failed = |e| Error::from_io("open", object.display(), e);
        let file = File::open(object.display()).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let then = object.len_bytes();
        // The old handle may be dead; where it can still tell, it must be the same file.
        let old = object.file().and_then(|file| file.metadata().ok());
        let same = old.is_none_or(|old| (old.dev(), old.ino()) == (meta.dev(), meta.ino()));
        if !same || meta.len() != then {
            let len_now = Some(meta.len());
            return Err(Error::Changed {
                what: object.display(),
                offset: 0,
                len_then: then,
                len_now,
            });
        }
        let mount = Mount::of(&file).map_err(failed)?;
        let again = file.try_clone().map_err(failed)?;
        Self::with(object, &file, Some(again), mount, wishes).map_err(failed)
    }

    fn with(
        object: &Arc<dyn Object>,
        file: &File,
        again: Option<File>,
        mount: Arc<Mount>,
        wishes: Wishes,
    ) -> io::Result<Self> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        sys::advise_random(file);
        let told = sys::direct_align(file).map(|align| align as usize);
        let align = told.filter(|&align| align > 0).unwrap_or(ALIGN_BYTES);
        let can = told != Some(0) && align <= ALIGN_BYTES && align.is_power_of_two();
        let direct = match wishes.direct {
            Wish::Only(false) => None,
            _ if !can || ladder(&mount, wishes).all(|way| !way.is_direct()) => None,
            _ => open_direct(file, &mount),
        };
        let layout = Layout::of(file, &mount.file_system);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let object = Arc::clone(object);
        Ok(OpenFile { id, object, again, direct, align, mount, layout })
    }

    /// The best way that is left for this file.
    pub(crate) fn way(&self, wishes: Wishes) -> Way {
        let usable = |way: &Way| self.direct.is_some() || !way.is_direct();
        ladder(&self.mount, wishes).find(usable).unwrap_or(Way::ThreadsCached)
    }

    /// The same, for a thread.
    pub(crate) fn way_of_threads(&self, wishes: Wishes) -> Way {
        match &self.direct {
            Some(_)
                if wishes.direct != Wish::Only(false)
                    && !self.mount.is_refused(Way::ThreadsDirect) =>
            {
                Way::ThreadsDirect
            }
            _ => Way::ThreadsCached,
        }
    }

    pub(crate) fn file(&self, way: Way) -> &File {
        match &self.direct {
            Some(direct) if way.is_direct() => direct,
            _ => self.again.as_ref().or(self.object.file()).expect("opened from a file"),
        }
    }

    pub(crate) fn align(&self, way: Way) -> usize {
        if way.is_direct() { self.align } else { 1 }
    }

    /// Reads by `pread`, on this thread, by the best way that works.
    pub(crate) fn read(&self, mut load: Load, wishes: Wishes) -> Done {
        loop {
            let way = self.way_of_threads(wishes);
            let mut transfer = Transfer::new(&load, self.align(way));
            let cause = match self.carry(&mut load, &mut transfer, way) {
                Ok(()) => return transfer.done(load, Ok(())),
                Err(cause) => cause,
            };
            match cause {
                Cause::Io(e) if is_refusal(&e, way) && way != Way::ThreadsCached => {
                    self.mount.refuse(way, &e);
                }
                cause => {
                    let error = self.error(&load, cause);
                    return transfer.done(load, Err(error));
                }
            }
        }
    }

    fn carry(&self, load: &mut Load, transfer: &mut Transfer, way: Way) -> Carried<()> {
        let file = self.file(way);
        loop {
            let (offset, range) = transfer.rest();
            let came = file.read_at(&mut load.buf[range.clone()], offset);
            if transfer.advance(came)? == Step::Done {
                if !way.is_direct() && self.mount.spares_cache() {
                    sys::advise_done(file, offset, range.len());
                }
                return Ok(());
            }
        }
    }

    /// What a failed read means. Asks the file system where the file ended.
    pub(crate) fn error(&self, load: &Load, cause: Cause) -> Error {
        let what = load.object.display();
        match cause {
            Cause::Io(e) => {
                Error::from_io(format!("read {} bytes at {} of", load.len, load.offset), what, e)
            }
            Cause::End => {
                let len_now = self.file(Way::ThreadsCached).metadata().ok().map(|meta| meta.len());
                let len_then = load.object.len_bytes();
                Error::Changed { what, offset: load.offset, len_then, len_now }
            }
        }
    }
}

/// What a transfer gives, or why it stopped.
type Carried<T> = std::result::Result<T, Cause>;

/// Opens what is open once more, by its descriptor, so that it is the same file whatever became of
/// its name.
fn open_direct(file: &File, mount: &Mount) -> Option<File> {
    let same = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = File::options();
    match options.read(true).custom_flags(libc::O_DIRECT).open(same) {
        Ok(file) => Some(file),
        Err(e) => {
            mount.refuse(Way::RingDirect, &e);
            mount.refuse(Way::ThreadsDirect, &e);
            None
        }
    }
}

/// The ways that a mount and the wishes leave, best first.
pub(crate) fn ladder(mount: &Mount, wishes: Wishes) -> impl Iterator<Item = Way> {
    let kind = mount.file_system.as_str();
    let in_memory = matches!(kind, "tmpfs" | "ramfs");
    // Without asynchronous buffered reads, a ring holds a kernel thread asleep for each. With
    // direct ones it does not, unless the file system is a process that answers one at a time.
    let network = matches!(kind, "lustre" | "ceph" | "nfs" | "nfs4" | "gpfs" | "beegfs");
    let (inline, asked) = (mount.inline, wishes.engine);
    let liked = move |way: Way| match way {
        Way::RingDirect => inline || network,
        Way::RingCached => inline,
        Way::ThreadsDirect => !in_memory,
        Way::ThreadsCached => true,
    };
    let granted = move |way: Way| {
        let engine = match asked {
            Wish::Auto => liked(way),
            Wish::Only(Engine::Ring) => true,
            Wish::Only(Engine::Pread) => !way.is_ring(),
        };
        let direct = match wishes.direct {
            Wish::Auto => !way.is_direct() || !in_memory,
            Wish::Only(wish) => wish || !way.is_direct(),
        };
        engine && direct
    };
    let left = Way::ALL.map(|way| (way, granted(way) && !mount.is_refused(way)));
    left.into_iter().filter(|(_, left)| *left).map(|(way, _)| way)
}

/// What sandboxes, old kernels and file systems without the operation say; never said of data.
pub(crate) fn is_refusal(e: &io::Error, way: Way) -> bool {
    match e.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => true,
        Some(libc::EPERM | libc::EACCES) => way.is_ring(),
        // An alignment that is not enough, whatever the file system told.
        Some(libc::EINVAL) => way.is_direct(),
        _ => false,
    }
}

/// One read in whole blocks, and how far it has come.
#[derive(Debug)]
pub(crate) struct Transfer {
    start: u64,
    skip: usize,
    /// Bytes to ask for.
    span: usize,
    progress: Progress,
    moved_bytes: u64,
    short_reads: u32,
}

impl Transfer {
    pub(crate) fn new(load: &Load, align: usize) -> Self {
        let skip = (load.offset % align as u64) as usize; // fits: less than align
        let due = skip + load.len;
        let span = due.next_multiple_of(align);
        assert!(span <= load.buf.len(), "the buffer has room for the blocks of its read");
        let (start, progress) = (load.offset - skip as u64, Progress::new(due, align));
        Transfer { start, skip, span, progress, moved_bytes: 0, short_reads: 0 }
    }

    /// What is still to come: the place in the file, and where in the buffer it goes.
    pub(crate) fn rest(&self) -> (u64, Range<usize>) {
        let done = self.progress.done();
        (self.start + done as u64, done..self.span)
    }

    pub(crate) fn advance(&mut self, came: io::Result<usize>) -> Carried<Step> {
        self.moved_bytes += came.as_ref().map_or(0, |&count| count as u64);
        let step = self.progress.advance(came)?;
        self.short_reads += u32::from(step == Step::Again);
        Ok(step)
    }

    pub(crate) fn done(self, load: Load, outcome: Result<()>) -> Done {
        let data = if outcome.is_ok() { self.skip..self.skip + load.len } else { 0..0 };
        let Transfer { moved_bytes, short_reads, .. } = self;
        Done { slot: load.slot, buf: load.buf, data, moved_bytes, short_reads, outcome }
    }
}
