//! Decompresses files on separate threads, ahead of the thread that cuts them.
//!
//! The files are processed in order and split into units (`frames`): a group of frames that can be
//! decompressed independently, or all of a file that has only one. Each thread takes the next unit
//! and appends its chunks to a queue; the reader takes them in the order of the units. The queue is
//! bounded. The first unit in it, which is being read, may always add one more chunk, so that later
//! units can fill the queue but never block it.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::frames::{DecodePlan, Unit};
use super::stream::{DecodeError, read_stream};

/// Bytes decompressed at a time: about a millisecond of work.
const CHUNK_BYTES: usize = 1 << 20;

/// Decompression is four to ten times as fast as tokenizing: 16 threads feed more than 64 cores.
pub(super) const THREADS_MAX: usize = 16;

/// Average read-ahead of a thread: 8 MiB, and 128 MiB for all. Shorter files are decompressed in
/// parallel; of longer ones, the next is decompressed this far when the reader reaches it.
const CHUNKS_PER_THREAD: usize = 8;

/// Chunks of the unit being read if the queue is full: one is taken while the next is produced.
const CHUNKS_FIRST: usize = 2;

/// The decompression threads. On drop they end after their current chunk.
#[derive(Debug)]
pub(super) struct Decompressor {
    shared: Arc<DecodeShared>,
}

#[derive(Debug)]
struct DecodeShared {
    plan: Mutex<DecodePlan>,
    queue: Mutex<DecodeQueue>,
    /// The queue has room, or another unit has become the first.
    room: Condvar,
    /// A chunk or the end of a unit was added.
    added: Condvar,
    chunks_max: usize,
}

#[derive(Debug, Default)]
struct DecodeQueue {
    lanes: VecDeque<DecodeLane>,
    /// Lanes removed at the front: the number of the first that remains.
    removed: u64,
    /// Chunks in all lanes.
    chunks: usize,
    /// Bytes of the current input still to be skipped.
    skip: u64,
    /// Buffers for reuse.
    spare: Vec<Vec<u8>>,
    /// All units have been added.
    planned: bool,
    closed: bool,
    panicked: bool,
}

/// The chunks of one unit so far.
#[derive(Debug)]
struct DecodeLane {
    input_idx: usize,
    /// Decompressed bytes to skip in this and the next units of its input.
    skip: u64,
    chunks: VecDeque<DecodedChunk>,
    end: Option<Result<(), DecodeError>>,
}

/// Decompressed bytes, some of which may have been consumed.
#[derive(Debug, Default)]
pub(super) struct DecodedChunk {
    bytes: Vec<u8>,
    at: usize,
    /// Stored bytes of the file that the decoder had read by its end.
    pub(super) stored: u64,
}

impl DecodedChunk {
    pub(super) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// Copies as many bytes as fit.
    pub(super) fn take(&mut self, buf: &mut [u8]) -> usize {
        let count = (self.bytes.len() - self.at).min(buf.len());
        buf[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
        self.at += count;
        count
    }
}

impl Decompressor {
    /// Starts the threads; fewer if the system starts no more.
    ///
    /// # Errors
    /// Those of the system, if it starts none.
    pub(super) fn start(plan: DecodePlan, threads: usize) -> io::Result<Self> {
        let threads = threads.clamp(1, THREADS_MAX);
        let shared = Arc::new(DecodeShared {
            plan: Mutex::new(plan),
            queue: Mutex::default(),
            room: Condvar::new(),
            added: Condvar::new(),
            chunks_max: threads * CHUNKS_PER_THREAD,
        });
        for nth in 0..threads {
            let shared = Arc::clone(&shared);
            // They are not joined: one may be waiting for a disk.
            let spawned = thread::Builder::new().name("decompress".to_owned()).spawn(move || {
                let notifier = PanicNotifier(shared);
                while notifier.0.work() {}
            });
            match spawned {
                Err(error) if nth == 0 => return Err(error),
                Err(_) => break,
                Ok(_) => {}
            }
        }
        Ok(Decompressor { shared })
    }

    /// The next chunk of an input; the caller has consumed all earlier ones. `None` at its end. The
    /// last chunk is passed back for reuse.
    pub(super) fn next(
        &self,
        input_idx: usize,
        last: DecodedChunk,
    ) -> Result<Option<DecodedChunk>, DecodeError> {
        let mut queue = self.shared.queue();
        if last.bytes.capacity() > 0 {
            queue.spare.push(last.bytes);
        }
        loop {
            assert!(!queue.panicked, "a thread that decompresses panicked");
            match queue.step(input_idx) {
                DecodeEvent::Chunk(chunk) => {
                    self.shared.room.notify_all();
                    return Ok(Some(chunk));
                }
                DecodeEvent::Again => self.shared.room.notify_all(),
                DecodeEvent::Failed(failed) => return Err(failed),
                DecodeEvent::End => return Ok(None),
                DecodeEvent::Wait => {
                    let added = self.shared.added.wait(queue);
                    queue = added.unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

/// The next event for the reader.
enum DecodeEvent {
    Chunk(DecodedChunk),
    /// An unwanted chunk was removed; try again.
    Again,
    Failed(DecodeError),
    End,
    Wait,
}

impl DecodeQueue {
    fn step(&mut self, input_idx: usize) -> DecodeEvent {
        let lane = match self.lanes.front_mut() {
            Some(lane) if lane.input_idx == input_idx => lane,
            None if !self.planned => return DecodeEvent::Wait,
            _ if self.skip > 0 => return DecodeEvent::Failed(too_short(self.skip)),
            _ => return DecodeEvent::End,
        };
        self.skip += std::mem::take(&mut lane.skip);
        if let Some(mut chunk) = lane.chunks.pop_front() {
            self.chunks -= 1;
            chunk.at = usize::try_from(self.skip).unwrap_or(usize::MAX).min(chunk.bytes.len());
            self.skip -= chunk.at as u64;
            if !chunk.is_empty() {
                return DecodeEvent::Chunk(chunk);
            }
            self.spare.push(chunk.bytes);
            return DecodeEvent::Again;
        }
        let Some(end) = lane.end.take() else { return DecodeEvent::Wait };
        self.lanes.pop_front();
        self.removed += 1;
        end.map_or_else(DecodeEvent::Failed, |()| DecodeEvent::Again)
    }

    fn lane(&mut self, lane: u64) -> &mut DecodeLane {
        // fits: a lane stays in the queue until its end was taken.
        &mut self.lanes[(lane - self.removed) as usize]
    }
}

/// The error of an input that has become shorter since it was last read.
pub(super) fn too_short(missing: u64) -> DecodeError {
    let message = format!("decompressed data is now {missing} bytes shorter than before");
    DecodeError { stored: None, source: io::Error::new(io::ErrorKind::UnexpectedEof, message) }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.room.notify_all();
    }
}

impl DecodeShared {
    fn queue(&self) -> MutexGuard<'_, DecodeQueue> {
        // A panic is recorded in the queue, whose contents are always consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decompresses the next unit. False if there are no more, or the reader has closed the queue.
    fn work(&self) -> bool {
        let Some((lane, unit)) = self.claim() else { return false };
        let end = match unit {
            Err(failed) => Err(failed),
            Ok(unit) => match self.decompress(lane, unit) {
                Some(end) => end,
                None => return false,
            },
        };
        self.queue().lane(lane).end = Some(end);
        self.added.notify_all();
        true
    }

    /// The next unit and its lane in the queue. There are none after one that failed.
    fn claim(&self) -> Option<(u64, Result<Unit, DecodeError>)> {
        // Held while the lane is added, so that lanes are in the order of the units.
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let unit = if self.queue().closed { None } else { plan.next() };
        let mut queue = self.queue();
        let Some((input_idx, unit)) = unit else {
            queue.planned = true;
            self.added.notify_all();
            return None;
        };
        let skip = unit.as_ref().map_or(0, |unit| unit.skip);
        queue.lanes.push_back(DecodeLane { input_idx, skip, chunks: VecDeque::new(), end: None });
        // Its input may have ended, or just started.
        self.added.notify_all();
        Some((queue.removed + queue.lanes.len() as u64 - 1, unit))
    }

    /// Appends a unit to the queue, chunk by chunk. `None`: the reader has closed the queue.
    fn decompress(&self, lane: u64, unit: Unit) -> Option<Result<(), DecodeError>> {
        if unit.is_big {
            drop(self.wait(|queue| queue.removed == lane)?);
        }
        let count = unit.bytes.count();
        let failed = |source| DecodeError { stored: Some(count.get()), source };
        let mut decoder = match unit.codec.decoder(unit.bytes) {
            Ok(decoder) => decoder,
            Err(source) => return Some(Err(failed(source))),
        };
        loop {
            let mut bytes = self.queue().spare.pop().unwrap_or_default();
            bytes.resize(CHUNK_BYTES, 0);
            let (len, error) = read_stream(decoder.as_mut(), &mut bytes);
            bytes.truncate(len);
            if len > 0 {
                self.put(lane, DecodedChunk { bytes, at: 0, stored: count.get() })?;
            }
            match error {
                Some(source) => return Some(Err(failed(source))),
                None if len < CHUNK_BYTES => return Some(Ok(())),
                None => {}
            }
        }
    }

    /// Appends a chunk when there is room. `None`: the reader has closed the queue.
    fn put(&self, lane: u64, chunk: DecodedChunk) -> Option<()> {
        let mut queue = self.wait(|queue| {
            let first = queue.removed == lane && queue.lanes[0].chunks.len() < CHUNKS_FIRST;
            first || queue.chunks < self.chunks_max
        })?;
        queue.chunks += 1;
        queue.lane(lane).chunks.push_back(chunk);
        self.added.notify_all();
        Some(())
    }

    /// Waits until there is room. `None`: the reader has closed the queue.
    fn wait(&self, is_room: impl Fn(&DecodeQueue) -> bool) -> Option<MutexGuard<'_, DecodeQueue>> {
        let mut queue = self.queue();
        while !queue.closed && !is_room(&queue) {
            queue = self.room.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        (!queue.closed).then_some(queue)
    }
}

/// Reports a panic to the reader, which would otherwise wait forever.
struct PanicNotifier(Arc<DecodeShared>);

impl Drop for PanicNotifier {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.queue().panicked = true;
            self.0.added.notify_all();
        }
    }
}
