//! A store whose reads fail, are late, or hang, for the tests of the loader.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use storage::{Entry, Error, Key, Map, Object, Read, Result, Storage, Upload};

/// Linux's number for a device that gave up.
const EIO: i32 = 5;

/// What goes wrong.
#[derive(Debug, Default)]
pub struct Trouble {
    /// Of 1000 reads, how many fail with `EIO`. The next try may do better.
    pub fail_per_mille: u64,
    /// Of 1000 reads, how many are late.
    pub late_per_mille: u64,
    /// By how much.
    pub late: Duration,
    /// Reads of bytes from here on always fail.
    pub broken_from: Option<u64>,
    /// No read ends before it is lifted.
    pub frozen: AtomicBool,
    /// Reads so far, and those that met something.
    pub reads: AtomicU64,
    pub failed: AtomicU64,
    /// Told when it is.
    pub thaw: Condvar,
    pub lock: Mutex<()>,
}

impl Trouble {
    /// Lets all reads end that hang.
    pub fn lift(&self) {
        let _lock = self.lock.lock().unwrap();
        self.frozen.store(false, SeqCst);
        self.thaw.notify_all();
    }

    fn meet(&self, what: &str, reads: &[Read<'_>]) -> Result<()> {
        let mut lock = self.lock.lock().unwrap();
        while self.frozen.load(SeqCst) {
            lock = self.thaw.wait(lock).unwrap();
        }
        drop(lock);
        let nth = self.reads.fetch_add(1, SeqCst);
        let dice = (nth + 1).wrapping_mul(6364136223846793005) >> 33;
        let broken = |read: &Read<'_>| {
            self.broken_from.is_some_and(|from| read.offset + read.buf.len() as u64 > from)
        };
        if dice % 1000 < self.fail_per_mille || reads.iter().any(broken) {
            self.failed.fetch_add(1, SeqCst);
            let source = io::Error::from_raw_os_error(EIO);
            return Err(Error::from_io("read", what, source));
        }
        if (dice / 1000) % 1000 < self.late_per_mille {
            std::thread::sleep(self.late);
        }
        Ok(())
    }
}

/// Another store, and trouble with reading it.
#[derive(Clone, Debug)]
pub struct Troubled {
    pub store: Arc<dyn Storage>,
    pub trouble: Arc<Trouble>,
}

impl Troubled {
    pub fn around(store: &Arc<dyn Storage>, trouble: Trouble) -> (Arc<dyn Storage>, Arc<Trouble>) {
        let trouble = Arc::new(trouble);
        let troubled = Troubled { store: Arc::clone(store), trouble: Arc::clone(&trouble) };
        (Arc::new(troubled), trouble)
    }
}

#[derive(Debug)]
struct TroubledObject {
    object: Arc<dyn Object>,
    trouble: Arc<Trouble>,
}

impl Object for TroubledObject {
    fn len_bytes(&self) -> u64 {
        self.object.len_bytes()
    }

    fn read_many(&self, reads: &mut [Read<'_>]) -> Result<()> {
        self.trouble.meet(&self.display(), reads)?;
        self.object.read_many(reads)
    }

    fn map(&self) -> Result<Map> {
        self.object.map()
    }

    fn display(&self) -> String {
        self.object.display()
    }
}

impl Storage for Troubled {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let object = self.store.open(key)?;
        Ok(Arc::new(TroubledObject { object, trouble: Arc::clone(&self.trouble) }))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        self.store.create(key, len_bytes_max)
    }

    fn list(&self, folder: &Key) -> Result<Vec<Entry>> {
        self.store.list(folder)
    }

    fn names(&self, folder: &Key) -> Result<Vec<String>> {
        self.store.names(folder)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.store.delete(key)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        self.store.publish(staged, target)
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
}
