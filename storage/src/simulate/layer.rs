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
    fn named<T>(&self, doing: &str, key: &Key, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let ticket = self.sim.ask(Op::Meta, 1, 0);
        self.sim.carry(ticket, doing, || self.display(key), work)
    }

    /// The listing requests for this many names.
    fn listed<T>(&self, key: &Key, names: Result<Vec<T>>) -> Result<Vec<T>> {
        let names = names?;
        let page = self.sim.model.meta.list_page as usize;
        let ticket = self.sim.ask(Op::Meta, names.len().div_ceil(page).max(1) as u64, 0);
        self.sim.carry(ticket, "list", || self.display(key), || Ok(names))
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
            flying: VecDeque::new(),
            flying_bytes: 0,
            last: SimulatedCompletion { done: 0, failure: None },
        })
    }

    /// Selects the servers of a file: the FNV-1a hash of its name.
    fn file(&self, key: &Key) -> u64 {
        let mix = |hash: u64, &byte: &u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        self.display(key).as_bytes().iter().fold(0xcbf2_9ce4_8422_2325, mix)
    }

    fn drafts(&self, operation: &'static str, key: &Key) -> Result<()> {
        match self.sim.model.meta.can_draft {
            true => Ok(()),
            false => Err(Error::Unsupported { operation, object: self.display(key) }),
        }
    }
}

impl Storage for SimulationLayer {
    fn open(&self, key: &Key) -> Result<Arc<dyn Object>> {
        let inner = self.named("open", key, || self.inner.open(key))?;
        Ok(self.object(inner, key))
    }

    fn create(&self, key: &Key, len_bytes_max: u64) -> Result<Box<dyn Upload>> {
        let inner = self.named("create", key, || self.inner.create(key, len_bytes_max))?;
        Ok(self.upload(inner, key))
    }

    fn list(&self, folder: &Key) -> Result<Vec<ObjectMeta>> {
        self.listed(folder, self.inner.list(folder))
    }

    fn list_names(&self, folder: &Key) -> Result<Vec<String>> {
        self.listed(folder, self.inner.list_names(folder))
    }

    fn delete(&self, key: &Key) -> Result<()> {
        self.named("delete", key, || self.inner.delete(key))
    }

    fn publish(&self, staged: &Key, target: &Key) -> Result<()> {
        if !self.sim.model.meta.can_publish {
            return Err(Error::Unsupported { operation: "publish", object: self.display(target) });
        }
        self.named("publish", target, || self.inner.publish(staged, target))
    }

    fn has_atomic_publish(&self, folder: &Key) -> Result<bool> {
        Ok(self.sim.model.meta.can_publish && self.inner.has_atomic_publish(folder)?)
    }

    fn replace(&self, key: &Key, bytes: &[u8]) -> Result<()> {
        let sim = &self.sim;
        let written = sim.transfer(Op::Write, self.file(key), 0, bytes.len() as u64);
        let ticket = written.and(sim.ask(Op::Commit, 1, written.done));
        sim.carry(ticket, "replace", || self.display(key), || self.inner.replace(key, bytes))
    }

    fn sync_folder(&self, folder: &Key) -> Result<()> {
        self.named("sync", folder, || self.inner.sync_folder(folder))
    }

    fn delete_empty_folder(&self, folder: &Key) -> Result<()> {
        self.named("delete", folder, || self.inner.delete_empty_folder(folder))
    }

    fn delete_folder(&self, folder: &Key) -> Result<()> {
        let page = u64::from(self.sim.model.meta.delete_page);
        let count = self.inner.list(folder)?.len() as u64;
        let ticket = self.sim.ask(Op::Meta, count.div_ceil(page) + 1, 0);
        let doing = "delete";
        self.sim.carry(ticket, doing, || self.display(folder), || self.inner.delete_folder(folder))
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        self.named("stat", &Key::root(), || self.inner.free_bytes())
    }

    fn display(&self, key: &Key) -> String {
        self.inner.display(key)
    }

    fn remove_orphans(&self, folder: &Key) -> Result<Vec<String>> {
        self.named("clean", folder, || self.inner.remove_orphans(folder))
    }

    fn remove_orphans_of(&self, folder: &Key, writer: &ProcessIdentity) -> Result<Vec<String>> {
        self.named("clean", folder, || self.inner.remove_orphans_of(folder, writer))
    }

    fn create_resumable(&self, key: &Key) -> Result<Box<dyn ResumableUpload>> {
        self.drafts("create a resumable upload of", key)?;
        let inner = self.named("create", key, || self.inner.create_resumable(key))?;
        Ok(self.upload(inner, key))
    }

    fn resume(&self, key: &Key, from: SyncPoint) -> Result<Box<dyn ResumableUpload>> {
        self.drafts("resume an upload of", key)?;
        let inner = self.named("open", key, || self.inner.resume(key, from))?;
        Ok(self.upload(inner, key))
    }

    fn resume_with(
        &self,
        key: &Key,
        find: &mut dyn FnMut(&dyn Object) -> Result<SyncPoint>,
    ) -> Result<Box<dyn ResumableUpload>> {
        self.drafts("resume an upload of", key)?;
        let inner = self.named("open", key, || self.inner.resume_with(key, find))?;
        Ok(self.upload(inner, key))
    }

    fn open_partial(&self, key: &Key) -> Result<Arc<dyn Object>> {
        self.drafts("open an unfinished upload of", key)?;
        let inner = self.named("open", key, || self.inner.open_partial(key))?;
        Ok(self.object(inner, key))
    }

    fn discard(&self, key: &Key) -> Result<()> {
        self.drafts("discard an upload of", key)?;
        self.named("delete", key, || self.inner.discard(key))
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
    fn ask(&self, offset: u64, len: u64) -> SimulatedCompletion {
        self.sim.transfer(Op::Read, self.file, offset, len)
    }
}

impl Object for SimObject {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>]) -> Result<()> {
        let asked = reads.iter().map(|read| self.ask(read.offset, read.buf.len() as u64));
        let Some(ticket) = asked.reduce(SimulatedCompletion::and) else { return Ok(()) };
        let (offset, bytes) = (reads[0].offset, reads.iter().map(|read| read.buf.len()).sum());
        let doing = Reading { offset, bytes };
        self.sim.carry(ticket, doing, || self.display(), || self.inner.read_many(reads))
    }

    /// A map counts as a read of the complete file.
    fn map(&self) -> Result<Map> {
        let ticket = self.ask(0, self.len_bytes());
        self.sim.carry(ticket, "map", || self.display(), || self.inner.map())
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
    flying: VecDeque<(u64, u64)>,
    flying_bytes: u64,
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
            let ticket = self.sim.transfer(Op::Write, self.file, self.offset, bytes);
            self.offset += bytes;
            self.flying.push_back((ticket.done, bytes));
            self.flying_bytes += bytes;
            self.last = self.last.and(ticket);
        }
        let room = u64::from(self.sim.model.client.in_flight_mib) << 20;
        while self.flying_bytes > room
            && let Some((done, bytes)) = self.flying.pop_front()
        {
            self.flying_bytes -= bytes;
            // Requests that completed before this call do not count as late.
            if done > before { self.sim.finish(done) } else { self.sim.wait(done) }
        }
        self.check("write")
    }

    /// After a failure every later call fails.
    fn check(&self, doing: &str) -> Result<()> {
        let SimulatedCompletion { failure, .. } = self.last;
        match failure {
            None => Ok(()),
            Some(_) => self.sim.carry(self.last, doing, || self.name.clone(), || Ok(())),
        }
    }

    /// Sends the rest and the commit request.
    fn commit(&mut self) -> Result<SimulatedCompletion> {
        self.send(true)?;
        let start = self.last.done;
        Ok(self.last.and(self.sim.ask(Op::Commit, 1, start)))
    }
}

impl<U: ?Sized + Upload> Upload for SimUpload<U> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.write(bytes)?;
        self.send(false)
    }

    fn write_with_crc(&mut self, bytes: &[u8]) -> Result<u64> {
        let sum = self.inner.write_with_crc(bytes)?;
        self.send(false).map(|()| sum)
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
        sim.carry(last, "write", || name, || inner.flush())
    }

    fn finish(mut self: Box<Self>) -> Result<FileEntry> {
        let ticket = self.commit()?;
        let Self { inner, sim, name, .. } = *self;
        sim.carry(ticket, "finish", || name, || inner.finish())
    }

    fn finish_deferred(mut self: Box<Self>) -> Result<(FileEntry, PendingDirSync)> {
        let ticket = self.commit()?;
        let Self { inner, sim, name, .. } = *self;
        sim.carry(ticket, "finish", || name, || inner.finish_deferred())
    }
}

impl<U: ?Sized + ResumableUpload> ResumableUpload for SimUpload<U> {
    fn sync(&mut self) -> Result<SyncPoint> {
        let ticket = self.commit()?;
        let name = self.name.clone();
        let Self { inner, sim, .. } = self;
        sim.carry(ticket, "sync", || name, || inner.sync())
    }
}
