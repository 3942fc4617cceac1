//! What the tests of this crate share.

#![expect(dead_code, reason = "no test uses all of it")]

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::Value;
use storage::{Entry, FileEntry, Key, Object, Result, Storage, Upload};

/// A folder of goldens.
pub fn golden(folder: &str) -> Arc<dyn Storage> {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/");
    storage::open_url(&format!("{root}{folder}")).unwrap()
}

/// A JSON file of goldens.
pub fn manifest(folder: &str, name: &str) -> Value {
    serde_json::from_slice(&read(golden(folder).as_ref(), name)).unwrap()
}

pub fn key(name: &str) -> Key {
    Key::new(name).unwrap()
}

pub fn read(store: &dyn Storage, name: &str) -> Vec<u8> {
    storage::read_all(store, &key(name)).unwrap()
}

/// A store in a folder that is gone with the guard.
pub fn temp_store() -> (tempfile::TempDir, Arc<dyn Storage>) {
    let folder = tempfile::tempdir().unwrap();
    let store = storage::open_url(folder.path().to_str().unwrap()).unwrap();
    (folder, store)
}

/// The numbers of a JSON array.
pub fn numbers<T: TryFrom<i64, Error: fmt::Debug>>(value: &Value) -> Vec<T> {
    let items = value.as_array().unwrap().iter();
    items.map(|item| T::try_from(item.as_i64().unwrap()).unwrap()).collect()
}

/// SplitMix64: random numbers for tests, from a seed.
#[derive(Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// A store that counts the calls that change it, and fails from one to another of them.
#[derive(Debug)]
pub struct Failing {
    pub inner: Arc<dyn Storage>,
    /// Calls in their order, as `finish a.bin`.
    pub calls: Arc<Calls>,
}

#[derive(Debug)]
pub struct Calls {
    count: AtomicUsize,
    fail: std::ops::Range<usize>,
    pub log: Mutex<Vec<String>>,
}

impl Failing {
    /// Fails the calls of these numbers, counted from 0.
    pub fn new(inner: &Arc<dyn Storage>, fail: std::ops::Range<usize>) -> Arc<Self> {
        let (count, log) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let calls = Arc::new(Calls { count, fail, log });
        Arc::new(Failing { inner: Arc::clone(inner), calls })
    }
}

impl Calls {
    fn enter(&self, what: &str, key: &Key) -> Result<()> {
        self.log.lock().unwrap().push(format!("{what} {key}"));
        if self.fail.contains(&self.count.fetch_add(1, Ordering::Relaxed)) {
            let source = std::io::Error::other("as the test wants it");
            return Err(storage::Error::from_io(what, key.to_string(), source));
        }
        Ok(())
    }
}

impl Storage for Failing {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.inner.open(key)
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.calls.enter("create", key)?;
        let inner = self.inner.create(key, len_bytes_max)?;
        Ok(Box::new(FailingUpload { inner, key: key.clone(), calls: Arc::clone(&self.calls) }))
    }

    fn list(&self, folder: &Key) -> Result<Vec<Entry>> {
        self.inner.list(folder)
    }

    fn names(&self, folder: &Key) -> Result<Vec<String>> {
        self.inner.names(folder)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.calls.enter("delete", key)?;
        self.inner.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.inner.publish(staged, target)
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
}

#[derive(Debug)]
struct FailingUpload {
    inner: Box<dyn Upload>,
    key: Key,
    calls: Arc<Calls>,
}

impl Upload for FailingUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.calls.enter("write", &self.key)?;
        self.inner.write(bytes)
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn finish(self: Box<Self>) -> Result<FileEntry> {
        self.calls.enter("finish", &self.key)?;
        self.inner.finish()
    }
}
