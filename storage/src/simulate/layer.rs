//! The wrapper of a simulation: stores, objects and uploads whose calls complete at the simulated
//! time.

use std::collections::VecDeque;
use std::sync::Arc;

use super::model::Op;
use super::{SimulatedCompletion, Simulation};
use crate::{
    Error, FileEntry, Key, Map, Object, ObjectMeta, PendingDirSync, ProcessIdentity, Profile,
    RangeRead, Result, ResumableUpload, Storage, SyncPoint, Upload,
};

/// Prefix of the name of a simulated file system.
pub(crate) const MARK: &str = "simulated ";

/// A store with the timing of a model.
#[derive(Debug)]
pub(super) struct SimulationLayer {
    inner: Arc<dyn Storage>,
    sim: Arc<Simulation>,
    profile: Profile,
}

impl SimulationLayer {
    pub(super) fn new(inner: Arc<dyn Storage>, sim: Arc<Simulation>) -> Self {
        let mut profile = inner.profile().clone();
        profile.file_system = format!("{MARK}{}", sim.model.name);
        SimulationLayer { inner, sim, profile }
    }

    /// One metadata request.
    fn meta_request<T>(
        &self,
        operation: &str,
        key: &Key,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let completion = self.sim.request(Op::Meta, 1, 0);
        self.sim.complete(completion, operation, || self.display(key), work)
    }

    /// The listing requests for this many names.
    fn list_requests<T>(&self, key: &Key, names: Result<Vec<T>>) -> Result<Vec<T>> {
        let names = names?;
        let page = self.sim.model.meta.list_page as usize;
        let completion = self.sim.request(Op::Meta, names.len().div_ceil(page).max(1) as u64, 0);
        self.sim.complete(completion, "list", || self.display(key), || Ok(names))
    }

    fn object(&self, inner: Arc<dyn Object>, key: &Key) -> Arc<dyn Object> {
        Arc::new(SimObject { inner, sim: Arc::clone(&self.sim), file: self.file(key) })
    }

    fn upload<U: ?Sized + Upload>(&self, inner: Box<U>, key: &Key) -> Box<SimUpload<U>> {
        let at = inner.len_bytes();
        Box::new(SimUpload {
            inner,
            sim: Arc::clone(&self.sim),
            file: self.file(key),
            name: self.display(key),
            offset: at,
            in_flight: VecDeque::new(),
            in_flight_bytes: 0,
            last: SimulatedCompletion { done: 0, failure: None },
        })
    }

    /// Selects the servers of a file: the FNV-1a hash of its name.
    fn file(&self, key: &Key) -> u64 {
        let mix = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        self.display(key).as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix)
    }

    fn check_resumable(&self, operation: &'static str, key: &Key) -> Result<()> {
        match self.sim.model.meta.can_draft {
            true => Ok(()),
            false => Err(Error::Unsupported { operation, object: self.display(key) }),
        }
    }
}

impl Storage for SimulationLayer {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let inner = self.meta_request("open", key, || self.inner.open(key))?;
        Ok(self.object(inner, key))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        let inner = self.meta_request("create", key, || self.inner.create(key, len_bytes_max))?;
        Ok(self.upload(inner, key))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        self.list_requests(folder, self.inner.list(folder))
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        self.list_requests(folder, self.inner.list_names(folder))
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.meta_request("delete", key, || self.inner.delete(key))
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        if !self.sim.model.meta.can_publish {
            return Err(Error::Unsupported { operation: "publish", object: self.display(target) });
        }
        self.meta_request("publish", target, || self.inner.publish(staged, target))
    }

    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        Ok(self.sim.model.meta.can_publish && self.inner.has_atomic_publish(folder)?)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let sim = &self.sim;
        let written = sim.transfer(Op::Write, self.file(key), 0, bytes.len() as u64);
        let completion = written.and(sim.request(Op::Commit, 1, written.done));
        sim.complete(completion, "replace", || self.display(key), || self.inner.replace(key, bytes))
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        self.meta_request("sync", folder, || self.inner.sync_folder(folder))
    }

    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        self.meta_request("delete", folder, || self.inner.delete_empty_folder(folder))
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        let page = u64::from(self.sim.model.meta.delete_page);
        let count = self.inner.list(folder)?.len() as u64;
        let completion = self.sim.request(Op::Meta, count.div_ceil(page) + 1, 0);
        let operation = "delete";
        self.sim.complete(
            completion,
            operation,
            || self.display(folder),
            || self.inner.delete_folder(folder),
        )
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.meta_request("stat", &Key::root(), || self.inner.free_bytes())
    }

    fn display(&self, key: &Key) -> String {
        self.inner.display(key)
    }

    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        self.meta_request("clean", folder, || self.inner.remove_orphans(folder))
    }

    fn remove_orphans_of(&self, folder: &Key, writer: &ProcessIdentity) -> Result<Vec<String>> {
        self.meta_request("clean", folder, || self.inner.remove_orphans_of(folder, writer))
    }

    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        self.check_resumable("create a resumable upload of", key)?;
        let inner = self.meta_request("create", key, || self.inner.create_resumable(key))?;
        Ok(self.upload(inner, key))
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        self.check_resumable("resume an upload of", key)?;
        let inner = self.meta_request("open", key, || self.inner.resume(key, from))?;
        Ok(self.upload(inner, key))
    }

    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        self.check_resumable("resume an upload of", key)?;
        let inner = self.meta_request("open", key, || self.inner.resume_with(key, find))?;
        Ok(self.upload(inner, key))
    }

    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.check_resumable("open an unfinished upload of", key)?;
        let inner = self.meta_request("open", key, || self.inner.open_partial(key))?;
        Ok(self.object(inner, key))
    }

    fn discard(&self, key: &Key) -> Result<()> {
        self.check_resumable("discard an upload of", key)?;
        self.meta_request("delete", key, || self.inner.discard(key))
    }

    fn reader_group(&self) -> Option<String> {
        Some(format!("simulation {:p}", Arc::as_ptr(&self.sim)))
    }

    fn metrics(&self) -> Vec<(String, u64)> {
        let done = self.sim.counters();
        [
            ("simulated_reads", done.reads),
            ("simulated_writes", done.writes),
            ("simulated_commits", done.commits),
            ("simulated_metas", done.metas),
            ("simulated_stalls", done.stalls),
            ("simulated_failures", done.failures),
            ("simulated_late_ops", done.late_ops),
            ("simulated_late_us", done.late_us),
        ]
        .map(|(name, count)| (name.to_owned(), count))
        .into()
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }
}

#[derive(Debug)]
struct SimObject {
    inner: Arc<dyn Object>,
    sim: Arc<Simulation>,
    file: u64,
}

impl SimObject {
    fn request(&self, offset: u64, len: u64) -> SimulatedCompletion {
        self.sim.transfer(Op::Read, self.file, offset, len)
    }
}

impl Object for SimObject {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        let requests = reads.iter().map(|read| self.request(read.offset, read.buf.len() as u64));
        let Some(completion) = requests.reduce(SimulatedCompletion::and) else { return Ok(()) };
        let (offset, bytes) = (reads[0].offset, reads.iter().map(|read| read.buf.len()).sum());
        let operation = Reading { offset, bytes };
        self.sim.complete(completion, operation, || self.display(), || self.inner.read_many(reads))
    }

    /// A map counts as a read of the complete file.
    fn map(&self) -> Result<Map> {
        let completion = self.request(0, self.len_bytes());
        self.sim.complete(completion, "map", || self.display(), || self.inner.map())
    }

    fn display(&self) -> String {
        self.inner.display()
    }

    fn version(&self) -> Option<String> {
        self.inner.version()
    }

    fn memory_align(&self) -> usize {
        self.inner.memory_align()
    }
}

/// The operation in errors; formatted only for a read that fails.
struct Reading {
    offset: u64,
    bytes: usize,
}

impl std::fmt::Display for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "read {} bytes at byte {} of", self.bytes, self.offset)
    }
}

/// An upload that sends its bytes in full requests, asynchronously, up to the in-flight limit of
/// the model's client.
#[derive(Debug)]
struct SimUpload<U: ?Sized> {
    inner: Box<U>,
    sim: Arc<Simulation>,
    file: u64,
    name: String,
    /// Offset of the bytes not yet sent.
    offset: u64,
    /// Completion time and bytes of each request.
    in_flight: VecDeque<(u64, u64)>,
    in_flight_bytes: u64,
    /// Completion of all of them, and whether one fails.
    last: SimulatedCompletion,
}

impl<U: ?Sized + Upload> SimUpload<U> {
    /// Sends all full requests, or all bytes; then waits as the client would.
    fn send(&mut self, all: bool) -> Result<()> {
        let before = self.sim.elapsed_ns();
        let request = u64::from(self.sim.model.servers.request_kib) << 10;
        let len = self.inner.len_bytes();
        let until = if all { len } else { len / request * request };
        while self.offset < until {
            let bytes = (request - self.offset % request).min(until - self.offset);
            let completion = self.sim.transfer(Op::Write, self.file, self.offset, bytes);
            self.offset += bytes;
            self.in_flight.push_back((completion.done, bytes));
            self.in_flight_bytes += bytes;
            self.last = self.last.and(completion);
        }
        let room = u64::from(self.sim.model.client.in_flight_mib) << 20;
        while self.in_flight_bytes > room
            && let Some((done, bytes)) = self.in_flight.pop_front()
        {
            self.in_flight_bytes -= bytes;
            // Requests that completed before this call do not count as late.
            if done > before { self.sim.finish(done) } else { self.sim.wait(done) }
        }
        self.check("write")
    }

    /// After a failure every later call fails.
    fn check(&self, operation: &str) -> Result<()> {
        let SimulatedCompletion { failure, .. } = self.last;
        match failure {
            None => Ok(()),
            Some(_) => self.sim.complete(self.last, operation, || self.name.clone(), || Ok(())),
        }
    }

    /// Sends the rest and the commit request.
    fn commit(&mut self) -> Result<SimulatedCompletion> {
        self.send(true)?;
        let start = self.last.done;
        Ok(self.last.and(self.sim.request(Op::Commit, 1, start)))
    }
}

impl<U: ?Sized + Upload> Upload for SimUpload<U> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write(bytes)?;
        self.send(false)
    }

    fn write_with_crc(&mut self, bytes: &[u8]) -> Result<u64> {
        let crc64 = self.inner.write_with_crc(bytes)?;
        self.send(false).map(|()| crc64)
    }

    fn write_with_known_crc(&mut self, bytes: &[u8], crc64: u64) -> Result<()> {
        self.inner.write_with_known_crc(bytes, crc64)?;
        self.send(false)
    }

    fn stage_in(&mut self, bytes_max: u64) {
        self.inner.stage_in(bytes_max);
    }

    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn flush(&mut self) -> Result<()> {
        self.send(true)?;
        let (last, name) = (self.last, self.name.clone());
        let Self { inner, sim, .. } = self;
        sim.complete(last, "write", || name, || inner.flush())
    }

    fn finish(mut self: Box<Self>) -> Result<FileEntry> {
        let completion = self.commit()?;
        let Self { inner, sim, name, .. } = *self;
        sim.complete(completion, "finish", || name, || inner.finish())
    }

    fn finish_deferred(mut self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        let completion = self.commit()?;
        let Self { inner, sim, name, .. } = *self;
        sim.complete(completion, "finish", || name, || inner.finish_deferred())
    }
}

impl<U: ?Sized + ResumableUpload> ResumableUpload for SimUpload<U> {
    fn sync(&mut self) -> Result<SyncPoint> {
        let completion = self.commit()?;
        let name = self.name.clone();
        let Self { inner, sim, .. } = self;
        sim.complete(completion, "sync", || name, || inner.sync())
    }
}
