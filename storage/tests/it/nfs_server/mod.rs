//! A real NFS for tests: mounts of one folder, and what may happen to its server.
//!
//! `scripts/services/nfs-test` makes it and sets the variable. Tests of it run one after the other:
//! they have one server.

#![allow(dead_code, reason = "each test has a use for some of it")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use tempfile::TempDir;

/// The folder of the mounts.
const NFS: &str = "FEEDLINE_TEST_NFS";

/// Mounts of one exported folder, by clients whose caches are apart.
pub struct Nfs(PathBuf);

impl Nfs {
    /// The one at hand, or why a test is left out.
    pub fn here() -> Result<Self, String> {
        let lab = std::env::var_os(NFS).filter(|lab| !lab.is_empty());
        let why = || format!("{NFS} is not set; `scripts/services/nfs-test` sets it");
        lab.map(|lab| Nfs(lab.into())).ok_or_else(why)
    }

    /// Of version 4.2, as it is mounted by default.
    pub fn hard(&self) -> PathBuf {
        self.0.join("hard")
    }

    /// Of version 3.
    pub fn three(&self) -> PathBuf {
        self.0.join("three")
    }

    /// Another machine's, over a network that can be cut.
    pub fn other(&self) -> PathBuf {
        self.0.join("other")
    }

    /// That machine's as well, of version 3 and `soft`: what is not answered in 3 s fails.
    pub fn soft(&self) -> PathBuf {
        self.0.join("soft")
    }

    /// A folder that is gone afterwards, as a mount has it.
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

    /// The server is cut off (`hang`) and comes back (`answer`), starts anew (`restart`), takes all
    /// handles for stale (`lose`) and knows them again (`know`).
    pub fn server(&self, what: &str) {
        let status = Command::new(self.0.join("server")).arg(what).status();
        let status = status.unwrap_or_else(|e| panic!("server {what}: {e}"));
        assert!(status.success(), "server {what}: {status}");
    }

    /// Does one thing to it in a moment and another 3 s later, by a process of its own. One that
    /// whoever writes to a mount starts later waits for the server before it begins: it closes the
    /// files that it inherits, and NFS then waits for what was written to them.
    pub fn server_soon(&self, harm: &str, mend: &str) -> Child {
        let mut shell = Command::new("sh");
        shell.args(["-ec", "sleep 0.1; \"$0\" \"$1\"; sleep 3; \"$0\" \"$2\""]);
        shell.arg(self.0.join("server")).args([harm, mend]);
        shell.spawn().unwrap_or_else(|e| panic!("server {harm}: {e}"))
    }
}
