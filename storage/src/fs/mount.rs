//! The file system of an open file, cached per mount: its kind and options, and the read methods
//! that it refused.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{fmt, fs, io};

use crate::base::per_process::PerProcess;
use crate::fs::detect;
use crate::sys::syscalls;

/// Read methods, from the best where it works to the one that always works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadMethod {
    /// `io_uring`, direct I/O.
    RingDirect,
    /// `io_uring`, buffered, without leaving pages in the cache where the kernel supports that.
    RingCached,
    /// `pread` by threads, direct I/O.
    ThreadsDirect,
    /// `pread` by threads, buffered.
    ThreadsCached,
}

impl ReadMethod {
    pub(crate) const ALL: [ReadMethod; 4] = [
        ReadMethod::RingDirect,
        ReadMethod::RingCached,
        ReadMethod::ThreadsDirect,
        ReadMethod::ThreadsCached,
    ];

    pub(crate) fn is_ring(self) -> bool {
        matches!(self, ReadMethod::RingDirect | ReadMethod::RingCached)
    }

    pub(crate) fn is_direct(self) -> bool {
        matches!(self, ReadMethod::RingDirect | ReadMethod::ThreadsDirect)
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

impl fmt::Display for ReadMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReadMethod::RingDirect => "direct I/O with io_uring",
            ReadMethod::RingCached => "buffered I/O with io_uring",
            ReadMethod::ThreadsDirect => "direct I/O with threads",
            ReadMethod::ThreadsCached => "buffered I/O with threads",
        })
    }
}

/// The bit after those of [`ReadMethod`]: the file system refuses `RWF_DONTCACHE`.
const DONTCACHE_REFUSED: u8 = 1 << 7;

/// One mounted file system, as this process knows it.
#[derive(Debug)]
pub(crate) struct Mount {
    /// Such as `ext4`, `lustre` or `fuse.ceph-fuse`.
    pub(crate) file_system: String,
    /// Where it is mounted, and those of its options that matter for reading.
    pub(crate) description: String,
    /// Whether buffered reads are asynchronous: then a submission does not block.
    pub(crate) inline: bool,
    /// Bits of [`ReadMethod`], and [`DONTCACHE_REFUSED`].
    refused: AtomicU8,
    /// Set once a ring was probed on it.
    pub(crate) probed: OnceLock<()>,
}

/// All mounts examined so far, by their device number.
static MOUNTS: PerProcess<Mutex<HashMap<u64, Arc<Mount>>>> = PerProcess::new();

impl Mount {
    /// The mount of an open file. Blocks if its file system does.
    pub(crate) fn of(file: &File) -> io::Result<Arc<Self>> {
        let device = file.metadata()?.dev();
        let mounts = MOUNTS.get(Mutex::default);
        let lock = || mounts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mount) = lock().get(&device) {
            return Ok(Arc::clone(mount));
        }
        let found = Arc::new(Mount::examine(file, device)?);
        Ok(Arc::clone(lock().entry(device).or_insert(found)))
    }

    fn examine(file: &File, device: u64) -> io::Result<Self> {
        let (file_system, inline) = detect::kind_of(syscalls::magic_of(file)?);
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let line = MountLine::find(&table, device);
        // FUSE serves a hundred file systems; the mount table names this one.
        let file_system = match &line {
            Some(line) if file_system == "fuse" => line.kind.to_owned(),
            _ => file_system,
        };
        let description = line.map_or_else(String::new, |line| line.describe());
        let refused = AtomicU8::new(0);
        Ok(Mount { file_system, description, inline, refused, probed: OnceLock::new() })
    }

    pub(crate) fn is_refused(&self, method: ReadMethod) -> bool {
        self.refused.load(Ordering::Relaxed) & method.bit() != 0
    }

    /// Disables a read method of this mount, for this process, and logs it once.
    pub(crate) fn refuse(&self, method: ReadMethod, why: &dyn fmt::Display) {
        if self.refused.fetch_or(method.bit(), Ordering::Relaxed) & method.bit() == 0 {
            log::info!("{} {}: {method} not used: {why}", self.file_system, self.description);
        }
    }

    /// Whether buffered reads can use `RWF_DONTCACHE`.
    pub(crate) fn uses_dontcache(&self) -> bool {
        self.refused.load(Ordering::Relaxed) & DONTCACHE_REFUSED == 0
    }

    pub(crate) fn refuse_dontcache(&self) {
        self.refused.fetch_or(DONTCACHE_REFUSED, Ordering::Relaxed);
    }
}

/// Where the file system of a path is mounted.
pub(crate) fn point_of(path: &Path) -> Option<String> {
    let device = fs::metadata(path).ok()?.dev();
    let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
    MountLine::find(&table, device).map(|line| line.point.to_owned())
}

/// A line of `/proc/self/mountinfo`, as `proc(5)` describes it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MountLine<'a> {
    pub(crate) point: &'a str,
    pub(crate) kind: &'a str,
    /// What is mounted, such as `/dev/vda` or `10.0.0.2@tcp:/scratch`.
    pub(crate) source: &'a str,
    /// Options of the mount itself, such as `ro`.
    pub(crate) flags: &'a str,
    pub(crate) options: &'a str,
}

/// Mount options that change how reads work, without their values.
const READ_OPTIONS: [&str; 16] = [
    "flock",
    "localflock",
    "noflock",
    "rasize",
    "rsize",
    "wsize",
    "recover_session",
    "vers",
    "nconnect",
    "soft",
    "hard",
    "timeo",
    "retrans",
    "proto",
    "noasyncreaddir",
    "max_read",
];

impl<'a> MountLine<'a> {
    /// Finds it by the device, not by the path, so that links and bind mounts are resolved.
    pub(crate) fn find(table: &'a str, device: u64) -> Option<Self> {
        let device = format!("{}:{}", libc::major(device), libc::minor(device));
        table.lines().find_map(|line| {
            let mut words = line.split(' ');
            if words.nth(2)? != device {
                return None;
            }
            let (point, flags) = (words.nth(1)?, words.next().unwrap_or(""));
            let mut rest = line.split_once(" - ")?.1.split(' ');
            let (kind, source) = (rest.next()?, rest.next().unwrap_or(""));
            let options = rest.next().unwrap_or("");
            Some(MountLine { point, kind, source, flags, options })
        })
    }

    fn describe(&self) -> String {
        let is_read_option = |option: &&str| {
            let name = option.split('=').next().unwrap_or(option);
            READ_OPTIONS.contains(&name)
        };
        let options: Vec<&str> = self.options.split(',').filter(is_read_option).collect();
        match options.as_slice() {
            [] => self.point.to_owned(),
            some => format!("{} ({})", self.point, some.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 22 0:35 / /ceph rw shared:9 master:2 - ceph 10.0.0.1:/ rw,rasize=8388608,recover_session=clean
41 22 0:36 / /a\\040b rw - fuse.ceph-fuse ceph-fuse rw,user_id=0,max_read=131072
42 22 2840:1053 / /lustre rw - lustre 10.0.0.2@tcp:/scratch rw,flock,lazystatfs
43 22 0:50 / /short rw - nfs4
broken line
";

    #[test]
    fn the_mount_table_is_read_by_device() {
        let described = |major, minor| {
            let line = MountLine::find(TABLE, libc::makedev(major, minor))?;
            Some((line.kind, line.describe()))
        };
        assert_eq!(described(254, 0), Some(("ext4", "/".to_owned())));
        let ceph = "/ceph (rasize=8388608,recover_session=clean)".to_owned();
        assert_eq!(described(0, 35), Some(("ceph", ceph)));
        assert_eq!(
            described(0, 36),
            Some(("fuse.ceph-fuse", "/a\\040b (max_read=131072)".to_owned()))
        );
        assert_eq!(described(2840, 1053), Some(("lustre", "/lustre (flock)".to_owned())));
        assert_eq!(described(0, 50), Some(("nfs4", "/short".to_owned())));
        assert_eq!(described(9, 9), None);
    }

    #[test]
    fn a_refused_method_stays_refused_on_its_mount() {
        let file = tempfile::tempfile().unwrap();
        let mount = Mount::examine(&file, file.metadata().unwrap().dev()).unwrap();
        assert!(!mount.is_refused(ReadMethod::RingCached));
        mount.refuse(ReadMethod::RingCached, &"refused by a test");
        assert!(
            mount.is_refused(ReadMethod::RingCached) && !mount.is_refused(ReadMethod::RingDirect)
        );
        assert!(mount.uses_dontcache());
        mount.refuse_dontcache();
        assert!(!mount.uses_dontcache() && !mount.is_refused(ReadMethod::ThreadsCached));
    }
}
