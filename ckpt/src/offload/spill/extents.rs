//! Tracks where each extent is, and what to do next.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::space::FileRange;
use super::{SpillOptions, SpillReport};
use crate::{Error, Result};
use storage::Zeros;

/// A part of spilled bytes, under one checksum.
#[derive(Debug)]
pub(super) struct SpillExtent {
    pub(super) len: usize,
    pub(super) crc64: u64,
    /// Whether it was announced, and has a place in `wanted` or `ahead`.
    is_wanted: bool,
    pub(super) state: ExtentState,
}

#[derive(Debug)]
pub(super) enum ExtentState {
    /// Only in a buffer, to be written.
    Memory(Arc<Zeros>),
    /// A thread writes it.
    Writing(Arc<Zeros>),
    Both(Arc<Zeros>, FileRange),
    Disk(FileRange),
    /// A thread reads it.
    Reading,
}

/// A task of a thread.
#[derive(Debug)]
pub(super) enum ExtentTask {
    Write { number: u64, len: usize, buffer: Arc<Zeros> },
    Read { number: u64, len: usize, crc64: u64, place: FileRange, buffer: Zeros },
}

/// All extents, by number: lower ones were put earlier.
#[derive(Debug, Default)]
pub(super) struct Extents {
    all: BTreeMap<u64, SpillExtent>,
    next: u64,
    /// To be written.
    dirty: BTreeSet<u64>,
    /// In memory and on the disk, and not announced: the lowest is evicted first, since it is
    /// needed last if the order is reversed.
    clean: BTreeSet<u64>,
    /// Announced and only on the disk, in the order of need.
    wanted: VecDeque<u64>,
    /// Announced and in memory or being read, half of the buffers at most.
    ahead: VecDeque<u64>,
    idle: Vec<Zeros>,
    /// The number of buffers.
    buffer_count: usize,
    /// Buffers that threads read into or write from.
    in_flight: usize,
    /// The first error, until it was returned, and its text.
    failed: Option<(Option<Error>, String)>,
    pub(super) is_closing: bool,
    pub(super) report: SpillReport,
}

impl Extents {
    /// Fails after an error.
    pub(super) fn check(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        let Some((error, first)) = &mut self.failed else { return Ok(()) };
        let again = || storage::Error::Poisoned { object: what(), first: first.clone() }.into();
        Err(error.take().unwrap_or_else(again))
    }

    pub(super) fn fail(&mut self, error: Error) {
        if self.failed.is_none() {
            let first = error.to_string();
            self.failed = Some((Some(error), first));
        }
    }

    /// A buffer for a waiting caller, if one is available now.
    pub(super) fn buffer(&mut self, options: SpillOptions) -> Result<Option<Zeros>> {
        if let Some(buffer) = self.spare(options)? {
            return Ok(Some(buffer));
        }
        if !self.dirty.is_empty() || self.in_flight > 0 {
            return Ok(None);
        }
        // All are announced: those needed last are evicted, and announced again or read
        // synchronously.
        while let Some(number) = self.ahead.pop_back() {
            if let Some(buffer) = self.evict(number) {
                return Ok(Some(buffer));
            }
        }
        Ok(None)
    }

    /// A buffer that is free or can be evicted.
    fn spare(&mut self, options: SpillOptions) -> Result<Option<Zeros>> {
        if let Some(idle) = self.idle.pop() {
            return Ok(Some(idle));
        }
        if self.buffer_count < options.buffers {
            let fresh = Zeros::try_new(options.buffer_bytes())
                .map_err(|e| storage::Error::from_io("allocate", "a spill buffer", e))?;
            self.buffer_count += 1;
            self.report.memory_bytes = (self.buffer_count * options.buffer_bytes()) as u64;
            return Ok(Some(fresh));
        }
        while let Some(number) = self.clean.pop_first() {
            if let Some(buffer) = self.evict(number) {
                return Ok(Some(buffer));
            }
        }
        Ok(None)
    }

    /// Drops the memory copy of an extent that is on the disk.
    fn evict(&mut self, number: u64) -> Option<Zeros> {
        let extent = self.all.get_mut(&number)?;
        match std::mem::replace(&mut extent.state, ExtentState::Reading) {
            ExtentState::Both(buffer, place) => {
                (extent.state, extent.is_wanted) = (ExtentState::Disk(place), false);
                Arc::into_inner(buffer)
            }
            other => {
                extent.state = other;
                None
            }
        }
    }

    /// Adds an extent whose bytes were copied into a buffer.
    pub(super) fn add(&mut self, buffer: Zeros, len: usize, crc64: u64) -> u64 {
        let number = self.next;
        self.next += 1;
        let at = ExtentState::Memory(Arc::new(buffer));
        self.all.insert(number, SpillExtent { len, crc64, is_wanted: false, state: at });
        self.dirty.insert(number);
        self.report.put_bytes += len as u64;
        number
    }

    /// Removes an extent; `None` while it is read, since its bytes are not in memory yet.
    pub(super) fn remove(&mut self, number: u64) -> Option<SpillExtent> {
        if matches!(self.all.get(&number)?.state, ExtentState::Reading) {
            return None;
        }
        self.discard(number)
    }

    /// Removes an extent, also while it is read: its reader then finds no entry.
    pub(super) fn discard(&mut self, number: u64) -> Option<SpillExtent> {
        let extent = self.all.remove(&number)?;
        self.dirty.remove(&number);
        self.clean.remove(&number);
        if extent.is_wanted {
            self.ahead.retain(|other| *other != number);
            self.wanted.retain(|other| *other != number);
        }
        Some(extent)
    }

    /// Returns a buffer, once its last user has dropped it.
    pub(super) fn give(&mut self, buffer: Arc<Zeros>) {
        self.idle.extend(Arc::into_inner(buffer));
    }

    /// Announces extents in the order of need, after all that were announced before.
    pub(super) fn expect(&mut self, numbers: &[u64], options: SpillOptions) {
        for &number in numbers {
            let Some(extent) = self.all.get_mut(&number).filter(|extent| !extent.is_wanted) else {
                continue;
            };
            match extent.state {
                ExtentState::Disk(_) => {
                    extent.is_wanted = true;
                    self.wanted.push_back(number);
                }
                ExtentState::Both(..) if self.ahead.len() < options.ahead_max() => {
                    extent.is_wanted = true;
                    self.clean.remove(&number);
                    self.ahead.push_back(number);
                }
                _ => {}
            }
        }
    }

    /// Moves extents before all that were announced: a caller waits for them.
    pub(super) fn prioritize(&mut self, numbers: &[u64]) {
        for &number in numbers.iter().rev() {
            let Some(extent) = self.all.get_mut(&number) else { continue };
            if matches!(extent.state, ExtentState::Disk(_)) {
                if std::mem::replace(&mut extent.is_wanted, true) {
                    self.wanted.retain(|other| *other != number);
                }
                self.wanted.push_front(number);
            }
        }
    }

    /// The next task: reads before writes, since a caller waits for them sooner.
    pub(super) fn next_task(&mut self, options: SpillOptions) -> Result<Option<ExtentTask>> {
        if self.failed.is_some() {
            return Ok(None);
        }
        if !self.wanted.is_empty()
            && self.ahead.len() < options.ahead_max()
            && let Some(buffer) = self.spare(options)?
        {
            // An extent that leaves the disk leaves `wanted` as well.
            let number = self.wanted.pop_front().expect("checked non-empty above");
            let extent = self.all.get_mut(&number).expect("wanted extents exist");
            let (len, crc64) = (extent.len, extent.crc64);
            if let ExtentState::Disk(place) =
                std::mem::replace(&mut extent.state, ExtentState::Reading)
            {
                self.ahead.push_back(number);
                self.in_flight += 1;
                return Ok(Some(ExtentTask::Read { number, len, crc64, place, buffer }));
            }
            unreachable!("wanted extents are only on the disk");
        }
        let Some(number) = self.dirty.pop_first() else { return Ok(None) };
        let extent = self.all.get_mut(&number).expect("dirty extents exist");
        let ExtentState::Memory(buffer) = &extent.state else {
            unreachable!("dirty extents are in memory")
        };
        let (len, buffer) = (extent.len, Arc::clone(buffer));
        extent.state = ExtentState::Writing(Arc::clone(&buffer));
        self.in_flight += 1;
        Ok(Some(ExtentTask::Write { number, len, buffer }))
    }

    /// An extent was written. Frees its range if it was taken meanwhile.
    pub(super) fn was_written(
        &mut self,
        number: u64,
        len: usize,
        buffer: Arc<Zeros>,
        place: Result<FileRange>,
    ) -> Option<FileRange> {
        self.in_flight -= 1;
        let place = match place {
            Ok(place) => {
                self.report.write_bytes += len as u64;
                place
            }
            Err(error) => {
                self.fail(error);
                self.give(buffer);
                return None;
            }
        };
        let Some(extent) = self.all.get_mut(&number) else {
            self.give(buffer);
            return Some(place);
        };
        extent.state = ExtentState::Both(buffer, place);
        self.clean.insert(number);
        None
    }

    /// An extent was read. Frees its range if it is no longer needed.
    pub(super) fn was_read(
        &mut self,
        number: u64,
        len: usize,
        buffer: Zeros,
        place: Result<FileRange>,
    ) -> Option<FileRange> {
        self.in_flight -= 1;
        let place = match place {
            Ok(place) => {
                self.report.read_bytes += len as u64;
                place
            }
            Err(error) => {
                self.fail(error);
                self.idle.push(buffer);
                return None;
            }
        };
        let Some(extent) = self.all.get_mut(&number) else {
            self.idle.push(buffer);
            return Some(place);
        };
        extent.state = ExtentState::Both(Arc::new(buffer), place);
        None
    }
}
