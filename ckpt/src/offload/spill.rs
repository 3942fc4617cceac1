//! Spill: bytes that are moved from memory to disk until they are needed.
//!
//! The inputs of a network's layers are produced in the forward pass and used in the backward pass,
//! the last first. [`Spill::put`] copies them into one of a few buffers, which are written in the
//! background, the oldest first. [`SpillHandle::take`] finds them in a buffer, not yet evicted or
//! prefetched after [`SpillHandle::expect`], or reads them synchronously. So memory is bounded by
//! the buffers, and the disk works while the step computes.
//!
//! The files are anonymous, nothing is synced and nothing outlives the process: a run resumes from
//! its checkpoints. The checksum of each extent stays in memory and is compared when it is read.
//! After an error every later call fails.
//!
//! `space` allocates ranges of files, `extents` tracks where each extent is and what to do next.

mod extents;
mod space;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::{fmt, io};

use super::Folder;
use crate::format::safetensors::ALIGN_BYTES;
use crate::{Error, Result};
use extents::{ExtentState, ExtentTask, Extents, SpillExtent};
use space::{FileRange, SpaceMap};
use storage::{Zeros, crc64};

/// Limits of memory and requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpillOptions {
    /// Bytes under one checksum, written and read at once. Default: 4 MiB. Minimum: one page; less
    /// counts as that.
    pub extent_bytes: usize,
    /// Buffers of `extent_bytes`, half of which are for prefetch. Default: 16. Minimum: 2; less
    /// counts as that.
    pub buffers: usize,
    /// Threads that write and read, per folder. Default: 4, with 16 MiB in flight: 2.3 ms of work
    /// for a device of 7 GB/s. Minimum: 1; less counts as that.
    pub threads: usize,
}

impl Default for SpillOptions {
    fn default() -> Self {
        SpillOptions { extent_bytes: 4 << 20, buffers: 16, threads: 4 }
    }
}

impl SpillOptions {
    /// The memory limit, however much is spilled.
    #[must_use]
    pub fn memory_bytes(self) -> u64 {
        self.buffers as u64 * self.buffer_bytes() as u64
    }

    fn buffer_bytes(self) -> usize {
        self.extent_bytes.next_multiple_of(ALIGN_BYTES as usize)
    }

    fn ahead_max(self) -> usize {
        self.buffers / 2
    }

    fn checked(self) -> Self {
        SpillOptions {
            extent_bytes: self.extent_bytes.max(ALIGN_BYTES as usize),
            buffers: self.buffers.max(2),
            threads: self.threads.max(1),
        }
    }
}

/// Bytes moved since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillReport {
    /// Bytes put.
    pub put_bytes: u64,
    /// Bytes of them that were written; the others were taken before.
    pub write_bytes: u64,
    /// Bytes that were prefetched.
    pub read_bytes: u64,
    /// Bytes that were read synchronously.
    pub late_bytes: u64,
    /// Memory of all buffers.
    pub memory_bytes: u64,
    /// Space of all files.
    pub disk_bytes: u64,
}

/// The files and threads of a spill.
pub struct Spill {
    shared: Arc<SpillShared>,
    threads: Vec<JoinHandle<()>>,
}

impl fmt::Debug for Spill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spill({})", self.shared.name())
    }
}

struct SpillShared {
    options: SpillOptions,
    /// One per folder; extents alternate among them.
    spaces: Vec<SpaceMap>,
    extents: Mutex<Extents>,
    /// Something was put, taken, written, read or announced, or has failed.
    changed: Condvar,
}

impl Spill {
    /// Opens a spill in folders, which may be shared, with `threads` threads each; extents are
    /// spread over them.
    ///
    /// # Errors
    /// [`Error::BadState`] for no folder; [`storage::Error::Unsupported`] within [`Error::Storage`]
    /// from a store without anonymous files; other errors of the store.
    pub fn open(folders: Vec<Folder>, options: SpillOptions) -> Result<Self> {
        let options = options.checked();
        if folders.is_empty() {
            let reason = "expected at least one folder, found none".to_owned();
            let object = "spill files".to_owned();
            return Err(Error::BadState { operation: "create", object, reason });
        }
        let spaces = folders.into_iter().map(SpaceMap::open).collect::<Result<Vec<_>>>()?;
        let count = options.threads * spaces.len();
        let (extents, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(SpillShared { options, spaces, extents, changed });
        let mut spill = Spill { shared, threads: Vec::with_capacity(count) };
        for _ in 0..count {
            let shared = Arc::clone(&spill.shared);
            let thread = thread::Builder::new().name("ckpt-spill".to_owned());
            let thread = thread
                .spawn(move || shared.work())
                .map_err(|e| storage::Error::from_io("start", "a spill thread", e));
            spill.threads.push(thread?);
        }
        Ok(spill)
    }

    /// Spills bytes. Waits for the disk if all buffers hold unwritten data.
    ///
    /// # Errors
    /// [`storage::Error::NoSpace`] within [`Error::Storage`] if the disk is full, also for bytes
    /// put before; [`storage::Error::Poisoned`] there after another error; errors of the store.
    pub fn put(&self, bytes: &[u8]) -> Result<SpillHandle> {
        let shared = &self.shared;
        let (extents, len) = (VecDeque::new(), bytes.len());
        // On an error, the drop of the handle frees the part that was put.
        let mut handle = SpillHandle { shared: Arc::clone(shared), extents, len };
        for part in bytes.chunks(shared.options.extent_bytes) {
            let mut buffer = shared.buffer()?;
            let (own, rest) = buffer.split_at_mut(part.len());
            own.copy_from_slice(part);
            rest[..whole_pages(part.len()) - part.len()].fill(0);
            let crc64 = crc64(part);
            handle.extents.push_back(shared.lock().add(buffer, part.len(), crc64));
            shared.changed.notify_all();
        }
        Ok(handle)
    }

    /// Bytes moved so far.
    #[must_use]
    pub fn report(&self) -> SpillReport {
        let disk_bytes = self.shared.spaces.iter().map(SpaceMap::bytes).sum();
        SpillReport { disk_bytes, ..self.shared.lock().report }
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.shared.lock().is_closing = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has reported it to its waiters.
            let _ = thread.join();
        }
    }
}

/// Handle of spilled bytes. Drop discards them.
pub struct SpillHandle {
    shared: Arc<SpillShared>,
    /// Its remaining extents, in order.
    extents: VecDeque<u64>,
    len: usize,
}

impl fmt::Debug for SpillHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpillHandle({} bytes in {})", self.len, self.shared.name())
    }
}

impl SpillHandle {
    /// Announces that they are needed next, after all that was announced before: they are
    /// prefetched as buffers become free.
    pub fn expect(&self) {
        let numbers: Vec<u64> = self.extents.iter().copied().collect();
        self.shared.lock().expect(&numbers, self.shared.options);
        self.shared.changed.notify_all();
    }

    /// Reads them back.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the disk returns other bytes than were written; [`Error::BadRequest`]
    /// for memory of another length; [`storage::Error::Poisoned`] within [`Error::Storage`] after
    /// another error; errors of the store.
    pub fn take(mut self, into: &mut [u8]) -> Result<()> {
        if into.len() != self.len {
            return Err(Error::BadRequest {
                operation: "read",
                object: format!("spilled bytes in {}", self.shared.name()),
                found: format!("a buffer of {} bytes", into.len()),
                expected: format!("{} bytes", self.len),
            });
        }
        let shared = Arc::clone(&self.shared);
        shared.lock().prioritize(self.extents.make_contiguous());
        shared.changed.notify_all();
        let mut rest = into;
        while let Some(number) = self.extents.front() {
            let (part, others) = rest.split_at_mut(rest.len().min(shared.options.extent_bytes));
            shared.fetch(*number, part)?;
            self.extents.pop_front();
            rest = others;
        }
        Ok(())
    }
}

impl Drop for SpillHandle {
    fn drop(&mut self) {
        for number in &self.extents {
            let extent = self.shared.lock().discard(*number);
            match extent.map(|extent| extent.state) {
                Some(ExtentState::Memory(buffer) | ExtentState::Writing(buffer)) => {
                    self.shared.give(buffer, None);
                }
                Some(ExtentState::Both(buffer, place)) => self.shared.give(buffer, Some(place)),
                Some(ExtentState::Disk(place)) => self.shared.free(place),
                // Taken, or freed by the thread that reads it.
                Some(ExtentState::Reading) | None => {}
            }
        }
    }
}

impl SpillShared {
    fn lock(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, extents: MutexGuard<'a, Extents>) -> MutexGuard<'a, Extents> {
        self.changed.wait(extents).unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> String {
        self.spaces.iter().map(SpaceMap::name).collect::<Vec<_>>().join(", ")
    }

    fn buffer(&self) -> Result<Zeros> {
        let mut extents = self.lock();
        loop {
            extents.check(|| self.name())?;
            if let Some(buffer) = extents.buffer(self.options)? {
                return Ok(buffer);
            }
            extents = self.wait(extents);
        }
    }

    /// Takes one extent, from memory or from the disk.
    fn fetch(&self, number: u64, into: &mut [u8]) -> Result<()> {
        let mut extents = self.lock();
        let SpillExtent { len, crc64, state: at, .. } = loop {
            extents.check(|| self.name())?;
            match extents.remove(number) {
                Some(extent) => break extent,
                None => extents = self.wait(extents),
            }
        };
        drop(extents);
        match at {
            ExtentState::Memory(buffer) | ExtentState::Writing(buffer) => {
                into.copy_from_slice(&buffer[..len]);
                self.give(buffer, None);
            }
            ExtentState::Both(buffer, place) => {
                into.copy_from_slice(&buffer[..len]);
                self.give(buffer, Some(place));
            }
            ExtentState::Disk(place) => {
                place.read(into, len, crc64).inspect_err(|error| self.fail(error))?;
                self.lock().report.late_bytes += len as u64;
                self.free(place);
            }
            ExtentState::Reading => unreachable!("`remove` returns no extent that is being read"),
        }
        Ok(())
    }

    /// Makes all later calls fail after an error that is returned here.
    fn fail(&self, error: &Error) {
        let first = storage::Error::Poisoned { object: self.name(), first: error.to_string() };
        self.lock().fail(first.into());
        self.changed.notify_all();
    }

    fn give(&self, buffer: Arc<Zeros>, place: Option<FileRange>) {
        place.into_iter().for_each(|place| self.free(place));
        self.lock().give(buffer);
        self.changed.notify_all();
    }

    fn free(&self, place: FileRange) {
        self.spaces[place.disk()].give(place);
    }

    /// Main loop of a thread.
    fn work(&self) {
        let _guard = PanicGuard(self);
        let mut extents = self.lock();
        while !extents.is_closing {
            let task = match extents.next_task(self.options) {
                Ok(Some(task)) => task,
                Ok(None) => {
                    extents = self.wait(extents);
                    continue;
                }
                Err(error) => {
                    extents.fail(error);
                    self.changed.notify_all();
                    continue;
                }
            };
            drop(extents);
            match task {
                ExtentTask::Write { number, len, buffer } => {
                    let place = self.write(number, &buffer[..whole_pages(len)]);
                    extents = self.lock();
                    let place = extents.was_written(number, len, buffer, place);
                    place.into_iter().for_each(|place| self.free(place));
                }
                ExtentTask::Read { number, len, crc64, place, mut buffer } => {
                    let read = place.read(&mut buffer[..whole_pages(len)], len, crc64);
                    extents = self.lock();
                    let place = extents.was_read(number, len, buffer, read.map(|()| place));
                    place.into_iter().for_each(|place| self.free(place));
                }
            }
            self.changed.notify_all();
        }
    }

    fn write(&self, number: u64, bytes: &[u8]) -> Result<FileRange> {
        let disk = (number % self.spaces.len() as u64) as usize; // fits: less than the folders
        let place = self.spaces[disk].take(disk, bytes.len() as u64)?;
        place.write(bytes)?;
        Ok(place)
    }
}

fn whole_pages(len: usize) -> usize {
    len.next_multiple_of(ALIGN_BYTES as usize)
}

/// Reports a panic of a thread to its waiters.
struct PanicGuard<'a>(&'a SpillShared);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let reason = "a spill thread panicked";
            let why = storage::Error::from_io("write", self.0.name(), io::Error::other(reason));
            self.0.fail(&why.into());
        }
    }
}
