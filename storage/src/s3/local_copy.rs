//! A remote object as a slice: small ones in memory, large ones in a file without a name.
//!
//! The index of a large corpus has gigabytes, which each rank of a node would hold permanently. In
//! a file they are pages that the kernel reclaims when memory is short, and the file disappears
//! with the process that mapped it, however that ends.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::base::process_identity::ProcessIdentity;
use crate::sys::{mapped, syscalls};
use crate::{Error, Map, Object, RangeRead, Result};

/// Up to this size the copy is in memory.
const IN_MEMORY_BYTES_MAX: u64 = 16 << 20;

/// Bytes in memory at a time: eight concurrent requests.
const CHUNK_BYTES: u64 = 64 << 20;

/// Copies an object, which is read once, and maps the copy.
pub(crate) fn map_copy(object: &dyn Object) -> Result<Map> {
    let len_bytes = object.len_bytes();
    if len_bytes <= IN_MEMORY_BYTES_MAX {
        let mut bytes = vec![0; len_bytes as usize]; // fits: checked above
        object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
        return Ok(Map::owned(bytes));
    }
    let folder = folder();
    let name = format!("{} (TMPDIR)", folder.display());
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Error::NoSpace { object: name.clone(), need_bytes: len_bytes, free_bytes: None }
        }
        _ => {
            let operation = format!("copy {} to", object.display());
            Error::from_io(operation, &*name, error)
        }
    };
    let file = unnamed(&folder).map_err(failed)?;
    // A full disk is an error here, and would be a signal in the slice.
    match syscalls::allocate(&file, len_bytes) {
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
        outcome => outcome.map_err(failed)?,
    }
    let mut chunk = vec![0; CHUNK_BYTES.min(len_bytes) as usize]; // fits: a chunk at most
    for offset in (0..len_bytes).step_by(CHUNK_BYTES as usize) {
        let len = CHUNK_BYTES.min(len_bytes - offset) as usize; // fits: a chunk at most
        object.read_many(&mut [RangeRead { offset, buf: &mut chunk[..len] }])?;
        file.write_all_at(&chunk[..len], offset).map_err(failed)?;
    }
    mapped::map(&file, len_bytes).map_err(failed)
}

/// The folder in `TMPDIR`; else `/var/tmp`, because `/tmp` is in memory on many machines.
fn folder() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// A file without a name.
fn unnamed(folder: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
        // Kernels without the flag return `EISDIR`.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {}
        outcome => return outcome,
    }
    let path = folder.join(format!("feedline-{}", ProcessIdentity::new()));
    let file = options.create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unnamed_file_keeps_its_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let file = unnamed(folder.path()).unwrap();
        file.write_all_at(b"here", 3).unwrap();
        assert_eq!(&mapped::map(&file, 7).unwrap()[3..], b"here");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(unnamed(&folder.path().join("missing")).is_err());
    }
}
