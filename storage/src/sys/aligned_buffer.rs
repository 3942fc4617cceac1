//! Aligned buffers from one bounded pool, for direct I/O.

use std::alloc::{Layout, handle_alloc_error};
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::{Advice, MmapMut, MmapOptions};

use crate::base::per_process::PerProcess;

/// Alignment of direct I/O, in memory and in the file: every known device and file system requires
/// 4,096 or less, and Lustre exactly that.
pub(crate) const ALIGN_BYTES: usize = 4096;

/// Eight pieces of 1 MiB: enough in flight at once for a device of 7 GB/s with 1.2 ms of latency.
/// An upload holds two such buffers, a direct read one.
pub(crate) const BUF_BYTES: usize = 8 << 20;

/// Idle buffers that are retained: 32 MiB, those of two uploads. More are freed.
const IDLE_MAX: usize = 4;

const _: () = assert!(BUF_BYTES.is_multiple_of(ALIGN_BYTES));

static IDLE: PerProcess<Mutex<Vec<Zeros>>> = PerProcess::new();

fn idle() -> MutexGuard<'static, Vec<Zeros>> {
    IDLE.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// [`BUF_BYTES`] of memory at a multiple of [`ALIGN_BYTES`]. Returns to the pool when dropped; its
/// initial content is unspecified.
#[derive(Debug)]
pub(crate) struct AlignedBuffer(Option<Zeros>);

impl AlignedBuffer {
    pub(crate) fn take() -> Self {
        AlignedBuffer(Some(idle().pop().unwrap_or_else(|| Zeros::new(BUF_BYTES))))
    }

    fn block(&self) -> &Zeros {
        self.0.as_ref().expect("present until dropped")
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        let mut idle = idle();
        if idle.len() < IDLE_MAX {
            idle.extend(self.0.take());
        }
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.block()
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.as_mut().expect("present until dropped")
    }
}

/// Zeros, whose pages are allocated at first touch.
#[derive(Debug)]
pub struct Zeros(MmapMut);

impl Zeros {
    /// Zeros of this length, in large pages where the system has them: in a table with random
    /// access, address translation would otherwise take as long as the data.
    ///
    /// Without memory the process is aborted, as by other allocations.
    ///
    /// # Panics
    /// If the length is beyond that of any allocation.
    #[must_use]
    pub fn new(len_bytes: usize) -> Self {
        Zeros::try_new(len_bytes).unwrap_or_else(|_| {
            let layout = Layout::array::<u8>(len_bytes).expect("a length of memory");
            handle_alloc_error(layout)
        })
    }

    /// As [`Zeros::new`], for a size from external input.
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
        let mut held: Vec<AlignedBuffer> =
            (0..IDLE_MAX + 2).map(|_| AlignedBuffer::take()).collect();
        for (i, buf) in held.iter_mut().enumerate() {
            assert_eq!(buf.as_ptr() as usize % ALIGN_BYTES, 0);
            assert_eq!(buf.len(), BUF_BYTES);
            buf[BUF_BYTES - 1] = i as u8;
        }
        assert!(held.iter().enumerate().all(|(i, buf)| buf[BUF_BYTES - 1] == i as u8));
        drop(held);
        assert!(idle().len() <= IDLE_MAX);
    }
}
