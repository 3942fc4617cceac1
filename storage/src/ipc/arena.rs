//! One large block of memory that is filled, passed on and reused.

use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{BorrowedFd, OwnedFd};

use memmap2::{Advice, MmapMut};

use super::shared_memory::SharedMemory;
use crate::{Error, Result};

/// Bytes of one length, zeros at first. The kernel allocates their pages at the first write, or
/// earlier by [`Arena::populate`], and keeps them until the arena is dropped.
pub struct Arena(Backing);

enum Backing {
    Own(MmapMut),
    Shared(SharedMemory),
}

/// Bytes that one thread populates at once: enough for the largest pages, small enough that the
/// threads end together.
const POPULATE_BYTES: usize = 64 << 20;

impl Arena {
    /// Private memory, in large pages where the system has them.
    ///
    /// # Errors
    /// [`Error::Io`] if the system has no address space for it.
    pub fn new(len: usize) -> Result<Self> {
        let failed = |e| Error::from_io("reserve", format!("{len} bytes of memory"), e);
        let map = MmapMut::map_anon(len.max(1)).map_err(failed)?;
        // It is advice: if ignored, copies are somewhat slower.
        let _ = map.advise(Advice::HugePage);
        Ok(Arena(Backing::Own(map)))
    }

    /// Memory that other processes may open by its descriptor, and that outlives this one with
    /// them. All processes that have it must agree on who writes when: it is read as plain memory.
    ///
    /// # Errors
    /// [`Error::Io`] if the kernel has none.
    pub fn new_shared(len: usize) -> Result<Self> {
        let failed = |e| Error::from_io("create", format!("{len} bytes of shared memory"), e);
        Ok(Arena(Backing::Shared(SharedMemory::create(len.max(1)).map_err(failed)?)))
    }

    /// Opens the memory that another process created with [`Arena::new_shared`].
    ///
    /// # Errors
    /// [`Error::Io`] if it has another length, or could lose pages.
    pub fn open(fd: OwnedFd, len: usize) -> Result<Self> {
        let failed = |e| Error::from_io("open", format!("{len} bytes of shared memory"), e);
        Ok(Arena(Backing::Shared(SharedMemory::open(fd, len.max(1)).map_err(failed)?)))
    }

    /// The descriptor for other processes; `None` for private memory.
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Backing::Own(_) => None,
            Backing::Shared(memory) => Some(memory.fd()),
        }
    }

    /// Allocates all pages now, with this many threads, so that the first writer need not wait for
    /// each. For shared memory this reports a lack of memory, which would kill the process later.
    ///
    /// # Errors
    /// [`Error::Io`] if there is not enough memory. A kernel before 5.14 does nothing.
    pub fn populate(&mut self, threads: usize) -> Result<()> {
        let len = self.len();
        let part = len.div_ceil(threads.max(1)).next_multiple_of(POPULATE_BYTES);
        let backing = &self.0;
        let populate = |start: usize| {
            let end = len.min(start + part);
            (start..end).step_by(POPULATE_BYTES).try_for_each(|at| {
                let count = POPULATE_BYTES.min(end - at);
                match backing {
                    Backing::Own(map) => map.advise_range(Advice::PopulateWrite, at, count),
                    Backing::Shared(memory) => memory.populate(at, count),
                }
            })
        };
        let outcomes: Vec<io::Result<()>> = std::thread::scope(|scope| {
            let starts = (0..len).step_by(part);
            let spawn = |at| {
                let thread = std::thread::Builder::new();
                thread.spawn_scoped(scope, move || populate(at)).map_err(|_| at)
            };
            let all: Vec<_> = starts.map(spawn).collect();
            let join = |one: std::result::Result<_, usize>| match one {
                Ok(one) => outcome_of(one),
                // The system creates no more threads.
                Err(at) => populate(at),
            };
            all.into_iter().map(join).collect()
        });
        for outcome in outcomes {
            match outcome {
                Err(e) if e.raw_os_error() != Some(libc::EINVAL) => {
                    return Err(Error::from_io("populate", format!("{len} bytes of memory"), e));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// What a thread returned.
fn outcome_of<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Deref for Arena {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Backing::Own(map) => map,
            Backing::Shared(memory) => memory.bytes(0, memory.len()),
        }
    }
}

impl DerefMut for Arena {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Backing::Own(map) => map,
            Backing::Shared(memory) => {
                let len = memory.len();
                memory.bytes_mut(0, len)
            }
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.fd().is_some() { ", shared" } else { "" };
        write!(f, "Arena({} bytes{kind})", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_visible_to_both_sides() {
        let len = 3 * 4096 + 5;
        let mut mine = Arena::new_shared(len).unwrap();
        mine.populate(2).unwrap();
        assert!(mine.iter().all(|&byte| byte == 0));
        mine[len - 1] = 7;
        let fd = mine.fd().unwrap().try_clone_to_owned().unwrap();
        let theirs = Arena::open(fd.try_clone().unwrap(), len).unwrap();
        assert_eq!((theirs.len(), theirs[len - 1]), (len, 7));
        assert!(Arena::open(fd, len - 1).is_err(), "of another length");
        drop(mine);
        assert_eq!(theirs[len - 1], 7, "it outlives its creator while another has it");
    }

    #[test]
    fn private_memory_is_zeroed_and_populated() {
        let mut arena = Arena::new(POPULATE_BYTES + 12345).unwrap();
        arena.populate(3).unwrap();
        assert!(arena.fd().is_none());
        let last = arena.len() - 1;
        arena[last] = 1;
        assert_eq!(arena.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 1);
        assert_eq!(Arena::new(0).unwrap().len(), 1);
    }
}
