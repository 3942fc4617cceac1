use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::sys::aligned_buffer::{ALIGN_BYTES, AlignedBuffer};
use crate::sys::syscalls;
use crate::{Error, ProcessIdentity, Result};

/// A temporary folder in which a file system is tested. [`ProbeFolder::remove`] deletes it; that of
/// a dead process is removed by the next sweep, like everything whose name starts with `.tmp-`.
#[derive(Clone, Debug)]
pub struct ProbeFolder {
    folder: PathBuf,
}

/// The direct I/O that the file system supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Direct {
    /// The least alignment of offsets that was accepted, in bytes.
    pub offset_align: u32,
    /// The memory alignment that the file system reports, if any.
    pub memory_align: Option<u32>,
}

type Tried<T> = io::Result<T>;

impl ProbeFolder {
    /// Creates the folder in an existing one.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn new(parent: &Path) -> Result<Self> {
        let folder = parent.join(format!(".tmp-doctor-{}", ProcessIdentity::new()));
        fs::create_dir(&folder)
            .map_err(|e| Error::from_io("create", folder.display().to_string(), e))?;
        Ok(ProbeFolder { folder })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> String {
        self.folder.display().to_string()
    }

    /// Deletes it, with its content.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn remove(&self) -> Result<()> {
        fs::remove_dir_all(&self.folder).map_err(|e| Error::from_io("remove", self.name(), e))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn make(&self, name: &str) -> Tried<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).open(self.path(name))
    }

    /// Whether exclusive creation refuses a taken name.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn exclusive_create(&self) -> Tried<bool> {
        self.make("exclusive")?;
        is_taken(self.make("exclusive").map(drop))
    }

    /// Whether `renameat2` refuses a taken name atomically. An error means that it is not supported
    /// here.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn exclusive_rename(&self) -> Tried<bool> {
        self.make("renamed")?;
        self.make("in the way")?;
        // The kernel itself checks whether a name is taken: only for a free name does a file system
        // without support return an error.
        let free = self.path("renamed to");
        syscalls::rename_noreplace(&self.path("renamed"), &free)?;
        is_taken(syscalls::rename_noreplace(&free, &self.path("in the way")))
    }

    /// Whether hard links work.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn hard_link(&self) -> Tried<()> {
        self.make("linked")?;
        fs::hard_link(self.path("linked"), self.path("link"))
    }

    /// Whether a lock excludes a second one.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn lock(&self) -> Tried<bool> {
        let first = self.make("locked")?;
        first.try_lock()?;
        // NFS grants exclusive locks only on files opened for writing.
        let second = OpenOptions::new().read(true).write(true).open(self.path("locked"))?;
        match second.try_lock() {
            Err(fs::TryLockError::WouldBlock) => Ok(true),
            Err(fs::TryLockError::Error(e)) => Err(e),
            Ok(()) => Ok(false),
        }
    }

    /// Whether reflinks work.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn reflink(&self) -> Tried<()> {
        let from = self.make("shared")?;
        from.write_all_at(&[7; ALIGN_BYTES], 0)?;
        syscalls::clone_file(&from, &self.make("sharing")?)
    }

    /// Whether space is reserved before the first byte.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn allocate(&self) -> Tried<()> {
        syscalls::allocate(&self.make("reserved")?, 1 << 20)
    }

    /// Tests direct I/O at 512 bytes and at 4096.
    ///
    /// # Errors
    /// The error of the file system at 4096.
    pub fn direct(&self) -> Tried<Direct> {
        let file = self.make("direct")?;
        let memory_align = syscalls::direct_align(&file).map(|align| align.memory);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let file = options.open(self.path("direct"))?;
        let mut buf = AlignedBuffer::take();
        let mut at = |align: usize| -> Tried<()> {
            buf[..align].fill(7);
            file.write_all_at(&buf[..align], align as u64)?;
            buf[..align].fill(0);
            file.read_exact_at(&mut buf[..align], align as u64)?;
            match buf[..align].iter().all(|&byte| byte == 7) {
                true => Ok(()),
                false => {
                    Err(io::Error::other("expected the bytes that were written, found others"))
                }
            }
        };
        at(ALIGN_BYTES)?;
        let finer = at(512);
        let offset_align = if finer.is_ok() { 512 } else { ALIGN_BYTES as u32 };
        Ok(Direct { offset_align, memory_align })
    }

    /// Milliseconds to make a small file and its name durable: the median of a few.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn commit_ms(&self) -> Tried<f64> {
        const ROUNDS: usize = 5;
        let mut all = Vec::with_capacity(ROUNDS);
        for round in 0..ROUNDS {
            let started = Instant::now();
            let mut file = self.make(&format!("durable {round}"))?;
            file.write_all(&[7; ALIGN_BYTES])?;
            file.sync_all()?;
            // Some file systems do not support it, and do not need it.
            let _ = File::open(&self.folder)?.sync_all();
            all.push(started.elapsed().as_secs_f64() * 1e3);
        }
        all.sort_by(f64::total_cmp);
        Ok(all[ROUNDS / 2])
    }

    /// Seconds that the clock of the file system's timestamps is ahead of this machine's.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn clock_ahead_s(&self) -> Tried<f64> {
        let now =
            || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
        let before = now();
        let mut file = self.make("dated")?;
        file.write_all(b"now")?;
        file.sync_all()?;
        let after = now();
        let meta = fs::metadata(self.path("dated"))?;
        let dated = meta.mtime() as f64 + meta.mtime_nsec() as f64 / 1e9;
        // A timestamp is that of the last clock tick, up to 10 ms old.
        Ok(if dated > after {
            dated - after
        } else if dated < before - 0.01 {
            dated - before
        } else {
            0.0
        })
    }
}

fn is_taken(outcome: Tried<()>) -> Tried<bool> {
    match outcome {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(true),
        outcome => outcome.map(|()| false),
    }
}
