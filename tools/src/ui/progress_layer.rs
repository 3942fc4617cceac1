//! A store that checks its [`CancellableJob`] before each request, and reports moved bytes to it.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use storage::{
    FileEntry, InPlaceFile, Key, LinkMethod, Map, Object, ObjectMeta, PendingDirSync,
    ProcessIdentity, Profile, RangeRead, Reader, ReaderOptions, Result, ResumableUpload, Storage,
    SyncPoint, Upload,
};

use crate::ui::job::{CancellableJob, CountedBytes};

/// A layer that watches another store.
#[derive(Debug)]
pub(super) struct ProgressLayer {
    inner: Arc<dyn Storage>,
    work: Arc<CancellableJob>,
}

impl ProgressLayer {
    pub(super) fn new(inner: Arc<dyn Storage>, work: &Arc<CancellableJob>) -> Self {
        ProgressLayer { inner, work: Arc::clone(work) }
    }

    fn upload<U: ?Sized + Upload>(&self, key: &Key, inner: Box<U>) -> Box<WatchedUpload<U>> {
        Box::new(WatchedUpload { inner, key: key.clone(), work: Arc::clone(&self.work) })
    }

    fn object(&self, inner: Arc<dyn Object>) -> Arc<dyn Object> {
        Arc::new(ProgressObject { inner, work: Arc::clone(&self.work), way: CountedBytes::Read })
    }
}

/// The operations that clean-up needs are never refused: listing, opening, resuming and deleting.
impl Storage for ProgressLayer {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        Ok(self.object(self.inner.open(key)?))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.work.check()?;
        Ok(self.upload(key, self.inner.create(key, len_bytes_max)?))
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
        self.work.check()?;
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
        self.work.check()?;
        Ok(self.upload(key, self.inner.create_resumable(key)?))
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        Ok(self.upload(key, self.inner.resume(key, from)?))
    }

    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        Ok(self.upload(key, self.inner.resume_with(key, find)?))
    }

    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        Ok(self.object(self.inner.open_partial(key)?))
    }

    fn discard(&self, key: &Key) -> Result<()> {
        self.inner.discard(key)
    }

    fn create_in_place(&self, key: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.work.check()?;
        self.inner.create_in_place(key, len_bytes)
    }

    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        self.inner.open_in_place(key)
    }

    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.work.check()?;
        self.inner.create_anonymous(folder, len_bytes)
    }

    fn link(
        &self,
        key: &Key,
        from: &dyn Object,
        how: LinkMethod,
    ) -> Result<Option<PendingDirSync>> {
        self.work.check()?;
        self.inner.link(key, from, how)
    }

    fn reader(&self, options: &ReaderOptions) -> Result<Box<dyn Reader>> {
        self.inner.reader(options)
    }

    fn reader_group(&self) -> Option<String> {
        self.inner.reader_group()
    }

    fn metrics(&self) -> Vec<(String, u64)> {
        self.inner.metrics()
    }

    fn profile(&self) -> &Profile {
        self.inner.profile()
    }
}

/// An object whose bytes count as read, or as written if an upload copies them.
#[derive(Debug)]
struct ProgressObject<O, W> {
    inner: O,
    work: W,
    way: CountedBytes,
}

impl<O, W> Object for ProgressObject<O, W>
where
    O: Deref<Target: Object> + fmt::Debug + Send + Sync,
    W: Deref<Target = CancellableJob> + fmt::Debug + Send + Sync,
{
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        self.work.check()?;
        self.inner.read_many(reads)?;
        self.work.moved(self.way, reads.iter().map(|read| read.buf.len() as u64).sum());
        Ok(())
    }

    fn map(&self) -> Result<Map> {
        self.work.check()?;
        self.inner.map()
    }

    fn display(&self) -> String {
        self.inner.display()
    }

    fn advise_random(&self) {
        self.inner.advise_random();
    }

    fn memory_align(&self) -> usize {
        self.inner.memory_align()
    }

    fn file(&self) -> Option<&std::fs::File> {
        self.inner.file()
    }

    fn copied(&self, bytes: u64) -> bool {
        self.work.moved(self.way, bytes);
        self.work.check().is_ok() && self.inner.copied(bytes)
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        self.inner.as_any()
    }
}

#[derive(Debug)]
struct WatchedUpload<U: ?Sized> {
    inner: Box<U>,
    key: Key,
    work: Arc<CancellableJob>,
}

impl<U: ?Sized + Upload> WatchedUpload<U> {
    /// Writes `bytes` bytes, unless the work must stop.
    fn write_by<T>(&mut self, bytes: u64, write: impl FnOnce(&mut U) -> Result<T>) -> Result<T> {
        self.work.check()?;
        let written = write(&mut self.inner)?;
        self.work.moved(CountedBytes::Written, bytes);
        Ok(written)
    }
}

impl<U: ?Sized + Upload> Upload for WatchedUpload<U> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.write_by(bytes.len() as u64, |inner| inner.write(bytes))
    }

    fn write_with_crc(&mut self, bytes: &[u8]) -> Result<u64> {
        self.write_by(bytes.len() as u64, |inner| inner.write_with_crc(bytes))
    }

    fn write_with_known_crc(&mut self, bytes: &[u8], crc64: u64) -> Result<()> {
        self.write_by(bytes.len() as u64, |inner| inner.write_with_known_crc(bytes, crc64))
    }

    fn write_from(
        &mut self,
        object: &dyn Object,
        range: Range<u64>,
        crc64: Option<u64>,
    ) -> Result<()> {
        self.work.check()?;
        let from = ProgressObject { inner: object, work: &*self.work, way: CountedBytes::Written };
        self.inner.write_from(&from, range, crc64)
    }

    fn stage_in(&mut self, bytes_max: u64) {
        self.inner.stage_in(bytes_max);
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn flush(&mut self) -> Result<()> {
        self.work.check()?;
        self.inner.flush()
    }

    fn finish(self: Box<Self>) -> Result<FileEntry> {
        self.work.check()?;
        self.work.begin_finish(&self.key)?;
        self.inner.finish()
    }

    fn finish_deferred(self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        self.work.check()?;
        self.work.begin_finish(&self.key)?;
        self.inner.finish_deferred()
    }
}

impl<U: ?Sized + ResumableUpload> ResumableUpload for WatchedUpload<U> {
    fn sync(&mut self) -> Result<SyncPoint> {
        self.inner.sync()
    }
}
