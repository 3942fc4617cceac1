//! Texts that may be read again, in an anonymous file.
//!
//! This is the only place that bypasses `storage`: the file is read while it is written, and must
//! vanish with the process however that ends, so it is unlinked at once.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::Result;

/// Size of a write, which combines small texts.
const WRITE_BYTES: usize = 1 << 20;

/// Names tried before giving up.
const NAMES_MAX: u32 = 64;

#[derive(Debug)]
pub(in crate::clean) struct TextSpool {
    file: File,
    folder: PathBuf,
    /// Bytes in the file; the rest is pending.
    written: u64,
    pending: Vec<u8>,
}

impl TextSpool {
    pub(in crate::clean) fn create(folder: Option<&Path>) -> Result<Self> {
        let folder = folder.map_or_else(std::env::temp_dir, Path::to_owned);
        let file = unnamed(&folder).map_err(|error| failed("create", &folder, error))?;
        Ok(TextSpool { file, folder, written: 0, pending: Vec::new() })
    }

    /// Appends, and returns the offset of the first byte.
    pub(in crate::clean) fn append(&mut self, bytes: &[u8]) -> Result<u64> {
        let place = self.len_bytes();
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= WRITE_BYTES {
            let written = self.file.write_all_at(&self.pending, self.written);
            written.map_err(|error| failed("write", &self.folder, error))?;
            self.written += self.pending.len() as u64;
            self.pending.clear();
            self.pending.shrink_to(WRITE_BYTES * 2);
        }
        Ok(place)
    }

    /// Reads an appended text from the file or the pending bytes: it is entirely in one of them.
    pub(in crate::clean) fn read(&self, place: u64, len: usize, bytes: &mut Vec<u8>) -> Result<()> {
        bytes.clear();
        if let Some(at) = place.checked_sub(self.written) {
            let at = at as usize; // fits: within what is pending
            bytes.extend_from_slice(&self.pending[at..at + len]);
            return Ok(());
        }
        bytes.resize(len, 0);
        let read = self.file.read_exact_at(bytes, place);
        read.map_err(|error| failed("read", &self.folder, error))
    }

    pub(in crate::clean) fn len_bytes(&self) -> u64 {
        self.written + self.pending.len() as u64
    }
}

fn failed(operation: &str, folder: &Path, source: io::Error) -> crate::Error {
    let object = format!("a temporary file in {} (--scratch sets the folder)", folder.display());
    storage::Error::from_io(operation, object, source).into()
}

/// An anonymous file.
fn unnamed(folder: &Path) -> io::Result<File> {
    let process = std::process::id();
    for nth in 0..NAMES_MAX {
        let path = folder.join(format!(".feedline-scratch-{process}-{nth}"));
        match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_texts_are_read_and_no_file_name_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let mut scratch = TextSpool::create(Some(folder.path())).unwrap();
        let other = TextSpool::create(Some(folder.path())).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let texts: Vec<Vec<u8>> = (0..50).map(|nth| vec![nth; usize::from(nth) * 3001]).collect();
        let places: Vec<u64> = texts.iter().map(|text| scratch.append(text).unwrap()).collect();
        assert!(scratch.written > 0 && !scratch.pending.is_empty());
        let mut bytes = Vec::new();
        for (text, place) in texts.iter().zip(places) {
            scratch.read(place, text.len(), &mut bytes).unwrap();
            assert_eq!(&bytes, text);
        }
        assert_eq!(other.len_bytes(), 0);
        let message = TextSpool::create(Some(&folder.path().join("no"))).unwrap_err().to_string();
        assert!(message.contains("--scratch"), "{message}");
    }
}
