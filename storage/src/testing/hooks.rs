use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::{
    FileEntry, InPlaceFile, Key, LinkMethod, Object, ObjectMeta, PendingDirSync, ProcessIdentity,
    Profile, Result, ResumableUpload, Storage, SyncPoint, Upload,
};

/// A hook for calls. Its arguments: the store below, the name of the method, and the key; for an
/// upload that of its object.
type Hook = dyn Fn(&dyn Storage, &str, &Key) -> Result<()> + Send + Sync;

/// A layer that runs a hook at every call that queries or changes something: the call returns the
/// hook's error, if there is one. Clones are the same store.
#[derive(Clone)]
pub struct HookLayer {
    inner: Arc<dyn Storage>,
    before: Arc<Hook>,
    after: Arc<Hook>,
}

impl fmt::Debug for HookLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl HookLayer {
    /// Runs the hook before each call, which is skipped if the hook fails.
    #[expect(clippy::new_ret_no_self, reason = "callers only need the store")]
    pub fn new(
        inner: Arc<dyn Storage>,
        before: impl Fn(&dyn Storage, &str, &Key) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<dyn Storage> {
        Self::around(inner, before, |_, _, _| Ok(()))
    }

    /// Runs the hook also after each call that succeeded: after a failure there the call has taken
    /// effect.
    pub fn around(
        inner: Arc<dyn Storage>,
        before: impl Fn(&dyn Storage, &str, &Key) -> Result<()> + Send + Sync + 'static,
        after: impl Fn(&dyn Storage, &str, &Key) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<dyn Storage> {
        Arc::new(HookLayer { inner, before: Arc::new(before), after: Arc::new(after) })
    }

    fn call<T>(
        &self,
        name: &str,
        key: &Key,
        call: impl FnOnce(&dyn Storage) -> Result<T>,
    ) -> Result<T> {
        (self.before)(&*self.inner, name, key)?;
        let done = call(&*self.inner)?;
        (self.after)(&*self.inner, name, key)?;
        Ok(done)
    }
}

impl Storage for HookLayer {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.call("open", key, |inner| inner.open(key))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        let inner = self.call("create", key, |inner| inner.create(key, len_bytes_max))?;
        Ok(Box::new(HookedUpload { inner, key: key.clone(), store: self.clone() }))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        self.call("list", folder, |inner| inner.list(folder))
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        self.call("names", folder, |inner| inner.list_names(folder))
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.call("delete", key, |inner| inner.delete(key))
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.call("publish", target, |inner| inner.publish(staged, target))
    }

    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        self.inner.has_atomic_publish(folder)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.call("replace", key, |inner| inner.replace(key, bytes))
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        self.call("sync_folder", folder, |inner| inner.sync_folder(folder))
    }

    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        self.call("delete_empty_folder", folder, |inner| inner.delete_empty_folder(folder))
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        self.call("delete_folder", folder, |inner| inner.delete_folder(folder))
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.call("free_bytes", &Key::root(), |inner| inner.free_bytes())
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
        self.call("create_work", key, |inner| inner.create_in_place(key, len_bytes))
    }

    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        self.call("open_work", key, |inner| inner.open_in_place(key))
    }

    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        self.call("create_unnamed", folder, |inner| inner.create_anonymous(folder, len_bytes))
    }

    fn link(
        &self,
        key: &Key,
        from: &dyn Object,
        how: LinkMethod,
    ) -> Result<Option<PendingDirSync>> {
        self.call("share", key, |inner| inner.link(key, from, how))
    }

    fn profile(&self) -> &Profile {
        self.inner.profile()
    }
}

#[derive(Debug)]
struct HookedUpload {
    inner: Box<dyn Upload>,
    key: Key,
    store: HookLayer,
}

impl Upload for HookedUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let HookedUpload { inner, key, store } = self;
        store.call("write", key, |_| inner.write(bytes))
    }

    fn write_from(
        &mut self,
        object: &dyn Object,
        range: Range<u64>,
        crc64: Option<u64>,
    ) -> Result<()> {
        let HookedUpload { inner, key, store } = self;
        store.call("write", key, |_| inner.write_from(object, range, crc64))
    }

    fn stage_in(&mut self, bytes_max: u64) {
        self.inner.stage_in(bytes_max);
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn flush(&mut self) -> Result<()> {
        self.inner.flush()
    }

    fn finish(self: Box<Self>) -> Result<FileEntry> {
        let HookedUpload { inner, key, store } = *self;
        store.call("finish", &key, |_| inner.finish())
    }

    fn finish_deferred(self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        let HookedUpload { inner, key, store } = *self;
        store.call("finish", &key, |_| inner.finish_deferred())
    }
}
