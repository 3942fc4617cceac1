//! Numbers here and there of a large table, read one by one.
//!
//! A table that is mapped costs its process sixteen pages for each that it looks at, as the kernel
//! maps what is beside it in the page cache; and where its device fails, it costs the process its
//! life. A read costs a third of a microsecond, and an error is one.

use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use storage::Object;

use crate::Result;

/// Smaller files are mapped whatever is read of them: they are few pages.
const LARGE_BYTES_MIN: u64 = 16 << 20;

/// A table of which single numbers will be read.
#[derive(Debug)]
pub(crate) struct Sparse {
    object: Option<Arc<dyn Object>>,
    /// Whether all of it was not looked at: if it was, it is mapped for good.
    is_used: AtomicBool,
    /// Whether the kernel was told to read no more than is asked for: not before all of it was
    /// looked at, if it is.
    is_told: AtomicBool,
}

impl Sparse {
    /// A table in memory.
    pub(crate) fn none() -> Self {
        Sparse { object: None, is_used: AtomicBool::new(false), is_told: AtomicBool::new(false) }
    }

    /// The file behind a table, if it is a large file.
    pub(crate) fn of(object: &Arc<dyn Object>) -> Self {
        let is_large = object.len_bytes() >= LARGE_BYTES_MIN && object.file().is_some();
        Sparse { object: is_large.then(|| Arc::clone(object)), ..Self::none() }
    }

    /// From now on by reads, if that is worth it, or through the map.
    pub(crate) fn set(&self, is_used: bool) {
        self.is_used.store(is_used, Ordering::Relaxed);
    }

    /// Fills a buffer from the file; false if the map is to be asked.
    ///
    /// # Errors
    /// [`Error::Storage`](crate::Error::Storage).
    #[inline]
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<bool> {
        let object = self.object.as_ref().filter(|_| self.is_used.load(Ordering::Relaxed));
        let Some(object) = object else { return Ok(false) };
        let Some(file) = object.file() else { return Ok(false) };
        if !self.is_told.load(Ordering::Relaxed) {
            object.advise_random();
            self.is_told.store(true, Ordering::Relaxed);
        }
        let read = file.read_exact_at(into, offset);
        let doing = || format!("read {} bytes at byte {offset} of", into.len());
        read.map_err(|e| storage::Error::from_io(doing(), object.display(), e))?;
        Ok(true)
    }
}
