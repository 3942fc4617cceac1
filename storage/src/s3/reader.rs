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
    fn submit(&mut self, mut request: BackendRead) {
        let sender = self.sender.clone();
        let Some(ours) = request.object.as_any().and_then(|any| any.downcast_ref::<S3Object>())
        else {
            let handle = self.live.runtime.handle();
            let read = move || {
                let (offset, buf) = (request.offset, &mut request.buf[..request.len]);
                let outcome = request.object.read_many(&mut [RangeRead { offset, buf }]);
                let moved_bytes = if outcome.is_ok() { request.len as u64 } else { 0 };
                let _ = sender.send(done(request, moved_bytes, outcome));
            };
            self.tasks.spawn_blocking_on(read, handle);
            return;
        };
        // The object may be in another bucket than the reader, with limits of its own.
        let live = match ours.live() {
            Ok(live) => live,
            Err(e) => {
                let _ = sender.send(done(request, 0, Err(e)));
                return;
            }
        };
        let opened = Arc::clone(&ours.opened);
        let task = async move {
            let (moved_bytes, outcome) = read(&live, &opened, &mut request).await;
            let _ = sender.send(done(request, moved_bytes, outcome));
        };
        self.tasks.spawn_on(task, self.live.runtime.handle());
    }

    fn wait(&mut self, until: Instant, done: &mut Vec<BackendCompletion>) {
        let remaining = until.saturating_duration_since(Instant::now());
        match self.done.recv_timeout(remaining) {
            Ok(first) => done.push(first),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return,
        }
        done.extend(self.done.try_iter());
        while self.tasks.try_join_next().is_some() {}
    }

    fn describe(&self, _: &Arc<dyn Object>, _: u64) -> (String, String) {
        let endpoint = self.live.clients().endpoint.clone();
        ("s3".to_owned(), endpoint.unwrap_or_else(|| "AWS".to_owned()))
    }
}

async fn read(
    live: &ProcessBucket,
    opened: &Opened,
    request: &mut BackendRead,
) -> (u64, Result<()>) {
    let (offset, deadline, len) = (request.offset, request.deadline, request.len);
    if let Err(e) = opened.check(offset, len) {
        return (0, Err(e));
    }
    let mut fills = FuturesUnordered::new();
    for (i, piece) in request.buf[..len].chunks_mut(PIECE_BYTES).enumerate() {
        let offset = offset + (i * PIECE_BYTES) as u64;
        fills.push(get::fill(live, opened, offset, piece, deadline));
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

fn done(request: BackendRead, moved_bytes: u64, outcome: Result<()>) -> BackendCompletion {
    let data = if outcome.is_ok() { 0..request.len } else { 0..0 };
    BackendCompletion {
        slot: request.slot,
        buf: request.buf,
        data,
        moved_bytes,
        short_reads: 0,
        outcome,
    }
}
