//! A committed object as one slice of memory.

use std::fs::File;
use std::io;
use std::ops::Range;

use crate::Zeros;

/// The bytes of a committed object, mapped or copied; dereferences to `[u8]`.
#[derive(Debug)]
pub struct Map(MapInner);

#[derive(Debug)]
enum MapInner {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
    Table(Zeros),
}

impl Map {
    pub(crate) fn mapped(map: memmap2::Mmap) -> Self {
        Map(MapInner::Mapped(map))
    }

    /// Bytes in memory, for stores without files.
    #[must_use]
    pub fn owned(bytes: Vec<u8>) -> Self {
        Map(MapInner::Owned(bytes))
    }

    /// Advises the kernel of random reads, so that a miss reads one page and not megabytes of
    /// read-ahead.
    pub fn expect_random_reads(&self) {
        if let MapInner::Mapped(map) = &self.0 {
            // It is advice: if ignored, reads are slower and return the same bytes.
            let _ = map.advise(memmap2::Advice::Random);
        }
    }

    /// Advises the kernel to cache the file in large pages, where its file system has them: lookups
    /// in a table then miss the TLB less, and a miss in the page cache reads 2 MiB.
    pub fn expect_table_lookups(&self) {
        if let MapInner::Mapped(map) = &self.0 {
            // It is advice, as above.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
    }

    /// Advises the kernel of a sequential read of all of it.
    pub fn expect_sequential_reads(&self) {
        if let MapInner::Mapped(map) = &self.0 {
            // As above.
            let _ = map.advise(memmap2::Advice::Sequential);
        }
    }

    /// Advises the kernel that these bytes are not needed soon, so that their pages no longer count
    /// as memory of this process. Bytes in memory stay.
    pub fn forget(&self, bytes: Range<usize>) {
        let MapInner::Mapped(map) = &self.0 else { return };
        let (start, end) = (bytes.start.min(map.len()), bytes.end.min(map.len()));
        let advice = memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: nothing was written to the pages, which are the file's: the next access reads
        // them again unchanged.
        let outcome =
            unsafe { map.unchecked_advise_range(advice, start, end.saturating_sub(start)) };
        // It is advice: if ignored, memory is freed later.
        let _ = outcome;
    }
}

impl std::ops::Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            MapInner::Mapped(map) => map,
            MapInner::Owned(bytes) => bytes,
            MapInner::Table(bytes) => bytes,
        }
    }
}

impl From<Zeros> for Map {
    /// A table that was zeros, and has been filled.
    fn from(table: Zeros) -> Self {
        Map(MapInner::Table(table))
    }
}

/// Maps a complete file that had `len_bytes` when it was opened. If the file system cannot map, the
/// caller reads it instead.
pub(crate) fn map(file: &File, len_bytes: u64) -> io::Result<Map> {
    let now = file.metadata()?.len();
    if now != len_bytes {
        let reason =
            format!("file changed while open: expected {len_bytes} bytes, found {now} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    if len_bytes == 0 {
        return Ok(Map::owned(Vec::new()));
    }
    // SAFETY: objects are write-once: a committed file is unlinked or renamed, but never written or
    // truncated, so its pages do not change below the slice. Other programs that edit one break the
    // contract of the store.
    unsafe { memmap2::Mmap::map(file) }.map(Map::mapped)
}
