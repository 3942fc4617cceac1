use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::{fmt, io, slice};

use memmap2::{Advice, MmapMut};

use crate::sys::aligned_buffer::ALIGN_BYTES;
use crate::{ByteSize, Error, Result};

/// Aligned memory for reads in flight: one arena of a fixed size, divided into buffers.
///
/// The lowest free range is taken first, so that only as much of the arena is ever touched as is in
/// use at once, and the start, which is registered with the kernel, is used most. Creating a pool
/// reserves address space; a page takes memory from its first use on. Nothing is allocated later.
#[derive(Debug)]
pub struct BufferPool {
    arena: Arena,
    taken: Mutex<PageBitmap>,
}

impl BufferPool {
    /// As [`BufferPool::try_new`], for small pools.
    ///
    /// # Panics
    /// If the system has no address space for it.
    #[must_use]
    pub fn new(bytes_max: usize) -> Arc<Self> {
        BufferPool::try_new(bytes_max).expect("address space for a pool")
    }

    /// A pool of this many bytes, rounded up to whole pages; at least one page.
    ///
    /// # Errors
    /// [`Error::Io`] if the process has no address space for it, as under `ulimit -v`.
    pub fn try_new(bytes_max: usize) -> Result<Arc<Self>> {
        let bytes = bytes_max.max(1).next_multiple_of(ALIGN_BYTES);
        let arena = Arena::new(bytes).map_err(|error| {
            let pool = format!("a buffer pool of {}", ByteSize(bytes as u64));
            Error::from_io("allocate", pool, error)
        })?;
        let pages = arena.len / ALIGN_BYTES;
        let taken =
            PageBitmap { words: vec![0; pages.div_ceil(64)], pages, count: 0, lowest_free: 0 };
        Ok(Arc::new(BufferPool { arena, taken: Mutex::new(taken) }))
    }

    /// A buffer with room for `len` bytes from any offset of a file, rounded out to whole blocks;
    /// `None` if the pool has no such free range now. Its content is unspecified. An unused pool
    /// serves every length up to [`BufferPool::len_max`].
    #[must_use]
    pub fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        let pages = len.checked_add(ALIGN_BYTES - 1)?.div_ceil(ALIGN_BYTES);
        let first = self.lock().take(pages)?;
        let span = PageRange { first, pages, pool: Arc::clone(self) };
        Some(Buffer(Some(span)))
    }

    /// The pool bytes of a buffer for a read of this length.
    #[must_use]
    pub fn bytes_of(len: u64) -> u64 {
        let align = ALIGN_BYTES as u64;
        len.saturating_add(align - 1).div_ceil(align).saturating_mul(align)
    }

    /// The longest read that a buffer of this pool can have room for.
    #[must_use]
    pub fn len_max(&self) -> usize {
        self.arena.len - (ALIGN_BYTES - 1)
    }

    /// Bytes in all.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        self.arena.len
    }

    /// Bytes in buffers that are in use.
    #[must_use]
    pub fn taken_bytes(&self) -> usize {
        self.lock().count * ALIGN_BYTES
    }

    /// The start of the arena, for its registration with the kernel.
    pub(crate) fn start(&self) -> *mut u8 {
        self.arena.start.as_ptr()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, PageBitmap> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of a [`BufferPool`], aligned to 4096. Dropping it returns it to the pool.
pub struct Buffer(Option<PageRange>);

struct PageRange {
    first: usize,
    pages: usize,
    pool: Arc<BufferPool>,
}

impl Buffer {
    /// A buffer without memory, of no pool.
    #[must_use]
    pub const fn empty() -> Self {
        Buffer(None)
    }

    /// Its offset in the arena of `pool`, if it is of that pool.
    pub(crate) fn offset_in(&self, pool: &BufferPool) -> Option<usize> {
        let span = self.0.as_ref()?;
        std::ptr::eq(&*span.pool, pool).then_some(span.first * ALIGN_BYTES)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len())
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let Some(span) = &self.0 else { return &[] };
        let start = span.pool.arena.at(span.first);
        // SAFETY: initialised memory of the arena, which lives as long as the span, and which the
        // pool assigned to this buffer only; shared while `self` is.
        unsafe { slice::from_raw_parts(start, span.pages * ALIGN_BYTES) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Some(span) = &self.0 else { return &mut [] };
        let start = span.pool.arena.at(span.first);
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(start, span.pages * ALIGN_BYTES) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(span) = &self.0 {
            span.pool.lock().release(span.first, span.pages);
        }
    }
}

/// The pages in use, one bit each. Adjacent freed ranges merge without extra work.
#[derive(Debug)]
struct PageBitmap {
    words: Vec<u64>,
    pages: usize,
    count: usize,
    /// No page below this one is free.
    lowest_free: usize,
}

impl PageBitmap {
    fn take(&mut self, pages: usize) -> Option<usize> {
        if pages > self.pages - self.count {
            return None;
        }
        let mut first = self.free_from(self.lowest_free);
        self.lowest_free = first;
        while first + pages <= self.pages {
            match (first..first + pages).rev().find(|&page| self.is_taken(page)) {
                Some(blocked) => first = self.free_from(blocked + 1),
                None => {
                    self.mark(first, pages);
                    return Some(first);
                }
            }
        }
        None
    }

    fn release(&mut self, first: usize, pages: usize) {
        for page in first..first + pages {
            assert!(self.is_taken(page), "a buffer is returned once");
            self.words[page / 64] &= !(1 << (page % 64));
        }
        self.count -= pages;
        self.lowest_free = self.lowest_free.min(first);
    }

    fn mark(&mut self, first: usize, pages: usize) {
        for page in first..first + pages {
            self.words[page / 64] |= 1 << (page % 64);
        }
        self.count += pages;
    }

    fn is_taken(&self, page: usize) -> bool {
        self.words[page / 64] & (1 << (page % 64)) != 0
    }

    /// The first free page from this one on; past the end if there is none.
    fn free_from(&self, page: usize) -> usize {
        let (mut word, below) = (page / 64, (1_u64 << (page % 64)) - 1);
        let mut taken = self.words.get(word).map_or(0, |bits| bits | below);
        while taken == u64::MAX {
            word += 1;
            taken = self.words.get(word).copied().unwrap_or(0);
        }
        word * 64 + taken.trailing_ones() as usize // fits: less than 64
    }
}

/// The memory itself.
struct Arena {
    start: NonNull<u8>,
    len: usize,
    /// Unmaps the arena when dropped. Only `start` is used for access.
    _owner: MmapMut,
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

// SAFETY: an arena owns its memory and has no tie to the thread that mapped it.
unsafe impl Send for Arena {}

// SAFETY: a shared arena only returns addresses; their owners are tracked under a lock.
unsafe impl Sync for Arena {}

impl Arena {
    /// A mapping, not an allocation: its zeros are the kernel's, so nothing is touched here.
    fn new(len: usize) -> io::Result<Self> {
        let mut owner = MmapMut::map_anon(len)?;
        // Large pages: a request has fewer scatter-gather entries, which makes it up to twice as
        // fast. A hint: some kernels have no large pages.
        let _ = owner.advise(Advice::HugePage);
        let start = NonNull::new(owner.as_mut_ptr()).expect("a mapping is not at address zero");
        Ok(Arena { start, len, _owner: owner })
    }

    fn at(&self, page: usize) -> *mut u8 {
        assert!(page * ALIGN_BYTES < self.len, "the page is in the arena");
        // SAFETY: within the mapping, as was just asserted.
        unsafe { self.start.as_ptr().add(page * ALIGN_BYTES) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::rng::Rng;

    #[test]
    fn buffers_have_room_at_any_offset_and_are_returned() {
        let pool = BufferPool::new(10 * ALIGN_BYTES);
        assert_eq!(pool.take(1).unwrap().len(), ALIGN_BYTES);
        assert_eq!(pool.take(2).unwrap().len(), 2 * ALIGN_BYTES);
        assert_eq!(pool.take(pool.len_max()).unwrap().len(), pool.bytes_max());
        assert!(pool.take(pool.len_max() + 1).is_none());
        assert!(pool.take(usize::MAX).is_none());
        assert_eq!(pool.take(0).unwrap().len(), ALIGN_BYTES);
        assert_eq!(Buffer::empty().len(), 0);
        assert_eq!(pool.taken_bytes(), 0);
    }

    /// In whatever order buffers are taken and returned, no two share a byte, and in the end the
    /// pool is one free range again.
    #[test]
    fn random_buffers_do_not_overlap() {
        let pool = BufferPool::new(200 * ALIGN_BYTES);
        let mut rng = Rng::new(11);
        let mut held: Vec<(u8, Buffer)> = Vec::new();
        let mut refused = 0;
        for i in 0..20_000_u32 {
            let len = rng.below(9 * ALIGN_BYTES as u64) as usize;
            let mark = i as u8;
            match pool.take(len) {
                Some(mut buffer) => {
                    assert_eq!(buffer.as_ptr() as usize % ALIGN_BYTES, 0);
                    buffer.fill(mark);
                    held.push((mark, buffer));
                }
                None => refused += 1,
            }
            if held.len() > 30 || rng.below(2) == 0 && !held.is_empty() {
                let (mark, buffer) = held.swap_remove(rng.below(held.len() as u64) as usize);
                assert!(buffer.iter().all(|&byte| byte == mark), "round {i}");
            }
        }
        assert!(refused > 0, "the pool was never full: the test covers nothing");
        drop(held);
        assert_eq!(pool.take(pool.len_max()).unwrap().len(), pool.bytes_max());
    }
}
