//! Aligned buffers from one bounded pool, for IO that goes around the page cache.

use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut, MmapOptions};

/// What direct IO is aligned to, in memory and in the file: every device and file system known to
/// us asks for 4,096 or less, and Lustre for exactly that.
pub(crate) const ALIGN_BYTES: usize = 4096;

/// Eight pieces of 1 MiB: enough in flight at once for a device of 7 GB/s with 1.2 ms of latency.
/// An upload holds two such buffers, a direct read one.
pub(crate) const BUF_BYTES: usize = 8 << 20;

/// Idle buffers that are kept while none is in use: 32 MiB, those of two uploads. More are given
/// back to the system.
const IDLE_MAX: usize = 4;

/// Buffers that are kept, in use or idle, while some are in use: 256 MiB, what a save may have on
/// its way. To give them back in the middle of it is to have the system zero them again and again.
const KEPT_MAX: usize = 32;

const _: () = assert!(BUF_BYTES.is_multiple_of(ALIGN_BYTES));

static POOL: Mutex<Pool> = Mutex::new(Pool { idle: Vec::new(), taken: 0 });

struct Pool {
    idle: Vec<Zeros>,
    /// In use.
    taken: usize,
}

impl Pool {
    /// Takes one back. Gives those that are too many.
    fn give(&mut self, block: Option<Zeros>) -> Vec<Zeros> {
        self.taken -= 1;
        self.idle.extend(block);
        let kept = match self.taken {
            0 => IDLE_MAX,
            taken => KEPT_MAX.saturating_sub(taken).max(IDLE_MAX),
        };
        self.idle.split_off(kept.min(self.idle.len()))
    }
}

fn pool() -> MutexGuard<'static, Pool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// [`BUF_BYTES`] of memory at a multiple of [`ALIGN_BYTES`]. Goes back to the pool when dropped;
/// what it holds when taken is unspecified.
#[derive(Debug)]
pub(crate) struct Buf(Option<Zeros>);

impl Buf {
    pub(crate) fn take() -> Self {
        let idle = {
            let mut pool = pool();
            pool.taken += 1;
            pool.idle.pop()
        };
        Buf(Some(idle.unwrap_or_else(|| Zeros::new(BUF_BYTES))))
    }

    fn block(&self) -> &Zeros {
        self.0.as_ref().expect("present until dropped")
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // Unmapped when the lock is free again.
        let freed = pool().give(self.0.take());
        drop(freed);
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.block()
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().expect("present until dropped")
    }
}

/// Zeros, each page of which the system gives when it is first touched.
#[derive(Debug)]
pub struct Zeros(MmapMut);

impl Zeros {
    /// So many bytes, in large pages where the system has them: a table that is asked at random
    /// would else wait for the addresses of its pages as long as for what is in them.
    ///
    /// # Panics
    /// If there is no memory, as every allocation does.
    #[must_use]
    pub fn new(len_bytes: usize) -> Self {
        Zeros::try_new(len_bytes).expect("memory")
    }

    /// The same, for a size that the outside world has a say in.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn try_new(len_bytes: usize) -> io::Result<Self> {
        let map = MmapOptions::new().len(len_bytes).map_anon()?;
        // A hint: some kernels have no large pages.
        let _ = map.advise(Advice::HugePage);
        Ok(Zeros(map))
    }
}

impl Deref for Zeros {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Zeros {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_writable_and_bounded() {
        let mut held: Vec<Buf> = (0..IDLE_MAX + 2).map(|_| Buf::take()).collect();
        for (i, buf) in held.iter_mut().enumerate() {
            assert_eq!(buf.as_ptr() as usize % ALIGN_BYTES, 0);
            assert_eq!(buf.len(), BUF_BYTES);
            buf[BUF_BYTES - 1] = i as u8;
        }
        assert!(held.iter().enumerate().all(|(i, buf)| buf[BUF_BYTES - 1] == i as u8));
        drop(held);
    }

    /// Those of a save stay while it lasts, and few of them after it.
    #[test]
    fn idle_buffers_are_bounded() {
        let mut pool = Pool { idle: Vec::new(), taken: 2 * KEPT_MAX };
        for taken in (0..2 * KEPT_MAX).rev() {
            let freed = pool.give(Some(Zeros::new(ALIGN_BYTES)));
            let kept = pool.idle.len() + taken;
            assert!(kept <= KEPT_MAX || pool.idle.len() <= IDLE_MAX, "{kept} with {taken} in use");
            assert!(
                freed.is_empty() || taken == 0 || kept >= KEPT_MAX,
                "freed with {taken} in use"
            );
        }
        assert_eq!((pool.taken, pool.idle.len()), (0, IDLE_MAX));
    }
}
