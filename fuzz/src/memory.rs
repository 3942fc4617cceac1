//! A store that only keeps files in memory. `FaultStore`, the store of the tests, simulates the
//! protocol of real disks, which takes a hundred times as long.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use storage::{
    Error, FileEntry, Key, Map, Object, ObjectMeta, RangeRead, Result, Storage, Upload, crc64,
};

type Files = BTreeMap<String, Arc<Vec<u8>>>;

/// A flat store with only the methods that readers and writers of token files and checkpoints call.
#[derive(Debug)]
pub struct Memory(Arc<Mutex<Files>>);

impl Memory {
    pub fn new(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, bytes)| (name.to_string(), Arc::new(bytes.to_vec())));
        Memory(Arc::new(Mutex::new(files.collect())))
    }

    fn with<T>(&self, act: impl FnOnce(&mut Files) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Storage for Memory {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let bytes = self.with(|files| files.get(key.as_str()).cloned());
        let bytes = bytes.ok_or_else(|| Error::NotFound { object: self.display(key) })?;
        Ok(Arc::new(File { name: self.display(key), bytes }))
    }

    fn create(&self, key: &Key, _: u64) -> Result<Box<dyn Upload>> {
        if self.with(|files| files.contains_key(key.as_str())) {
            return Err(Error::Exists { object: self.display(key) });
        }
        Ok(Box::new(Writing { files: Arc::clone(&self.0), key: key.clone(), bytes: Vec::new() }))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        self.with(|files| {
            let below = files.iter().filter(|(name, _)| below(folder, name).is_some());
            let entry = |(name, bytes): (&String, &Arc<Vec<u8>>)| {
                Ok(ObjectMeta { key: Key::new(name.as_str())?, bytes: bytes.len() as u64 })
            };
            below.map(entry).collect()
        })
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        let first = |name: &String| Some(below(folder, name)?.split('/').next()?.to_owned());
        let mut names: Vec<String> = self.with(|files| files.keys().filter_map(first).collect());
        names.dedup();
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        let found = self.with(|files| files.remove(key.as_str()));
        found.map(drop).ok_or_else(|| Error::NotFound { object: self.display(key) })
    }

    fn publish(&self, _: &Key, _: &Key) -> Result<()> {
        Err(Error::Unsupported { operation: "rename", object: "files in memory".to_owned() })
    }

    /// As on an object store, where a commit record makes a step visible.
    fn has_atomic_publish(&self, _: &Key) -> Result<bool> {
        Ok(false)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        self.with(|files| files.retain(|name, _| below(folder, name).is_none()));
        Ok(())
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn display(&self, key: &Key) -> String {
        format!("memory:{}", key.as_str())
    }
}

fn below<'a>(folder: &Key, name: &'a str) -> Option<&'a str> {
    match folder.as_str() {
        "" => Some(name),
        folder => name.strip_prefix(folder)?.strip_prefix('/'),
    }
}

#[derive(Debug)]
struct File {
    name: String,
    bytes: Arc<Vec<u8>>,
}

impl Object for File {
    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Panics on a read past the end: the reader used a number from the file without checking it.
    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        for RangeRead { offset, buf } in reads {
            let rest = usize::try_from(*offset).ok().and_then(|at| self.bytes.get(at..));
            let bytes = rest.and_then(|rest| rest.get(..buf.len()));
            let bytes = bytes.unwrap_or_else(|| {
                panic!("read {} bytes at {offset} of {}", buf.len(), self.bytes.len())
            });
            buf.copy_from_slice(bytes);
        }
        Ok(())
    }

    fn map(&self) -> Result<Map> {
        Ok(Map::owned(self.bytes.to_vec()))
    }

    fn display(&self) -> String {
        self.name.clone()
    }
}

#[derive(Debug)]
struct Writing {
    files: Arc<Mutex<Files>>,
    key: Key,
    bytes: Vec<u8>,
}

impl Upload for Writing {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn finish(self: Box<Self>) -> Result<FileEntry> {
        let Writing { files, key, bytes } = *self;
        let entry = FileEntry {
            path: key.name().to_owned(),
            bytes: bytes.len() as u64,
            crc64: crc64(&bytes),
        };
        let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
        files.insert(key.as_str().to_owned(), Arc::new(bytes));
        Ok(entry)
    }
}
