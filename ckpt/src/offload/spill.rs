//! Bytes that leave memory until they are needed: what a step computes early and uses late.
//!
//! The inputs of a network's layers are made on the way there and used on the way back, the last
//! first. What is [`Spill::put`] is copied into one of a few buffers and written behind the caller,
//! the oldest first; [`SpillHandle::take`] finds it in a buffer still, or read ahead because it was
//! announced ([`SpillHandle::expect`]), or reads it there and then. So memory is bounded by the
//! buffers and the disk works while the step computes.
//!
//! The files have no name, nothing is synced and nothing outlives the process: a run goes on from
//! its checkpoints. The checksum of each extent stays in memory and is compared when it is read.
//! After an error nothing goes on: every later call fails.
//!
//! `space` has the places in files, `extents` what is where and what is to be done next.

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

/// How much memory and how many requests it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpillOptions {
    /// Bytes under one checksum, which are written and read at once. Default: 4 MiB. Less than a
    /// page is one.
    pub extent_bytes: usize,
    /// Buffers of so many bytes, half of which are for what is read ahead. Default: 16. Less than
    /// two is two.
    pub buffers: usize,
    /// Threads that write and read, for each folder. Default: 4, which have 16 MiB on their way: a
    /// device of 7 GB/s has them for 2.3 ms. Less than one is one.
    pub threads: usize,
}

impl Default for SpillOptions {
    fn default() -> Self {
        SpillOptions { extent_bytes: 4 << 20, buffers: 16, threads: 4 }
    }
}

impl SpillOptions {
    /// The most memory that it takes, however much is away.
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

/// What was moved since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillReport {
    /// Bytes that were given away.
    pub put_bytes: u64,
    /// Bytes of them that were written; the rest was taken before.
    pub write_bytes: u64,
    /// Bytes that were read ahead of their need.
    pub read_bytes: u64,
    /// Bytes that were read by who needed them.
    pub late_bytes: u64,
    /// What all buffers take.
    pub memory_bytes: u64,
    /// What all files take.
    pub disk_bytes: u64,
}

/// Files that bytes are moved away to.
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
    /// One a folder; extents take turns among them.
    spaces: Vec<SpaceMap>,
    extents: Mutex<Extents>,
    /// Something was put, taken, written, read or announced, or has failed.
    changed: Condvar,
}

impl Spill {
    /// In folders that others may use too, each with so many threads; extents are spread over them.
    ///
    /// # Errors
    /// [`Error::BadInput`] for no folder; [`storage::Error::Unsupported`] within [`Error::Storage`]
    /// from a store that has no such files; what it says else.
    pub fn open(folders: Vec<Folder>, options: SpillOptions) -> Result<Self> {
        let options = options.checked();
        if folders.is_empty() {
            let reason = "it has no folder".to_owned();
            return Err(Error::BadInput { object: "what leaves memory".to_owned(), reason });
        }
        let spaces = folders.into_iter().map(SpaceMap::open).collect::<Result<Vec<_>>>()?;
        let count = options.threads * spaces.len();
        let (extents, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(SpillShared { options, spaces, extents, changed });
        let mut spill = Spill { shared, threads: Vec::with_capacity(count) };
        for _ in 0..count {
            let shared = Arc::clone(&spill.shared);
            let thread = thread::Builder::new().name("ckpt-spill".to_owned());
            let thread = thread.spawn(move || shared.work()).map_err(|e| {
                storage::Error::from_io("start", "a thread that moves bytes to a disk", e)
            });
            spill.threads.push(thread?);
        }
        Ok(spill)
    }

    /// Gives bytes away. Waits for the disk if all buffers are full of what is not written yet.
    ///
    /// # Errors
    /// [`storage::Error::NoSpace`] within [`Error::Storage`] if the disk is full, also for what was
    /// put before; [`storage::Error::Poisoned`] there after another error; what the store says.
    pub fn put(&self, bytes: &[u8]) -> Result<SpillHandle> {
        let shared = &self.shared;
        let (extents, len) = (VecDeque::new(), bytes.len());
        // Dropped by an error, it gives back what was put of it.
        let mut away = SpillHandle { shared: Arc::clone(shared), extents, len };
        for part in bytes.chunks(shared.options.extent_bytes) {
            let mut buffer = shared.buffer()?;
            let (own, rest) = buffer.split_at_mut(part.len());
            own.copy_from_slice(part);
            rest[..whole_pages(part.len()) - part.len()].fill(0);
            let crc64 = crc64(part);
            away.extents.push_back(shared.lock().add(buffer, part.len(), crc64));
            shared.changed.notify_all();
        }
        Ok(away)
    }

    /// What was moved so far.
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
            // One that panicked has said so, to whoever waited for it.
            let _ = thread.join();
        }
    }
}

/// Bytes that were put somewhere. Dropped, they are given up.
pub struct SpillHandle {
    shared: Arc<SpillShared>,
    /// Those that are left of it, in their order.
    extents: VecDeque<u64>,
    len: usize,
}

impl fmt::Debug for SpillHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Away({} bytes in {})", self.len, self.shared.name())
    }
}

impl SpillHandle {
    /// Tells that they are needed next, after all that was announced before: they are read as
    /// buffers become free.
    pub fn expect(&self) {
        let numbers: Vec<u64> = self.extents.iter().copied().collect();
        self.shared.lock().expect(&numbers, self.shared.options);
        self.shared.changed.notify_all();
    }

    /// Takes them back.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the disk gives other bytes than were written; [`Error::BadRequest`]
    /// for memory of another length; [`storage::Error::Poisoned`] within [`Error::Storage`] after
    /// another error; what the store says.
    pub fn take(mut self, into: &mut [u8]) -> Result<()> {
        if into.len() != self.len {
            return Err(Error::BadRequest {
                object: format!("what is away in {}", self.shared.name()),
                found: format!("memory of {} bytes", into.len()),
                expected: self.len.to_string(),
            });
        }
        let shared = Arc::clone(&self.shared);
        shared.lock().urge(self.extents.make_contiguous());
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
            let extent = self.shared.lock().forget(*number);
            match extent.map(|extent| extent.state) {
                Some(ExtentState::Memory(buffer) | ExtentState::Writing(buffer)) => {
                    self.shared.give(buffer, None);
                }
                Some(ExtentState::Both(buffer, place)) => self.shared.give(buffer, Some(place)),
                Some(ExtentState::Disk(place)) => self.shared.free(place),
                // Taken, or given back by the thread that reads it.
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

    /// Takes one extent from wherever it is.
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
            ExtentState::Reading => unreachable!("it was waited for"),
        }
        Ok(())
    }

    /// Lets nothing go on after an error that is told here.
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

    /// What a thread does.
    fn work(&self) {
        let _watch = PanicGuard(self);
        let mut extents = self.lock();
        while !extents.is_closing {
            let job = match extents.job(self.options) {
                Ok(Some(job)) => job,
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
            match job {
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

/// Tells those who wait for a thread that it has panicked.
struct PanicGuard<'a>(&'a SpillShared);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let why = io::Error::other("a thread that moves bytes has panicked");
            let why = storage::Error::from_io("go on with", self.0.name(), why);
            self.0.fail(&why.into());
        }
    }
}
