//! Detects the file system, and chooses the I/O method for it.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::{fmt, fs};

use crate::api::settings::{IoSettings, Setting};
use crate::base::per_process::PerProcess;
use crate::fs::mount;
use crate::io::uring_batch;
use crate::simulate::MARK;
use crate::sys::aligned_buffer::ALIGN_BYTES;
use crate::sys::syscalls;
use crate::{Error, Result};

/// The system calls for reads and writes. Both keep the same contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoEngine {
    /// `io_uring`: a window of requests in flight from one thread.
    Ring,
    /// `pread` and `pwrite`, for large batches from a few threads.
    Pread,
}

impl fmt::Display for IoEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoEngine::Ring => "ring",
            IoEngine::Pread => "pread",
        })
    }
}

/// How a store does its I/O, and why; detected when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Profile {
    /// The name of the file system, such as `ext4`, `lustre` or `fuse.ceph-fuse`; the magic number
    /// for an unknown kind; `simulated lustre` for a model.
    pub file_system: String,
    /// The I/O engine.
    pub engine: IoEngine,
    /// Why that engine.
    pub engine_why: String,
    /// Whether large transfers use direct I/O. If the file system refuses that later, buffered I/O
    /// is used from then on.
    pub direct: bool,
    /// Alignment of direct I/O in bytes, as the file system reports it for one of its files; 4096
    /// if it does not. Transfers are aligned to 4096 in any case.
    pub align_bytes: u32,
    /// Where the file system is mounted; empty if unknown.
    pub mount_point: String,
}

/// Environment variable with the engine for all stores whose URL sets none.
const ENGINE_VARIABLE: &str = "FEEDLINE_ENGINE";

/// Magic numbers of `statfs(2)`, names, and whether a buffered read that misses the page cache is
/// asynchronous (`FMODE_NOWAIT`). Where it is not, io_uring would block a kernel thread for each
/// read: no more parallelism than a thread pool, and harder to debug.
const FILE_SYSTEMS: [(u32, &str, bool); 14] = [
    (0xef53, "ext4", true),
    (0x5846_5342, "xfs", true),
    (0x9123_683e, "btrfs", true),
    (0xf2f5_2010, "f2fs", true),
    (0x0102_1994, "tmpfs", false),
    (0x8584_58f6, "ramfs", false),
    (0x794c_7630, "overlay", false),
    (0x6573_5546, "fuse", false),
    (0x6969, "nfs", false),
    (0x0bd0_0bd0, "lustre", false),
    (0x00c3_6400, "ceph", false),
    (0x4750_4653, "gpfs", false),
    (0x1983_0326, "beegfs", false),
    (0x8f3f_5fff, "hf3fs", false),
];

/// The name of a kind of file system, and whether its buffered reads are asynchronous.
pub(crate) fn kind_of(magic: u32) -> (String, bool) {
    match FILE_SYSTEMS.iter().find(|(of, ..)| *of == magic) {
        Some((_, name, asynchronous)) => ((*name).to_owned(), *asynchronous),
        None => (format!("file system {magic:#x}"), false),
    }
}

/// The settings, with the engine of the environment where the URL has none. An invalid engine was
/// refused when the store was opened.
pub(crate) fn with_environment(settings: IoSettings) -> IoSettings {
    let engine = match (settings.engine, std::env::var(ENGINE_VARIABLE).ok().as_deref()) {
        (Setting::Auto, Some("ring")) => Setting::Only(IoEngine::Ring),
        (Setting::Auto, Some("pread")) => Setting::Only(IoEngine::Pread),
        (requested, _) => requested,
    };
    IoSettings { engine, ..settings }
}

impl Profile {
    /// The kind of file system, also of a simulated one.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.file_system.strip_prefix(MARK).unwrap_or(&self.file_system)
    }

    /// Whether it is a simulated file system.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        self.file_system.starts_with(MARK)
    }

    /// The profile of a store without a file system: the default of [`crate::Storage::profile`].
    pub(crate) fn unknown() -> &'static Profile {
        static UNKNOWN: std::sync::OnceLock<Profile> = std::sync::OnceLock::new();
        UNKNOWN.get_or_init(|| Profile {
            file_system: "unknown".to_owned(),
            engine: IoEngine::Pread,
            engine_why: "not a file system".to_owned(),
            direct: false,
            align_bytes: ALIGN_BYTES as u32,
            mount_point: String::new(),
        })
    }

    /// Detects the file system of `root`, or of the nearest folder above it that exists. Logs each
    /// file system and choice once.
    ///
    /// # Errors
    /// A setting that does not work here.
    pub(crate) fn detect(root: &Path, settings: IoSettings) -> Result<Self> {
        let name = root.display().to_string();
        let nearest = root.ancestors().map(or_here).find(|p| p.exists()).unwrap_or(Path::new("/"));
        let status =
            syscalls::file_system(nearest).map_err(|e| Error::from_io("stat", name.clone(), e))?;
        let (kind, asynchronous) = kind_of(status.magic);
        let file_system = match kind.as_str() {
            "fuse" => fuse_name(nearest).unwrap_or(kind),
            _ => kind,
        };
        let (engine, engine_why) =
            choose_engine(&name, &file_system, asynchronous, settings.engine)?;
        let in_memory = matches!(file_system.as_str(), "tmpfs" | "ramfs");
        let align = align_of_some_file(nearest);
        let direct = match settings.direct {
            Setting::Only(requested) => requested,
            Setting::Auto => !in_memory && align != Some(0),
        };
        let align_bytes = align.filter(|&align| align > 0).unwrap_or(ALIGN_BYTES as u32);
        let mount_point = mount::point_of(nearest).unwrap_or_default();
        let profile = Profile { file_system, engine, engine_why, direct, align_bytes, mount_point };
        profile.log_once(nearest, &name);
        Ok(profile)
    }

    fn log_once(&self, nearest: &Path, name: &str) {
        static LOGGED: PerProcess<Mutex<HashSet<(u64, IoEngine, bool)>>> = PerProcess::new();
        let device = fs::metadata(nearest).map_or(0, |meta| meta.dev());
        let mut logged = LOGGED.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        let choice = (device, self.engine, self.direct);
        if logged.insert(choice) {
            log::debug!("{name}: {self}");
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Profile { file_system, engine, engine_why, direct, align_bytes, .. } = self;
        let direct = if *direct { "direct" } else { "buffered" };
        write!(
            f,
            "{file_system}, engine {engine} ({engine_why}), {direct} I/O for large transfers, \
             aligned to {align_bytes} bytes"
        )
    }
}

/// Chooses the engine: from the URL, else the environment, else the best one.
fn choose_engine(
    name: &str,
    file_system: &str,
    asynchronous: bool,
    requested: Setting<IoEngine>,
) -> Result<(IoEngine, String)> {
    let bad = |reason: String| Error::BadUrl { url: name.to_owned(), reason };
    let (requested, set_by) = match (requested, std::env::var(ENGINE_VARIABLE).ok().as_deref()) {
        (Setting::Only(engine), _) => (Setting::Only(engine), "set in the URL".to_owned()),
        (Setting::Auto, None | Some("" | "auto")) => (Setting::Auto, String::new()),
        (Setting::Auto, Some(value)) => {
            let engine = match value {
                "ring" => IoEngine::Ring,
                "pread" => IoEngine::Pread,
                _ => {
                    let url = format!("{ENGINE_VARIABLE}={value}");
                    let reason = "expected auto, ring or pread".to_owned();
                    return Err(Error::BadUrl { url, reason });
                }
            };
            (Setting::Only(engine), format!("set by {ENGINE_VARIABLE}"))
        }
    };
    let works = uring_batch::probe();
    match (requested, works) {
        (Setting::Only(IoEngine::Ring), Err(reason)) => {
            Err(bad(format!("engine ring is not available: {reason}")))
        }
        (Setting::Only(engine), _) => Ok((engine, set_by)),
        (Setting::Auto, Err(reason)) => {
            Ok((IoEngine::Pread, format!("io_uring is not available: {reason}")))
        }
        (Setting::Auto, Ok(())) if asynchronous => {
            Ok((IoEngine::Ring, format!("io_uring reads {file_system} asynchronously")))
        }
        (Setting::Auto, Ok(())) => {
            Ok((IoEngine::Pread, format!("io_uring does not read {file_system} asynchronously")))
        }
    }
}

/// Only a file reports the alignment of direct I/O: queries one of the files in this folder.
fn align_of_some_file(folder: &Path) -> Option<u32> {
    const ENTRIES_MAX: usize = 64;
    let entries = fs::read_dir(folder).ok()?.take(ENTRIES_MAX);
    let file = entries.flatten().find(|e| e.file_type().is_ok_and(|kind| kind.is_file()))?;
    syscalls::direct_align(&File::open(file.path()).ok()?).map(syscalls::DirectAlign::most)
}

/// FUSE serves a hundred file systems; the mount table names this one.
fn fuse_name(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    let device = format!("{}:{}", libc::major(device), libc::minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    mount.split_once(" - ")?.1.split(' ').next().map(str::to_owned)
}

fn or_here(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_the_file_system_of_a_folder_that_does_not_exist_yet() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("not/yet/there");
        let profile = Profile::detect(&deep, IoSettings::default()).unwrap();
        assert_eq!(
            profile.file_system,
            Profile::detect(folder.path(), IoSettings::default()).unwrap().file_system
        );
        assert!(profile.align_bytes.is_power_of_two());
        let proc = Profile::detect(Path::new("/proc"), IoSettings::default()).unwrap();
        assert_eq!(
            (proc.file_system.as_str(), proc.engine),
            ("file system 0x9fa0", IoEngine::Pread)
        );
    }

    #[test]
    fn settings_of_the_url_are_used() {
        let folder = tempfile::tempdir().unwrap();
        let settings =
            IoSettings { engine: Setting::Only(IoEngine::Pread), direct: Setting::Only(false) };
        let profile = Profile::detect(folder.path(), settings).unwrap();
        assert_eq!((profile.engine, profile.direct), (IoEngine::Pread, false));
        assert_eq!(profile.engine_why, "set in the URL");
    }
}
