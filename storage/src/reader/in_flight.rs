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

/// One way to do reads. Dropping it abandons the requests in flight, and never blocks on a stuck
/// one.
pub(crate) trait ReadBackend: fmt::Debug {
    /// Starts a read, at once or in the next `wait`. It completes once, with its slot number.
    fn carry(&mut self, load: BackendRead);

    /// Waits for at least one completion or until `until`; polls if that is past.
    fn wait(&mut self, until: Instant, done: &mut Vec<BackendCompletion>);

    /// How the object is read, and which server has its byte at `offset`, as far as that is known.
    fn place(&self, object: &Arc<dyn Object>, offset: u64) -> (String, String);

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
    carrier: C,
    depth: usize,
    options: ReaderOptions,
    slots: Vec<RequestSlot>,
    free: Vec<u32>,
    flying: usize,
    orphans: usize,
    /// Slots whose read is to be retried, when, and with which buffer.
    later: Vec<(Instant, u32, Buffer)>,
    done: Vec<BackendCompletion>,
    /// When to check for stuck requests next.
    look_next: Instant,
    counters: ReaderCounters,
    seats: RequestTable,
}

#[derive(Debug)]
struct RequestSlot {
    state: SlotState,
    tag: u64,
    object: Option<Arc<dyn Object>>,
    offset: u64,
    len: usize,
    deadline: Option<Instant>,
    began: Instant,
    attempt: u32,
    moved_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Free,
    Flying,
    /// Abandoned: timed out, and the backend still has it.
    Orphan,
}

/// Checks for stuck requests per timeout: it bounds how late a timeout is detected.
const LOOKS_PER_TIMEOUT: u32 = 16;

/// Longest pause between two checks.
const LOOK_PAUSE_MAX: Duration = Duration::from_millis(250);

impl<C: ReadBackend> InFlightReader<C> {
    pub(crate) fn new(carrier: C, depth: usize, options: &ReaderOptions) -> Self {
        let slots = depth + options.orphans_max;
        let now = Instant::now();
        let slot = || RequestSlot {
            state: SlotState::Free,
            tag: 0,
            object: None,
            offset: 0,
            len: 0,
            deadline: None,
            began: now,
            attempt: 0,
            moved_bytes: 0,
        };
        InFlightReader {
            carrier,
            depth,
            options: options.clone(),
            slots: std::iter::repeat_with(slot).take(slots).collect(),
            free: (0..slots as u32).rev().collect(), // fits: DEPTH_MAX and as many orphans
            flying: 0,
            orphans: 0,
            later: Vec::with_capacity(depth),
            done: Vec::with_capacity(slots),
            look_next: now,
            counters: ReaderCounters::default(),
            seats: RequestTable::new(slots, options.warn_after),
        }
    }

    /// Starts the retries that are due, and fails the requests that timed out.
    fn look(&mut self, now: Instant, came: &mut Vec<Completion>) -> Result<()> {
        while let Some(i) = self.later.iter().position(|(when, ..)| *when <= now) {
            let (_, index, buf) = self.later.swap_remove(i);
            let slot = &self.slots[index as usize];
            self.carrier.carry(slot.load(index, buf));
        }
        if now < self.look_next {
            return Ok(());
        }
        let limit = self.options.timeout.min(self.options.warn_after[0]);
        self.look_next = now + (limit / LOOKS_PER_TIMEOUT).min(LOOK_PAUSE_MAX);
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            let age = now.duration_since(slot.began);
            let is_old = slot.state == SlotState::Flying && age >= self.options.warn_after[0] / 2;
            if is_old && let Some(object) = &slot.object {
                self.seats.place(index, self.carrier.place(object, slot.offset));
            }
            if slot.state == SlotState::Flying && age >= self.options.timeout {
                self.give_up(index, age, came)?;
            }
        }
        Ok(())
    }

    fn give_up(&mut self, index: usize, age: Duration, came: &mut Vec<Completion>) -> Result<()> {
        // A request that waits for a retry is not in the backend.
        let waiting = self.later.iter().position(|(_, slot, _)| *slot as usize == index);
        let buf = waiting.map(|i| self.later.swap_remove(i).2);
        let slot = &mut self.slots[index];
        let object = slot.object.as_ref().expect("a slot in use has its object");
        let (backend, placement) = self.carrier.place(object, slot.offset);
        let story = || Error::Stuck {
            object: object.display(),
            offset: slot.offset,
            age,
            backend,
            placement,
        };
        if buf.is_none() && self.orphans == self.options.orphans_max {
            return Err(story());
        }
        let outcome = Err(story());
        let (tag, moved_bytes) = (slot.tag, slot.moved_bytes);
        self.flying -= 1;
        self.counters.stuck += 1;
        match buf {
            Some(_) => self.release(index as u32), // fits: it was one
            None => {
                slot.state = SlotState::Orphan;
                self.orphans += 1;
            }
        }
        let buf = buf.unwrap_or(Buffer::empty());
        came.push(Completion { tag, buf, data: 0..0, moved_bytes, outcome });
        Ok(())
    }

    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = SlotState::Free;
        slot.object = None;
        self.seats.rise(index as usize);
        self.free.push(index);
    }

    /// Processes a completion of the backend.
    fn land(&mut self, done: BackendCompletion, now: Instant, came: &mut Vec<Completion>) {
        let BackendCompletion { slot: index, buf, data, moved_bytes, short_reads, outcome } = done;
        let slot = &mut self.slots[index as usize];
        self.counters.moved_bytes += moved_bytes;
        self.counters.short_reads += u64::from(short_reads);
        slot.moved_bytes += moved_bytes;
        match slot.state {
            SlotState::Free => unreachable!("a read comes once"),
            SlotState::Orphan => {
                self.orphans -= 1;
                return self.release(index);
            }
            SlotState::Flying => {}
        }
        if let Err(error) = &outcome
            && let Some(pause) = self.options.retry_pauses.get(slot.attempt as usize)
            // Past its timeout it would be reported as stuck, and the error would be lost.
            && now.duration_since(slot.began) + *pause < self.options.timeout
            && let Some(cause) = may_pass(error)
        {
            slot.attempt += 1;
            self.seats.retried(index as usize);
            self.counters.retries += 1;
            self.counters.retries_by[cause] += 1;
            log::debug!("retry {} in {pause:?}: {error}", slot.attempt + 1);
            self.later.push((now + *pause, index, buf));
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
        came.push(Completion { tag: slot.tag, buf, data, moved_bytes: slot.moved_bytes, outcome });
        self.flying -= 1;
        self.release(index);
    }
}

impl RequestSlot {
    fn load(&self, index: u32, buf: Buffer) -> BackendRead {
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
        self.flying
    }

    fn submit(&mut self, want: ReadRequest) {
        assert!(self.flying < self.depth, "no more than depth_max() in flight");
        let ReadRequest { object, offset, len, buf, tag, deadline: due } = want;
        let blocks = (offset % ALIGN_BYTES as u64) as usize + len; // fits: less than ALIGN_BYTES
        let room = len == 0 || blocks.next_multiple_of(ALIGN_BYTES) <= buf.len();
        assert!(room, "the buffer has room for the blocks of the read");
        let index = self.free.pop().expect("a slot for each of depth and orphans");
        let got = object.len_bytes().saturating_sub(offset);
        let slot = &mut self.slots[index as usize];
        let began = Instant::now();
        self.seats.sit(index as usize, &object, offset, len as u64, began);
        let (state, object) = (SlotState::Flying, Some(object));
        let (attempt, moved_bytes) = (0, 0);
        *slot = RequestSlot {
            state,
            tag,
            object,
            offset,
            len,
            deadline: due,
            began,
            attempt,
            moved_bytes,
        };
        self.flying += 1;
        let load = slot.load(index, buf);
        if len > 0 && got >= len as u64 {
            return self.carrier.carry(load);
        }
        let outcome = if len == 0 { Ok(()) } else { Err(past_the_end(&load)) };
        let (moved_bytes, short_reads) = (0, 0);
        let buf = load.buf;
        self.done.push(BackendCompletion {
            slot: index,
            buf,
            data: 0..0,
            moved_bytes,
            short_reads,
            outcome,
        });
    }

    fn wait(&mut self, until: Instant, came: &mut Vec<Completion>) -> Result<()> {
        let before = came.len();
        loop {
            let now = Instant::now();
            self.look(now, came)?;
            let soonest = self.later.iter().map(|(when, ..)| *when).fold(self.look_next, Ord::min);
            let idle = self.done.is_empty() && came.len() == before && self.flying > 0;
            let wake = if idle { until.min(soonest) } else { now };
            if self.flying > 0 {
                self.carrier.wait(wake, &mut self.done);
            }
            let mut done = std::mem::take(&mut self.done);
            for one in done.drain(..) {
                self.land(one, now, came);
            }
            self.done = done;
            if came.len() > before || self.flying == 0 || now >= until {
                return Ok(());
            }
        }
    }

    fn counters(&self) -> ReaderCounters {
        let page_cache_bytes = self.carrier.page_cache_bytes();
        ReaderCounters { page_cache_bytes, ..self.counters }
    }
}

fn past_the_end(load: &BackendRead) -> Error {
    let len_bytes = load.object.len_bytes();
    Error::ShortRead {
        object: load.object.display(),
        offset: load.offset,
        found: len_bytes.saturating_sub(load.offset),
        expected: load.len as u64,
        len_bytes,
    }
}

/// The index in [`RETRY_CAUSES`] of an error of a device or a server that a retry may get past.
fn may_pass(error: &Error) -> Option<usize> {
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
