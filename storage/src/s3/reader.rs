//! The read backend of S3: each read is a task on the async runtime.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Instant;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

use tokio::task::JoinSet;

use super::bucket::ProcessBucket;
use super::get::{self, Opened, PIECE_BYTES};
use super::object::S3Object;
use crate::reader::in_flight::{BackendCompletion, BackendRead, InFlightReader, ReadBackend};
use crate::{Error, Object, RangeRead, ReaderOptions, Result};

/// The S3 read backend. Dropping it ends the tasks, and their connections and buffers with them.
pub(crate) struct S3Backend {
    live: Arc<ProcessBucket>,
    tasks: JoinSet<()>,
    sender: Sender<BackendCompletion>,
    done: Receiver<BackendCompletion>,
}

pub(crate) fn reader(
    live: Arc<ProcessBucket>,
    options: &ReaderOptions,
) -> InFlightReader<S3Backend> {
    let depth = options.depth_or(live.options.depth).min(live.options.depth);
    let (sender, done) = channel();
    InFlightReader::new(S3Backend { live, tasks: JoinSet::new(), sender, done }, depth, options)
}

impl fmt::Debug for S3Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Backend").field("bucket", &self.live.bucket).finish_non_exhaustive()
    }
}

impl ReadBackend for S3Backend {
    fn carry(&mut self, mut load: BackendRead) {
        let sender = self.sender.clone();
        let Some(ours) = load.object.as_any().and_then(|any| any.downcast_ref::<S3Object>()) else {
            let handle = self.live.runtime.handle();
            let read = move || {
                let (offset, buf) = (load.offset, &mut load.buf[..load.len]);
                let outcome = load.object.read_many(&mut [RangeRead { offset, buf }]);
                let moved_bytes = if outcome.is_ok() { load.len as u64 } else { 0 };
                let _ = sender.send(done(load, moved_bytes, outcome));
            };
            self.tasks.spawn_blocking_on(read, handle);
            return;
        };
        // The object may be of another bucket than the reader, which then has its own limits.
        let live = match ours.live() {
            Ok(live) => live,
            Err(e) => {
                let _ = sender.send(done(load, 0, Err(e)));
                return;
            }
        };
        let opened = Arc::clone(&ours.opened);
        let task = async move {
            let (moved_bytes, outcome) = read(&live, &opened, &mut load).await;
            let _ = sender.send(done(load, moved_bytes, outcome));
        };
        self.tasks.spawn_on(task, self.live.runtime.handle());
    }

    fn wait(&mut self, until: Instant, done: &mut Vec<BackendCompletion>) {
        let left = until.saturating_duration_since(Instant::now());
        match self.done.recv_timeout(left) {
            Ok(first) => done.push(first),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
        }
        done.extend(self.done.try_iter());
        while self.tasks.try_join_next().is_some() {}
    }

    fn place(&self, _: &Arc<dyn Object>, _: u64) -> (String, String) {
        let endpoint = self.live.clients.endpoint.as_deref().unwrap_or("AWS");
        ("s3".to_owned(), endpoint.to_owned())
    }
}

async fn read(live: &ProcessBucket, opened: &Opened, load: &mut BackendRead) -> (u64, Result<()>) {
    let (offset, due, len) = (load.offset, load.deadline, load.len);
    if let Err(e) = opened.check(offset, len) {
        return (0, Err(e));
    }
    let mut fills = FuturesUnordered::new();
    for (i, piece) in load.buf[..len].chunks_mut(PIECE_BYTES).enumerate() {
        let offset = offset + (i * PIECE_BYTES) as u64;
        fills.push(get::fill(live, opened, offset, piece, due));
    }
    let mut moved_bytes = 0;
    while let Some((moved, outcome)) = fills.next().await {
        moved_bytes += moved;
        if let Err(e) = outcome {
            return (moved_bytes, Err::<(), Error>(e));
        }
    }
    (moved_bytes, Ok(()))
}

fn done(load: BackendRead, moved_bytes: u64, outcome: Result<()>) -> BackendCompletion {
    let data = if outcome.is_ok() { 0..load.len } else { 0..0 };
    BackendCompletion { slot: load.slot, buf: load.buf, data, moved_bytes, short_reads: 0, outcome }
}
