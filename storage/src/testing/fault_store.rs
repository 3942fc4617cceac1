//! A store in memory with fault injection and simulated power loss. It runs the same protocol as on
//! real file systems, over a disk that tracks which writes were synced.
//!
//! ```
//! use storage::{Key, Storage as _};
//! use storage::testing::fault_store;
//!
//! let store = fault_store::FaultStore::new(7, fault_store::FaultPlan::default());
//! let key = Key::new("a")?;
//! storage::write_all(&store, &key, b"all of it")?;
//! // Whenever the power fails, the object is absent or complete.
//! for ops in 0..=store.op_count() {
//!     let after = store.crash_at(ops, 1);
//!     if after.open(&key).is_ok() {
//!         assert_eq!(storage::read_all(&after, &key)?, b"all of it");
//!     }
//! }
//! # Ok::<(), storage::Error>(())
//! ```
//!
//! What a power cut may leave is decided in `crash`: any subset of the sectors written since the
//! last sync of their file, the last one half written; any subset of the changes to a folder since
//! its last sync.

pub use crate::testing::hooks::HookLayer;
pub use crate::testing::read_faults::{ReadFaultLayer, ReadFaults};

use std::path::PathBuf;
use std::sync::Arc;

use crate::posix::store::Posix;
use crate::testing::fault_filesystem::FaultFileSystem;
pub use crate::testing::tmpfs::Mount;
use crate::{
    InPlaceFile, Key, LinkMethod, Object, ObjectMeta, PendingDirSync, ProcessIdentity, Profile,
    Reader, ReaderOptions, Result, ResumableUpload, Storage, SyncPoint, Upload,
};

/// Random faults. Default: none.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// Short transfers per 1000.
    pub short_per_mille: u32,
    /// Interrupted (`EINTR`) or postponed (`EAGAIN`) transfers per 1000.
    pub interrupted_per_mille: u32,
    /// Bytes that all files together may have. Default: no limit.
    pub capacity_bytes: Option<u64>,
    /// `fsync` of a file succeeds without effect. No protocol survives that: a crash test that
    /// passes with it tests nothing.
    pub sync_lies: bool,
    /// `fsync` of a folder succeeds without effect.
    pub sync_dir_lies: bool,
    /// Folders have no rename that refuses a taken name, as on FUSE and NFS.
    pub no_exclusive_rename: bool,
}

/// How one operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// `EIO`: a device error. After a failed sync the data is lost, whatever a second one returns.
    Io,
    /// `ENOSPC`: no space.
    NoSpace,
    /// `EACCES`: not allowed.
    Denied,
    /// This and every later operation fails with `EIO`: the disk is lost.
    DiskLost,
}

/// The store. Clones are the same store.
#[derive(Clone, Debug)]
pub struct FaultStore {
    disk: Arc<FaultFileSystem>,
    store: Posix,
}

impl FaultStore {
    /// An empty store. The seed decides which transfers fail.
    #[must_use]
    pub fn new(seed: u64, faults: FaultPlan) -> Self {
        Self::on(FaultFileSystem::new(seed, faults, crate::testing::tree::Tree::new(), 1))
    }

    fn on(disk: FaultFileSystem) -> Self {
        let disk = Arc::new(disk);
        let store = Posix::new(
            Arc::clone(&disk) as _,
            PathBuf::from(crate::testing::fault_filesystem::ROOT),
        );
        FaultStore { disk, store }
    }

    /// Operations so far that would change the disk, failed ones among them: creating, writing,
    /// syncing, renaming, removing. Reads do not count.
    #[must_use]
    pub fn op_count(&self) -> usize {
        self.disk.op_count()
    }

    /// Makes the operation with this number, counted from 0, fail.
    pub fn fail_op(&self, op: usize, how: FaultKind) {
        self.disk.fail_op(op, how);
    }

    /// The store after a power cut now and a restart: without faults, and with the leftovers of
    /// other uploads. The seed picks one of the possible states of the disk. This store is not
    /// affected.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        self.crash_at(self.op_count(), seed)
    }

    /// The store after a power cut when `ops` operations were done, of the [`op_count`] so far.
    ///
    /// [`op_count`]: FaultStore::op_count
    ///
    /// # Panics
    /// If there were fewer operations.
    #[must_use]
    pub fn crash_at(&self, op_count: usize, seed: u64) -> Self {
        let (tree, boot) = self.disk.crash_at(op_count, seed);
        // Of the faults, only this one is a property of the file system.
        let no_exclusive_rename = self.disk.no_exclusive_rename();
        let faults = FaultPlan { no_exclusive_rename, ..FaultPlan::default() };
        Self::on(FaultFileSystem::new(seed, faults, tree, boot + 1))
    }

    /// All paths on the disk, temporaries among them, sorted.
    #[must_use]
    pub fn raw_paths(&self) -> Vec<String> {
        self.disk.raw_paths()
    }
}

impl Storage for FaultStore {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.store.open(key)
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.store.create(key, len_bytes_max)
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        self.store.list(folder)
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        self.store.list_names(folder)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.store.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.store.publish(staged, target)
    }

    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        self.store.has_atomic_publish(folder)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.store.replace(key, bytes)
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        self.store.sync_folder(folder)
    }

    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        self.store.delete_empty_folder(folder)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        self.store.delete_folder(folder)
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.store.free_bytes()
    }

    fn display(&self, key: &Key) -> String {
        self.store.display(key)
    }

    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        self.store.remove_orphans(folder)
    }

    fn remove_orphans_of(&self, folder: &Key, writer: &ProcessIdentity) -> Result<Vec<String>> {
        self.store.remove_orphans_of(folder, writer)
    }

    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        self.store.create_resumable(key)
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        self.store.resume(key, from)
    }

    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        self.store.resume_with(key, find)
    }

    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.store.open_partial(key)
    }

    fn discard(&self, key: &Key) -> Result<()> {
        self.store.discard(key)
    }

    fn create_in_place(&self, key: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.store.create_in_place(key, len_bytes)
    }

    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        self.store.open_in_place(key)
    }

    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.store.create_anonymous(folder, len_bytes)
    }

    fn link(
        &self,
        key: &Key,
        from: &dyn Object,
        how: LinkMethod,
    ) -> Result<Option<PendingDirSync>> {
        self.store.link(key, from, how)
    }

    fn reader(&self, options: &ReaderOptions) -> Result<Box<dyn Reader>> {
        self.store.reader(options)
    }

    fn profile(&self) -> &Profile {
        self.store.profile()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::Path;

    use super::*;
    use crate::fs::filesystem::FileSystem as _;
    use crate::read_all;
    use crate::testing::fault_filesystem::ROOT;

    /// The steps of a protocol.
    #[derive(Clone, Copy)]
    enum FaultStep {
        Write,
        Sync,
        Rename,
        SyncFolder,
    }

    /// Runs a protocol, and returns whether a crash can leave a partial object.
    fn can_be_partial(steps: &[FaultStep]) -> bool {
        let store = FaultStore::new(3, FaultPlan::default());
        let (temporary, path) = (Path::new("sim:/.a"), Path::new("sim:/a"));
        let bytes = [7; 5000];
        let act = || -> io::Result<()> {
            let file = store.disk.create_new(temporary)?;
            for step in steps {
                match step {
                    FaultStep::Write => file.write(0, &bytes).expect("no fault is planned"),
                    FaultStep::Sync => file.sync()?,
                    FaultStep::Rename => store.disk.rename_new(temporary, path)?,
                    FaultStep::SyncFolder => store.disk.sync_dir(Path::new(ROOT))?,
                }
            }
            Ok(())
        };
        act().unwrap();
        let is_partial =
            |ops, seed| match read_all(&store.crash_at(ops, seed), &Key::new("a").unwrap()) {
                Ok(found) => found != bytes,
                Err(_) => ops == store.op_count(),
            };
        (0..=store.op_count()).any(|ops| (0..50).any(|seed| is_partial(ops, seed)))
    }

    /// Wrong protocols that other programs have shipped must be distinguished from the correct one.
    #[test]
    fn wrong_protocols_are_detected() {
        use FaultStep::{Rename, Sync, SyncFolder, Write};
        assert!(
            !can_be_partial(&[Write, Sync, Rename, SyncFolder]),
            "the correct protocol was rejected"
        );
        assert!(
            can_be_partial(&[Write, Rename, Sync, SyncFolder]),
            "renamed before it was durable"
        );
        assert!(can_be_partial(&[Write, Rename, SyncFolder]), "never synced");
        assert!(can_be_partial(&[Write, Sync, Rename]), "the name was never synced");
        assert!(can_be_partial(&[Sync, Write, Rename, SyncFolder]), "synced too early");
    }

    /// `fsync` fails once and then succeeds without having written anything, as in real kernels.
    #[test]
    fn a_second_sync_does_not_recover_lost_data() {
        let store = FaultStore::new(4, FaultPlan::default());
        let file = store.disk.create_new(Path::new("sim:/a")).unwrap();
        store.disk.sync_dir(Path::new(ROOT)).unwrap();
        file.write(0, &[7; 600]).unwrap();
        store.fail_op(store.op_count(), FaultKind::Io);
        assert!(file.sync().is_err());
        assert!(file.sync().is_ok());
        let is_complete = |seed| {
            let after = store.crash(seed);
            read_all(&after, &Key::new("a").unwrap()).is_ok_and(|found| found == [7; 600])
        };
        assert!((0..50).any(|seed| !is_complete(seed)));
        assert!((0..50).any(is_complete));
    }

    #[test]
    fn equal_seeds_give_equal_disks() {
        let store = FaultStore::new(5, FaultPlan { short_per_mille: 300, ..FaultPlan::default() });
        let key = Key::new("a").unwrap();
        let mut upload = store.create(&key, 0).unwrap();
        upload.write(&[9; 400_000]).unwrap();
        upload.finish().unwrap();
        let images = |seed| (0..store.op_count()).map(move |ops| (ops, seed));
        for (ops, seed) in images(1).chain(images(2)) {
            let contents = |store: FaultStore| {
                let list = store.list(&Key::root()).unwrap();
                let bytes: Vec<_> =
                    list.iter().map(|e| read_all(&store, &e.key).unwrap()).collect();
                (store.raw_paths(), list, bytes)
            };
            assert!(contents(store.crash_at(ops, seed)) == contents(store.crash_at(ops, seed)));
        }
    }
}
