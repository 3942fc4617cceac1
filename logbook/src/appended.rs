//! Files that only grow.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use storage::{Error, Result};

/// A file that only grows. After a failure every later call fails: a record after a truncated one
/// would look like corruption.
#[derive(Debug)]
pub(super) struct Appended {
    path: PathBuf,
    file: File,
    first_failure: Option<String>,
}

impl Appended {
    pub(super) fn new(path: PathBuf, file: File) -> Self {
        Appended { path, file, first_failure: None }
    }

    /// Appends with one write: the kernel has all of it, or the disk was full.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.attempt("append to", |file| file.write_all(bytes))
    }

    /// Makes all of it durable.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.attempt("sync", |file| file.sync_data())
    }

    fn attempt(
        &mut self,
        operation: &str,
        work: impl FnOnce(&mut File) -> io::Result<()>,
    ) -> Result<()> {
        let object = self.path.display().to_string();
        if let Some(first) = &self.first_failure {
            return Err(Error::Poisoned { object, first: first.clone() });
        }
        work(&mut self.file).map_err(|error| {
            self.first_failure = Some(error.to_string());
            Error::from_io(operation, object, error)
        })
    }
}

/// Replaces a file by a durable copy of its first bytes, open for appending. A frozen process that
/// has the old file open then appends to a file without a name.
pub(super) fn detach(path: &Path, len_bytes: u64) -> io::Result<File> {
    // Resolves a symbolic link.
    let path = &fs::canonicalize(path)?;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let source = File::open(path)?;
    match fs::remove_file(&name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut copy = OpenOptions::new().append(true).create_new(true).open(&name)?;
    let copied = (|| {
        copy.set_permissions(source.metadata()?.permissions())?;
        io::copy(&mut source.take(len_bytes), &mut copy)?;
        copy.sync_all()?;
        fs::rename(&name, path)
    })();
    match copied {
        Ok(()) => Ok(copy),
        Err(error) => {
            // If this fails, the next start removes the file.
            let _ = fs::remove_file(&name);
            Err(error)
        }
    }
}

/// Makes new names in a folder durable.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)?.sync_all()
}
