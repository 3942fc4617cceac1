//! Reads single numbers at random positions of a large table.
//!
//! Each access to a mapped table maps sixteen pages, because the kernel also maps the neighbours in
//! the page cache (fault-around); and if the device fails, SIGBUS kills the process. A read costs a
//! third of a microsecond and returns errors.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use storage::Object;

use crate::Result;

/// Smaller files are always mapped: they have few pages.
const LARGE_BYTES_MIN: u64 = 16 << 20;

/// A table that is read number by number.
#[derive(Debug)]
pub(crate) struct Sparse {
    object: Option<Arc<dyn Object>>,
    /// Whether the table was not read completely: if it was, it stays mapped.
    is_used: AtomicBool,
    /// Whether the kernel was advised to read only what is requested. If the table is read
    /// completely, this happens after that.
    is_advised: AtomicBool,
}

impl Sparse {
    /// A table in memory.
    pub(crate) fn none() -> Self {
        Sparse { object: None, is_used: AtomicBool::new(false), is_advised: AtomicBool::new(false) }
    }

    /// The file of a table, if it is large.
    pub(crate) fn of(object: &Arc<dyn Object>) -> Self {
        let is_large = object.len_bytes() >= LARGE_BYTES_MIN && object.file().is_some();
        Sparse { object: is_large.then(|| Arc::clone(object)), ..Self::none() }
    }

    /// From now on reads numbers with `pread`, if that pays off, else through the map.
    pub(crate) fn set(&self, is_used: bool) {
        self.is_used.store(is_used, Ordering::Relaxed);
    }

    /// Fills a buffer from the file; false if the caller must use the map.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage).
    #[inline]
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<bool> {
        let object = self.object.as_ref().filter(|_| self.is_used.load(Ordering::Relaxed));
        let Some(object) = object else { return Ok(false) };
        let Some(file) = object.file() else { return Ok(false) };
        if !self.is_advised.load(Ordering::Relaxed) {
            object.advise_random();
            self.is_advised.store(true, Ordering::Relaxed);
        }
        let read = file.read_exact_at(into, offset);
        let doing = || format!("read {} bytes at byte {offset} of", into.len());
        read.map_err(|e| storage::Error::from_io(doing(), object.display(), e))?;
        Ok(true)
    }
}
