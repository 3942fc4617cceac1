//! Reads in flight: how samples come, many at a time and in any order.
//!
//! [`crate::Object::read_many`] is a batch: it returns when all is there. A loader that knows what
//! it will read minutes from now keeps a window of reads open instead, and takes each as it comes.
//! That is a [`Reader`]: [`ReadRequest`]s go in, [`Completion`]s come out. `in_flight` tracks the
//! requests, timeouts and retries for every backend. `uring_backend` and `worker_pool` carry reads
//! of files; `file_backend` chooses between them for each mount.
//!
//! The kernel owns a buffer from submission to completion, whatever the process decides in between.
//! So a request that is given up becomes an orphan: it keeps its buffer and its file until it
//! comes, and only its tag goes back to the caller.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Buffer, BufferPool, Object, Result};

/// Reads in flight on buffers that they own. One thread owns a reader; it is made by the thread
/// that uses it. Dropping it never blocks: what is in flight then is let go, and owns its memory
/// and its file until it ends.
pub trait Reader: fmt::Debug {
    /// Most requests at once that this backend is meant to carry; the caller keeps to it or below.
    fn depth_max(&self) -> usize;

    /// Requests handed over that have not come. Those reported stuck have come.
    fn in_flight(&self) -> usize;

    /// Hands over one read. It may begin at once or with the next [`Reader::wait`].
    ///
    /// # Panics
    /// If [`Reader::depth_max`] are in flight, or the buffer has no room for the read.
    fn submit(&mut self, want: ReadRequest);

    /// Waits until something comes or `until` is past, and appends what came. With an `until` in
    /// the past it looks and does not wait; with nothing in flight it returns at once.
    ///
    /// # Errors
    /// [`crate::Error::Stuck`] if more requests hang than [`ReaderOptions::orphans_max`]. Nothing
    /// more may be hoped for then. What fails one read is in its [`Completion::outcome`].
    fn wait(&mut self, until: Instant, came: &mut Vec<Completion>) -> Result<()>;

    /// What was done so far.
    fn counters(&self) -> ReaderCounters;
}

/// How a [`Reader`] is to go about it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReaderOptions {
    /// Where the buffers of most wants will come from: its memory may be registered with the
    /// kernel. Others are as right, and a little slower.
    pub pool: Arc<BufferPool>,
    /// Requests at once. Default: what the backend likes. Minimum: 1. Maximum: 4096.
    pub depth: Option<usize>,
    /// Age at which a request is given up as [`crate::Error::Stuck`]. Default: 300 s, half of what
    /// collective operations wait before they end a run and blame the network.
    pub timeout: Duration,
    /// Ages at which the log names a request. Default: 10, 30 and 60 s.
    pub warn_after: [Duration; 3],
    /// Pauses before a read that failed is made again, on the file opened anew. Default: 1, 8 and
    /// 24 s, which outlasts the restart of a server.
    pub retry_pauses: [Duration; 3],
    /// Requests given up that may hang at once. Default: 64. Each keeps its buffer.
    pub orphans_max: usize,
}

/// The largest [`ReaderOptions::depth`]: past it latency grows and nothing else.
pub(crate) const DEPTH_MAX: usize = 4096;

impl ReaderOptions {
    /// The defaults, with this pool.
    #[must_use]
    pub fn new(pool: &Arc<BufferPool>) -> Self {
        ReaderOptions {
            pool: Arc::clone(pool),
            depth: None,
            timeout: Duration::from_secs(300),
            warn_after: [10, 30, 60].map(Duration::from_secs),
            retry_pauses: [1, 8, 24].map(Duration::from_secs),
            orphans_max: 64,
        }
    }

    /// The depth wished for, or that of the backend.
    pub(crate) fn depth_or(&self, liked: usize) -> usize {
        self.depth.unwrap_or(liked).clamp(1, DEPTH_MAX)
    }
}

/// A read to be made.
#[derive(Debug)]
pub struct ReadRequest {
    /// What to read.
    pub object: Arc<dyn Object>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    /// Where to: taken with [`BufferPool::take`] for `len` bytes or more.
    pub buf: Buffer,
    /// Comes back with the bytes.
    pub tag: u64,
    /// When the bytes are needed, if that is known: stores that can hurry do then.
    pub deadline: Option<Instant>,
}

/// A read that was made, or failed.
#[derive(Debug)]
pub struct Completion {
    /// That of the [`ReadRequest`].
    pub tag: u64,
    /// The buffer of the want; [`Buffer::empty`] if the read is stuck, and keeps it.
    pub buf: Buffer,
    /// Where in the buffer the wanted bytes are. Empty after a failure.
    pub data: Range<usize>,
    /// Bytes that were moved for it: rounding and repetition count.
    pub moved_bytes: u64,
    /// Whether it did.
    pub outcome: Result<()>,
}

impl Completion {
    /// The wanted bytes. None after a failure.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.data.clone()]
    }
}

/// Errors after which a read is made again, as `errno(3)` names them.
pub const RETRY_CAUSES: [&str; 9] = [
    "EIO",
    "ESTALE",
    "ENODATA",
    "EREMOTEIO",
    "ETIMEDOUT",
    "ENOMEM",
    "ENOTCONN",
    "ESHUTDOWN",
    "EHOSTDOWN",
];

/// What a [`Reader`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReaderCounters {
    /// Reads that came whole.
    pub reads: u64,
    /// Their bytes.
    pub wanted_bytes: u64,
    /// Bytes that were moved for them and for those that failed.
    pub moved_bytes: u64,
    /// Transfers that brought less than was asked for, before the end of the file.
    pub short_reads: u64,
    /// Reads made again after an error.
    pub retries: u64,
    /// The same by the error, in the order of [`RETRY_CAUSES`].
    pub retries_by: [u64; RETRY_CAUSES.len()],
    /// Reads given up as stuck.
    pub stuck: u64,
    /// Reads that failed otherwise.
    pub failed: u64,
}
