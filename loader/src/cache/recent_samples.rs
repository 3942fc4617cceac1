use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use storage::{Key, Storage};

use super::segment::{Segment, SegmentBuilder};
use super::{Identity, room};
use crate::{Result, SampleCache, SampleOrder};

/// How an [`OrderLog`] is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The most bytes that it may take. Default: all that may be written but a twentieth.
    pub limit_bytes: u64,
    /// As [`CacheOptions::salt`](super::CacheOptions::salt). Default: 0.
    pub salt: u64,
    /// A file has so many bytes. Default: 64 MiB, which any disk writes at its best; as many are
    /// lost to a crash, and twice as many stand in memory.
    pub segment_bytes: usize,
}

impl Default for LogOptions {
    fn default() -> Self {
        LogOptions { limit_bytes: u64::MAX, salt: 0, segment_bytes: 64 << 20 }
    }
}

/// Tables that are kept in memory: one is read at a time, and a neighbour or two of other jobs.
const OPEN_MAX: usize = 4;

/// Files that are asked for a sample, if several ranks or jobs have written runs that overlap.
const OVERLAPS_MAX: usize = 8;

/// Names that are looked at for them: those that begin last before the sample. A microsecond or
/// two, and runs of 64 ranks that begin at different places are all among them.
const LOOK_BACK_MAX: usize = 256;

/// The samples of an order that were fetched lately, in the order of their use.
///
/// What comes from afar is gathered to files of [`LogOptions::segment_bytes`], which a thread
/// writes; a sample is dropped sooner than waited for. A run that begins again at its last
/// checkpoint finds there what it had fetched since. What lies before the checkpoint goes, file by
/// file, those that other jobs wrote and this one never read last of all, when the space is wanted.
/// When there is no space, what is there stays: a restart wants the oldest first.
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

/// What the writer is given.
#[derive(Debug, Default)]
struct LogState {
    filling: SegmentBuilder,
    /// Full, to be written.
    handed: Option<SegmentBuilder>,
    /// Memory to be filled next.
    spare: SegmentBuilder,
    /// The writer has nothing to do.
    is_idle: bool,
    is_over: bool,
    checkpointed: u64,
    /// What the writer has dropped files for.
    dropped: u64,
}

/// What lies in the folder. A file's name has its first sample, its last, and a number that makes
/// it unlike those of other writers.
#[derive(Debug, Default)]
struct LogFiles {
    by_first: BTreeMap<(u64, u64), LogFile>,
    open: Vec<((u64, u64), Arc<Segment>)>,
    /// Those that this process wrote or read.
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
    /// Opens the log of an order, with what is in it by now.
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
            "cache: {} holds {} of samples in their order",
            store.display(&shared.folder),
            storage::ByteSize(bytes)
        );
        let writer = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("cache".to_owned())
            .spawn(move || writer.write())
            .map_err(|error| storage::Error::from_io("start a thread for", "the cache", error))?;
        Ok(OrderLog { shared, writer: Some(writer) })
    }

    /// Tells that the run will never go back behind so many samples, because a checkpoint of that
    /// state is durable. What only served to go back further goes. Does not wait for it.
    pub fn checkpointed(&self, samples_consumed: u64) {
        let mut state = lock(&self.shared.state);
        state.checkpointed = state.checkpointed.max(samples_consumed);
        self.shared.work.notify_all();
    }

    /// Writes what is gathered by now, and waits until all is done that was asked for.
    pub fn flush(&self) {
        let mut state = lock(&self.shared.state);
        while !state.filling.is_empty() || state.handed.is_some() {
            state.hand_over();
            self.shared.work.notify_all();
            state = wait(&self.shared.work, state);
        }
        while !(state.is_idle && state.dropped >= state.checkpointed) {
            self.shared.work.notify_all();
            state = wait(&self.shared.work, state);
        }
    }

    /// What the log takes on the disk, as far as this process knows.
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
                return; // the disk is slower than what comes: forgotten
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
        lock(&self.shared.state).is_over = true;
        self.shared.work.notify_all();
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl LogState {
    /// Gives what is filled to the writer, unless that has not begun with what it was given before.
    fn hand_over(&mut self) -> bool {
        if self.handed.is_some() {
            return false;
        }
        let spare = std::mem::take(&mut self.spare);
        self.handed = Some(std::mem::replace(&mut self.filling, spare));
        true
    }
}

impl LogShared {
    /// The writer's thread.
    fn write(&self) {
        let mut state = lock(&self.state);
        loop {
            let to = state.checkpointed;
            if to > state.dropped {
                drop(state);
                self.drop_used_before(to);
                state = lock(&self.state);
                state.dropped = to;
            } else if let Some(mut filling) = state.handed.take() {
                state.is_idle = false;
                drop(state);
                self.write_file(&mut filling, to);
                filling.clear();
                state = lock(&self.state);
                state.spare = filling;
            } else if state.is_over {
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
        self.scan(); // what other jobs have written counts too
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

    /// Whether so many bytes may be written, after what is of no use to this run has gone.
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
            let behind = files.by_first.iter().find(|(_, file)| file.last < checkpointed);
            let Some(name) = behind.map(|(&name, _)| name) else {
                if !std::mem::replace(&mut files.is_full, true) {
                    log::info!("cache: {} is full", self.store.display(&self.folder));
                }
                return false;
            };
            self.forget(&mut files, name);
        }
    }

    fn drop_used_before(&self, sample: u64) {
        let mut files = lock(&self.files);
        let behind =
            |name: &&(u64, u64)| files.by_first.get(name).is_none_or(|file| file.last < sample);
        let behind: Vec<(u64, u64)> = files.used.iter().filter(behind).copied().collect();
        for name in behind {
            self.forget(&mut files, name);
        }
    }

    fn forget(&self, files: &mut LogFiles, name: (u64, u64)) {
        files.used.remove(&name);
        files.open.retain(|(open, _)| *open != name);
        if let Some(file) = files.by_first.remove(&name) {
            let _ = self.store.delete(&file.key); // somebody else may have been faster
        }
    }

    fn find(&self, sample: u64, into: &mut [u8]) -> bool {
        let mut files = lock(&self.files);
        let runs = files.by_first.range(..=(sample, u64::MAX)).rev().take(LOOK_BACK_MAX);
        let runs = runs.filter(|(_, file)| file.last >= sample).map(|(&name, _)| name);
        let mut names = [None; OVERLAPS_MAX];
        names.iter_mut().zip(runs).for_each(|(place, name)| *place = Some(name));
        for name in names.into_iter().flatten() {
            let Some(segment) = self.segment(&mut files, name) else {
                self.forget(&mut files, name); // deleted, or not what it should be
                continue;
            };
            if segment.find(sample, into) {
                files.used.insert(name);
                return true;
            }
        }
        false
    }

    /// A file with its table, the one that was wanted last kept open.
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

    /// Looks at what lies in the folder. What has no name of ours is let alone.
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

/// Unlike the numbers of other writers on this machine, now and later.
fn nonce() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

/// A thread that panicked has left nothing half done here that a cache could be wrong by.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}
