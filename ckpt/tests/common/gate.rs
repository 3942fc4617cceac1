//! A store that holds up, or fails, whoever writes.

use std::io;
use std::sync::{Arc, Condvar, Mutex};

use storage::{Entry, Key, Object, Result, Storage, Upload};

/// What a [`Gate`] does with new objects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Open,
    /// Whoever creates an object waits.
    Shut,
    /// Whoever creates one fails.
    Broken,
    /// Whoever creates a file of tensors finds no room.
    Full,
    /// Whoever creates one panics.
    Panics,
}

/// A store that lets nothing pass until it is told to.
#[derive(Clone, Debug)]
pub struct Gate {
    inner: Arc<dyn Storage>,
    way: Arc<(Mutex<Way>, Condvar)>,
}

impl Gate {
    pub fn new(inner: Arc<dyn Storage>) -> Self {
        Gate { inner, way: Arc::new((Mutex::new(Way::Open), Condvar::new())) }
    }

    pub fn set(&self, way: Way) {
        *self.way.0.lock().unwrap() = way;
        self.way.1.notify_all();
    }
}

impl Storage for Gate {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.inner.open(key)
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        let way = self.way.0.lock().unwrap();
        let way = *self.way.1.wait_while(way, |way| *way == Way::Shut).unwrap();
        if way == Way::Broken {
            let e = io::Error::other("pulled");
            return Err(storage::Error::from_io("write", self.display(key), e));
        }
        if way == Way::Full && key.as_str().ends_with(".safetensors") {
            let (what, need_bytes) = (self.display(key), len_bytes_max);
            return Err(storage::Error::NoSpace { what, need_bytes, free_bytes: Some(17) });
        }
        assert!(way != Way::Panics, "pulled");
        self.inner.create(key, len_bytes_max)
    }

    fn list(&self, folder: &Key) -> Result<Vec<Entry>> {
        self.inner.list(folder)
    }

    fn names(&self, folder: &Key) -> Result<Vec<String>> {
        self.inner.names(folder)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.inner.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.inner.publish(staged, target)
    }

    fn can_publish(&self, folder: &Key) -> Result<bool> {
        self.inner.can_publish(folder)
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
