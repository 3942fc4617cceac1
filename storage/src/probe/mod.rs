//! Facts about a folder, a bucket and this machine. `feedline doctor` judges what they mean for a
//! run.
//!
//! Every call may block for as long as the file system does, so callers make it in a
//! [`crate::Stage`], which has a time limit.

mod probe_folder;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use crate::base::temp_names;
use crate::fs::detect;
use crate::fs::mount::MountLine;
use crate::io::uring_batch;
use crate::sys::syscalls;
use crate::{Error, Object, ProcessIdentity, Result};

pub use probe_folder::{Direct, ProbeFolder};

/// A file of a store that its listings omit, because its upload is not finished.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnfinishedUpload {
    /// A temporary file or a half-deleted folder of this process: an orphan if that is dead, which
    /// [`crate::Storage::remove_orphans`] removes.
    Temporary(ProcessIdentity),
    /// A resumable upload, which the next run of the same command continues.
    Draft,
}

impl UnfinishedUpload {
    /// The kind of a file by its name; `None` for objects and for the files of other programs.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        let draft = || temp_names::is_draft(name).then_some(UnfinishedUpload::Draft);
        temp_names::writer_of(name).map(UnfinishedUpload::Temporary).or_else(draft)
    }
}

/// The mount that a path is on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MountInfo {
    /// The nearest folder that exists, the path itself or one above it.
    pub nearest: String,
    /// Whether the path itself exists.
    pub is_there: bool,
    /// Where its file system is mounted.
    pub point: String,
    /// The kind of file system, as `ext4`, `lustre` or `fuse.ceph-fuse`.
    pub file_system: String,
    /// What is mounted, as `/dev/vda` or `10.0.0.2@tcp:/scratch`.
    pub source: String,
    /// All options.
    pub options: Vec<String>,
    /// Read-ahead of the kernel for buffered and mapped reads.
    pub read_ahead_kib: Option<u64>,
    /// Its capacity in bytes.
    pub total_bytes: Option<u64>,
    /// Bytes that may still be written.
    pub free_bytes: Option<u64>,
    /// Files that may still be created.
    pub free_files: Option<u64>,
    /// All files that it may hold.
    pub total_files: Option<u64>,
}

impl MountInfo {
    /// Examines the mount of a path.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn of(path: &Path) -> Result<Self> {
        let failed = |e| Error::from_io("stat", path.display().to_string(), e);
        let path = std::path::absolute(path).map_err(failed)?;
        let nearest = nearest(&path)?;
        let stat = syscalls::file_system(&nearest).map_err(failed)?;
        let device = fs::metadata(&nearest).map_err(failed)?.dev();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let line = MountLine::find(&table, device);
        let kind = detect::kind_of(stat.magic).0;
        // FUSE serves a hundred file systems; the mount table names this one.
        let file_system = match &line {
            Some(line) if kind == "fuse" => line.kind.to_owned(),
            _ => kind,
        };
        let words =
            line.iter().flat_map(|line| line.flags.split(',').chain(line.options.split(',')));
        let mut options: Vec<String> = words.filter(|w| !w.is_empty()).map(str::to_owned).collect();
        options.sort_unstable();
        options.dedup();
        let text = |name: Option<&str>| name.unwrap_or_default().to_owned();
        Ok(MountInfo {
            is_there: nearest == path,
            nearest: nearest.display().to_string(),
            point: text(line.as_ref().map(|line| line.point)),
            source: text(line.as_ref().map(|line| line.source)),
            file_system,
            options,
            read_ahead_kib: read_ahead_kib(device),
            total_bytes: stat.total_bytes,
            free_bytes: stat.free_bytes,
            free_files: stat.files.map(|(free, _)| free),
            total_files: stat.files.map(|(_, total)| total),
        })
    }

    /// Whether it was mounted with an option of this name.
    #[must_use]
    pub fn has(&self, option: &str) -> bool {
        self.value(option).is_some()
    }

    /// The value of an option; empty for one without a value.
    #[must_use]
    pub fn value(&self, option: &str) -> Option<&str> {
        self.options.iter().find_map(|set| match set.split_once('=') {
            Some((name, value)) => (name == option).then_some(value),
            None => (set == option).then_some(""),
        })
    }
}

/// The nearest of a path and the folders above it that exists.
fn nearest(path: &Path) -> Result<PathBuf> {
    for folder in path.ancestors() {
        match fs::metadata(folder) {
            Ok(_) => return Ok(folder.to_owned()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::from_io("stat", folder.display().to_string(), e)),
        }
    }
    Err(Error::NotFound { object: path.display().to_string() })
}

fn read_ahead_kib(device: u64) -> Option<u64> {
    let (major, minor) = (libc::major(device), libc::minor(device));
    let text = fs::read_to_string(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb")).ok()?;
    text.trim().parse().ok()
}

/// The limits of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostInfo {
    /// Why `io_uring` does not work; `None` if it does.
    pub ring_refused: Option<String>,
    /// `kernel.io_uring_disabled`, if this kernel has it.
    pub ring_disabled: Option<u32>,
    /// Memory that a process may lock; `None` if there is no limit.
    pub memlock_bytes: Option<u64>,
    /// Files that a process may have open; `None` if there is no limit.
    pub open_files: Option<u64>,
    /// Whether the clock is synchronized (NTP); `None` if unknown.
    pub clock_is_kept: Option<bool>,
}

impl HostInfo {
    /// Examines this machine.
    #[must_use]
    pub fn here() -> Self {
        let text = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok();
        HostInfo {
            ring_refused: uring_batch::probe().err().map(str::to_owned),
            ring_disabled: text.and_then(|text| text.trim().parse().ok()),
            memlock_bytes: limit("Max locked memory"),
            open_files: limit("Max open files"),
            clock_is_kept: syscalls::clock().ok().map(|(is_synchronized, _)| is_synchronized),
        }
    }
}

/// A limit of this process, as the kernel lists them: name, soft, hard, unit.
fn limit(name: &str) -> Option<u64> {
    let table = fs::read_to_string("/proc/self/limits").ok()?;
    let line = table.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// What a bucket offers.
#[derive(Debug, Default)]
pub struct BucketInfo {
    /// The server, if it is not AWS.
    pub endpoint: Option<String>,
    /// The operations tried, and their results.
    pub tried: Vec<(&'static str, Result<()>)>,
    /// Seconds that the server's clock is ahead of this machine's, if known.
    pub clock_ahead_s: Option<i64>,
    /// Whether `If-None-Match` protects an existing object from a single request.
    pub conditional_put: Option<bool>,
    /// Whether it does so from a multipart upload.
    pub conditional_complete: Option<bool>,
    /// Why multipart uploads do not work.
    pub multipart: Option<String>,
    /// Whether bytes that do not match their CRC-64/NVME are refused.
    pub checks_sums: Option<bool>,
    /// Whether a lifecycle rule removes the parts of unfinished uploads.
    pub aborts_parts: Option<bool>,
}

/// What a probe may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeDepth {
    /// Nothing is written.
    Look,
    /// One test object is written, and deleted afterwards.
    Write,
}

#[cfg(feature = "s3")]
impl BucketInfo {
    /// Examines the folder of a bucket that a URL names, or tests the operations in it. `announce`
    /// is called with the name of each step before it.
    ///
    /// # Errors
    /// [`Error::BadUrl`]. Operations that the bucket refuses are part of the result.
    pub fn of(url: &str, depth: ProbeDepth, announce: &dyn Fn(&'static str)) -> Result<Self> {
        crate::s3::examine(url, depth, announce)
    }
}

/// CPU time of this process, in user and in kernel mode; `None` if unknown.
#[must_use]
pub fn cpu_times() -> Option<[Duration; 2]> {
    syscalls::cpu_times().ok()
}

/// The share of an object that is in this machine's page cache; `None` if unknown.
#[must_use]
pub fn cached_share(object: &dyn Object) -> Option<f64> {
    let (file, len) = (object.file()?, object.len_bytes());
    let pages = syscalls::cached_pages(file, 0, len).ok()?;
    (len > 0).then(|| (pages as f64 * syscalls::page_bytes() as f64 / len as f64).min(1.0))
}
