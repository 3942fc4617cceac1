//! A small file system in memory for one test, where the process may mount one.

use std::io;
use std::path::Path;
use std::process::{Command, Output};

/// A `tmpfs` of its own, unmounted when dropped.
#[derive(Debug)]
pub struct Mount(tempfile::TempDir);

impl Mount {
    /// Mounts one with options such as `size=1m`.
    ///
    /// # Errors
    /// Why it cannot be mounted: that needs root. The caller reports its test as skipped.
    pub fn new(options: &str) -> io::Result<Self> {
        Self::of("tmpfs", options)
    }

    /// Mounts another kind, such as `ramfs`, which refuses direct I/O and the reservation of space.
    ///
    /// # Errors
    /// As [`Tmpfs::new`].
    pub fn of(kind: &str, options: &str) -> io::Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", options, kind]).arg(folder.path());
        check(&mount.output()?).map(|()| Mount(folder))
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Remounts it with other options.
    ///
    /// # Errors
    /// The error of `mount`.
    pub fn remount(&self, options: &str) -> io::Result<()> {
        let options = format!("remount,{options}");
        check(&Command::new("mount").args(["-o", &options]).arg(self.path()).output()?)
    }
}

fn check(output: &Output) -> io::Result<()> {
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg(self.path()).output().and_then(|o| check(&o));
        if let Err(e) = unmounted {
            log::warn!("{}: not unmounted: {e}", self.path().display());
        }
    }
}
