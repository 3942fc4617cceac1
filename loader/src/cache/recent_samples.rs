use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use storage::{Key, Storage};

use super::segment::{Segment, SegmentBuilder};
use super::{Identity, room};
use crate::{Result, SampleCache, SampleOrder};

/// Options of an [`OrderLog`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The most bytes of the log. Default: all but a twentieth of the free space.
    pub limit_bytes: u64,
    /// As [`CacheOptions::salt`](super::CacheOptions::salt). Default: 0.
    pub salt: u64,
    /// Bytes of a file. Default: 64 MiB, which any disk writes at its full rate; a crash loses as
    /// much, and twice as much is held in memory.
    pub segment_bytes: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { limit_bytes: u64::MAX, salt: 0, segment_bytes: 64 << 20 }
    }
}

/// Tables kept in memory: one file is read at a time, and perhaps one or two of other jobs.
const OPEN_MAX: usize = 4;

/// The most files searched for a sample, if several ranks or jobs have written overlapping ranges.
const OVERLAPS_MAX: usize = 8;

/// File names examined for that: the last ones that start before the sample. It takes a microsecond
/// or two, and covers ranges of 64 ranks that start at different samples.
const NAMES_MAX: usize = 256;

/// The recently read samples of an order, in the order of their use.
///
/// Samples read from the store are collected into files of [`LogOptions::segment_bytes`], which a
/// thread writes; if the thread is behind, samples are dropped. A run that restarts from its last
/// checkpoint finds the samples read since then. Files from before the checkpoint are deleted;
/// those that other jobs wrote and this job never read, only when the space is needed. If there is
/// no space, the existing files stay: a restart needs the oldest first.
#[derive(Debug)]
pub struct OrderLog {
    shared: Arc<LogShared>,
    writer: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct LogShared {
    store: Arc<dyn Storage>,
    identity: Identity,
    folder: Key,
    options: LogOptions,
    state: Mutex<LogState>,
    work: Condvar,
    files: Mutex<LogFiles>,
}

/// Messages to and from the writer.
#[derive(Debug, Default)]
struct LogState {
    filling: SegmentBuilder,
    /// A full buffer for the writer.
    to_write: Option<SegmentBuilder>,
    /// An empty buffer to fill next.
    spare: SegmentBuilder,
    /// The writer is idle.
    is_idle: bool,
    is_stopping: bool,
    checkpointed: u64,
    /// The checkpoint up to which the writer has deleted files.
    deleted: u64,
}

/// The files in the folder. A file's name has its first sample, its last, and a number that is
/// unique among writers.
#[derive(Debug, Default)]
struct LogFiles {
    by_first: BTreeMap<(u64, u64), LogFile>,
    open: Vec<((u64, u64), Arc<Segment>)>,
    /// Files that this process wrote or read.
    used: BTreeSet<(u64, u64)>,
    is_full: bool,
}

#[derive(Debug)]
struct LogFile {
    last: u64,
    bytes: u64,
    key: Key,
}

impl OrderLog {
    /// Opens the log of an order, with its existing content.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn open(
        store: &Arc<dyn Storage>,
        order: &dyn SampleOrder,
        options: LogOptions,
    ) -> Result<Self> {
        let identity = Identity::of(order, options.salt);
        let folder = identity.folder("order");
        let shared = Arc::new(LogShared {
            store: Arc::clone(store),
            identity,
            folder,
            options,
            state: Mutex::default(),
            work: Condvar::new(),
            files: Mutex::default(),
        });
        if let Err(error) = store.remove_orphans(&shared.folder) {
            log::warn!("cache: {error}");
        }
        shared.scan();
        let bytes = shared.bytes();
        log::info!(
            "cache: {} holds {} of logged samples",
            store.display(&shared.folder),
            storage::ByteSize(bytes)
        );
        let writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("cache".to_owned())
            .spawn(move || writer.write())
            .map_err(|error| storage::Error::from_io("start", "a thread for the cache", error))?;
        Ok(OrderLog { shared, writer: Some(writer) })
    }

    /// Reports a durable checkpoint: the run will never need earlier samples again. Files that only
    /// served those are deleted. Does not wait for it.
    pub fn checkpointed(&self, samples_consumed: u64) {
        let mut state = lock(&self.shared.state);
        state.checkpointed = state.checkpointed.max(samples_consumed);
        self.shared.work.notify_all();
    }

    /// Writes the samples collected so far, and waits for all pending work.
    pub fn flush(&self) {
        let mut state = lock(&self.shared.state);
        while !state.filling.is_empty() || state.to_write.is_some() {
            state.hand_over();
            self.shared.work.notify_all();
            state = wait(&self.shared.work, state);
        }
        while !(state.is_idle && state.deleted >= state.checkpointed) {
            self.shared.work.notify_all();
            state = wait(&self.shared.work, state);
        }
    }

    /// Bytes of the log on the disk, as far as this process knows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.shared.bytes()
    }
}

impl SampleCache for OrderLog {
    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        self.shared.find(sample, into)
    }

    fn keep(&self, sample: u64, bytes: &[u8]) {
        let mut state = lock(&self.shared.state);
        let full = state.filling.file_bytes() + bytes.len() as u64
            > self.shared.options.segment_bytes as u64;
        let ascends = state.filling.ends().is_none_or(|(_, last)| last < sample);
        if (full || !ascends) && !state.filling.is_empty() {
            if !state.hand_over() {
                return; // the disk is slower than the reads: dropped
            }
            self.shared.work.notify_all();
        }
        state.filling.push(sample, bytes);
    }

    fn consumed(&self, _samples: u64) {}
}

impl Drop for OrderLog {
    fn drop(&mut self) {
        self.flush();
        lock(&self.shared.state).is_stopping = true;
        self.shared.work.notify_all();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl LogState {
    /// Hands the full buffer to the writer, unless it has not taken the previous one yet.
    fn hand_over(&mut self) -> bool {
        if self.to_write.is_some() {
            return false;
        }
        let spare = std::mem::take(&mut self.spare);
        self.to_write = Some(std::mem::replace(&mut self.filling, spare));
        true
    }
}

impl LogShared {
    /// The writer's thread.
    fn write(&self) {
        let mut state = lock(&self.state);
        loop {
            let to = state.checkpointed;
            if to > state.deleted {
                drop(state);
                self.delete_used_before(to);
                state = lock(&self.state);
                state.deleted = to;
            } else if let Some(mut filling) = state.to_write.take() {
                state.is_idle = false;
                drop(state);
                self.write_file(&mut filling, to);
                filling.clear();
                state = lock(&self.state);
                state.spare = filling;
            } else if state.is_stopping {
                return;
            } else {
                state.is_idle = true;
                self.work.notify_all();
                state = wait(&self.work, state);
            }
        }
    }

    fn write_file(&self, filling: &mut SegmentBuilder, checkpointed: u64) {
        let Some((first, last)) = filling.ends() else { return };
        self.scan(); // files of other jobs count too
        let bytes = filling.file_bytes();
        if !self.make_room(bytes, checkpointed) {
            return;
        }
        let nonce = nonce();
        let name = format!("{first:016x}-{last:016x}-{nonce:016x}");
        let Ok(key) = self.folder.join(&name) else { return };
        match filling.write(self.store.as_ref(), &key, &self.identity) {
            Ok(()) => {
                let mut files = lock(&self.files);
                files.by_first.insert((first, nonce), LogFile { last, bytes, key });
                files.used.insert((first, nonce));
            }
            Err(error) => log::warn!("cache: {error}"),
        }
    }

    /// Whether so many bytes may be written, after deleting what this run does not need.
    fn make_room(&self, bytes: u64, checkpointed: u64) -> bool {
        loop {
            let taken = self.bytes();
            let fits = taken.saturating_add(bytes) <= self.options.limit_bytes
                && bytes <= room(self.store.as_ref(), taken);
            let mut files = lock(&self.files);
            if fits {
                files.is_full = false;
                return true;
            }
            let obsolete = files.by_first.iter().find(|(_, file)| file.last < checkpointed);
            let Some(name) = obsolete.map(|(&name, _)| name) else {
                if !std::mem::replace(&mut files.is_full, true) {
                    log::info!("cache: {} is full", self.store.display(&self.folder));
                }
                return false;
            };
            self.delete(&mut files, name);
        }
    }

    fn delete_used_before(&self, sample: u64) {
        let mut files = lock(&self.files);
        let is_obsolete =
            |name: &&(u64, u64)| files.by_first.get(name).is_none_or(|file| file.last < sample);
        let obsolete: Vec<(u64, u64)> = files.used.iter().filter(is_obsolete).copied().collect();
        for name in obsolete {
            self.delete(&mut files, name);
        }
    }

    fn delete(&self, files: &mut LogFiles, name: (u64, u64)) {
        files.used.remove(&name);
        files.open.retain(|(open, _)| *open != name);
        if let Some(file) = files.by_first.remove(&name) {
            let _ = self.store.delete(&file.key); // another process may have deleted it
        }
    }

    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        let mut files = lock(&self.files);
        let runs = files.by_first.range(..=(sample, u64::MAX)).rev().take(NAMES_MAX);
        let runs = runs.filter(|(_, file)| file.last >= sample).map(|(&name, _)| name);
        let mut names = [None; OVERLAPS_MAX];
        names.iter_mut().zip(runs).for_each(|(place, name)| *place = Some(name));
        for name in names.into_iter().flatten() {
            let Some(segment) = self.segment(&mut files, name) else {
                self.delete(&mut files, name); // deleted, or invalid
                continue;
            };
            if segment.find(sample, into) {
                files.used.insert(name);
                return true;
            }
        }
        false
    }

    /// A file with its table; the last used files stay open.
    fn segment(&self, files: &mut LogFiles, name: (u64, u64)) -> Option<Arc<Segment>> {
        if let Some(at) = files.open.iter().position(|(open, _)| *open == name) {
            files.open[..=at].rotate_right(1);
            return Some(Arc::clone(&files.open[0].1));
        }
        let key = &files.by_first.get(&name)?.key;
        let segment = Arc::new(Segment::open(self.store.as_ref(), key, &self.identity)?);
        files.open.truncate(OPEN_MAX - 1);
        files.open.insert(0, (name, Arc::clone(&segment)));
        Some(segment)
    }

    fn bytes(&self) -> u64 {
        lock(&self.files).by_first.values().map(|file| file.bytes).sum()
    }

    /// Scans the folder. Files with foreign names are ignored.
    fn scan(&self) {
        let entries = match self.store.list(&self.folder) {
            Ok(entries) => entries,
            Err(error) => return log::warn!("cache: {error}"),
        };
        let files = entries.into_iter().filter_map(|entry| {
            let mut numbers = entry.key.name().split('-').map(|text| u64::from_str_radix(text, 16));
            let mut next = || numbers.next()?.ok();
            let (first, last, nonce) = (next()?, next()?, next()?);
            let file = LogFile { last, bytes: entry.bytes, key: entry.key };
            Some(((first, nonce), file))
        });
        let by_first = files.collect();
        lock(&self.files).by_first = by_first;
    }
}

/// Unique among writers on this machine, now and later.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

/// A thread that panicked leaves no state here that could make the cache wrong.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
