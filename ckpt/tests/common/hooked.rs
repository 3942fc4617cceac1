//! A store that tells of every call before it makes it.

use std::fmt;
use std::sync::Arc;

use storage::{Entry, Key, Object, Result, Storage, Upload};

/// Hears of a call by its name; what it says is what the caller gets, unless it says nothing.
pub type Hook = dyn Fn(&dyn Storage, &str, &Key) -> Result<()> + Send + Sync;

#[derive(Clone)]
pub struct Hooked {
    inner: Arc<dyn Storage>,
    hook: Arc<Hook>,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Hooked {
    #[expect(clippy::new_ret_no_self, reason = "a store is all that anybody wants of it")]
    pub fn new(
        inner: Arc<dyn Storage>,
        hook: impl Fn(&dyn Storage, &str, &Key) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<dyn Storage> {
        Arc::new(Hooked { inner, hook: Arc::new(hook) })
    }

    fn call(&self, name: &str, key: &Key) -> Result<&dyn Storage> {
        (self.hook)(&*self.inner, name, key)?;
        Ok(&*self.inner)
    }
}

impl Storage for Hooked {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.call("open", key)?.open(key)
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.call("create", key)?.create(key, len_bytes_max)
    }

    fn list(&self, folder: &Key) -> Result<Vec<Entry>> {
        self.call("list", folder)?.list(folder)
    }

    fn names(&self, folder: &Key) -> Result<Vec<String>> {
        self.call("names", folder)?.names(folder)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.call("delete", key)?.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.call("publish", target)?.publish(staged, target)
    }

    fn can_publish(&self, folder: &Key) -> Result<bool> {
        self.inner.can_publish(folder)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        self.call("replace", key)?.replace(key, bytes)
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        self.call("sync_folder", folder)?.sync_folder(folder)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        self.call("delete_folder", folder)?.delete_folder(folder)
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.inner.free_bytes()
    }

    fn display(&self, key: &Key) -> String {
        self.inner.display(key)
    }

    fn sweep(&self, folder: &Key) -> Result<Vec<String>> {
        self.inner.sweep(folder)
    }
}

/// That a device failed.
pub fn pulled(key: &Key) -> storage::Error {
    storage::Error::from_io("reach", key.as_str(), std::io::Error::other("pulled"))
}
