//! Reads through an io_uring of one thread. The ring is created, used and dropped by the thread
//! that owns the reader, so the kernel need not lock it (`SINGLE_ISSUER`), and posts completions
//! when that thread enters the kernel, not at any moment (`DEFER_TASKRUN`).

use std::cell::RefCell;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io, mem, thread};

use io_uring::{IoUring, opcode, squeue, types};

use crate::BufferPool;
use crate::fs::mount::ReadMethod;
use crate::io::transfer::{NextStep, TransferErrorKind};
use crate::io::uring_batch::explain;
use crate::reader::in_flight::{BackendCompletion, BackendRead};
use crate::reader::open_file::{AlignedRead, OpenFile, is_refusal};

/// The most memory registered with the kernel, from the start of the pool, which is used most. Half
/// of the usual limit of locked memory, and four times what 64 samples of 16 KiB need.
const FIXED_BYTES_MAX: usize = 4 << 20;

/// The least to register after halving: less gains nothing.
const FIXED_BYTES_MIN: usize = 256 << 10;

/// Registered files of a ring, which save a look-up of the descriptor for each request.
pub(crate) const FILES_MAX: usize = 256;

/// Entries of the file table: one for direct and one for buffered reads of each file.
const FILE_TABLE_ENTRIES: usize = 2 * FILES_MAX;

/// How long to batch completions: until a quarter of the requests in flight, at most 16, are
/// complete. Each system call, and each signal to the device, then serves several.
const BATCH_WAIT: Duration = Duration::from_millis(1);

/// How long a dropped ring waits for its requests in flight before it abandons them.
const DROP_TIMEOUT: Duration = Duration::from_millis(100);

/// The ring of a reader. Dropping it waits briefly for the requests in flight, then abandons them.
pub(crate) struct UringBackend(Option<Ring>);

struct Ring {
    ring: IoUring,
    requests: Vec<Option<RingRead>>,
    in_flight: usize,
    pool: Arc<BufferPool>,
    fixed_bytes: usize,
    /// The id of the file in each entry of the kernel's file table. A file has two entries, for
    /// direct and for buffered reads: the kernel may look an entry up long after submission, so it
    /// must not change while a read through it is in flight.
    registered_ids: Vec<u64>,
    /// Whether the limit of kernel worker threads (io-wq) has been set, for requests that may
    /// block.
    has_worker_limit: bool,
}

#[derive(Debug)]
struct RingRead {
    request: BackendRead,
    file: Arc<OpenFile>,
    number: u32,
    method: ReadMethod,
    transfer: AlignedRead,
    /// Submitted with [`RWF_DONTCACHE`].
    dontcache: bool,
}

/// The outcome of a read through a ring.
#[derive(Debug)]
pub(crate) enum RingOutcome {
    /// Complete, with its bytes.
    Done(BackendCompletion),
    /// Refused by the mount: to be read by another method.
    Refused(BackendRead, Arc<OpenFile>),
    /// An error or an early end of file, which a thread examines.
    Failed(BackendRead, Arc<OpenFile>, TransferErrorKind),
}

impl fmt::Debug for UringBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ring = self.ring();
        write!(f, "Uring({} in flight, {} bytes registered)", ring.in_flight, ring.fixed_bytes)
    }
}

impl UringBackend {
    /// Creates the ring of this thread.
    ///
    /// # Errors
    /// The system call that failed, and why.
    pub(crate) fn new(slots_max: usize, pool: &Arc<BufferPool>) -> Result<Self, String> {
        let ring = build(slots_max).map_err(|e| explain("io_uring_setup", &e))?;
        if !ring.params().is_feature_ext_arg() {
            return Err("io_uring_enter: the kernel does not support timeouts".to_owned());
        }
        // Without sparse file tables (before Linux 5.19), reads use file descriptors.
        let has_file_table =
            ring.submitter().register_files_sparse(FILE_TABLE_ENTRIES as u32).is_ok();
        let fixed_bytes = register(&ring, pool);
        reap_abandoned();
        Ok(UringBackend(Some(Ring {
            ring,
            requests: std::iter::repeat_with(|| None).take(slots_max).collect(),
            in_flight: 0,
            pool: Arc::clone(pool),
            fixed_bytes,
            registered_ids: if has_file_table { vec![0; FILE_TABLE_ENTRIES] } else { Vec::new() },
            has_worker_limit: false,
        })))
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.ring().in_flight
    }

    /// Queues a read; it starts in the next `wait`, or sooner. `number` is below [`FILES_MAX`], and
    /// belongs to one file as long as that is in use.
    pub(crate) fn start(
        &mut self,
        request: BackendRead,
        file: Arc<OpenFile>,
        number: u32,
        method: ReadMethod,
    ) {
        self.ring_mut().start(request, file, number, method);
    }

    /// Submits queued reads, and waits for at least one outcome or until `until`.
    pub(crate) fn wait(&mut self, until: Instant, outcomes: &mut Vec<RingOutcome>) {
        self.ring_mut().wait(until, outcomes);
    }

    fn ring(&self) -> &Ring {
        self.0.as_ref().expect("present until dropped")
    }

    fn ring_mut(&mut self) -> &mut Ring {
        self.0.as_mut().expect("present until dropped")
    }
}

impl Drop for UringBackend {
    fn drop(&mut self) {
        let mut ring = self.0.take().expect("present until dropped");
        if ring.drain(DROP_TIMEOUT) {
            log::warn!(
                "{} reads still in flight at shutdown; their buffers stay allocated",
                ring.in_flight
            );
            let mut ring = Some(ring);
            let _ = ABANDONED.try_with(|abandoned| abandoned.borrow_mut().0.extend(ring.take()));
            // A thread that is ending no longer has a list of abandoned rings.
            mem::forget(ring);
        }
    }
}

impl Ring {
    fn start(
        &mut self,
        request: BackendRead,
        file: Arc<OpenFile>,
        number: u32,
        method: ReadMethod,
    ) {
        let transfer = AlignedRead::new(&request, file.align(method));
        let slot = request.slot as usize;
        assert!(self.requests[slot].is_none(), "a slot is in flight once");
        if !file.mount.inline && !mem::replace(&mut self.has_worker_limit, true) {
            // The kernel's default is four threads per processor.
            let mut limits = [self.requests.len() as u32, 0]; // fits: DEPTH_MAX and orphans
            let _ = self.ring.submitter().register_iowq_max_workers(&mut limits);
        }
        let dontcache = false;
        self.requests[slot] = Some(RingRead { request, file, number, method, transfer, dontcache });
        self.in_flight += 1;
        self.push(slot);
    }

    fn push(&mut self, slot: usize) {
        let ring_read = self.requests[slot].as_mut().expect("in flight");
        let RingRead { request, file, number, method, transfer, dontcache } = ring_read;
        let fd = file.file(*method).as_raw_fd();
        let index = 2 * *number + u32::from(method.is_direct());
        let known = self.registered_ids.get_mut(index as usize).is_some_and(|known| {
            let update = || self.ring.submitter().register_files_update(index, &[fd]);
            if *known != file.id && matches!(update(), Ok(1)) {
                *known = file.id;
            }
            *known == file.id
        });
        let (offset, range) = transfer.rest();
        let fixed = request.buf.offset_in(&self.pool);
        let fixed = fixed.is_some_and(|at| at + range.end <= self.fixed_bytes);
        let to = &mut request.buf[range];
        // fits: a read is as long as its buffer, which is below 2 GiB in any sane pool; bytes cut
        // off here are read by the next request.
        let (start, len) = (to.as_mut_ptr(), u32::try_from(to.len()).unwrap_or(1 << 30));
        *dontcache = !method.is_direct() && file.mount.uses_dontcache();
        let flags = if *dontcache { RWF_DONTCACHE } else { 0 };
        let entry = match (known, fixed) {
            (true, true) => opcode::ReadFixed::new(types::Fixed(index), start, len, 0)
                .offset(offset)
                .rw_flags(flags)
                .build(),
            (true, false) => opcode::Read::new(types::Fixed(index), start, len)
                .offset(offset)
                .rw_flags(flags)
                .build(),
            (false, true) => opcode::ReadFixed::new(types::Fd(fd), start, len, 0)
                .offset(offset)
                .rw_flags(flags)
                .build(),
            (false, false) => {
                opcode::Read::new(types::Fd(fd), start, len).offset(offset).rw_flags(flags).build()
            }
        };
        // Where reads are not asynchronous, a submission may block unless it is punted to a worker.
        let punt = if file.mount.inline { squeue::Flags::empty() } else { squeue::Flags::ASYNC };
        let entry = entry.flags(punt).user_data(slot as u64);
        loop {
            // SAFETY: the request owns its buffer and its file, and stays in `requests`, of this or
            // an abandoned ring, until its completion was taken. Nothing else accesses the buffer
            // until then.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            // The submission queue is full: submit it.
            if self.ring.submit().is_err() {
                thread::yield_now();
            }
        }
    }

    fn wait(&mut self, until: Instant, outcomes: &mut Vec<RingOutcome>) {
        let batch = (self.in_flight / 4).clamp(1, 16);
        let now = Instant::now();
        let remaining = until.saturating_duration_since(now);
        if batch > 1 && remaining > BATCH_WAIT {
            self.enter(batch, BATCH_WAIT);
            if self.reap(outcomes) {
                return;
            }
        }
        self.enter(1, until.saturating_duration_since(now));
        self.reap(outcomes);
    }

    /// Submits, and waits for `count` completions or for `timeout`.
    fn enter(&mut self, count: usize, timeout: Duration) {
        let time = types::Timespec::from(timeout);
        let args = types::SubmitArgs::new().timespec(&time);
        let Err(e) = self.ring.submitter().submit_with_args(count, &args) else { return };
        match e.raw_os_error() {
            Some(libc::ETIME | libc::EINTR) => {}
            Some(libc::EAGAIN | libc::EBUSY) => thread::sleep(timeout.min(BATCH_WAIT)),
            _ => {
                // Submitted requests complete or time out; so do those that were not submitted.
                log::warn!("{}", explain("io_uring_enter", &e));
                thread::sleep(timeout.min(BATCH_WAIT));
            }
        }
    }

    /// Takes all completions; true if any request is done.
    fn reap(&mut self, outcomes: &mut Vec<RingOutcome>) -> bool {
        let before = outcomes.len();
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            let slot = entry.user_data() as usize; // fits: it was an index
            let result = entry.result();
            let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            if let Some(one) = self.complete(slot, result) {
                outcomes.push(one);
            }
        }
        outcomes.len() > before
    }

    /// Processes a completion: `None` if the read continues.
    fn complete(&mut self, slot: usize, result: io::Result<usize>) -> Option<RingOutcome> {
        let ring_read =
            self.requests[slot].as_mut().expect("a completion is of something in flight");
        let method = ring_read.method;
        let step = ring_read.transfer.advance(result);
        if matches!(step, Ok(NextStep::Again)) {
            self.push(slot);
            return None;
        }
        if let Err(TransferErrorKind::Io(e)) = &step
            && is_refusal(e, method)
        {
            let mount = &ring_read.file.mount;
            // Each of the reads in flight together gets this error; only the flag is refused.
            if ring_read.dontcache && e.raw_os_error() == Some(libc::EOPNOTSUPP) {
                mount.refuse_dontcache();
                self.push(slot);
                return None;
            }
            mount.refuse(method, e);
            let RingRead { request, file, .. } = self.take(slot);
            return Some(RingOutcome::Refused(request, file));
        }
        let RingRead { request, file, transfer, .. } = self.take(slot);
        Some(match step {
            Ok(_) => RingOutcome::Done(transfer.done(request, Ok(()))),
            Err(cause) => RingOutcome::Failed(request, file, cause),
        })
    }

    fn take(&mut self, slot: usize) -> RingRead {
        self.in_flight -= 1;
        self.requests[slot].take().expect("in flight")
    }

    /// Waits up to `timeout` for the requests in flight; true if any still is.
    fn drain(&mut self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut outcomes = Vec::new();
        while self.in_flight > 0 {
            self.enter(1, until.saturating_duration_since(Instant::now()));
            self.reap(&mut outcomes);
            outcomes.clear();
            if Instant::now() >= until {
                break;
            }
        }
        self.in_flight > 0
    }
}

/// "Do not leave pages in the cache", Linux 6.14.
const RWF_DONTCACHE: i32 = 0x80;

thread_local! {
    /// Rings of this thread that were dropped with stuck requests. No other thread may take their
    /// completions (`SINGLE_ISSUER`), so they are retained here, with all memory that the kernel
    /// may still write to, until this thread creates another ring. Remaining rings are leaked when
    /// the thread ends.
    static ABANDONED: RefCell<AbandonedRings> = const { RefCell::new(AbandonedRings(Vec::new())) };
}

struct AbandonedRings(Vec<Ring>);

impl Drop for AbandonedRings {
    fn drop(&mut self) {
        self.0.drain(..).for_each(mem::forget);
    }
}

fn reap_abandoned() {
    ABANDONED
        .with_borrow_mut(|abandoned| abandoned.0.retain_mut(|ring| ring.drain(Duration::ZERO)));
}

/// Creates a ring with the fastest setup that this kernel supports.
fn build(slots_max: usize) -> io::Result<IoUring> {
    let entries = slots_max.next_power_of_two() as u32; // fits: DEPTH_MAX and orphans
    let refused = |made: &io::Result<IoUring>| {
        let error = made.as_ref().err();
        error.is_some_and(|e| e.raw_os_error() == Some(libc::EINVAL))
    };
    let mut builder = IoUring::builder();
    let made =
        builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all().build(entries);
    if !refused(&made) {
        return made;
    }
    let made = IoUring::builder().setup_coop_taskrun().setup_submit_all().build(entries);
    if refused(&made) { IoUring::new(entries) } else { made }
}

/// Registers the start of the pool, as much as the limit of locked memory allows. Returns how many
/// bytes: reads into memory past it are a little slower.
fn register(ring: &IoUring, pool: &BufferPool) -> usize {
    let mut len = pool.bytes_max().min(FIXED_BYTES_MAX);
    while len >= FIXED_BYTES_MIN.min(pool.bytes_max()) && len > 0 {
        let memory = libc::iovec { iov_base: pool.start().cast(), iov_len: len };
        // SAFETY: the memory is the pool's, which the ring's owner holds for longer than the ring.
        if unsafe { ring.submitter().register_buffers(&[memory]) }.is_ok() {
            return len;
        }
        len /= 2;
    }
    0
}
