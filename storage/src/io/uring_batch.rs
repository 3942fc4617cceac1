//! Positioned reads and writes by io_uring: a window of requests, drained before it returns.
//!
//! Rings come from a bounded pool and one thread uses one at a time. They move between threads, so
//! they are created without `SINGLE_ISSUER`, which ties a ring to one thread: a ring per loader
//! thread would count against the locked-memory limit and be lost with the thread, to save about a
//! tenth of the cost of a completion.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use std::{io, thread};

use io_uring::{IoUring, opcode, squeue, types};

use crate::base::per_process::PerProcess;
use crate::io::transfer::{NextStep, Transfer, TransferBuffer, TransferError};

/// Requests in flight. On local NVMe 64 random reads of 8 KiB at once gave 59.7 thousand a second,
/// 16 gave 48.2 and 128 gave 51.6; 64 pieces of 1 MiB carry 7 GB/s up to 9.5 ms of latency. A ring
/// of 64 entries is 8 KiB.
const DEPTH: usize = 64;

/// Rings in all. Further threads read by `pread`, which is what they would do in the kernel anyway.
/// 16 rings cost 128 KiB of a locked-memory limit that is 8 MiB by default.
const RINGS_MAX: usize = 16;

/// Times that the kernel may refuse a submission as busy while nothing completes: 1 s.
const BUSY_MAX: u32 = 1000;

const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// How requests start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubmitMode {
    /// In the submission, as far as that does not block.
    Inline,
    /// On a kernel thread, for file systems whose submission may block.
    Punted,
}

/// Why the transfers were not done.
#[derive(Debug)]
pub(crate) enum BatchError {
    /// All rings are in use: use the other engine for this batch.
    Busy,
    /// The kernel refuses io_uring, or refuses it for this file: use the other engine from now on.
    Refused(String),
    /// A transfer failed.
    Failed(TransferError),
}

impl From<TransferError> for BatchError {
    fn from(failure: TransferError) -> Self {
        match failure.errno() {
            // Errors of sandboxes, old kernels, and file systems without the operation; never I/O
            // errors.
            Some(libc::EPERM | libc::ENOSYS | libc::EACCES | libc::EOPNOTSUPP) => {
                BatchError::Refused(format!("cannot complete a request: {failure}"))
            }
            _ => BatchError::Failed(failure),
        }
    }
}

/// Completes all transfers, or fails with the first that did. Nothing is in flight when it returns.
pub(crate) fn transfer(
    file: &File,
    pieces: &mut [Transfer<'_>],
    start: SubmitMode,
) -> Result<(), BatchError> {
    let mut batch = BatchInFlight { lease: RingGuard::take()?, in_flight: 0 };
    let mut started = 0;
    loop {
        while started < pieces.len() && batch.in_flight < DEPTH {
            batch.push(file, &mut pieces[started], started, start);
            started += 1;
        }
        if batch.in_flight == 0 {
            return Ok(());
        }
        batch.wait()?;
        while let Some((index, result)) = batch.reap() {
            if pieces[index].advance(result)? == NextStep::Again {
                batch.push(file, &mut pieces[index], index, start);
            }
        }
    }
}

/// Whether io_uring works here, and if not, why: tests a ring with a read, once.
pub(crate) fn probe() -> Result<(), &'static str> {
    static PROBED: OnceLock<Result<(), String>> = OnceLock::new();
    let read = || {
        let own =
            File::open("/proc/self/exe").map_err(|e| format!("cannot open /proc/self/exe: {e}"))?;
        let mut bytes = [0; 4];
        match transfer(&own, &mut [Transfer::read(0, &mut bytes)], SubmitMode::Inline) {
            Ok(()) if &bytes == b"\x7fELF" => Ok(()),
            Ok(()) => Err("a test read returned wrong bytes".to_owned()),
            Err(BatchError::Busy) => Err("all rings are in use".to_owned()),
            Err(BatchError::Refused(why)) => Err(why),
            Err(BatchError::Failed(failure)) => Err(format!("cannot read with it: {failure}")),
        }
    };
    PROBED.get_or_init(read).as_ref().copied().map_err(String::as_str)
}

/// The requests in flight. Dropping it waits for all of them, so however `transfer` ends, by an
/// error or a panic, no buffer outlives its request.
struct BatchInFlight {
    lease: RingGuard,
    /// Entries pushed and not yet completed.
    in_flight: usize,
}

impl BatchInFlight {
    fn push(&mut self, file: &File, piece: &mut Transfer<'_>, index: usize, start: SubmitMode) {
        assert!(self.in_flight < DEPTH, "the window is bounded");
        let fd = types::Fd(file.as_raw_fd());
        let entry = match piece.rest() {
            // fits: a piece is at most PIECE_BYTES, 1 MiB.
            (offset, TransferBuffer::Into(buf)) => {
                opcode::Read::new(fd, buf.as_mut_ptr(), buf.len() as u32).offset(offset).build()
            }
            (offset, TransferBuffer::From(bytes)) => {
                opcode::Write::new(fd, bytes.as_ptr(), bytes.len() as u32).offset(offset).build()
            }
        };
        let punt = match start {
            SubmitMode::Inline => squeue::Flags::empty(),
            SubmitMode::Punted => squeue::Flags::ASYNC,
        };
        let entry = entry.flags(punt).user_data(index as u64);
        // SAFETY: the transfer borrows its buffer, and the function `transfer` its transfers and
        // file, for longer than `self` lives; its drop waits for every completion. Nothing else
        // accesses the buffer until then.
        let pushed = unsafe { self.lease.ring().submission().push(&entry) };
        pushed.expect("the queue has DEPTH entries, and fewer are in flight");
        self.in_flight += 1;
    }

    /// Submits the pushed entries and waits for an eighth of the requests in flight, at least one:
    /// each call then yields several completions, and the device is never idle.
    fn wait(&mut self) -> Result<(), BatchError> {
        let want = (self.in_flight / 8).max(1);
        for _ in 0..BUSY_MAX {
            let Err(e) = self.lease.ring().submit_and_wait(want) else { return Ok(()) };
            match e.raw_os_error() {
                Some(libc::EINTR) => return Ok(()),
                Some(libc::EAGAIN | libc::EBUSY) => {
                    if !self.lease.ring().completion().is_empty() {
                        return Ok(());
                    }
                    thread::sleep(BUSY_PAUSE);
                }
                _ => return Err(BatchError::Refused(explain("io_uring_enter", &e))),
            }
        }
        Err(BatchError::Refused(format!("cannot submit: io_uring_enter was busy {BUSY_MAX} times")))
    }

    fn reap(&mut self) -> Option<(usize, io::Result<usize>)> {
        let entry = self.lease.ring().completion().next()?;
        self.in_flight -= 1;
        let result = usize::try_from(entry.result())
            .map_err(|_| io::Error::from_raw_os_error(-entry.result()));
        Some((entry.user_data() as usize, result)) // fits: it was an index
    }
}

impl Drop for BatchInFlight {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            if let Err(e) = self.lease.ring().submit_and_wait(1)
                && e.raw_os_error() != Some(libc::EINTR)
            {
                // The kernel accepts no more. Entries that it never accepted are not executed; the
                // rest is waited for, as a `pread` would.
                self.lease.usable = false;
                if self.in_flight <= self.lease.ring().submission().len() {
                    return;
                }
                thread::sleep(BUSY_PAUSE);
            }
            while self.reap().is_some() {}
        }
    }
}

/// One ring of the pool, returned when dropped unless it is broken.
struct RingGuard {
    ring: Option<IoUring>,
    usable: bool,
}

#[derive(Default)]
struct RingPool {
    idle: Vec<IoUring>,
    alive: usize,
}

/// Not inherited by a forked child: both processes would share the memory and completions of a
/// ring.
static RINGS: PerProcess<Mutex<RingPool>> = PerProcess::new();

fn rings() -> MutexGuard<'static, RingPool> {
    RINGS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl RingGuard {
    fn take() -> Result<Self, BatchError> {
        let mut rings = rings();
        let ring = match rings.idle.pop() {
            Some(ring) => ring,
            None if rings.alive == RINGS_MAX => return Err(BatchError::Busy),
            None => {
                let made = build().map_err(|e| match (e.raw_os_error(), rings.alive) {
                    // The limit of locked memory is reached: the existing rings still work.
                    (Some(libc::ENOMEM), 1..) => BatchError::Busy,
                    _ => BatchError::Refused(explain("io_uring_setup", &e)),
                })?;
                rings.alive += 1;
                made
            }
        };
        Ok(RingGuard { ring: Some(ring), usable: true })
    }

    fn ring(&mut self) -> &mut IoUring {
        self.ring.as_mut().expect("present until dropped")
    }
}

impl Drop for RingGuard {
    fn drop(&mut self) {
        let mut rings = rings();
        match self.ring.take() {
            Some(ring) if self.usable => rings.idle.push(ring),
            _ => rings.alive -= 1,
        }
    }
}

/// Creates a ring for any thread; kernels before 5.19 refuse the flags.
fn build() -> io::Result<IoUring> {
    let flagged = IoUring::builder().setup_coop_taskrun().setup_submit_all().build(DEPTH as u32);
    match flagged {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::new(DEPTH as u32),
        made => made,
    }
}

/// The error text, and the setting, sandbox or limit behind it.
pub(crate) fn explain(call: &str, e: &io::Error) -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cause = match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            let setting = read("/proc/sys/kernel/io_uring_disabled");
            refused_by(setting.trim(), &read("/proc/self/status"))
        }
        Some(libc::ENOMEM) => " (limit of locked memory, ulimit -l)".to_owned(),
        _ => String::new(),
    };
    format!("{call}: {e}{cause}")
}

/// The cause of a refusal: the kernel's setting, a seccomp filter, or a security module.
fn refused_by(setting: &str, status: &str) -> String {
    let filter = status.lines().find_map(|line| line.strip_prefix("Seccomp:"));
    match (setting, filter.map(str::trim)) {
        ("" | "0", Some("1" | "2")) => " (blocked by a seccomp filter)".to_owned(),
        ("" | "0", _) => " (blocked by a sandbox or a security module such as SELinux)".to_owned(),
        (value, _) => format!(" (blocked by kernel.io_uring_disabled = {value})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn works() -> bool {
        let works = probe();
        if let Err(why) = works {
            eprintln!("SKIPPED: io_uring does not work here: {why}");
        }
        works.is_ok()
    }

    /// A batch that fails in the middle is drained: the ring that it used serves the next one, and
    /// no late completion is mistaken for one of that batch.
    #[test]
    fn a_failed_batch_leaves_nothing_in_flight() {
        if !works() {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
        for start in [SubmitMode::Inline, SubmitMode::Punted] {
            transfer(&file, &mut Transfer::of_write(0, &bytes, 1), start).unwrap();
            for round in 0..50 {
                let mut bufs = vec![vec![0; 5000]; 3 * DEPTH];
                let offset = |i: usize| if i == 70 + round { 2_000_000 } else { i as u64 * 5000 };
                let pieces = bufs.iter_mut().enumerate();
                let mut pieces: Vec<_> =
                    pieces.map(|(i, buf)| Transfer::read(offset(i), buf)).collect();
                let outcome = transfer(&file, &mut pieces, start);
                let Err(BatchError::Failed(TransferError { offset: 2_000_000, cause, .. })) =
                    outcome
                else {
                    panic!("a read past the end gave {outcome:?}")
                };
                assert!(matches!(cause, crate::io::transfer::TransferErrorKind::End));

                let mut back = vec![0; bytes.len()];
                let mut reads = [crate::RangeRead { offset: 0, buf: &mut back }];
                transfer(&file, &mut Transfer::of_reads(&mut reads), start).unwrap();
                assert!(back == bytes, "round {round}");
            }
        }
        assert!(rings().idle.len() <= RINGS_MAX);
    }

    #[test]
    fn a_refusal_names_its_cause() {
        assert!(refused_by("2", "Seccomp:\t2\n").contains("io_uring_disabled = 2"));
        assert!(refused_by("0", "Name:\ta\nSeccomp:\t2\n").contains("seccomp filter"));
        assert!(refused_by("", "Seccomp:\t0\n").contains("SELinux"));
        let text = explain("io_uring_setup", &io::Error::from_raw_os_error(libc::ENOMEM));
        assert!(text.contains("locked memory"), "{text}");
    }

    #[test]
    fn refusals_are_distinguished_from_io_errors() {
        let error_of = |errno| {
            let cause =
                crate::io::transfer::TransferErrorKind::Io(io::Error::from_raw_os_error(errno));
            BatchError::from(TransferError { offset: 0, expected: 1, found: 0, cause })
        };
        assert!(matches!(error_of(libc::EPERM), BatchError::Refused(_)));
        assert!(matches!(error_of(libc::EOPNOTSUPP), BatchError::Refused(_)));
        assert!(matches!(error_of(libc::EIO), BatchError::Failed(_)));
        assert!(matches!(error_of(libc::EINVAL), BatchError::Failed(_)));
    }
}
