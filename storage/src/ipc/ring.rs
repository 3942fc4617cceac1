//! One sender, one receiver, a few slots between them.
//!
//! ```text
//! page 0    magic, slots, bytes a slot; bell, sent, state; taken; reason of a failure, its length
//! page 1    the lengths of the messages, a word each
//! page 2..  the slots, each from a page of its own
//! ```
//!
//! `sent` and `taken` count messages and wrap. The slots from `taken` to `sent` belong to the
//! receiver, the others to the sender; each side moves its own counter, so a slot has one owner at
//! any time, and the slices of it are sound. The sender rings the bell after all that it does, and
//! the receiver sleeps on the bell value that it saw before it checked, so no wake-up is lost.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::shared_memory::{SharedMemory, wait, wake};
use crate::{Error, Result};

/// How large a ring is. Both sides must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The most messages at once, with the one being read: a power of two up to 1024, so that
    /// counters may wrap.
    pub slots: usize,
    /// The largest message in bytes.
    pub slot_bytes: usize,
}

/// What follows the last message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RingEnd {
    /// More messages may follow.
    Open,
    /// No more: the sender has sent all.
    End,
    /// No more: the sender failed, with this reason.
    Failed(String),
}

/// The sending side. If it is dropped without a close, the ring stays [`RingEnd::Open`]: the socket
/// reports that its process has ended.
#[derive(Debug)]
pub struct RingSender {
    memory: SharedMemory,
    geometry: Geometry,
    sent: u32,
    closed: bool,
}

/// The receiving side.
#[derive(Debug)]
pub struct RingReceiver {
    memory: SharedMemory,
    geometry: Geometry,
    taken: u32,
    holds_message: bool,
}

const PAGE_BYTES: usize = 4096;
const MAGIC: u32 = u32::from_le_bytes(*b"FLr1");
const SLOTS_MAX: usize = PAGE_BYTES / 4;
const SLOT_BYTES_MAX: usize = 1 << 30;

// Each side's counter has a cache line of its own.
const AT_MAGIC: usize = 0;
const AT_SLOTS: usize = 4;
const AT_SLOT_BYTES: usize = 8;
const AT_BELL: usize = 64;
const AT_SENT: usize = 68;
const AT_STATE: usize = 72;
const AT_NOTE: usize = 76;
const AT_TAKEN: usize = 128;
const AT_REASON_LEN: usize = 192;
const AT_REASON: usize = 256;
const AT_LENGTHS: usize = PAGE_BYTES;
const AT_MESSAGES: usize = 2 * PAGE_BYTES;
const REASON_BYTES_MAX: usize = PAGE_BYTES - AT_REASON;

const OPEN: u32 = 0;
const END: u32 = 1;
const FAILED: u32 = 2;

impl Geometry {
    fn stride(&self) -> usize {
        self.slot_bytes.next_multiple_of(PAGE_BYTES)
    }

    fn len(&self) -> Result<usize> {
        let slots = self.slots <= SLOTS_MAX && self.slots.is_power_of_two();
        let bytes = (1..=SLOT_BYTES_MAX).contains(&self.slot_bytes);
        let len = self.stride().checked_mul(self.slots).filter(|_| slots && bytes);
        len.and_then(|len| len.checked_add(AT_MESSAGES)).ok_or_else(|| {
            let Geometry { slots, slot_bytes } = self;
            let reason = format!(
                "expected a power of two up to {SLOTS_MAX} slots, of 1 byte to 1 GiB each, found \
                 {slots} slots of {slot_bytes} bytes"
            );
            let source = io::Error::new(io::ErrorKind::InvalidInput, reason);
            Error::from_io("create", "shared memory", source)
        })
    }
}

impl RingSender {
    /// An empty ring in memory of its own.
    ///
    /// # Errors
    /// [`Error::Io`] if the kernel has none, or the geometry is out of bounds.
    pub fn create(geometry: Geometry) -> Result<Self> {
        let memory = SharedMemory::create(geometry.len()?)
            .map_err(|e| Error::from_io("create", "shared memory", e))?;
        // fits: `len` bounds both
        memory.word(AT_SLOTS).store(geometry.slots as u32, Ordering::Relaxed);
        memory.word(AT_SLOT_BYTES).store(geometry.slot_bytes as u32, Ordering::Relaxed);
        memory.word(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok(RingSender { memory, geometry, sent: 0, closed: false })
    }

    /// The descriptor for the receiver to open.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// A free slot to write a message into, or `None` if there is none now. It is invisible to the
    /// receiver before [`Self::send`].
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the receiver's counter is invalid.
    pub fn slot(&mut self) -> Result<Option<&mut [u8]>> {
        let taken = self.memory.word(AT_TAKEN).load(Ordering::Acquire);
        let waiting = waiting(self.sent, taken, &self.geometry)?;
        if self.closed || waiting == self.geometry.slots {
            return Ok(None);
        }
        let at = message_offset(&self.geometry, self.sent);
        Ok(Some(self.memory.bytes_mut(at, self.geometry.slot_bytes)))
    }

    /// Sends the first `len` bytes of the slot that [`Self::slot`] returned.
    ///
    /// # Panics
    /// If `len` is more than a slot has.
    pub fn send(&mut self, len: usize) {
        assert!(len <= self.geometry.slot_bytes, "a message of {len} bytes");
        let at = AT_LENGTHS + 4 * nth(&self.geometry, self.sent);
        // fits: a slot has 1 GiB at most
        self.memory.word(at).store(len as u32, Ordering::Relaxed);
        self.sent = self.sent.wrapping_add(1);
        self.memory.word(AT_SENT).store(self.sent, Ordering::Release);
        self.wake_receiver();
    }

    /// Ends the ring, with the reason. Messages sent before can still be received.
    pub fn close(&mut self, tail: &RingEnd) {
        let (state, reason) = match tail {
            RingEnd::Open => return,
            RingEnd::End => (END, ""),
            RingEnd::Failed(reason) => (FAILED, reason.as_str()),
        };
        if self.closed {
            return;
        }
        let mut len = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(len) {
            len -= 1;
        }
        self.memory.bytes_mut(AT_REASON, len).copy_from_slice(&reason.as_bytes()[..len]);
        self.memory.word(AT_REASON_LEN).store(len as u32, Ordering::Relaxed);
        self.memory.word(AT_STATE).store(state, Ordering::Release);
        self.closed = true;
        self.wake_receiver();
    }

    /// Sets a number for the error message of a receiver that times out. It does not wake the
    /// receiver.
    pub fn note(&self, number: u32) {
        self.memory.word(AT_NOTE).store(number, Ordering::Relaxed);
    }

    fn wake_receiver(&self) {
        let bell = self.memory.word(AT_BELL);
        bell.fetch_add(1, Ordering::Release);
        wake(bell);
    }
}

impl RingReceiver {
    /// Opens the ring that another process created.
    ///
    /// # Errors
    /// [`Error::Io`] if it is not what both sides agreed on.
    pub fn open(fd: OwnedFd, geometry: Geometry) -> Result<Self> {
        let open = |e| Error::from_io("open", "shared memory", e);
        let memory = SharedMemory::open(fd, geometry.len()?).map_err(open)?;
        let found =
            [AT_MAGIC, AT_SLOTS, AT_SLOT_BYTES].map(|at| memory.word(at).load(Ordering::Acquire));
        let expected = [MAGIC, geometry.slots as u32, geometry.slot_bytes as u32];
        if found != expected {
            let reason = format!("expected header {expected:?}, found {found:?}");
            return Err(open(io::Error::new(io::ErrorKind::InvalidData, reason)));
        }
        Ok(RingReceiver { memory, geometry, taken: 0, holds_message: false })
    }

    /// The oldest message that was not released, if there is one. It is read in place.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the sender's counter or length is invalid.
    pub fn message(&mut self) -> Result<Option<&[u8]>> {
        self.holds_message = self.waiting()? > 0;
        if !self.holds_message {
            return Ok(None);
        }
        let at = AT_LENGTHS + 4 * nth(&self.geometry, self.taken);
        let len = self.memory.word(at).load(Ordering::Relaxed) as usize;
        if len > self.geometry.slot_bytes {
            let expected = format!("a message of at most {} bytes", self.geometry.slot_bytes);
            return Err(corrupt(at, format!("{len} bytes"), expected));
        }
        Ok(Some(self.memory.bytes(message_offset(&self.geometry, self.taken), len)))
    }

    /// Frees the slot of the message last read; returns whether one was held. The sender does not
    /// sleep on the ring: notify it.
    pub fn release(&mut self) -> bool {
        let held = std::mem::take(&mut self.holds_message);
        if held {
            self.taken = self.taken.wrapping_add(1);
            self.memory.word(AT_TAKEN).store(self.taken, Ordering::Release);
        }
        held
    }

    /// The last [`RingSender::note`]; 0 before that.
    #[must_use]
    pub fn note(&self) -> u32 {
        self.memory.word(AT_NOTE).load(Ordering::Relaxed)
    }

    /// What follows the messages in the ring: valid once all of them are read.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the state is unknown, or its text is not UTF-8.
    pub fn tail(&self) -> Result<RingEnd> {
        match self.memory.word(AT_STATE).load(Ordering::Acquire) {
            OPEN => Ok(RingEnd::Open),
            END => Ok(RingEnd::End),
            FAILED => {
                let len = self.memory.word(AT_REASON_LEN).load(Ordering::Relaxed) as usize;
                let reason = self.memory.bytes(AT_REASON, len.min(REASON_BYTES_MAX));
                Ok(RingEnd::Failed(String::from_utf8_lossy(reason).into_owned()))
            }
            state => Err(corrupt(AT_STATE, format!("state {state}"), "state 0 to 2".to_owned())),
        }
    }

    /// Sleeps until a message or the end may have arrived, or for `limit`. Checks first.
    ///
    /// # Errors
    /// As [`Self::message`].
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let bell = self.memory.word(AT_BELL);
        let seen = bell.load(Ordering::Acquire);
        if self.waiting()? == 0 && self.tail()? == RingEnd::Open {
            wait(bell, seen, limit);
        }
        Ok(())
    }

    fn waiting(&self) -> Result<usize> {
        let sent = self.memory.word(AT_SENT).load(Ordering::Acquire);
        waiting(sent, self.taken, &self.geometry)
    }
}

/// Messages between the two counters. The other side's counter is memory that it may have
/// corrupted.
fn waiting(sent: u32, taken: u32, geometry: &Geometry) -> Result<usize> {
    let waiting = sent.wrapping_sub(taken) as usize;
    if waiting > geometry.slots {
        let found = format!("{sent} messages sent and {taken} taken");
        return Err(corrupt(
            AT_SENT,
            found,
            format!("at most {} waiting messages", geometry.slots),
        ));
    }
    Ok(waiting)
}

fn nth(geometry: &Geometry, count: u32) -> usize {
    count as usize % geometry.slots
}

fn message_offset(geometry: &Geometry, count: u32) -> usize {
    AT_MESSAGES + nth(geometry, count) * geometry.stride()
}

fn corrupt(at: usize, found: String, expected: String) -> Error {
    Error::Corrupt { object: "shared memory".to_owned(), offset: at as u64, found, expected }
}
