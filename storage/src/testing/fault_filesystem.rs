//! The simulated disk: the operations of [`FileSystem`] on a tree in memory, with a log of each.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::rng::Rng;
use crate::fs::filesystem::{DirEntry, FileSystem, FsFile, Stat};
use crate::io::pread::{self, PositionedIo};
use crate::io::transfer::{Transfer, TransferError};
use crate::testing::crash::{self, Op};
use crate::testing::fault_store::{FaultKind, FaultPlan};
use crate::testing::tree::{Content, Node, Tree, errno};
use crate::{Map, ProcessIdentity, Profile, RangeRead};

/// The root of its paths.
pub(super) const ROOT: &str = "sim:";

#[derive(Debug)]
pub(super) struct FaultFileSystem {
    state: Arc<Mutex<FaultDiskState>>,
    faults: FaultPlan,
    /// Each simulated restart has another process.
    writer: ProcessIdentity,
}

#[derive(Debug)]
struct FaultDiskState {
    live: Tree,
    /// The durable content at the start, and the operations since.
    start: Tree,
    log: Vec<Op>,
    failing: HashMap<usize, FaultKind>,
    disk_failed: bool,
    rng: Rng,
}

impl FaultFileSystem {
    pub(super) fn new(seed: u64, faults: FaultPlan, tree: Tree, boot: u32) -> Self {
        let state = FaultDiskState {
            live: tree.clone(),
            start: tree,
            log: Vec::new(),
            failing: HashMap::new(),
            disk_failed: false,
            rng: Rng::new(seed),
        };
        FaultFileSystem {
            state: Arc::new(Mutex::new(state)),
            faults,
            writer: ProcessIdentity::simulated(boot),
        }
    }

    pub(super) fn op_count(&self) -> usize {
        lock(&self.state).log.len()
    }

    pub(super) fn fail_op(&self, op: usize, how: FaultKind) {
        lock(&self.state).failing.insert(op, how);
    }

    pub(super) fn crash_at(&self, op_count: usize, seed: u64) -> (Tree, u32) {
        let state = lock(&self.state);
        (crash::image(&state.start, &state.log[..op_count], seed), self.writer.pid())
    }

    pub(super) fn no_exclusive_rename(&self) -> bool {
        self.faults.no_exclusive_rename
    }

    pub(super) fn raw_paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        let visit = &mut |path: &str, _| paths.push(path.to_owned());
        lock(&self.state).live.walk(crate::testing::tree::TOP, "", visit);
        paths
    }

    fn file(&self, node: Node) -> Arc<dyn FsFile> {
        let (state, faults) = (Arc::clone(&self.state), self.faults.clone());
        Arc::new(SimFile { state, faults, node })
    }
}

fn lock(state: &Mutex<FaultDiskState>) -> MutexGuard<'_, FaultDiskState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The components of a path below the root.
fn parts(path: &Path) -> io::Result<Vec<&str>> {
    let text = path.to_str().ok_or_else(|| errno(libc::EINVAL))?;
    let below = text.strip_prefix(ROOT).ok_or_else(|| errno(libc::ENOENT))?;
    Ok(below.split('/').filter(|part| !part.is_empty()).collect())
}

impl FaultDiskState {
    /// Runs one operation that changes the disk, and logs its outcome.
    fn change<T>(&mut self, act: impl FnOnce(&mut Tree) -> io::Result<(T, Op)>) -> io::Result<T> {
        let planned = self.failing.remove(&self.log.len());
        self.disk_failed |= planned == Some(FaultKind::DiskLost);
        let outcome = match planned {
            _ if self.disk_failed => Err(errno(libc::EIO)),
            Some(FaultKind::NoSpace) => Err(errno(libc::ENOSPC)),
            Some(FaultKind::Denied) => Err(errno(libc::EACCES)),
            Some(FaultKind::Io | FaultKind::DiskLost) => Err(errno(libc::EIO)),
            None => act(&mut self.live),
        };
        let (outcome, op) = match outcome {
            Ok((value, op)) => (Ok(value), op),
            Err(e) => (Err(e), Op::Failed),
        };
        self.log.push(op);
        outcome
    }

    fn sync(&mut self, node: Node, faults: &FaultPlan) -> io::Result<()> {
        let ignored = faults.sync_lies;
        let synced =
            self.change(|_| Ok(((), if ignored { Op::Failed } else { Op::Sync { node } })));
        if synced.is_err() {
            // The kernel marks the pages clean although they were not written, so that the next
            // sync writes nothing.
            self.log.pop();
            self.log.push(Op::SyncFailed { node });
        }
        synced
    }

    fn used_bytes(&self) -> u64 {
        let mut used = 0;
        self.live.walk(crate::testing::tree::TOP, "", &mut |_, node| {
            used += self.live.file(node).map_or(0, |bytes| bytes.len() as u64);
        });
        used
    }

    /// Whether a file may grow to a length.
    fn has_room(&self, node: Node, len_bytes: u64, faults: &FaultPlan) -> io::Result<()> {
        let Some(capacity) = faults.capacity_bytes else { return Ok(()) };
        let growth = len_bytes.saturating_sub(self.live.file(node)?.len() as u64);
        if self.used_bytes() + growth > capacity { Err(errno(libc::ENOSPC)) } else { Ok(()) }
    }

    /// How many of `len` bytes a transfer moves.
    fn transferred(&mut self, len: usize, faults: &FaultPlan) -> io::Result<usize> {
        if self.disk_failed {
            return Err(errno(libc::EIO));
        }
        if self.rng.chance(faults.interrupted_per_mille) {
            let again = self.rng.chance(50);
            return Err(errno(if again { libc::EAGAIN } else { libc::EINTR }));
        }
        if len > 1 && self.rng.chance(faults.short_per_mille) {
            return Ok(1 + self.rng.below(len as u64 - 1) as usize); // fits: less than len
        }
        Ok(len)
    }
}

impl FileSystem for FaultFileSystem {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn FsFile>> {
        let state = lock(&self.state);
        let node = state.live.find(&parts(path)?)?;
        state.live.file(node)?;
        Ok(self.file(node))
    }

    fn create_new(&self, path: &Path) -> io::Result<Arc<dyn FsFile>> {
        let parts = parts(path)?;
        let node = lock(&self.state).change(|tree| {
            let (folder, name) = vacant(tree, &parts)?;
            let node = tree.add(Content::File(Vec::new()));
            tree.folder_mut(folder)?.insert(name.to_owned(), node);
            Ok((node, Op::create_file(folder, name, node)))
        })?;
        Ok(self.file(node))
    }

    fn reopen(&self, path: &Path) -> io::Result<Arc<dyn FsFile>> {
        self.open(path)
    }

    fn stat(&self, path: &Path) -> io::Result<Stat> {
        let state = lock(&self.state);
        let node = state.live.find(&parts(path)?)?;
        Ok(match state.live.content(node) {
            Content::File(bytes) => Stat::File { len_bytes: bytes.len() as u64 },
            Content::Folder(_) => Stat::Folder,
        })
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (from, to) = (parts(from)?, parts(to)?);
        lock(&self.state).change(|tree| {
            let (from_folder, from_name) = tree.parent(&from)?;
            let node = tree.find(&from)?;
            let (to_folder, to_name) = vacant(tree, &to)?;
            if to.starts_with(&from) {
                return Err(errno(libc::EINVAL));
            }
            tree.folder_mut(from_folder)?.remove(from_name);
            tree.folder_mut(to_folder)?.insert(to_name.to_owned(), node);
            Ok(((), Op::rename((from_folder, from_name), (to_folder, to_name), node)))
        })
    }

    fn renames_exclusively(&self, _folder: &Path) -> io::Result<bool> {
        Ok(!self.faults.no_exclusive_rename)
    }

    fn rename_over(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (from, to) = (parts(from)?, parts(to)?);
        lock(&self.state).change(|tree| {
            let (from_folder, from_name) = tree.parent(&from)?;
            let (to_folder, to_name) = tree.parent(&to)?;
            let node = tree.find(&from)?;
            tree.folder_mut(from_folder)?.remove(from_name);
            tree.folder_mut(to_folder)?.insert(to_name.to_owned(), node);
            Ok(((), Op::rename((from_folder, from_name), (to_folder, to_name), node)))
        })
    }

    fn unlink(&self, path: &Path) -> io::Result<()> {
        let parts = parts(path)?;
        lock(&self.state).change(|tree| {
            let (folder, name) = tree.parent(&parts)?;
            tree.file(tree.find(&parts)?)?;
            tree.folder_mut(folder)?.remove(name);
            Ok(((), Op::remove(folder, name)))
        })
    }

    fn mkdir(&self, path: &Path) -> io::Result<()> {
        let parts = parts(path)?;
        lock(&self.state).change(|tree| {
            let (folder, name) = vacant(tree, &parts)?;
            let node = tree.add(Content::Folder(BTreeMap::new()));
            tree.folder_mut(folder)?.insert(name.to_owned(), node);
            Ok(((), Op::create_folder(folder, name, node)))
        })
    }

    fn rmdir(&self, path: &Path) -> io::Result<()> {
        let parts = parts(path)?;
        lock(&self.state).change(|tree| {
            let (folder, name) = tree.parent(&parts)?;
            if !tree.folder(tree.find(&parts)?)?.is_empty() {
                return Err(errno(libc::ENOTEMPTY));
            }
            tree.folder_mut(folder)?.remove(name);
            Ok(((), Op::remove(folder, name)))
        })
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let parts = parts(path)?;
        let ignored = self.faults.sync_dir_lies;
        lock(&self.state).change(|tree| {
            let folder = tree.find(&parts)?;
            tree.folder(folder)?;
            Ok(((), if ignored { Op::Failed } else { Op::SyncFolder { folder } }))
        })
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let state = lock(&self.state);
        let folder = state.live.folder(state.live.find(&parts(path)?)?)?;
        let is_folder = |node: Node| matches!(state.live.content(node), Content::Folder(_));
        let name = |(text, node): (&String, &Node)| DirEntry {
            text: text.clone(),
            is_folder: is_folder(*node),
        };
        Ok(folder.iter().map(name).collect())
    }

    fn free_bytes(&self, _path: &Path) -> io::Result<Option<u64>> {
        let used = lock(&self.state).used_bytes();
        Ok(self.faults.capacity_bytes.map(|capacity| capacity.saturating_sub(used)))
    }

    fn writer(&self) -> ProcessIdentity {
        ProcessIdentity::new().of_process(&self.writer)
    }

    fn is_alive(&self, writer: &ProcessIdentity) -> bool {
        writer.is_same_process(&self.writer)
    }

    fn profile(&self) -> &Profile {
        Profile::unknown()
    }
}

/// The folder and the name of a new entry; the name must be free.
fn vacant<'p>(tree: &Tree, path: &[&'p str]) -> io::Result<(Node, &'p str)> {
    let (folder, name) = tree.parent(path).map_err(|e| match e.raw_os_error() {
        Some(libc::EBUSY) => errno(libc::EEXIST), // the root
        _ => e,
    })?;
    if tree.folder(folder)?.contains_key(name) {
        Err(errno(libc::EEXIST))
    } else {
        Ok((folder, name))
    }
}

#[derive(Debug)]
struct SimFile {
    state: Arc<Mutex<FaultDiskState>>,
    faults: FaultPlan,
    node: Node,
}

impl PositionedIo for SimFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = lock(&self.state);
        let count = state.transferred(buf.len(), &self.faults)?;
        let bytes = state.live.file(self.node)?;
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(bytes.len());
        let count = count.min(bytes.len() - start);
        buf[..count].copy_from_slice(&bytes[start..start + count]);
        Ok(count)
    }

    fn read_cached_at(&self, _buf: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(errno(libc::EOPNOTSUPP))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let mut state = lock(&self.state);
        let count = state.transferred(bytes.len(), &self.faults)?;
        let end = offset + count as u64;
        let room = state.has_room(self.node, end, &self.faults);
        let (node, bytes) = (self.node, bytes[..count].to_vec());
        state.change(|tree| {
            room?;
            let (file, end) = (tree.file_mut(node)?, end as usize); // fits: it is in memory
            file.resize(file.len().max(end), 0);
            file[end - count..end].copy_from_slice(&bytes);
            Ok((count, Op::Write { node, offset, bytes }))
        })
    }
}

impl SimFile {
    fn resize(&self, len_bytes: u64) -> io::Result<()> {
        let mut state = lock(&self.state);
        let room = state.has_room(self.node, len_bytes, &self.faults);
        let node = self.node;
        state.change(|tree| {
            room?;
            tree.file_mut(node)?.resize(len_bytes as usize, 0); // fits: it is in memory
            Ok(((), Op::SetLen { node, len_bytes }))
        })
    }
}

impl FsFile for SimFile {
    fn len_bytes(&self) -> io::Result<u64> {
        Ok(lock(&self.state).live.file(self.node)?.len() as u64)
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<(), TransferError> {
        pread::transfer(self, &mut Transfer::of_reads(reads), 1)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TransferError> {
        pread::transfer(self, &mut Transfer::of_write(offset, bytes, 1), 1)
    }

    fn lock(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, len_bytes: u64) -> io::Result<()> {
        self.resize(len_bytes)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.resize(len_bytes)
    }

    fn sync(&self) -> io::Result<()> {
        lock(&self.state).sync(self.node, &self.faults)
    }

    fn map(&self, _len_bytes: u64) -> io::Result<Map> {
        Err(errno(libc::ENODEV))
    }

    fn names(&self) -> io::Result<u64> {
        let mut names = 0;
        let count = &mut |_: &str, node| names += u64::from(node == self.node);
        lock(&self.state).live.walk(crate::testing::tree::TOP, "", count);
        Ok(names)
    }
}
