//! A file system that keeps the contract: temporary name, fsync, rename, fsync of the directory.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Crc64, Entry, Error, FileEntry, Key, Map, Object, Read, Result, Storage, Upload};

pub(crate) fn open(root: &Path) -> Result<Arc<dyn Storage>> {
    Ok(Arc::new(Posix { root: root.to_owned() }))
}

#[derive(Debug)]
struct Posix {
    root: PathBuf,
}

impl Posix {
    fn path(&self, key: &Key) -> PathBuf {
        if key.as_str().is_empty() { self.root.clone() } else { self.root.join(key.as_str()) }
    }
}

fn sync_dir(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)
        .and_then(|dir| dir.sync_all())
        .map_err(|e| Error::from_io("sync the folder", parent.display().to_string(), e))
}

impl Storage for Posix {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let path = self.path(key);
        let name = path.display().to_string();
        let file = File::open(&path).map_err(|e| Error::from_io("open", &name, e))?;
        let len = file.metadata().map_err(|e| Error::from_io("stat", &name, e))?.len();
        Ok(Arc::new(PosixObject { file, len, name }))
    }

    fn create(&self, key: &Key, _len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        let path = self.path(key);
        let name = path.display().to_string();
        if path.exists() {
            return Err(Error::Exists { what: name });
        }
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)
                .map_err(|e| Error::from_io("make the folder of", &name, e))?;
        }
        let tmp = path.with_file_name(format!(".{}.tmp-{}", key.name(), std::process::id()));
        let file = File::create_new(&tmp).map_err(|e| Error::from_io("create", &name, e))?;
        Ok(Box::new(PosixUpload { file: Some(file), tmp, path, name, len: 0, crc: Crc64::new() }))
    }

    fn list(&self, folder: &Key) -> Result<Vec<Entry>> {
        let mut out = Vec::new();
        for name in self.names(folder)? {
            let key = folder.join(&name)?;
            let meta = fs::metadata(self.path(&key))
                .map_err(|e| Error::from_io("stat", self.display(&key), e))?;
            if meta.is_dir() {
                out.extend(self.list(&key)?);
            } else {
                out.push(Entry { key, bytes: meta.len() });
            }
        }
        Ok(out)
    }

    fn names(&self, folder: &Key) -> Result<Vec<String>> {
        let path = self.path(folder);
        let doing = |e| Error::from_io("list", path.display().to_string(), e);
        let entries = match fs::read_dir(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(doing)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            if let Ok(name) = entry.map_err(doing)?.file_name().into_string() {
                names.push(name);
            }
        }
        names.retain(|name| !name.contains(".tmp-"));
        names.sort();
        Ok(names)
    }

    fn delete(&self, key: &Key) -> Result<()> {
        let path = self.path(key);
        fs::remove_file(&path).map_err(|e| Error::from_io("delete", self.display(key), e))?;
        sync_dir(&path)
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        let (from, to) = (self.path(staged), self.path(target));
        if to.exists() {
            return Err(Error::Exists { what: self.display(target) });
        }
        fs::rename(&from, &to).map_err(|e| Error::from_io("publish", self.display(staged), e))?;
        sync_dir(&to)
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        match fs::remove_dir_all(self.path(folder)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::from_io("delete", self.display(folder), e))
            }
            _ => Ok(()),
        }
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    fn display(&self, key: &Key) -> String {
        self.path(key).display().to_string()
    }
}

#[derive(Debug)]
struct PosixObject {
    file: File,
    len: u64,
    name: String,
}

impl Object for PosixObject {
    fn len_bytes(&self) -> u64 {
        self.len
    }

    fn read_many(&self, reads: &mut [Read<'_>]) -> Result<()> {
        for read in reads {
            let due = read.buf.len() as u64;
            if read.offset + due > self.len {
                let got = self.len.saturating_sub(read.offset);
                return Err(Error::ShortRead {
                    what: self.name.clone(),
                    offset: read.offset,
                    got,
                    due,
                    len_bytes: self.len,
                });
            }
            self.file
                .read_exact_at(read.buf, read.offset)
                .map_err(|e| Error::from_io("read", &self.name, e))?;
        }
        Ok(())
    }

    fn map(&self) -> Result<Map> {
        let mut bytes = vec![0; self.len as usize];
        self.read_many(&mut [Read { offset: 0, buf: &mut bytes }])?;
        Ok(Map::owned(bytes))
    }

    fn display(&self) -> String {
        self.name.clone()
    }
}

#[derive(Debug)]
struct PosixUpload {
    file: Option<File>,
    tmp: PathBuf,
    path: PathBuf,
    name: String,
    len: u64,
    crc: Crc64,
}

impl Upload for PosixUpload {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let file = self.file.as_mut().expect("present until finished");
        file.write_all(bytes).map_err(|e| Error::from_io("write", &self.name, e))?;
        self.len += bytes.len() as u64;
        self.crc.update(bytes);
        Ok(())
    }

    fn len_bytes(&self) -> u64 {
        self.len
    }

    fn finish(mut self: Box<Self>) -> Result<FileEntry> {
        let file = self.file.take().expect("present until finished");
        file.sync_all().map_err(|e| Error::from_io("sync", &self.name, e))?;
        fs::rename(&self.tmp, &self.path).map_err(|e| Error::from_io("rename", &self.name, e))?;
        sync_dir(&self.path)?;
        let path =
            self.path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(FileEntry { path, bytes: self.len, crc64: self.crc.value() })
    }
}

impl Drop for PosixUpload {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(&self.tmp);
        }
    }
}
