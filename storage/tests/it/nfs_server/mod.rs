//! A real NFS server for tests: mounts of one folder, and control of the server.
//!
//! `scripts/services/nfs-test` starts it and sets the variable. Its tests run one after the other,
//! because they share the server.

#![allow(dead_code, reason = "each test has a use for some of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;

/// The folder of the mounts.
const NFS: &str = "FEEDLINE_TEST_NFS";

/// Mounts of one exported folder, by clients with separate caches.
pub struct Nfs(PathBuf);

impl Nfs {
    /// The running server, or why the test is skipped.
    pub fn here() -> Result<Self, String> {
        let folder = std::env::var_os(NFS).filter(|folder| !folder.is_empty());
        let why = || format!("{NFS} is not set; `scripts/services/nfs-test` sets it");
        folder.map(|folder| Nfs(folder.into())).ok_or_else(why)
    }

    /// Version 4.2, mounted with the default options.
    pub fn hard(&self) -> PathBuf {
        self.0.join("hard")
    }

    /// Version 3.
    pub fn three(&self) -> PathBuf {
        self.0.join("three")
    }

    /// The mount of another machine, over a network that can be cut.
    pub fn other(&self) -> PathBuf {
        self.0.join("other")
    }

    /// A second mount of that machine, version 3 and `soft`: a request without a response within 3
    /// s fails.
    pub fn soft(&self) -> PathBuf {
        self.0.join("soft")
    }

    /// A folder on a mount, deleted afterwards.
    pub fn folder_on(&self, mount: &Path) -> TempDir {
        tempfile::tempdir_in(mount).expect("the mount takes a folder")
    }

    /// The same path on another mount.
    pub fn seen_on(&self, mount: &Path, path: &Path) -> PathBuf {
        let below = path.strip_prefix(&self.0).expect("a path on one of the mounts");
        let below: PathBuf = below.components().skip(1).collect();
        mount.join(below)
    }

    /// The same path on the server's own disk.
    pub fn on_disk(&self, path: &Path) -> PathBuf {
        self.seen_on(&self.0.join("disk"), path)
    }

    /// Controls the server: disconnects (`hang`) or reconnects it (`answer`), restarts it
    /// (`restart`), makes all handles stale (`lose`) or valid again (`know`).
    pub fn server(&self, what: &str) {
        let status = Command::new(self.0.join("server")).arg(what).status();
        let status = status.unwrap_or_else(|e| panic!("server {what}: {e}"));
        assert!(status.success(), "server {what}: {status}");
    }

    /// Runs one server command after 0.1 s and another 3 s later, in a child process. Start it
    /// before writing to a mount: a child started later closes the files that it inherits, and NFS
    /// then waits for the server to receive what was written to them.
    pub fn server_soon(&self, harm: &str, mend: &str) -> Child {
        let mut shell = Command::new("sh");
        shell.args(["-ec", "sleep 0.1; \"$0\" \"$1\"; sleep 3; \"$0\" \"$2\""]);
        shell.arg(self.0.join("server")).args([harm, mend]);
        shell.spawn().unwrap_or_else(|e| panic!("server {harm}: {e}"))
    }
}
