//! The state of a reader's requests: in flight, waiting for a retry, abandoned. How a read is done
//! is up to its [`ReadBackend`].

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::api::reader::{RETRY_CAUSES, ReaderOptions};
use crate::reader::watchdog::RequestTable;
use crate::sys::aligned_buffer::ALIGN_BYTES;
use crate::{Buffer, Completion, Error, Object, ReadRequest, Reader, ReaderCounters, Result};

/// A way to carry reads. Dropping it abandons the requests in flight, and never blocks on a stuck
/// one.
pub(crate) trait ReadBackend: fmt::Debug {
    /// Starts a read, at once or in the next `wait`. It completes once, with its slot number.
    fn submit(&mut self, request: BackendRead);

    /// Waits for at least one completion or until `until`; polls if that is past.
    fn wait(&mut self, until: Instant, done: &mut Vec<BackendCompletion>);

    /// How the object is read, and which server has its byte at `offset`, as far as that is known.
    fn describe(&self, object: &Arc<dyn Object>, offset: u64) -> (String, String);

    /// As [`ReaderCounters::page_cache_bytes`].
    fn page_cache_bytes(&self) -> u64 {
        0
    }
}

/// A read handed to a backend.
#[derive(Debug)]
pub(crate) struct BackendRead {
    pub(crate) slot: u32,
    pub(crate) object: Arc<dyn Object>,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) buf: Buffer,
    /// When the bytes are needed, for backends that can speed up a late read.
    #[cfg_attr(not(feature = "s3"), expect(dead_code, reason = "files cannot be hurried"))]
    pub(crate) deadline: Option<Instant>,
    /// 0 for the first attempt. Later ones reopen the file.
    pub(crate) attempt: u32,
}

/// The result of a read from a backend.
#[derive(Debug)]
pub(crate) struct BackendCompletion {
    pub(crate) slot: u32,
    pub(crate) buf: Buffer,
    /// Where in the buffer the bytes are.
    pub(crate) data: Range<usize>,
    pub(crate) moved_bytes: u64,
    pub(crate) short_reads: u32,
    pub(crate) outcome: Result<()>,
}

/// A reader over any backend.
#[derive(Debug)]
pub(crate) struct InFlightReader<C> {
    backend: C,
    depth: usize,
    options: ReaderOptions,
    slots: Vec<RequestSlot>,
    free: Vec<u32>,
    in_flight: usize,
    orphans: usize,
    /// The reads to retry: when, the slot, and the buffer.
    retry_queue: Vec<(Instant, u32, Buffer)>,
    done: Vec<BackendCompletion>,
    /// When to check for stuck requests next.
    next_check: Instant,
    counters: ReaderCounters,
    table: RequestTable,
}

#[derive(Debug)]
struct RequestSlot {
    state: SlotState,
    tag: u64,
    object: Option<Arc<dyn Object>>,
    offset: u64,
    len: usize,
    deadline: Option<Instant>,
    started: Instant,
    attempt: u32,
    moved_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Free,
    InFlight,
    /// Abandoned: timed out, and the backend still has it.
    Orphan,
}

/// Checks for stuck requests per timeout: it bounds how late a timeout is detected.
const CHECKS_PER_TIMEOUT: u32 = 16;

/// Longest pause between two checks.
const CHECK_PAUSE_MAX: Duration = Duration::from_millis(250);

impl<C: ReadBackend> InFlightReader<C> {
    pub(crate) fn new(backend: C, depth: usize, options: &ReaderOptions) -> Self {
        let slots = depth + options.orphans_max;
        let now = Instant::now();
        let slot = || RequestSlot {
            state: SlotState::Free,
            tag: 0,
            object: None,
            offset: 0,
            len: 0,
            deadline: None,
            started: now,
            attempt: 0,
            moved_bytes: 0,
        };
        InFlightReader {
            backend,
            depth,
            options: options.clone(),
            slots: std::iter::repeat_with(slot).take(slots).collect(),
            free: (0..slots as u32).rev().collect(), // fits: DEPTH_MAX and as many orphans
            in_flight: 0,
            orphans: 0,
            retry_queue: Vec::with_capacity(depth),
            done: Vec::with_capacity(slots),
            next_check: now,
            counters: ReaderCounters::default(),
            table: RequestTable::new(slots, options.warn_after),
        }
    }

    /// Submits the retries whose pause is over, and fails the requests that timed out.
    fn check_requests(&mut self, now: Instant, completions: &mut Vec<Completion>) -> Result<()> {
        while let Some(i) = self.retry_queue.iter().position(|(when, ..)| *when <= now) {
            let (_, index, buf) = self.retry_queue.swap_remove(i);
            let slot = &self.slots[index as usize];
            self.backend.submit(slot.request(index, buf));
        }
        if now < self.next_check {
            return Ok(());
        }
        let limit = self.options.timeout.min(self.options.warn_after[0]);
        self.next_check = now + (limit / CHECKS_PER_TIMEOUT).min(CHECK_PAUSE_MAX);
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            let age = now.duration_since(slot.started);
            let is_old = slot.state == SlotState::InFlight && age >= self.options.warn_after[0] / 2;
            if is_old && let Some(object) = &slot.object {
                self.table.set_description(index, self.backend.describe(object, slot.offset));
            }
            if slot.state == SlotState::InFlight && age >= self.options.timeout {
                self.time_out(index, age, completions)?;
            }
        }
        Ok(())
    }

    fn time_out(
        &mut self,
        index: usize,
        age: Duration,
        completions: &mut Vec<Completion>,
    ) -> Result<()> {
        // A request that waits for a retry is not in the backend.
        let waiting = self.retry_queue.iter().position(|(_, slot, _)| *slot as usize == index);
        let buf = waiting.map(|i| self.retry_queue.swap_remove(i).2);
        let slot = &mut self.slots[index];
        let object = slot.object.as_ref().expect("a slot in use has its object");
        let (backend, placement) = self.backend.describe(object, slot.offset);
        let stuck = || Error::Stuck {
            object: object.display(),
            offset: slot.offset,
            age,
            backend,
            placement,
        };
        if buf.is_none() && self.orphans == self.options.orphans_max {
            return Err(stuck());
        }
        let outcome = Err(stuck());
        let (tag, moved_bytes) = (slot.tag, slot.moved_bytes);
        self.in_flight -= 1;
        self.counters.stuck += 1;
        match buf {
            Some(_) => self.release(index as u32), // fits: it was one
            None => {
                slot.state = SlotState::Orphan;
                self.orphans += 1;
            }
        }
        let buf = buf.unwrap_or(Buffer::empty());
        completions.push(Completion { tag, buf, data: 0..0, moved_bytes, outcome });
        Ok(())
    }

    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = SlotState::Free;
        slot.object = None;
        self.table.clear(index as usize);
        self.free.push(index);
    }

    /// Processes a completion of the backend.
    fn complete(
        &mut self,
        done: BackendCompletion,
        now: Instant,
        completions: &mut Vec<Completion>,
    ) {
        let BackendCompletion { slot: index, buf, data, moved_bytes, short_reads, outcome } = done;
        let slot = &mut self.slots[index as usize];
        self.counters.moved_bytes += moved_bytes;
        self.counters.short_reads += u64::from(short_reads);
        slot.moved_bytes += moved_bytes;
        match slot.state {
            SlotState::Free => unreachable!("a read completes once"),
            SlotState::Orphan => {
                self.orphans -= 1;
                return self.release(index);
            }
            SlotState::InFlight => {}
        }
        if let Err(error) = &outcome
            && let Some(pause) = self.options.retry_pauses.get(slot.attempt as usize)
            // Past its timeout it would be reported as stuck, and the error would be lost.
            && now.duration_since(slot.started) + *pause < self.options.timeout
            && let Some(cause) = retry_cause(error)
        {
            slot.attempt += 1;
            self.table.retried(index as usize);
            self.counters.retries += 1;
            self.counters.retries_by[cause] += 1;
            log::debug!("retry {} in {pause:?}: {error}", slot.attempt + 1);
            self.retry_queue.push((now + *pause, index, buf));
            return;
        }
        let data = if outcome.is_ok() { data } else { 0..0 };
        match &outcome {
            Ok(()) => {
                self.counters.reads += 1;
                self.counters.wanted_bytes += data.len() as u64;
            }
            Err(_) => self.counters.failed += 1,
        }
        completions.push(Completion {
            tag: slot.tag,
            buf,
            data,
            moved_bytes: slot.moved_bytes,
            outcome,
        });
        self.in_flight -= 1;
        self.release(index);
    }
}

impl RequestSlot {
    fn request(&self, index: u32, buf: Buffer) -> BackendRead {
        let object = self.object.as_ref().expect("a slot in use has its object");
        BackendRead {
            slot: index,
            object: Arc::clone(object),
            offset: self.offset,
            len: self.len,
            buf,
            deadline: self.deadline,
            attempt: self.attempt,
        }
    }
}

impl<C: ReadBackend> Reader for InFlightReader<C> {
    fn depth_max(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, request: ReadRequest) {
        assert!(self.in_flight < self.depth, "no more than depth_max() in flight");
        let ReadRequest { object, offset, len, buf, tag, deadline } = request;
        let blocks = (offset % ALIGN_BYTES as u64) as usize + len; // fits: less than ALIGN_BYTES
        let room = len == 0 || blocks.next_multiple_of(ALIGN_BYTES) <= buf.len();
        assert!(room, "the buffer has room for the blocks of the read");
        let index = self.free.pop().expect("a slot for each of depth and orphans");
        let available = object.len_bytes().saturating_sub(offset);
        let slot = &mut self.slots[index as usize];
        let started = Instant::now();
        self.table.fill(index as usize, &object, offset, len as u64, started);
        let (state, object) = (SlotState::InFlight, Some(object));
        let (attempt, moved_bytes) = (0, 0);
        *slot = RequestSlot {
            state,
            tag,
            object,
            offset,
            len,
            deadline,
            started,
            attempt,
            moved_bytes,
        };
        self.in_flight += 1;
        let request = slot.request(index, buf);
        if len > 0 && available >= len as u64 {
            return self.backend.submit(request);
        }
        let outcome = if len == 0 { Ok(()) } else { Err(past_the_end(&request)) };
        let (moved_bytes, short_reads) = (0, 0);
        let buf = request.buf;
        self.done.push(BackendCompletion {
            slot: index,
            buf,
            data: 0..0,
            moved_bytes,
            short_reads,
            outcome,
        });
    }

    fn wait(&mut self, until: Instant, completions: &mut Vec<Completion>) -> Result<()> {
        let before = completions.len();
        loop {
            let now = Instant::now();
            self.check_requests(now, completions)?;
            let soonest =
                self.retry_queue.iter().map(|(when, ..)| *when).fold(self.next_check, Ord::min);
            let idle = self.done.is_empty() && completions.len() == before && self.in_flight > 0;
            let wake = if idle { until.min(soonest) } else { now };
            if self.in_flight > 0 {
                self.backend.wait(wake, &mut self.done);
            }
            let mut done = std::mem::take(&mut self.done);
            for one in done.drain(..) {
                self.complete(one, now, completions);
            }
            self.done = done;
            if completions.len() > before || self.in_flight == 0 || now >= until {
                return Ok(());
            }
        }
    }

    fn counters(&self) -> ReaderCounters {
        let page_cache_bytes = self.backend.page_cache_bytes();
        ReaderCounters { page_cache_bytes, ..self.counters }
    }
}

fn past_the_end(request: &BackendRead) -> Error {
    let len_bytes = request.object.len_bytes();
    Error::ShortRead {
        object: request.object.display(),
        offset: request.offset,
        found: len_bytes.saturating_sub(request.offset),
        expected: request.len as u64,
        len_bytes,
    }
}

/// The index in [`RETRY_CAUSES`] of a device or server error after which a retry may succeed.
fn retry_cause(error: &Error) -> Option<usize> {
    const NUMBERS: [i32; RETRY_CAUSES.len()] = [
        libc::EIO,
        libc::ESTALE,
        libc::ENODATA,
        libc::EREMOTEIO,
        libc::ETIMEDOUT,
        libc::ENOMEM,
        libc::ENOTCONN,
        libc::ESHUTDOWN,
        libc::EHOSTDOWN,
    ];
    let number = match error {
        Error::Stale { .. } => libc::ESTALE,
        Error::Io { source, .. } => source.raw_os_error()?,
        _ => return None,
    };
    NUMBERS.iter().position(|&cause| cause == number)
}
