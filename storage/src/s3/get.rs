//! A ranged read of one object that survives network faults: the body may stall, trickle, break off
//! or be of another object, and bytes received are not requested again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use aws_sdk_s3::Client;
use aws_sdk_s3::operation::RequestId as _;
use aws_sdk_s3::primitives::ByteStream;

use super::attempt_error::AttemptError;
use super::bucket::{ProcessBucket, Tries, count};
use crate::{RemoteErrorKind, Result};

type AttemptResult<T> = std::result::Result<T, AttemptError>;

/// A body with fewer bytes within the stall time is too slow: it would take ten minutes for a
/// mebibyte.
const DRIP_BYTES: usize = 16 << 10;

/// An object as it was when it was opened.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Its key in the bucket.
    pub(crate) path: String,
    /// Its name in messages.
    pub(crate) name: String,
    pub(crate) len_bytes: u64,
    pub(crate) etag: String,
}

/// The destination. Two requests may fill it at once: both return the same bytes, and neither
/// stores bytes that the other has already stored.
struct Filled<'a> {
    buf: &'a mut [u8],
    /// Bytes received, from the start.
    done: usize,
}

/// Fills a buffer from a range within the object. Returns the bytes transferred for that, also if
/// it fails.
pub(crate) async fn fill(
    live: &ProcessBucket,
    object: &Opened,
    offset: u64,
    buf: &mut [u8],
    deadline: Option<Instant>,
) -> (u64, Result<()>) {
    let len = buf.len();
    let filled = Mutex::new(Filled { buf, done: 0 });
    let get = Get { live, object, offset, len, filled, moved: AtomicU64::new(0) };
    let mut tries = Tries::default();
    let outcome = loop {
        match get.once(&mut tries, deadline).await {
            Ok(()) => break Ok(()),
            Err(failed) => {
                if let Err(failed) = tries.wait_for_retry(live, failed).await {
                    let operation = format!("read {len} bytes at byte {offset} of");
                    break Err(tries.error(&operation, &object.name, failed));
                }
            }
        }
    };
    let moved = get.moved.into_inner();
    count(&live.metrics.moved_bytes, moved);
    if outcome.is_ok() {
        live.limiter.record_success();
        count(&live.metrics.delivered_bytes, len as u64);
    }
    (moved, outcome)
}

struct Get<'a> {
    live: &'a ProcessBucket,
    object: &'a Opened,
    offset: u64,
    len: usize,
    filled: Mutex<Filled<'a>>,
    moved: AtomicU64,
}

impl Get<'_> {
    /// One attempt, when it is admitted. The time of a first attempt is recorded.
    async fn once(&self, tries: &mut Tries, deadline: Option<Instant>) -> AttemptResult<()> {
        let _permit = self.live.limiter.acquire().await;
        tries.start(self.live);
        let made = tries.made();
        let started = Instant::now();
        let outcome = self.hedged(made, deadline).await;
        if outcome.is_ok() && made == 0 {
            self.live.latency.record(self.len, started.elapsed());
        }
        outcome
    }

    /// A request, and a hedged one if the first is late.
    async fn hedged(&self, made: u32, deadline: Option<Instant>) -> AttemptResult<()> {
        let live = self.live;
        // Failed requests are retried soon enough: only first attempts are hedged.
        let slack = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let late = live.latency.late_after(self.len, slack).filter(|_| live.options.hedge);
        let clients = live.clients();
        let Some(late) = late.filter(|_| made == 0) else {
            return self.request(&clients.usual).await;
        };
        let hedged = AtomicBool::new(false);
        let first = self.request(&clients.usual);
        let second = async {
            tokio::time::sleep(late).await;
            if !live.latency.may_hedge() {
                std::future::pending::<()>().await;
            }
            hedged.store(true, Ordering::Relaxed);
            count(&live.metrics.hedges_sent, 1);
            self.request(&clients.fresh).await
        };
        tokio::pin!(first, second);
        tokio::select! {
            outcome = &mut first => match outcome {
                Err(failed) if hedged.load(Ordering::Relaxed) => second.await.map_err(|_| failed),
                outcome => outcome,
            },
            outcome = &mut second => match outcome {
                Ok(()) => {
                    count(&live.metrics.hedges_won, 1);
                    Ok(())
                }
                Err(_) => first.await,
            },
        }
    }

    /// Requests the missing bytes, and stores them as they arrive.
    async fn request(&self, client: &Client) -> AttemptResult<()> {
        let mut at = self.done();
        let (mut body, id) = self.open(client, at).await?;
        let stall = self.live.options.stall;
        let mut window = (Instant::now(), at);
        while self.done() < self.len {
            let next = tokio::time::timeout(stall, body.next()).await;
            let before = at;
            let with_progress = |mut failed: AttemptError| {
                failed.request_id.clone_from(&id);
                failed.response =
                    format!("{}, after {before} of {} bytes", failed.response, self.len);
                failed
            };
            let stalled = || {
                let response = format!("no data for {stall:?}");
                AttemptError::new(RemoteErrorKind::Stalled, response)
            };
            let chunk = match next.map_err(|_| with_progress(stalled()))? {
                None => {
                    let ended = "response ended";
                    return Err(with_progress(AttemptError::new(
                        RemoteErrorKind::Truncated,
                        ended,
                    )));
                }
                Some(chunk) => chunk.map_err(|e| with_progress(AttemptError::of_body(&e)))?,
            };
            if chunk.len() > self.len - at {
                let more = "more bytes than requested";
                return Err(with_progress(AttemptError::new(RemoteErrorKind::WrongLength, more)));
            }
            self.take(at, &chunk);
            at += chunk.len();
            if window.0.elapsed() >= stall {
                let received = at - window.1;
                if received < DRIP_BYTES.min(self.len - at) {
                    let rate = format!("{received} bytes in {:?}", window.0.elapsed());
                    return Err(with_progress(AttemptError::new(RemoteErrorKind::Drip, rate)));
                }
                window = (Instant::now(), at);
            }
        }
        Ok(())
    }

    /// Opens a response, and checks that it is for this object and this range.
    async fn open(
        &self,
        client: &Client,
        at: usize,
    ) -> AttemptResult<(ByteStream, Option<String>)> {
        let (object, live) = (self.object, self.live);
        let (first, end) = (self.offset + at as u64, self.offset + self.len as u64);
        let request = client
            .get_object()
            .bucket(&live.bucket)
            .key(&object.path)
            .range(format!("bytes={first}-{}", end - 1))
            .if_match(&object.etag)
            .send();
        count(&live.metrics.requests, 1);
        let stalled = |_| {
            let response = format!("no response within {:?}", live.options.stall);
            AttemptError::new(RemoteErrorKind::Stalled, response)
        };
        let output = tokio::time::timeout(live.options.stall, request).await.map_err(stalled)?;
        let output = output.map_err(AttemptError::of)?;
        let id = output.request_id().map(str::to_owned);
        let wrong = |cause, response: String| {
            let request_id = id.clone();
            Err(AttemptError { request_id, ..AttemptError::new(cause, response) })
        };
        if let Some(found) = output.e_tag().filter(|&etag| etag != object.etag) {
            let response = format!("expected ETag {}, found {found}", object.etag);
            return wrong(RemoteErrorKind::Replaced, response);
        }
        let expected = format!("bytes {first}-{}/{}", end - 1, object.len_bytes);
        let is_complete = first == 0 && end == object.len_bytes;
        match output.content_range() {
            Some(range) if range == expected => {}
            None if is_complete => {}
            range => {
                let found = range.unwrap_or("no range");
                let response = format!("expected {expected}, found {found}");
                return wrong(RemoteErrorKind::WrongLength, response);
            }
        }
        Ok((output.body, id))
    }

    fn done(&self) -> usize {
        self.filled.lock().unwrap_or_else(PoisonError::into_inner).done
    }

    /// Copies a chunk to its place, except bytes that are already filled.
    fn take(&self, at: usize, chunk: &[u8]) {
        count(&self.moved, chunk.len() as u64);
        let mut filled = self.filled.lock().unwrap_or_else(PoisonError::into_inner);
        let (end, done) = (at + chunk.len(), filled.done);
        if end > done {
            // Both requests started within the received bytes, so there is no gap.
            filled.buf[done..end].copy_from_slice(&chunk[done - at..]);
            filled.done = end;
        }
    }
}

/// Size of the ranges of a long read: each is a request that is retried or hedged separately.
pub(crate) const PIECE_BYTES: usize = 8 << 20;
