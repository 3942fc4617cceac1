//! System calls that `std` lacks, each behind a safe function.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

/// Prefetches a table entry that will soon be read. It does not wait, whereas a read would stall
/// all later instructions.
#[inline]
pub fn prefetch<T>(entry: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint that reads nothing, and the entry exists.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(entry).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = entry;
}

/// Renames unless the target exists (`EEXIST`). File systems without support return `EINVAL`,
/// kernels without it `ENOSYS`.
pub(crate) fn rename_noreplace(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (c_path(from)?, c_path(to)?);
    let cwd = libc::AT_FDCWD;
    // SAFETY: both strings end in NUL and live until the call returns.
    let rc =
        unsafe { libc::renameat2(cwd, from.as_ptr(), cwd, to.as_ptr(), libc::RENAME_NOREPLACE) };
    checked(rc)
}

/// Sets a file's length and reserves its space. Unlike `posix_fallocate` it writes nothing on file
/// systems without support, but returns `EOPNOTSUPP`.
pub(crate) fn allocate(file: &File, len_bytes: u64) -> io::Result<()> {
    let len =
        libc::off_t::try_from(len_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: the descriptor is open as long as `file`.
    checked(unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) })
}

/// Disables read-ahead: samples of 8 KiB would otherwise transfer fifteen times their bytes. It is
/// a hint, and never changes a result.
pub(crate) fn advise_random(file: &File) {
    // SAFETY: the descriptor is open as long as `file`.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
}

/// Enables read-ahead, for sequential copies within the kernel.
pub(crate) fn advise_sequential(file: &File) {
    // SAFETY: the descriptor is open as long as `file`.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_SEQUENTIAL) };
}

/// Reads from the page cache only. `EAGAIN`: the first byte is not cached; `EOPNOTSUPP`: not
/// supported by this file system.
pub(crate) fn read_cached_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let offset =
        libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let to = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: the descriptor is open, and `to` is one buffer that lives until the call returns.
    let count =
        unsafe { libc::preadv2(file.as_raw_fd(), &raw const to, 1, offset, libc::RWF_NOWAIT) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Copies up to `count` bytes from one file to another within the kernel, and returns how many; 0
/// is the end of `from`. The files' own offsets do not change.
pub(crate) fn copy_file_range(
    from: &File,
    from_offset: u64,
    to: &File,
    to_offset: u64,
    count: usize,
) -> io::Result<usize> {
    let place = |offset| {
        libc::off64_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
    };
    let (mut at, mut to_at) = (place(from_offset)?, place(to_offset)?);
    let (from, to) = (from.as_raw_fd(), to.as_raw_fd());
    // SAFETY: both descriptors are open, and both offsets live until the call returns.
    let done = unsafe { libc::copy_file_range(from, &raw mut at, to, &raw mut to_at, count, 0) };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

/// Links an open file to another name, unless that is taken (`EEXIST`). A file without any name
/// left cannot be linked (`ENOENT`).
pub(crate) fn link(file: &File, to: &Path) -> io::Result<()> {
    let from = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let (to, cwd) = (c_path(to)?, libc::AT_FDCWD);
    // SAFETY: both strings end in NUL and live until the call returns.
    let rc = unsafe { libc::linkat(cwd, from.as_ptr(), cwd, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
    checked(rc)
}

/// Replaces the content of a file by the shared blocks of another, where the file system supports
/// that.
pub(crate) fn clone_blocks(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open until the call returns, which takes nothing else.
    checked(unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) })
}

/// The result of `statfs` for the file system of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StatFs {
    /// `f_type`, the magic number of its kind.
    pub(crate) magic: u32,
    /// Bytes that an unprivileged writer may still use; `None` if not counted.
    pub(crate) free_bytes: Option<u64>,
    /// All bytes; `None` likewise.
    pub(crate) total_bytes: Option<u64>,
    /// Free files, and all; `None` if not counted.
    pub(crate) files: Option<(u64, u64)>,
}

/// Drops these bytes from the page cache, after they were read: a hint.
pub(crate) fn advise_done(file: &File, offset: u64, len: usize) {
    let (Ok(offset), Ok(len)) = (libc::off_t::try_from(offset), libc::off_t::try_from(len)) else {
        return;
    };
    // SAFETY: the descriptor is open as long as `file`.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED) };
}

/// The magic number of the file system that an open file is on.
pub(crate) fn magic_of(file: &File) -> io::Result<u32> {
    let mut filled = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the descriptor is open, and `filled` is room for one `statfs`.
    checked(unsafe { libc::fstatfs(file.as_raw_fd(), filled.as_mut_ptr()) })?;
    // SAFETY: all zeros is a valid `statfs`, and the call filled it.
    let stat = unsafe { filled.assume_init() };
    Ok(stat.f_type as u32) // fits: as below
}

/// An extended attribute of an open file. `ENODATA` and `EOPNOTSUPP`: there is none of that name.
pub(crate) fn attribute(file: &File, name: &CStr) -> io::Result<Vec<u8>> {
    // What the kernel allows: 64 KiB, which is Lustre's layout over 2000 servers and some more.
    let mut value = vec![0_u8; 64 << 10];
    let (fd, name, room) = (file.as_raw_fd(), name.as_ptr(), value.len());
    // SAFETY: the name ends in NUL, and `value` has room for so many bytes.
    let len = unsafe { libc::fgetxattr(fd, name, value.as_mut_ptr().cast(), room) };
    value.truncate(usize::try_from(len).map_err(|_| io::Error::last_os_error())?);
    Ok(value)
}

/// Sets an extended attribute of an open file.
pub(crate) fn set_attribute(file: &File, name: &CStr, value: &[u8]) -> io::Result<()> {
    let (fd, name, len) = (file.as_raw_fd(), name.as_ptr(), value.len());
    // SAFETY: the name ends in NUL, and `value` has so many bytes; both live until the call
    // returns.
    checked(unsafe { libc::fsetxattr(fd, name, value.as_ptr().cast(), len, 0) })
}

/// Sets the Lustre layout of an open folder, or of a new file without objects: the bytes of a
/// `lov_user_md`, whose length the kernel takes from its magic number.
pub(crate) fn set_stripes(file: &File, layout: &[u8]) -> io::Result<()> {
    /// `LL_IOC_LOV_SETSTRIPE` of `lustre_user.h`: `_IOW('f', 154, long)`.
    const SET_STRIPE: libc::Ioctl = 0x4008_669a;
    // SAFETY: the descriptor is open, and the layout is as long as its magic number says and lives
    // until the call returns. On other file systems the number has no meaning.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), SET_STRIPE, layout.as_ptr()) })
}

/// Makes one file share the blocks of another.
pub(crate) fn clone_file(from: &File, to: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open; the request takes a descriptor and no pointer.
    checked(unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) })
}

/// The size of a page of the page cache: 4,096 bytes on x86-64, up to 65,536 on arm64.
pub(crate) fn page_bytes() -> u64 {
    // SAFETY: it only returns a number.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(bytes).expect("every kernel has pages")
}

/// How many pages of a range of a file are in the page cache. `ENOSYS`: not supported before Linux
/// 6.5. `EPERM`: the kernel reports it only to the owner of the file and to those who may write to
/// it.
pub(crate) fn cached_pages(file: &File, offset: u64, len_bytes: u64) -> io::Result<u64> {
    /// `cachestat(2)`, which has one number on all machines.
    const CACHESTAT: libc::c_long = 451;
    let range = [offset, len_bytes];
    let mut filled = [0_u64; 5];
    let (fd, range) = (file.as_raw_fd(), range.as_ptr());
    // SAFETY: a range is an offset and a length, and the answer five numbers, the first of which is
    // the pages in the cache; both live until the call returns.
    let rc = unsafe { libc::syscall(CACHESTAT, fd, range, filled.as_mut_ptr(), 0) };
    if rc == 0 { Ok(filled[0]) } else { Err(io::Error::last_os_error()) }
}

/// Whether the clock of this machine is synchronized, and its maximum error in microseconds.
pub(crate) fn clock() -> io::Result<(bool, u64)> {
    let mut filled = MaybeUninit::<libc::timex>::zeroed();
    // SAFETY: all zeros asks for nothing to be changed, and there is room for the answer.
    let state = unsafe { libc::adjtimex(filled.as_mut_ptr()) };
    if state < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all zeros is a valid `timex`, and the call filled it.
    let timex = unsafe { filled.assume_init() };
    let is_synchronized = timex.status & libc::STA_UNSYNC == 0;
    Ok((is_synchronized, u64::try_from(timex.maxerror).unwrap_or(0)))
}

/// User and kernel CPU time of this process, with its threads that have ended and the kernel
/// threads that work for it.
pub(crate) fn cpu_times() -> io::Result<[Duration; 2]> {
    let mut filled = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `filled` is room for one `rusage`.
    checked(unsafe { libc::getrusage(libc::RUSAGE_SELF, filled.as_mut_ptr()) })?;
    // SAFETY: all zeros is a valid `rusage`, and the call filled it.
    let usage = unsafe { filled.assume_init() };
    // fits: it counts up from 0, and the second number is below 10^6
    let time = |of: libc::timeval| Duration::new(of.tv_sec as u64, of.tv_usec as u32 * 1000);
    Ok([usage.ru_utime, usage.ru_stime].map(time))
}

pub(crate) fn file_system(path: &Path) -> io::Result<StatFs> {
    let path = c_path(path)?;
    let mut filled = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the path ends in NUL, and `filled` is room for one `statfs`.
    checked(unsafe { libc::statfs(path.as_ptr(), filled.as_mut_ptr()) })?;
    // SAFETY: all zeros is a valid `statfs`, and the call filled it.
    let stat = unsafe { filled.assume_init() };
    let counted = stat.f_blocks > 0;
    let free_bytes = counted.then(|| stat.f_bavail.saturating_mul(stat.f_bsize.unsigned_abs()));
    let total_bytes = counted.then(|| stat.f_blocks.saturating_mul(stat.f_bsize.unsigned_abs()));
    // File systems without a limit report impossible numbers: CephFS that all but none are free.
    let limited = stat.f_files > 0 && stat.f_ffree <= stat.f_files;
    let files = limited.then_some((stat.f_ffree, stat.f_files));
    // The magic numbers have 32 bits; `f_type` is wider, and signed, on some machines.
    Ok(StatFs { magic: stat.f_type as u32, free_bytes, total_bytes, files })
}

/// The alignment of direct I/O on a file, for memory and offsets, in bytes. Zero: there is none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirectAlign {
    pub(crate) memory: u32,
    pub(crate) offset: u32,
}

impl DirectAlign {
    /// Whether the file has no direct I/O.
    pub(crate) fn is_none(self) -> bool {
        self.memory == 0 || self.offset == 0
    }

    /// One alignment for both; zero if there is no direct I/O.
    pub(crate) fn most(self) -> u32 {
        if self.is_none() { 0 } else { self.memory.max(self.offset) }
    }
}

/// The alignment of direct I/O on this file. `None`: not reported by the file system.
pub(crate) fn direct_align(file: &File) -> Option<DirectAlign> {
    let mut filled = MaybeUninit::<libc::statx>::zeroed();
    let (fd, flags) = (file.as_raw_fd(), libc::AT_EMPTY_PATH);
    // SAFETY: the path is an empty C string, and `filled` is room for one `statx`.
    let rc =
        unsafe { libc::statx(fd, c"".as_ptr(), flags, libc::STATX_DIOALIGN, filled.as_mut_ptr()) };
    checked(rc).ok()?;
    // SAFETY: all zeros is a valid `statx`, and the call filled it.
    let stat = unsafe { filled.assume_init() };
    let known = stat.stx_mask & libc::STATX_DIOALIGN != 0;
    let align = DirectAlign { memory: stat.stx_dio_mem_align, offset: stat.stx_dio_offset_align };
    known.then_some(align)
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn checked(rc: libc::c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
