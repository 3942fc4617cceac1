//! Asynchronous reads: many in flight, completed in any order.
//!
//! [`crate::Object::read_many`] is a batch: it returns when every read is complete. A loader that
//! knows what it will read minutes from now keeps a window of requests in flight instead, and takes
//! each completion as it arrives. That is a [`Reader`]: [`ReadRequest`]s go in, [`Completion`]s
//! come out. `in_flight` tracks the requests, timeouts and retries for every backend.
//! `uring_backend` and `worker_pool` read files; `file_backend` chooses between them for each
//! mount.
//!
//! The kernel owns a buffer from submission to completion, whatever the process decides in between.
//! So a request that times out becomes an abandoned request: it keeps its buffer and its file until
//! it completes, and only its tag goes back to the caller.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::watchdog::WARN_AFTER;
use crate::{Buffer, BufferPool, Object, Result};

/// A queue of reads, each of which owns its buffer. It is created and used by one thread. Dropping
/// it never blocks on a stuck read: requests still in flight are abandoned, and own their memory
/// and file until they complete.
pub trait Reader: fmt::Debug {
    /// The maximum queue depth; the caller must not exceed it.
    fn depth_max(&self) -> usize;

    /// Requests submitted and not completed. One reported as stuck counts as completed.
    fn in_flight(&self) -> usize;

    /// Submits one read. It may start at once or in the next [`Reader::wait`].
    ///
    /// # Panics
    /// If [`Reader::depth_max`] requests are in flight, or the buffer is too small for the read.
    fn submit(&mut self, request: ReadRequest);

    /// Waits for at least one completion or until `until`, and appends the completions. If `until`
    /// is past it polls once; with nothing in flight it returns at once.
    ///
    /// # Errors
    /// [`crate::Error::Stuck`] if more than [`ReaderOptions::orphans_max`] requests are stuck. No
    /// further progress is to be expected then. An error of one read is in its
    /// [`Completion::outcome`].
    fn wait(&mut self, until: Instant, completions: &mut Vec<Completion>) -> Result<()>;

    /// Counters since the reader was created.
    fn counters(&self) -> ReaderCounters;
}

/// Settings of a [`Reader`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReaderOptions {
    /// The pool of most request buffers: its memory may be registered with the kernel. Buffers of
    /// other pools work too, a little slower.
    pub pool: Arc<BufferPool>,
    /// Queue depth. Default: chosen by the backend.
    pub depth: Option<usize>,
    /// Age at which a request fails as [`crate::Error::Stuck`]. Default: 300 s, half of the timeout
    /// after which collective operations end a run and blame the network.
    pub timeout: Duration,
    /// Ages at which a request is reported in the log. Default: 10, 30 and 60 s.
    pub warn_after: [Duration; 3],
    /// Pauses before each retry of a failed read, which reopens the file. Default: 1, 8 and 24 s,
    /// which outlasts the restart of a server.
    pub retry_pauses: [Duration; 3],
    /// The most abandoned requests at once. Default: 64. Each keeps its buffer.
    pub orphans_max: usize,
}

/// The largest [`ReaderOptions::depth`]: beyond it only latency grows.
pub(crate) const DEPTH_MAX: usize = 4096;

impl ReaderOptions {
    /// The defaults, with this pool.
    #[must_use]
    pub fn new(pool: &Arc<BufferPool>) -> Self {
        ReaderOptions {
            pool: Arc::clone(pool),
            depth: None,
            timeout: Duration::from_secs(300),
            warn_after: WARN_AFTER,
            retry_pauses: [1, 8, 24].map(Duration::from_secs),
            orphans_max: 64,
        }
    }

    /// The depth set, or else the backend's default.
    pub(crate) fn depth_or(&self, default: usize) -> usize {
        self.depth.unwrap_or(default).clamp(1, DEPTH_MAX)
    }
}

/// A read request.
#[derive(Debug)]
pub struct ReadRequest {
    /// What to read.
    pub object: Arc<dyn Object>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    /// The destination, taken with [`BufferPool::take`].
    pub buf: Buffer,
    /// Returned in the [`Completion`].
    pub tag: u64,
    /// When the bytes are needed, if that is known: some stores can speed up a late read.
    pub deadline: Option<Instant>,
}

/// The result of a request.
#[derive(Debug)]
pub struct Completion {
    /// The tag of the [`ReadRequest`].
    pub tag: u64,
    /// The buffer of the request; [`Buffer::empty`] if the read is stuck and keeps its buffer.
    pub buf: Buffer,
    /// Where in the buffer the requested bytes are. Empty after a failure.
    pub data: Range<usize>,
    /// Bytes transferred for it, with alignment and retries.
    pub moved_bytes: u64,
    /// Success, or why the read failed.
    pub outcome: Result<()>,
}

impl Completion {
    /// The requested bytes. Empty after a failure.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.data.clone()]
    }
}

/// Errors after which a read is retried, as `errno(3)` names them.
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

/// Counters of a [`Reader`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReaderCounters {
    /// Reads that succeeded.
    pub reads: u64,
    /// Their bytes.
    pub wanted_bytes: u64,
    /// Bytes transferred for them and for those that failed.
    pub moved_bytes: u64,
    /// Of these, bytes copied from the page cache by file readers that otherwise bypass it.
    pub page_cache_bytes: u64,
    /// Transfers that returned less than requested, before the end of the file.
    pub short_reads: u64,
    /// Retries after an error.
    pub retries: u64,
    /// Retries by error, in the order of [`RETRY_CAUSES`].
    pub retries_by: [u64; RETRY_CAUSES.len()],
    /// Reads that timed out as stuck.
    pub stuck: u64,
    /// Reads that failed with another error.
    pub failed: u64,
}
