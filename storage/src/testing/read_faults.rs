use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, thread};

use crate::base::rng::Rng;
use crate::{
    Error, InPlaceFile, Key, LinkMethod, Map, Object, ObjectMeta, PendingDirSync, ProcessIdentity,
    Profile, RangeRead, Result, ResumableUpload, Storage, SyncPoint, Upload,
};

/// Random faults of reads. Default: none.
#[derive(Clone, Debug, Default)]
pub struct ReadFaults {
    /// Reads per 1000 that fail with `EIO`. A retry has the same chance.
    pub io_per_mille: u32,
    /// Reads per 1000 that fail with a stale handle.
    pub stale_per_mille: u32,
    /// Reads per 1000 that are late by `late`.
    pub late_per_mille: u32,
    /// The delay of late reads.
    pub late: Duration,
    /// Reads that touch these bytes, of whichever object, always fail with `EIO`.
    pub broken: Range<u64>,
}

/// A layer whose reads of objects and of files without a name fail, are late or hang. Everything
/// else is passed on. Clones are the same store.
///
/// ```
/// use std::sync::Arc;
/// use storage::Key;
/// use storage::testing::fault_store::{FaultPlan, FaultStore, ReadFaultLayer, ReadFaults};
///
/// let inner = Arc::new(FaultStore::new(1, FaultPlan::default()));
/// let key = Key::new("a")?;
/// storage::write_all(&*inner, &key, b"all of it")?;
/// let faults = ReadFaults { io_per_mille: 1000, ..ReadFaults::default() };
/// let faulty = ReadFaultLayer::new(inner, 2, faults);
/// assert!(storage::read_all(&faulty, &key).is_err());
/// # Ok::<(), storage::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReadFaultLayer {
    inner: Arc<dyn Storage>,
    plan: Arc<ReadFaultPlan>,
}

#[derive(Debug)]
struct ReadFaultPlan {
    seed: u64,
    faults: ReadFaults,
    reads: AtomicU64,
    bytes: AtomicU64,
    failed: AtomicU64,
    /// Reads that touch this hang.
    hung: Mutex<Range<u64>>,
    released: Condvar,
}

impl ReadFaultLayer {
    /// A store with these faults. The seed decides which reads fail.
    #[must_use]
    pub fn new(inner: Arc<dyn Storage>, seed: u64, faults: ReadFaults) -> Self {
        let [reads, bytes, failed] = [0; 3].map(AtomicU64::new);
        let (hung, released) = (Mutex::new(0..0), Condvar::new());
        let plan = ReadFaultPlan { seed, faults, reads, bytes, failed, hung, released };
        ReadFaultLayer { inner, plan: Arc::new(plan) }
    }

    /// From now on reads that touch these bytes, of whichever object, hang until
    /// [`ReadFaultLayer::release`].
    pub fn hang(&self, bytes: Range<u64>) {
        *self.plan.hung() = bytes;
    }

    /// Lets the hanging reads continue.
    pub fn release(&self) {
        self.hang(0..0);
        self.plan.released.notify_all();
    }

    /// Reads started, with retries.
    #[must_use]
    pub fn read_count(&self) -> u64 {
        self.plan.reads.load(Ordering::Relaxed)
    }

    /// The bytes that they requested.
    #[must_use]
    pub fn read_bytes(&self) -> u64 {
        self.plan.bytes.load(Ordering::Relaxed)
    }

    /// Reads that failed.
    #[must_use]
    pub fn failed_count(&self) -> u64 {
        self.plan.failed.load(Ordering::Relaxed)
    }
}

impl ReadFaultPlan {
    fn hung(&self) -> MutexGuard<'_, Range<u64>> {
        self.hung.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies the planned fault to one read.
    fn apply(&self, object: &str, read: &RangeRead<'_>) -> Result<()> {
        let outcome = self.try_apply(object, read);
        self.failed.fetch_add(u64::from(outcome.is_err()), Ordering::Relaxed);
        outcome
    }

    fn try_apply(&self, object: &str, read: &RangeRead<'_>) -> Result<()> {
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(read.buf.len() as u64, Ordering::Relaxed);
        let mut rng = Rng::new(self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let end = read.offset + read.buf.len() as u64;
        let touches = |bytes: &Range<u64>| read.offset < bytes.end && bytes.start < end;
        let waited = self.released.wait_while(self.hung(), |hung| touches(hung));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        if rng.chance(self.faults.late_per_mille) {
            thread::sleep(self.faults.late);
        }
        let operation = || format!("read {} bytes at byte {} of", read.buf.len(), read.offset);
        if rng.chance(self.faults.io_per_mille) || touches(&self.faults.broken) {
            let source = io::Error::from_raw_os_error(libc::EIO);
            return Err(Error::Io { operation: operation(), object: object.to_owned(), source });
        }
        if rng.chance(self.faults.stale_per_mille) {
            return Err(Error::Stale { operation: operation(), object: object.to_owned() });
        }
        Ok(())
    }
}

/// An object, or a file without a name, whose writes are passed on.
#[derive(Debug)]
struct ReadFaultObject<T: ?Sized> {
    inner: Arc<T>,
    plan: Arc<ReadFaultPlan>,
}

impl<T: ?Sized + Object> Object for ReadFaultObject<T> {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        reads.iter().try_for_each(|read| self.plan.apply(&self.inner.display(), read))?;
        self.inner.read_many(reads)
    }

    fn map(&self) -> Result<Map> {
        self.inner.map()
    }

    fn display(&self) -> String {
        self.inner.display()
    }
}

impl InPlaceFile for ReadFaultObject<dyn InPlaceFile> {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.inner.write_at(offset, bytes)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    fn names(&self) -> Result<u64> {
        self.inner.names()
    }
}

impl Storage for ReadFaultLayer {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let inner = self.inner.open(key)?;
        Ok(Arc::new(ReadFaultObject { inner, plan: Arc::clone(&self.plan) }))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.inner.create(key, len_bytes_max)
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        self.inner.list(folder)
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        self.inner.list_names(folder)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.inner.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.inner.publish(staged, target)
    }

    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        self.inner.has_atomic_publish(folder)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.inner.replace(key, bytes)
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        self.inner.delete_empty_folder(folder)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        self.inner.delete_folder(folder)
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.inner.free_bytes()
    }

    fn display(&self, key: &Key) -> String {
        self.inner.display(key)
    }

    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        self.inner.remove_orphans(folder)
    }

    fn remove_orphans_of(&self, folder: &Key, writer: &ProcessIdentity) -> Result<Vec<String>> {
        self.inner.remove_orphans_of(folder, writer)
    }

    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        self.inner.create_resumable(key)
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        self.inner.resume(key, from)
    }

    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.inner.open_partial(key)
    }

    fn discard(&self, key: &Key) -> Result<()> {
        self.inner.discard(key)
    }

    fn create_in_place(&self, key: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.inner.create_in_place(key, len_bytes)
    }

    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        self.inner.open_in_place(key)
    }

    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        let inner = self.inner.create_anonymous(folder, len_bytes)?;
        Ok(Arc::new(ReadFaultObject { inner, plan: Arc::clone(&self.plan) }))
    }

    fn link(
        &self,
        key: &Key,
        from: &dyn Object,
        how: LinkMethod,
    ) -> Result<Option<PendingDirSync>> {
        self.inner.link(key, from, how)
    }

    fn profile(&self) -> &Profile {
        self.inner.profile()
    }
}
