//! A memfd, mapped and sealed: atomic words, and slices of the rest.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Memory of fixed length that other processes can map too. It starts with words, all else is
/// bytes.
#[derive(Debug)]
pub(super) struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the value, and nothing in it is bound to a thread.
unsafe impl Send for SharedMemory {}

// SAFETY: through a shared reference words are atomic, and bytes are only read.
unsafe impl Sync for SharedMemory {}

/// With these seals no page can vanish from under a mapping, which would raise a signal, and no
/// process can remove the seals.
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

impl SharedMemory {
    /// Zeros, which take no memory until they are touched.
    pub(super) fn create(len: usize) -> io::Result<Self> {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string; it shows in /proc, and names nothing.
        let fd = unsafe { libc::memfd_create(c"feedline".as_ptr(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just created, and has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(len as u64)?;
        // SAFETY: the descriptor is open as long as `file`.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Self::map(file.into(), len)
    }

    /// Maps the memory of another process, if it has that length and can never lose it.
    pub(super) fn open(fd: OwnedFd, len: usize) -> io::Result<Self> {
        // SAFETY: the descriptor is open as long as `fd`.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "expected sealed memory"));
        }
        let file = File::from(fd);
        let found = file.metadata()?.len();
        if found != len as u64 {
            let reason = format!("expected {len} bytes, found {found}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        Self::map(file.into(), len)
    }

    fn map(fd: OwnedFd, len: usize) -> io::Result<Self> {
        let (how, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, how, flags, fd.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).expect("the kernel maps nothing at zero");
        Ok(SharedMemory { start, len, fd })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The word at a place that is a multiple of 4. The same bytes must never be accessed as a
    /// slice.
    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset + 4 <= self.len,
            "a word at {offset} of {}",
            self.len
        );
        // SAFETY: the place is within the mapping, as checked above.
        let word = unsafe { self.start.add(offset) };
        // SAFETY: it is aligned, lives as long as `self`, and every process takes it for an atomic.
        unsafe { word.cast().as_ref() }
    }

    /// Bytes that no process writes while the slice lives: see [`super::ring`], which ensures that.
    pub(super) fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        let start = self.place(offset, len);
        // SAFETY: the place is within the mapping, which lives as long as `self`; no process writes
        // to it by the protocol of the ring's counters, which every Feedline process follows.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), len) }
    }

    /// Bytes that no process reads or writes while the slice lives, but this one through it.
    pub(super) fn bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        let start = self.place(offset, len);
        // SAFETY: as for `bytes`; within this process the slice borrows the memory exclusively, and
        // the ring takes no bytes that overlap its words.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Makes the kernel allocate the pages now; a lack of memory is an error here, and a signal
    /// later.
    pub(super) fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let start = self.place(offset, len);
        // SAFETY: the place is within the mapping, and no page changes its contents.
        match unsafe { libc::madvise(start.as_ptr().cast(), len, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn place(&self, offset: usize, len: usize) -> NonNull<u8> {
        let end = offset.checked_add(len).expect("fits: both are of a mapping");
        assert!(end <= self.len, "bytes {offset}..{end} of {}", self.len);
        // SAFETY: the place is within the mapping, as checked above.
        unsafe { self.start.add(offset) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no slice outlives it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Sleeps while the word is `seen`, until [`wake`] or for `limit`. Wake-ups may be spurious.
pub(super) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = libc::timespec {
        // fits: no wait is that long
        tv_sec: limit.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    let (number, wait) = (libc::SYS_futex, libc::FUTEX_WAIT);
    // SAFETY: word and limit live until the call returns. A futex that processes share is known by
    // its page, so every mapping of it will do.
    unsafe { libc::syscall(number, word.as_ptr(), wait, seen, &raw const limit) };
}

/// Wakes all sleepers on the word, in any process.
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: the word lives until the call returns.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}
