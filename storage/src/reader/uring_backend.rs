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

/// The least to register if halving gets there: less gains nothing.
const FIXED_BYTES_MIN: usize = 256 << 10;

/// Registered files of a ring, which save a look-up of the descriptor for each request.
pub(crate) const FILES_MAX: usize = 256;

/// Entries of the file table: one for direct and one for buffered reads of each file.
const PLACES: usize = 2 * FILES_MAX;

/// How long to batch completions: until a quarter of the requests in flight, at most 16, are
/// complete. Each system call, and each signal to the device, then pays for several.
const COMPANY: Duration = Duration::from_millis(1);

/// How long a dropped ring waits for its requests in flight before it abandons them.
const DROP_PATIENCE: Duration = Duration::from_millis(100);

/// The ring of a reader. Dropping it waits briefly for the requests in flight, then abandons them.
pub(crate) struct UringBackend(Option<Ring>);

struct Ring {
    ring: IoUring,
    flights: Vec<Option<RingRead>>,
    flying: usize,
    pool: Arc<BufferPool>,
    fixed_bytes: usize,
    /// The id of the file in each entry of the kernel's file table. A file has two entries, for
    /// direct and for buffered reads: the kernel may look an entry up long after submission, so it
    /// must not change while a read through it is in flight.
    places: Vec<u64>,
    /// Whether the limit of kernel worker threads (io-wq) has been set, for requests that may
    /// block.
    punts: bool,
}

#[derive(Debug)]
struct RingRead {
    load: BackendRead,
    file: Arc<OpenFile>,
    number: u32,
    way: ReadMethod,
    transfer: AlignedRead,
    /// Submitted with [`RWF_DONTCACHE`].
    spares_cache: bool,
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
        write!(f, "Uring({} in flight, {} bytes registered)", ring.flying, ring.fixed_bytes)
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
        let numbered = ring.submitter().register_files_sparse(PLACES as u32).is_ok();
        let fixed_bytes = register(&ring, pool);
        sweep_graves();
        Ok(UringBackend(Some(Ring {
            ring,
            flights: std::iter::repeat_with(|| None).take(slots_max).collect(),
            flying: 0,
            pool: Arc::clone(pool),
            fixed_bytes,
            places: if numbered { vec![0; PLACES] } else { Vec::new() },
            punts: false,
        })))
    }

    pub(crate) fn flying(&self) -> usize {
        self.ring().flying
    }

    /// Queues a read; it starts in the next `wait`, or sooner. `number` is below [`FILES_MAX`], and
    /// belongs to one file as long as that is in use.
    pub(crate) fn begin(
        &mut self,
        load: BackendRead,
        file: Arc<OpenFile>,
        number: u32,
        way: ReadMethod,
    ) {
        self.ring_mut().begin(load, file, number, way);
    }

    /// Submits queued reads, and waits for at least one outcome or until `until`.
    pub(crate) fn wait(&mut self, until: Instant, landed: &mut Vec<RingOutcome>) {
        self.ring_mut().wait(until, landed);
    }

    fn ring(&self) -> &Ring {
        self.0.as_ref().expect("there until it is dropped")
    }

    fn ring_mut(&mut self) -> &mut Ring {
        self.0.as_mut().expect("there until it is dropped")
    }
}

impl Drop for UringBackend {
    fn drop(&mut self) {
        let mut ring = self.0.take().expect("there until it is dropped");
        if ring.drain(DROP_PATIENCE) {
            log::warn!(
                "{} reads still in flight at shutdown; their buffers stay allocated",
                ring.flying
            );
            let mut ring = Some(ring);
            let _ = GRAVES.try_with(|graves| graves.borrow_mut().0.extend(ring.take()));
            // A thread that is ending has no list of abandoned rings any more.
            mem::forget(ring);
        }
    }
}

impl Ring {
    fn begin(&mut self, load: BackendRead, file: Arc<OpenFile>, number: u32, way: ReadMethod) {
        let transfer = AlignedRead::new(&load, file.align(way));
        let slot = load.slot as usize;
        assert!(self.flights[slot].is_none(), "a slot is in flight once");
        if !file.mount.inline && !mem::replace(&mut self.punts, true) {
            // The kernel's default is four threads per processor.
            let mut most = [self.flights.len() as u32, 0]; // fits: DEPTH_MAX and orphans
            let _ = self.ring.submitter().register_iowq_max_workers(&mut most);
        }
        let spares_cache = false;
        self.flights[slot] = Some(RingRead { load, file, number, way, transfer, spares_cache });
        self.flying += 1;
        self.push(slot);
    }

    fn push(&mut self, slot: usize) {
        let flight = self.flights[slot].as_mut().expect("in flight");
        let RingRead { load, file, number, way, transfer, spares_cache } = flight;
        let fd = file.file(*way).as_raw_fd();
        let place = 2 * *number + u32::from(way.is_direct());
        let known = self.places.get_mut(place as usize).is_some_and(|known| {
            let update = || self.ring.submitter().register_files_update(place, &[fd]);
            if *known != file.id && matches!(update(), Ok(1)) {
                *known = file.id;
            }
            *known == file.id
        });
        let (offset, range) = transfer.rest();
        let fixed = load.buf.place_in(&self.pool);
        let fixed = fixed.is_some_and(|place| place + range.end <= self.fixed_bytes);
        let to = &mut load.buf[range];
        // fits: a read is as long as its buffer, which is below 2 GiB in any sane pool; bytes cut
        // off here are read by the next request.
        let (start, len) = (to.as_mut_ptr(), u32::try_from(to.len()).unwrap_or(1 << 30));
        *spares_cache = !way.is_direct() && file.mount.spares_cache();
        let flags = if *spares_cache { RWF_DONTCACHE } else { 0 };
        let entry = match (known, fixed) {
            (true, true) => opcode::ReadFixed::new(types::Fixed(place), start, len, 0)
                .offset(offset)
                .rw_flags(flags)
                .build(),
            (true, false) => opcode::Read::new(types::Fixed(place), start, len)
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
            // SAFETY: the request owns its buffer and its file, and stays in `flights`, of this or
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

    fn wait(&mut self, until: Instant, landed: &mut Vec<RingOutcome>) {
        let company = (self.flying / 4).clamp(1, 16);
        let now = Instant::now();
        let left = until.saturating_duration_since(now);
        if company > 1 && left > COMPANY {
            self.enter(company, COMPANY);
            if self.reap(landed) {
                return;
            }
        }
        self.enter(1, until.saturating_duration_since(now));
        self.reap(landed);
    }

    /// Submits, and waits for `want` completions or for `patience`.
    fn enter(&mut self, want: usize, patience: Duration) {
        let time = types::Timespec::from(patience);
        let args = types::SubmitArgs::new().timespec(&time);
        let Err(e) = self.ring.submitter().submit_with_args(want, &args) else { return };
        match e.raw_os_error() {
            Some(libc::ETIME | libc::EINTR) => {}
            Some(libc::EAGAIN | libc::EBUSY) => thread::sleep(patience.min(COMPANY)),
            _ => {
                // Submitted requests complete or time out; so do those that were not submitted.
                log::warn!("{}", explain("io_uring_enter", &e));
                thread::sleep(patience.min(COMPANY));
            }
        }
    }

    /// Takes all completions; true if any request is done.
    fn reap(&mut self, landed: &mut Vec<RingOutcome>) -> bool {
        let before = landed.len();
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            let slot = entry.user_data() as usize; // fits: it was an index
            let result = entry.result();
            let came = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
            if let Some(one) = self.settle(slot, came) {
                landed.push(one);
            }
        }
        landed.len() > before
    }

    /// Processes a completion: `None` if the read continues.
    fn settle(&mut self, slot: usize, came: io::Result<usize>) -> Option<RingOutcome> {
        let flight = self.flights[slot].as_mut().expect("a completion is of something in flight");
        let way = flight.way;
        let verdict = flight.transfer.advance(came);
        if matches!(verdict, Ok(NextStep::Again)) {
            self.push(slot);
            return None;
        }
        if let Err(TransferErrorKind::Io(e)) = &verdict
            && is_refusal(e, way)
        {
            let mount = &flight.file.mount;
            // Each of the reads in flight together gets this error; only the flag is refused.
            if flight.spares_cache && e.raw_os_error() == Some(libc::EOPNOTSUPP) {
                mount.keeps_cache();
                self.push(slot);
                return None;
            }
            mount.refuse(way, e);
            let RingRead { load, file, .. } = self.take(slot);
            return Some(RingOutcome::Refused(load, file));
        }
        let RingRead { load, file, transfer, .. } = self.take(slot);
        Some(match verdict {
            Ok(_) => RingOutcome::Done(transfer.done(load, Ok(()))),
            Err(cause) => RingOutcome::Failed(load, file, cause),
        })
    }

    fn take(&mut self, slot: usize) -> RingRead {
        self.flying -= 1;
        self.flights[slot].take().expect("in flight")
    }

    /// Waits up to `patience` for the requests in flight; true if any still is.
    fn drain(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut landed = Vec::new();
        while self.flying > 0 {
            self.enter(1, until.saturating_duration_since(Instant::now()));
            self.reap(&mut landed);
            landed.clear();
            if Instant::now() >= until {
                break;
            }
        }
        self.flying > 0
    }
}

/// "Do not leave pages in the cache", Linux 6.14.
const RWF_DONTCACHE: i32 = 0x80;

thread_local! {
    /// Rings of this thread that were dropped with stuck requests. No other thread may take their
    /// completions (`SINGLE_ISSUER`), so they are kept here, with all memory that the kernel may
    /// still write to, until this thread creates another ring. Rings left when it ends are leaked.
    static GRAVES: RefCell<AbandonedRings> = const { RefCell::new(AbandonedRings(Vec::new())) };
}

struct AbandonedRings(Vec<Ring>);

impl Drop for AbandonedRings {
    fn drop(&mut self) {
        self.0.drain(..).for_each(mem::forget);
    }
}

fn sweep_graves() {
    GRAVES.with_borrow_mut(|graves| graves.0.retain_mut(|ring| ring.drain(Duration::ZERO)));
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
