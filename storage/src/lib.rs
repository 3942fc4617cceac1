//! Bytes at offsets: write-once objects on local, parallel and object stores.
//!
//! Everything that Feedline reads or writes goes through [`Storage`], a flat namespace of objects
//! that are written once. A key is absent or complete, never partial: an [`Upload`] is invisible
//! until it is durable, and a dropped upload leaves no files. [`Storage::publish`] makes a folder
//! of objects visible in one step, and a folder is complete if and only if its [`Manifest`] says
//! so. The rest of the toolkit relies on these two guarantees.
//!
//! In reading order: [`Key`] and [`Location`] name objects; [`Storage`], [`Object`] and [`Upload`]
//! are the contract, which `api` completes; [`Manifest`] is the commit record. `posix` implements
//! the contract on file systems with the operations of `fs`; its reads and writes are batches of
//! `io`, by io_uring or `pread`. `s3` implements it on object stores. [`testing`] has stores with
//! fault injection and the conformance suite, [`simulate`] a model of another store's latencies,
//! [`probe`] the facts about a folder, a bucket and this machine, and [`ipc`] memory that processes
//! of a machine share. `base` and `sys` are below all of these.
//!
//! A [`Reader`] keeps a window of requests in flight instead of waiting for batches. [`StuckReads`]
//! reports requests that do not complete, and [`Stage`] startup steps that do not.

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

pub use api::location::Location;
pub use api::manifest::{FileEntry, Manifest, VerifyReport, unique_json};
pub use api::pending_dir_sync::PendingDirSync;
pub use api::reader::{
    Completion, RETRY_CAUSES, ReadRequest, Reader, ReaderCounters, ReaderOptions,
};
pub use api::startup_step::Stage;
pub use base::checksum::{Crc32, Crc32c, Crc64, crc32c, crc64, crc64_join};
pub use base::error::{Error, Result, one_line};
pub use base::key::Key;
pub use base::printable::{printable, printable_message};
pub use base::process_identity::{Liveness, ProcessIdentity};
pub use base::remote_error::{RemoteError, RemoteErrorKind};
pub use base::stderr_log::StderrLog;
pub use base::time_span::TimeSpan;
pub use base::units::{ByteSize, rate_text};
pub use fs::detect::{IoEngine, Profile};
pub use posix::in_place_file::{InPlaceFile, LinkMethod};
pub use reader::open_file::drop_cached;
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
    /// [`Error::NotFound`] if there is none; [`Error::Io`] for other errors of the store.
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>>;

    /// Starts a new object, and creates the folders of its key. `len_bytes_max` is an upper bound
    /// of its length, or zero if unknown: free space is checked before the first byte.
    ///
    /// # Errors
    /// [`Error::Exists`] if the key is taken: nothing is ever overwritten. [`Error::NoSpace`] if
    /// the store reports less free space.
    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>>;

    /// The complete objects below a folder, at any depth, sorted by key. An absent folder is empty.
    /// Unfinished uploads are not included.
    ///
    /// # Errors
    /// Errors of the store.
    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>>;

    /// The names directly below a folder, folders and objects alike, sorted. An absent folder is
    /// empty.
    ///
    /// # Errors
    /// Errors of the store.
    fn list_names(&self, folder: &Key) -> Result<Vec<String>>;

    /// Deletes one object, durably.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none.
    fn delete(&self, key: &Key) -> Result<()>;

    /// Renames a complete folder to its final name in one step: after a crash it has either name,
    /// never half of each. All uploads into it must have finished.
    ///
    /// # Errors
    /// [`Error::Exists`] if the target exists, [`Error::NotFound`] if the staged folder does not.
    fn publish(&self, staged: &Key, target: &Key) -> Result<()>;

    /// Whether [`Storage::publish`] into this folder is one atomic operation that fails if the name
    /// is taken. Object stores have none, and FUSE and NFS none that refuses a taken name. Without
    /// it, write the objects at their final keys and the commit record last: creating an object is
    /// exclusive on every store. The result is cached.
    ///
    /// # Errors
    /// Errors of the store when this is probed.
    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        let _ = folder;
        Ok(true)
    }

    /// Replaces a small object, for advisory data: after a crash the old content may be back.
    /// Readers see the old or the new content, never a mix.
    ///
    /// # Errors
    /// [`Error::Unsupported`] from a store that only writes once; [`Error::NoSpace`],
    /// [`Error::Io`].
    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let _ = bytes;
        Err(Error::Unsupported { operation: "replace", object: self.display(key) })
    }

    /// Makes the names in a folder durable, also those that another process created: a visible name
    /// may be lost in a crash if its creator died before the sync. A no-op for stores that show
    /// only durable objects.
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
    /// Errors of the store; objects deleted before the error stay deleted.
    fn delete_folder(&self, folder: &Key) -> Result<()>;

    /// Removes a folder if nothing is in it. Object stores have no empty folders.
    ///
    /// # Errors
    /// Errors of the store; none if the folder does not exist, or has something in it.
    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        let _ = folder;
        Ok(())
    }

    /// Bytes that may still be written, or `None` if the store has no such limit.
    ///
    /// # Errors
    /// Errors of the store.
    fn free_bytes(&self) -> Result<Option<u64>>;

    /// How a message names this key: a full path or URL.
    fn display(&self, key: &Key) -> String;

    /// Removes what dead writers of this machine left directly in a folder: unfinished uploads and
    /// half-deleted folders. Files of live writers and everything with a final name stay. Returns
    /// the names removed. A no-op for stores whose uploads leave no files.
    ///
    /// # Errors
    /// Errors of the store; names removed before the error stay removed.
    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        let _ = folder;
        Ok(Vec::new())
    }

    /// As [`Storage::remove_orphans`], for one process that is dead as the caller knows: of another
    /// machine or container, whose processes cannot be checked from here.
    ///
    /// # Errors
    /// As [`Storage::remove_orphans`].
    fn remove_orphans_of(&self, folder: &Key, writer: &ProcessIdentity) -> Result<Vec<String>> {
        let _ = (folder, writer);
        Ok(Vec::new())
    }

    /// Starts a resumable upload. Like every upload it is invisible until it is finished, but it
    /// outlives its writer: if that is dropped or killed, [`Storage::resume`] continues the upload
    /// and [`Storage::discard`] removes it. Only one writer may have it open.
    ///
    /// # Errors
    /// [`Error::Exists`] if the key is taken or has an unfinished upload; [`Error::Unsupported`]
    /// from a store without resumable uploads; [`Error::NoSpace`], [`Error::Io`].
    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        Err(Error::Unsupported {
            operation: "create a resumable upload of",
            object: self.display(key),
        })
    }

    /// Continues a resumable upload from a sync point; bytes written after it are cut off.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is no such upload, [`Error::Corrupt`] if it is shorter than the
    /// sync point, [`Error::Locked`] if another process writes it; [`Error::Unsupported`],
    /// [`Error::Io`].
    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        let _ = from;
        Err(Error::Unsupported { operation: "resume an upload of", object: self.display(key) })
    }

    /// As [`Storage::resume`], but `find` picks the sync point from the bytes stored so far. No
    /// other process writes the upload by then.
    ///
    /// # Errors
    /// As [`Storage::resume`], and the errors of `find`.
    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        let from = find(self.open_partial(key)?.as_ref())?;
        self.resume(key, from)
    }

    /// Opens an unfinished resumable upload for reading. It has the bytes synced when it was
    /// opened, and perhaps more, which must not be relied on. On object stores it cannot be read.
    ///
    /// # Errors
    /// [`Error::NotFound`] if there is none; [`Error::Unsupported`], [`Error::Io`].
    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        Err(Error::Unsupported {
            operation: "open an unfinished upload of",
            object: self.display(key),
        })
    }

    /// Removes an unfinished resumable upload, durably. An absent one is no error.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Io`].
    fn discard(&self, key: &Key) -> Result<()> {
        Err(Error::Unsupported { operation: "discard an upload of", object: self.display(key) })
    }

    /// Creates a file of `len_bytes` bytes that only this process may write, in place; its space is
    /// reserved. It has the key's name from the start, whatever its content.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::NoSpace`], [`Error::Io`]; [`Error::Unsupported`] from a store
    /// that has no such files.
    fn create_in_place(&self, key: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        let _ = len_bytes;
        Err(Error::Unsupported { operation: "create an in-place file", object: self.display(key) })
    }

    /// Opens a file made by [`Storage::create_in_place`].
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Locked`] if another process has it open; otherwise as
    /// [`Storage::create_in_place`].
    fn open_in_place(&self, key: &Key) -> Result<Arc<dyn InPlaceFile>> {
        Err(Error::Unsupported { operation: "open an in-place file", object: self.display(key) })
    }

    /// Creates an in-place file without a name: no other process can open it, and its space is
    /// freed when it is dropped or this process ends, in whatever way.
    ///
    /// # Errors
    /// As [`Storage::create_in_place`].
    fn create_anonymous(&self, folder: &Key, len_bytes: u64) -> Result<Arc<dyn InPlaceFile>> {
        let _ = len_bytes;
        Err(Error::Unsupported {
            operation: "create an unnamed file in",
            object: self.display(folder),
        })
    }

    /// Makes an object from a file of this machine without copying its bytes, which must all be
    /// durable. Returns `None` where that is not possible; then nothing was created.
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

    /// Returns a [`Reader`] for objects of this store. Default: a pool of threads that call
    /// [`Object::read_many`], with a depth of 256 unless the options set it.
    ///
    /// # Errors
    /// [`Error::Refused`] if the requested read method does not work here.
    fn reader(&self, options: &ReaderOptions) -> Result<Box<dyn Reader>> {
        // At 4,600 reads a second, of which one in fifty is a second late, 92 requests are late at
        // any time.
        let depth = options.depth_or(256);
        let backend = reader::worker_pool::WorkerPool::new(depth + options.orphans_max);
        Ok(Box::new(reader::in_flight::InFlightReader::new(backend, depth, options)))
    }

    /// A [`Reader`] of one store can serve every store with the same group, so that one mount or
    /// bucket has one reader and one limit. `None` is a group of its own.
    fn reader_group(&self) -> Option<String> {
        None
    }

    /// Counters since the process started, such as requests and retries by cause; empty if the
    /// store has none.
    fn metrics(&self) -> Vec<(String, u64)> {
        Vec::new()
    }

    /// How this store does its I/O, and why.
    fn profile(&self) -> &Profile {
        Profile::unknown()
    }
}

/// One complete, immutable object.
pub trait Object: fmt::Debug + Send + Sync {
    /// Its length.
    fn len_bytes(&self) -> u64;

    /// Fills every buffer from its offset, or fails. No request is in flight when it returns, so no
    /// buffer outlives its request. Reads may be done in any order.
    ///
    /// # Errors
    /// [`Error::ShortRead`] if a read reaches past the end; [`Error::Io`] after the bounded retries
    /// of interrupted calls. The contents of the buffers are then unspecified.
    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()>;

    /// Returns the object as one slice of memory, for index files. Data files are read, never
    /// mapped.
    ///
    /// # Errors
    /// [`Error::Io`] if it can be neither mapped nor read.
    fn map(&self) -> Result<Map>;

    /// How a message names this object.
    fn display(&self) -> String;

    /// A text that changes when the object is written or replaced: an ETag, or the change time of a
    /// file, which no program can set. Another version may have the same bytes. `None` if the store
    /// has neither.
    fn version(&self) -> Option<String> {
        None
    }

    /// Advises the kernel that [`Self::file`] will be read at random: no read-ahead.
    fn advise_random(&self) {}

    /// The alignment that avoids a copy in long reads: the address of a byte and its offset in the
    /// object are equal modulo this value, which is at most 4096.
    fn memory_align(&self) -> usize {
        1
    }

    /// Its file, if it is a file of this machine: only for copies within the kernel.
    fn file(&self) -> Option<&std::fs::File> {
        None
    }

    /// Reports bytes of [`Self::file`] copied by the kernel since the last call. Returns whether to
    /// continue that way; otherwise the rest is read instead.
    fn copied(&self, bytes: u64) -> bool {
        let _ = bytes;
        true
    }

    /// `self`, for a downcast by the [`Reader`] of its store.
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

    /// Appends bytes and returns their CRC-64/NVME, computed once for the caller and the object.
    ///
    /// # Errors
    /// As [`Upload::write`].
    fn write_with_crc(&mut self, bytes: &[u8]) -> Result<u64> {
        self.write(bytes)?;
        Ok(crc64(bytes))
    }

    /// Appends bytes whose CRC-64/NVME is known; a store may use it unverified instead of computing
    /// it.
    ///
    /// # Errors
    /// As [`Upload::write`].
    fn write_with_known_crc(&mut self, bytes: &[u8], crc64: u64) -> Result<()> {
        let _ = crc64;
        self.write(bytes)
    }

    /// Appends a range of a complete object, in bounded memory. `crc64` is the CRC-64/NVME of that
    /// range, if it is known from a trusted source such as a [`Manifest`]. The bytes then need not
    /// be read, and are not even copied on a file system that shares blocks. They are not verified
    /// in that case: a source that differs from its checksum makes an object that differs from its
    /// own, which [`Manifest::verify`] finds. Without `crc64` the bytes are read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the bytes were read and do not match `crc64`; [`Error::ShortRead`] if
    /// the object ends before the range; otherwise as [`Upload::write`]. The upload can then only
    /// be dropped.
    ///
    /// # Panics
    /// If the range ends before it starts.
    fn write_from(
        &mut self,
        object: &dyn Object,
        range: std::ops::Range<u64>,
        crc64: Option<u64>,
    ) -> Result<()> {
        posix::kernel_copy::read_and_write(self, object, &range, crc64)
    }

    /// Sets the memory for bytes not yet written to the store: a hint, before the first write.
    fn stage_in(&mut self, bytes_max: u64) {
        let _ = bytes_max;
    }

    /// Bytes written so far.
    fn len_bytes(&self) -> u64;

    /// Ends the writing: waits until the store has every byte, durable or not, and frees the
    /// buffers. So many uploads can be flushed one by one when they are full, and finished
    /// together. No write may follow.
    ///
    /// # Errors
    /// As [`Upload::write`].
    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    /// Makes the object durable, then visible. Until this returns the key is absent, also after a
    /// crash; when it has returned the key is complete, also after a crash. An upload dropped
    /// unfinished leaves nothing.
    ///
    /// # Errors
    /// [`Error::Exists`] if another writer took the key; [`Error::NoSpace`], [`Error::Io`]. The key
    /// is then absent, or has the other writer's object.
    fn finish(self: Box<Self>) -> Result<FileEntry>;

    /// As [`Upload::finish`], but a crash may lose the name until the returned [`PendingDirSync`]
    /// is synced. For a folder of many objects, which is not read before it is published.
    ///
    /// # Errors
    /// As [`Upload::finish`].
    fn finish_deferred(self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        Ok((self.finish()?, PendingDirSync::nothing()))
    }
}

/// An upload that can be resumed after a crash.
pub trait ResumableUpload: Upload {
    /// Makes the bytes written so far durable, without making them visible, and returns the sync
    /// point. It covers all of them, except on object stores, which store complete parts only until
    /// the upload is [flushed](Upload::flush).
    ///
    /// # Errors
    /// As [`Upload::write`]; every later call then fails too.
    fn sync(&mut self) -> Result<SyncPoint>;
}

/// A position in a resumable upload up to which it is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct SyncPoint {
    /// Bytes before it.
    pub bytes: u64,
    /// Their CRC-64/NVME.
    pub crc64: u64,
}

/// A request to fill `buf` with the bytes from `offset` on.
#[derive(Debug)]
pub struct RangeRead<'a> {
    /// First byte, counted from the start of the object.
    pub offset: u64,
    /// The buffer; all of it is filled.
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
/// exist yet. A plain path is taken literally; a URL may set the I/O method:
/// `file:/data?engine=auto|ring|pread&direct=auto|on|off`. If the engine is left open, the
/// environment variable `FEEDLINE_ENGINE` sets it.
///
/// # Errors
/// [`Error::BadUrl`] for an unknown scheme or option, or an engine that does not work here.
pub fn open_url(url: &str) -> Result<Arc<dyn Storage>> {
    Location::new(url).open()
}

/// Splits a URL or plain path into the store of its folder and the key of its last component, as
/// `data/wiki_text_document` or `file:///lustre/run/step-000100` are given on a command line.
/// Options are as for [`open_url`].
///
/// # Errors
/// [`Error::BadUrl`] as for [`open_url`], or for a path without a last component.
pub fn locate(url: &str) -> Result<(Arc<dyn Storage>, Key)> {
    Location::new(url).locate()
}

/// Reads a complete object into memory.
///
/// # Errors
/// As [`Storage::open`] and [`Object::read_many`].
pub fn read_all(store: &dyn Storage, key: &Key) -> Result<Vec<u8>> {
    let object = store.open(key)?;
    let too_big = |_| Error::Corrupt {
        object: object.display(),
        offset: 0,
        found: format!("{} bytes", object.len_bytes()),
        expected: "no more bytes than this machine can address".to_owned(),
    };
    let mut bytes = vec![0; usize::try_from(object.len_bytes()).map_err(too_big)?];
    object.read_many(&mut [RangeRead { offset: 0, buf: &mut bytes }])?;
    Ok(bytes)
}

/// Reads a small object into memory.
///
/// # Errors
/// [`Error::Corrupt`] if it is longer than `bytes_max`; otherwise as [`read_all`].
pub fn read_small(store: &dyn Storage, key: &Key, bytes_max: u64) -> Result<Vec<u8>> {
    let bytes = store.open(key)?.len_bytes();
    if bytes > bytes_max {
        let (found, expected) = (format!("{bytes} bytes"), format!("at most {bytes_max} bytes"));
        return Err(Error::Corrupt { object: store.display(key), offset: 0, found, expected });
    }
    read_all(store, key)
}

/// Writes a complete object.
///
/// # Errors
/// As [`Storage::create`], [`Upload::write`] and [`Upload::finish`].
pub fn write_all(store: &dyn Storage, key: &Key, bytes: &[u8]) -> Result<FileEntry> {
    let mut upload = store.create(key, bytes.len() as u64)?;
    upload.write(bytes)?;
    upload.finish()
}
