//! A committed object as one slice of memory.

use std::fs::File;
use std::io;

use crate::Map;

/// Maps a whole file that had `len_bytes` when it was opened. Where the file system cannot map, the
/// caller reads it instead.
pub(crate) fn map(file: &File, len_bytes: u64) -> io::Result<Map> {
    let now = file.metadata()?.len();
    if now != len_bytes {
        let told = format!("it had {len_bytes} bytes when it was opened, and has {now} now");
        return Err(io::Error::new(io::ErrorKind::InvalidData, told));
    }
    if len_bytes == 0 {
        return Ok(Map::owned(Vec::new()));
    }
    // SAFETY: objects are write-once: a committed file is unlinked or renamed, but never written or
    // cut, so its pages do not change below the slice. Whoever edits one by other means has broken
    // the contract of the store.
    unsafe { memmap2::Mmap::map(file) }.map(Map::mapped)
}
