//! Files that only grow.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use storage::{Error, Result};

/// A file that only grows, and fails for ever once it has failed: what follows a torn record could
/// not be told from damage.
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

    /// In one write: it is in the kernel's hands whole, or the disk was full.
    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.tried("append to", |file| file.write_all(bytes))
    }

    /// Makes all of it durable.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.tried("sync", |file| file.sync_data())
    }

    fn tried(&mut self, doing: &str, work: impl FnOnce(&mut File) -> io::Result<()>) -> Result<()> {
        let object = self.path.display().to_string();
        if let Some(first) = &self.first_failure {
            return Err(Error::Poisoned { object, first: first.clone() });
        }
        work(&mut self.file).map_err(|error| {
            self.first_failure = Some(error.to_string());
            Error::from_io(doing, object, error)
        })
    }
}

/// Replaces a file by a durable copy of its first bytes, open for appending. A process that was
/// frozen and has the old file open appends to what has no name any more.
pub(super) fn detach(path: &Path, len_bytes: u64) -> io::Result<File> {
    // Of a symbolic link, the file that it leads to.
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
            // What stays of it is removed by the next start.
            let _ = fs::remove_file(&name);
            Err(error)
        }
    }
}

/// A new name in a folder is durable when the folder is.
pub(super) fn sync_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)?.sync_all()
}
