//! Aligned buffers from one bounded pool, for IO that goes around the page cache.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, PoisonError};

/// What direct IO is aligned to, in memory and in the file: every device and file system known to
/// us asks for 4,096 or less, and Lustre for exactly that.
pub(crate) const ALIGN_BYTES: usize = 4096;

/// Eight pieces of 1 MiB: enough in flight at once for a device of 7 GB/s with 1.2 ms of latency.
/// An upload holds two such buffers, a direct read one.
pub(crate) const BUF_BYTES: usize = 8 << 20;

/// Idle buffers that are kept: 32 MiB, those of two uploads. More are given back to the system.
const IDLE_MAX: usize = 4;

const _: () = assert!(BUF_BYTES.is_multiple_of(ALIGN_BYTES));

static IDLE: Mutex<Vec<Block>> = Mutex::new(Vec::new());

/// [`BUF_BYTES`] of memory at a multiple of [`ALIGN_BYTES`]. Goes back to the pool when dropped;
/// what it holds when taken is unspecified.
#[derive(Debug)]
pub(crate) struct Buf(Option<Block>);

impl Buf {
    pub(crate) fn take() -> Self {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Buf(Some(idle.unwrap_or_else(Block::new)))
    }

    fn block(&self) -> &Block {
        self.0.as_ref().expect("present until dropped")
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MAX {
            idle.extend(self.0.take());
        }
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.block().0.as_ptr();
        // SAFETY: the block is BUF_BYTES of initialised memory that we own, shared while `self` is.
        unsafe { slice::from_raw_parts(start, BUF_BYTES) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        let start = self.block().0.as_ptr();
        // SAFETY: the block is BUF_BYTES of initialised memory that only `self` points to.
        unsafe { slice::from_raw_parts_mut(start, BUF_BYTES) }
    }
}

/// The memory itself.
#[derive(Debug)]
struct Block(NonNull<u8>);

// SAFETY: a block owns its memory and has no tie to the thread that allocated it.
unsafe impl Send for Block {}

// SAFETY: a shared block gives out nothing but shared slices.
unsafe impl Sync for Block {}

impl Block {
    const LAYOUT: Layout = match Layout::from_size_align(BUF_BYTES, ALIGN_BYTES) {
        Ok(layout) => layout,
        Err(_) => panic!("the alignment is a power of two"),
    };

    fn new() -> Self {
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(Self::LAYOUT) };
        Block(NonNull::new(start).unwrap_or_else(|| handle_alloc_error(Self::LAYOUT)))
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and not freed before.
        unsafe { dealloc(self.0.as_ptr(), Self::LAYOUT) };
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
        assert!(IDLE.lock().unwrap().len() <= IDLE_MAX);
    }
}
