//! Bytes at offsets: write-once objects on local, parallel and object stores.
//!
//! Everything that Feedline reads or writes goes through [`Storage`], a flat namespace of objects
//! that are written once. A key is absent or complete, never partial: an [`Upload`] is invisible
//! until it is durable, and one that is dropped leaves nothing behind. A folder of objects becomes
//! visible in one step by [`Storage::publish`], and is complete if and only if its [`Manifest`]
//! says so. The rest of the toolkit relies on these two guarantees.
//!
//! In reading order: [`Key`] and [`locate`] name objects; [`Storage`], [`Object`] and [`Upload`]
//! are the contract, which `api` completes; [`Manifest`] is the commit record. `posix` implements
//! the contract on file systems with the operations of `fs`; its reads and writes are batches of
//! `io`, by io_uring or `pread`. `s3` implements it on object stores. [`testing`] has stores with
//! fault injection and the conformance suite, [`simulate`] a model of another store's latencies,
//! [`probe`] the facts about a folder, a bucket and this machine, and [`ipc`] memory that processes
//! of a machine share. `base` and `sys` are below all of these.
//!
//! A [`Reader`] keeps a window of requests in flight instead of waiting for batches. [`StuckReads`]
//! reports the requests that hang, and [`Stage`] the startup steps that do.

#![deny(unsafe_code)]

mod api;
mod base;
pub mod fs;
mod io;
pub mod ipc;
mod posix;
pub mod probe;
mod reader;
#[cfg(feature = "s3")]
mod s3;
pub mod simulate;
mod sys;
pub mod testing;

pub use api::manifest::{FileEntry, Manifest, VerifyReport};
pub use api::pending_dir_sync::PendingDirSync;
pub use api::reader::{
    Completion, RETRY_CAUSES, ReadRequest, Reader, ReaderCounters, ReaderOptions,
};
pub use api::startup_step::Stage;
pub use base::checksum::{Crc32, Crc64, crc64, crc64_join};
pub use base::error::{Error, Result, one_line};
pub use base::key::Key;
pub use base::process_identity::{Liveness, ProcessIdentity};
pub use base::remote_error::{RemoteError, RemoteErrorKind};
pub use base::units::{ByteSize, rate_text};
pub use fs::detect::{IoEngine, Profile};
pub use posix::in_place_file::{InPlaceFile, LinkMethod};
pub use reader::watchdog::{StuckRead, StuckReads};
pub use sys::aligned_buffer::Zeros;
pub use sys::buffer_pool::{Buffer, BufferPool};
pub use sys::mapped::Map;
pub use sys::nontemporal::copy_past_cache;
pub use sys::simd::{Kernel, Width};
pub use sys::syscalls::prefetch;
#[cfg(feature = "server")]
pub use testing::s3_server;

use std::fmt;
use std::sync::Arc;

/// A flat namespace of write-once objects: a key is absent or complete, never partial.
pub trait Storage: fmt::Debug + Send + Sync {
    /// Opens a complete object for reading.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; [`Error::Io`] for what the store says else.
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>>;

    /// Begins a new object. Folders in the key are made as needed. `len_bytes_max` is the most that
    /// will be written: space is looked for before the first byte. Zero if it is not known.
    ///
    /// # Errors
    /// [`Error::Exists`] if the key is taken: nothing is ever overwritten. [`Error::NoSpace`] if
    /// the store says that so much will not fit.
    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>>;

    /// The complete objects below a folder, at any depth, sorted by key. An absent folder is empty.
    /// Uploads in flight are not among them.
    ///
    /// # Errors
    /// What the store says.
    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>>;

    /// The names directly below a folder, folders and objects alike, sorted. An absent folder is
    /// empty.
    ///
    /// # Errors
    /// What the store says.
    fn list_names(&self, folder: &Key) -> Result<Vec<String>>;

    /// Deletes one object, durably.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none.
    fn delete(&self, key: &Key) -> Result<()>;

    /// Makes a whole folder visible under its final name in one step: after a crash it has either
    /// name, never half of each. All uploads into it must have finished.
    ///
    /// # Errors
    /// [`Error::Exists`] if the target exists, [`Error::NotFound`] if the staged folder does not.
    fn publish(&self, staged: &Key, target: &Key) -> Result<()>;

    /// Whether [`Storage::publish`] into this folder is one operation that cannot meet another's:
    /// object stores have none, and FUSE and NFS none that refuses a name that is taken. What is to
    /// appear at once is then written where it belongs, and last the object that says so; objects
    /// are exclusive everywhere. The answer is found once.
    ///
    /// # Errors
    /// What the store says when it is tried.
    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        let _ = folder;
        Ok(true)
    }

    /// Writes a small object in place of what is there, for advice that nobody relies on: after a
    /// crash it may be the old one. Readers see either, never half of each.
    ///
    /// # Errors
    /// [`Error::Unsupported`] from a store that only writes once; [`Error::NoSpace`],
    /// [`Error::Io`].
    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let _ = bytes;
        Err(Error::Unsupported { operation: "replace", object: self.display(key) })
    }

    /// Makes the names in a folder durable, whoever gave them: one that is seen may be gone after a
    /// crash, if its maker died before it could sync. A store that shows only what is durable has
    /// nothing to do.
    ///
    /// # Errors
    /// [`Error::Io`].
    fn sync_folder(&self, folder: &Key) -> Result<()> {
        let _ = folder;
        Ok(())
    }

    /// Deletes a folder and all in it. An absent folder is no error.
    ///
    /// # Errors
    /// What the store says; what was deleted by then stays deleted.
    fn delete_folder(&self, folder: &Key) -> Result<()>;

    /// Bytes that may still be written, or `None` if the store has no such limit.
    ///
    /// # Errors
    /// What the store says.
    fn free_bytes(&self) -> Result<Option<u64>>;

    /// How a message names this key: a full path or URL.
    fn display(&self, key: &Key) -> String;

    /// Removes what dead writers of this machine left directly in a folder: uploads never finished,
    /// folders half deleted. Live ones stay, and so does all that has a name of its own. Gives the
    /// names removed. A store whose uploads leave nothing behind has nothing to do.
    ///
    /// # Errors
    /// What the store says; what was removed by then stays removed.
    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        let _ = folder;
        Ok(Vec::new())
    }

    /// Begins an object that outlives its writer. It is as invisible as every upload until it is
    /// finished, but dropped or killed before, it stays as a draft: [`Storage::resume`] goes
    /// on with it, [`Storage::discard`] removes it. Nobody else may write it meanwhile.
    ///
    /// # Errors
    /// [`Error::Exists`] if the key is taken or has a draft; [`Error::Unsupported`] from a store
    /// that keeps none; [`Error::NoSpace`], [`Error::Io`].
    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        Err(Error::Unsupported { operation: "begin a draft of", object: self.display(key) })
    }

    /// Goes on with a draft from a place that it was synced at; what was written after that is cut
    /// off.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no draft, [`Error::Corrupt`] if it is shorter than the mark,
    /// [`Error::Locked`] if another process writes it; [`Error::Unsupported`], [`Error::Io`].
    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        let _ = from;
        Err(Error::Unsupported { operation: "go on with a draft of", object: self.display(key) })
    }

    /// As [`Storage::resume`], from a place that `find` tells when it has seen what is there,
    /// which nobody else writes by then.
    ///
    /// # Errors
    /// As there, and what `find` says.
    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        let from = find(self.open_partial(key)?.as_ref())?;
        self.resume(key, from)
    }

    /// Opens a draft for reading: what was synced when it was opened, and perhaps more, of which
    /// nothing may be assumed. Object stores keep drafts that cannot be read.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; [`Error::Unsupported`], [`Error::Io`].
    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        Err(Error::Unsupported { operation: "open a draft of", object: self.display(key) })
    }

    /// Removes a draft, durably. There need not be one.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Io`].
    fn discard(&self, key: &Key) -> Result<()> {
        Err(Error::Unsupported { operation: "discard a draft of", object: self.display(key) })
    }

    /// Makes a file of so many bytes that this process writes in place and no other may; its space
    /// is reserved. It has the key's name from the start, whatever it holds.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoSpace`], [`Error::Io`]; [`Error::Unsupported`] from a store
    /// that has no such files.
    fn create_in_place(&self, key: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        let _ = len_bytes;
        Err(Error::Unsupported {
            operation: "keep a file that is written in place,",
            object: self.display(key),
        })
    }

    /// Opens such a file again.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Locked`] if another process has it; as
    /// [`Storage::create_in_place`] else.
    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        Err(Error::Unsupported {
            operation: "open a file that is written in place,",
            object: self.display(key),
        })
    }

    /// The same without a name, in a folder: nobody else can open it, and its space is given back
    /// when it is dropped or this process is gone, however it goes.
    ///
    /// # Errors
    /// As [`Storage::create_in_place`].
    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        let _ = len_bytes;
        Err(Error::Unsupported {
            operation: "keep a file without a name in",
            object: self.display(folder),
        })
    }

    /// Makes an object of the bytes of a file of this machine without copying them. All of them are
    /// to be durable. `None` where that cannot be; then nothing was made.
    ///
    /// # Errors
    /// [`Error::Exists`] if the key is taken; [`Error::NotFound`] if the file was removed;
    /// [`Error::Io`].
    fn link(
        &self,
        key: &Key,
        from: &dyn Object,
        how: LinkMethod,
    ) -> Result<Option<PendingDirSync>> {
        let _ = (key, from, how);
        Ok(None)
    }

    /// Reads in flight on objects of this store. Here: threads that read by
    /// [`Object::read_many`], as many as there are reads, up to 256 unless the options say else.
    ///
    /// # Errors
    /// [`Error::Refused`] if a way was asked for that is closed here.
    fn reader(&self, options: &ReaderOptions) -> Result<Box<dyn Reader>> {
        // One read in fifty a second late, at 4,600 a second, is 92 in flight that only wait.
        let depth = options.depth_or(256);
        let carrier = reader::worker_pool::WorkerPool::new(depth + options.orphans_max);
        Ok(Box::new(reader::in_flight::InFlightReader::new(carrier, depth, options)))
    }

    /// Stores with the same answer read alike: a [`Reader`] of one carries the reads of all as
    /// their own would, so that one mount or bucket has one reader and one limit. `None` is like
    /// no other.
    fn reader_group(&self) -> Option<String> {
        None
    }

    /// What was counted since the process began, such as requests and retries by cause; none from a
    /// store that counts nothing.
    fn metrics(&self) -> Vec<(String, u64)> {
        Vec::new()
    }

    /// How this store goes about its bytes, and why.
    fn profile(&self) -> &Profile {
        Profile::unknown()
    }
}

/// One complete, immutable object.
pub trait Object: fmt::Debug + Send + Sync {
    /// Its length.
    fn len_bytes(&self) -> u64;

    /// Fills every buffer from its offset, or fails. When it returns nothing is in flight, so no
    /// buffer outlives its request. Reads may be carried out in any order.
    ///
    /// # Errors
    /// [`Error::ShortRead`] if a read reaches past the end; [`Error::Io`] after the bounded retries
    /// for interrupted calls are spent. The buffers' contents are then unspecified.
    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()>;

    /// The object as one slice of memory, for index files. Data files are read, never mapped.
    ///
    /// # Errors
    /// [`Error::Io`] if it can be neither mapped nor read.
    fn map(&self) -> Result<Map>;

    /// How a message names this object.
    fn display(&self) -> String;

    /// Tells that a few bytes here and there will be read of [`Self::file`]: no read-ahead.
    fn advise_random(&self) {}

    /// What long reads want of memory, so that no copy is made: that the address of a byte and its
    /// offset in the object are the same but for multiples of this, at most 4096.
    fn memory_align(&self) -> usize {
        1
    }

    /// The file that it is, if it is a file of this machine: for copies within the kernel alone.
    fn file(&self) -> Option<&std::fs::File> {
        None
    }

    /// Hears how many bytes of [`Self::file`] the kernel has copied since it was asked last, and
    /// says whether to go on so; else all are read instead.
    fn copied(&self, bytes: u64) -> bool {
        let _ = bytes;
        true
    }

    /// Itself, for the [`Reader`] of the store that it is of.
    fn as_any(&self) -> Option<&dyn std::any::Any> {
        None
    }
}

/// One object being written, invisible until it is finished.
pub trait Upload: fmt::Debug + Send {
    /// Appends bytes. After an error every later call fails the same way.
    ///
    /// # Errors
    /// [`Error::NoSpace`] for a full disk or quota, [`Error::Io`] for the rest.
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Appends bytes, and gives their CRC-64/NVME, summed once for the caller and for the object.
    ///
    /// # Errors
    /// As [`Upload::write`].
    fn write_with_crc(&mut self, bytes: &[u8]) -> Result<u64> {
        self.write(bytes)?;
        Ok(crc64(bytes))
    }

    /// Appends bytes whose CRC-64/NVME is known; a store need not sum them again, nor compare.
    ///
    /// # Errors
    /// As [`Upload::write`].
    fn write_with_known_crc(&mut self, bytes: &[u8], crc64: u64) -> Result<()> {
        let _ = crc64;
        self.write(bytes)
    }

    /// Appends a range of a complete object, in bounded memory. `crc64` is the CRC-64/NVME of that
    /// range, if it is known from a source that is trusted, such as a [`Manifest`]: the bytes then
    /// need not be read, and on a file system that shares blocks they are not even copied. They are
    /// not compared with it in that case, so a file that differs from its sum makes an object that
    /// differs from its own, which [`Manifest::verify`] finds. Without it the bytes are read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes were read and do not sum to `crc64`; [`Error::ShortRead`] if
    /// the object ends before the range; as [`Upload::write`] else. Only dropping it is left then.
    ///
    /// # Panics
    /// If the range ends before it begins.
    fn write_from(
        &mut self,
        object: &dyn Object,
        range: std::ops::Range<u64>,
        crc64: Option<u64>,
    ) -> Result<()> {
        posix::kernel_copy::read_and_write(self, object, &range, crc64)
    }

    /// Memory that it may take for bytes on their way: a hint, for before the first byte.
    fn stage_in(&mut self, bytes_max: u64) {
        let _ = bytes_max;
    }

    /// Bytes written so far.
    fn len_bytes(&self) -> u64;

    /// Says that all is written: waits until the store has every byte, durable or not, and gives
    /// back the memory that they took. So of many uploads each can be settled when it is full, and
    /// all be finished together. Nothing may be written after it.
    ///
    /// # Errors
    /// As [`Upload::write`].
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Makes the object durable, then visible. Until this returns the key is absent, also after a
    /// crash; when it has returned the key is complete, also after a crash. Dropped unfinished, an
    /// upload is as if never begun.
    ///
    /// # Errors
    /// [`Error::Exists`] if the key was taken meanwhile; [`Error::NoSpace`], [`Error::Io`]. The key
    /// is then absent, or what another wrote.
    fn finish(self: Box<Self>) -> Result<FileEntry>;

    /// As [`Upload::finish`], but a crash may take the name away until it is synced, together with
    /// others: for a folder of many objects, which nobody looks into before it is published.
    ///
    /// # Errors
    /// As [`Upload::finish`].
    fn finish_deferred(self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        Ok((self.finish()?, PendingDirSync::nothing()))
    }
}

/// An upload that can be gone on with after a crash.
pub trait ResumableUpload: Upload {
    /// Makes what was written so far durable, without making it visible, and says how far. That is
    /// all of it, but on object stores, which keep whole parts until the draft is
    /// [flushed](Upload::flush).
    ///
    /// # Errors
    /// As [`Upload::write`]; every later call fails then.
    fn sync(&mut self) -> Result<SyncPoint>;
}

/// A place in a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SyncPoint {
    /// Bytes before it.
    pub bytes: u64,
    /// Their CRC-64/NVME.
    pub crc64: u64,
}

/// A wish: fill `buf` with the bytes that begin at `offset`.
#[derive(Debug)]
pub struct RangeRead<'a> {
    /// First byte, counted from the start of the object.
    pub offset: u64,
    /// What to fill, whole.
    pub buf: &'a mut [u8],
}

/// One object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectMeta {
    /// Its key, from the root of the store.
    pub key: Key,
    /// Its length.
    pub bytes: u64,
}

/// Opens the store whose root is the folder named by a URL or a plain path. The folder need not
/// exist yet. A plain path is taken as it is; a URL may say how to go about it:
/// `file:/data?engine=auto|ring|pread&direct=auto|on|off`. The engine of stores that leave it open
/// is that of the environment variable `FEEDLINE_ENGINE`, if it is set.
///
/// # Errors
/// [`Error::BadUrl`] for a scheme or option that is not known, or an engine that does not work
/// here.
pub fn open_url(url: &str) -> Result<Arc<dyn Storage>> {
    #[cfg(feature = "s3")]
    if s3::is_ours(url) {
        return s3::open(url);
    }
    posix::store::open(&api::settings::parse(url)?)
}

/// Splits a URL or plain path into the store of its folder and the key of its last component, as
/// `data/wiki_text_document` or `file:///lustre/run/step-000100` are given on a command line.
/// Options are as for [`open_url`].
///
/// # Errors
/// [`Error::BadUrl`] as for [`open_url`], or for a path without a last component.
pub fn locate(url: &str) -> Result<(Arc<dyn Storage>, Key)> {
    #[cfg(feature = "s3")]
    if s3::is_ours(url) {
        return s3::locate(url);
    }
    let mut location = api::settings::parse(url)?;
    let bad = |reason: &str| Error::BadUrl { url: url.to_owned(), reason: reason.to_owned() };
    let name = location.path.file_name().ok_or_else(|| bad("it has no last component"))?;
    let name = name.to_str().ok_or_else(|| bad("its last component is not UTF-8"))?;
    let key = Key::new(name)?;
    location.path = fs::filesystem::folder_of(&location.path);
    Ok((posix::store::open(&location)?, key))
}

/// Reads a whole object into memory.
///
/// # Errors
/// As [`Storage::open`] and [`Object::read_many`].
pub fn read_all(store: &dyn Storage, key: &Key) -> Result<Vec<u8>> {
    let object = store.open(key)?;
    let too_big = |_| Error::Corrupt {
        object: object.display(),
        offset: 0,
        found: format!("{} bytes", object.len_bytes()),
        expected: "no more than this machine can address".to_owned(),
    };
    let mut bytes = vec![0; usize::try_from(object.len_bytes()).map_err(too_big)?];
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
    Ok(bytes)
}

/// Reads a whole object that is to be small, into memory.
///
/// # Errors
/// [`Error::Corrupt`] if it has more bytes than that; as [`read_all`] else.
pub fn read_small(store: &dyn Storage, key: &Key, bytes_max: u64) -> Result<Vec<u8>> {
    let bytes = store.open(key)?.len_bytes();
    if bytes > bytes_max {
        let (found, expected) = (format!("{bytes} bytes"), format!("at most {bytes_max}"));
        return Err(Error::Corrupt { object: store.display(key), offset: 0, found, expected });
    }
    read_all(store, key)
}

/// Writes a whole object.
///
/// # Errors
/// As [`Storage::create`], [`Upload::write`] and [`Upload::finish`].
pub fn write_all(store: &dyn Storage, key: &Key, bytes: &[u8]) -> Result<FileEntry> {
    let mut upload = store.create(key, bytes.len() as u64)?;
    upload.write(bytes)?;
    upload.finish()
}
