//! Compressed files, decompressed on threads of their own ahead of the one that cuts them.
//!
//! The files are walked in order and handed out in units (`frames`): a group of frames that can be
//! decompressed by itself, or all of a file that has only one. Each thread takes the next unit and
//! puts its chunks on a board; who reads takes them off in the order of the units. The board holds
//! so many chunks and no more. The first unit on it, which is being read, may always put one more,
//! so that units behind it can fill the board but never stop it.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::frames::{DecodePlan, Unit};
use super::stream::{DecodeError, read_stream};

/// What is decompressed at a time: about a millisecond of work.
const CHUNK_BYTES: usize = 1 << 20;

/// Decompression is four to ten times as fast as tokenizing: 16 threads feed more than 64 cores.
pub(super) const THREADS_MAX: usize = 16;

/// A thread may be so far ahead, on average: 8 MiB, and 128 MiB for all. Files that are shorter
/// are decompressed side by side; of longer ones the next is so far when its turn comes.
const CHUNKS_PER_THREAD: usize = 8;

/// Of the unit that is read, if all else is full: one is taken while the next is made.
const CHUNKS_FIRST: usize = 2;

/// What decompresses ahead. When it is dropped its threads end, each with the chunk it is at.
#[derive(Debug)]
pub(super) struct Decompressor {
    shared: Arc<DecodeShared>,
}

#[derive(Debug)]
struct DecodeShared {
    plan: Mutex<DecodePlan>,
    board: Mutex<DecodeQueue>,
    /// There is room on the board, or another unit has become the first.
    room: Condvar,
    /// A chunk or the end of a unit has come.
    news: Condvar,
    chunks_max: usize,
}

#[derive(Debug, Default)]
struct DecodeQueue {
    lanes: VecDeque<DecodeLane>,
    /// How many lanes were taken away at the front: the number of the first that is here.
    gone: u64,
    /// Chunks in all lanes.
    chunks: usize,
    /// Bytes of the input being read that come before what is wanted.
    skip: u64,
    /// Buffers to be used again.
    spare: Vec<Vec<u8>>,
    /// No unit will be added.
    planned: bool,
    closed: bool,
    panicked: bool,
}

/// What one unit has given so far.
#[derive(Debug)]
struct DecodeLane {
    input_idx: usize,
    /// Decompressed bytes to leave out before any of this and the next units of its input.
    skip: u64,
    chunks: VecDeque<DecodedChunk>,
    end: Option<Result<(), DecodeError>>,
}

/// Decompressed bytes, some of which may have been taken.
#[derive(Debug, Default)]
pub(super) struct DecodedChunk {
    bytes: Vec<u8>,
    at: usize,
    /// How far in the file this is, in bytes as stored.
    pub(super) stored: u64,
}

impl DecodedChunk {
    pub(super) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// Moves as many bytes as both have room for.
    pub(super) fn take(&mut self, buf: &mut [u8]) -> usize {
        let count = (self.bytes.len() - self.at).min(buf.len());
        buf[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
        self.at += count;
        count
    }
}

impl Decompressor {
    /// Begins with the first units of a plan.
    pub(super) fn start(plan: DecodePlan, threads: usize) -> Self {
        let threads = threads.clamp(1, THREADS_MAX);
        let shared = Arc::new(DecodeShared {
            plan: Mutex::new(plan),
            board: Mutex::default(),
            room: Condvar::new(),
            news: Condvar::new(),
            chunks_max: threads * CHUNKS_PER_THREAD,
        });
        for _ in 0..threads {
            let shared = Arc::clone(&shared);
            // Nobody waits for them: one may be waiting for a disk.
            thread::spawn(move || {
                let alarm = PanicNotifier(shared);
                while alarm.0.work() {}
            });
        }
        Decompressor { shared }
    }

    /// The next chunk of an input, all of whose predecessors have been taken; none at its end.
    /// Takes the last one back, to be filled again.
    pub(super) fn next(
        &self,
        input_idx: usize,
        last: DecodedChunk,
    ) -> Result<Option<DecodedChunk>, DecodeError> {
        let mut board = self.shared.board();
        if last.bytes.capacity() > 0 {
            board.spare.push(last.bytes);
        }
        loop {
            assert!(!board.panicked, "a thread that decompresses panicked");
            match board.step(input_idx) {
                DecodeEvent::Chunk(chunk) => {
                    self.shared.room.notify_all();
                    return Ok(Some(chunk));
                }
                DecodeEvent::Again => self.shared.room.notify_all(),
                DecodeEvent::Failed(failed) => return Err(failed),
                DecodeEvent::End => return Ok(None),
                DecodeEvent::Wait => {
                    let news = self.shared.news.wait(board);
                    board = news.unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

/// What the board has for who reads.
enum DecodeEvent {
    Chunk(DecodedChunk),
    /// Something was taken away that is not wanted.
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
        self.gone += 1;
        end.map_or_else(DecodeEvent::Failed, |()| DecodeEvent::Again)
    }

    fn lane(&mut self, lane: u64) -> &mut DecodeLane {
        // fits: a lane is here until its end has come and was taken.
        &mut self.lanes[(lane - self.gone) as usize]
    }
}

/// What an input is that has become shorter since it was read before.
pub(super) fn too_short(missing: u64) -> DecodeError {
    let told = format!("{missing} bytes fewer than were read of it before, decompressed");
    DecodeError { stored: None, source: io::Error::new(io::ErrorKind::UnexpectedEof, told) }
}

impl Drop for Decompressor {
    fn drop(&mut self) {
        self.shared.board().closed = true;
        self.shared.room.notify_all();
    }
}

impl DecodeShared {
    fn board(&self) -> MutexGuard<'_, DecodeQueue> {
        // Whoever panics says so on the board; what stands there is whole at any time.
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a unit and decompresses it. False: there are no more, or nobody wants them.
    fn work(&self) -> bool {
        let Some((lane, unit)) = self.claim() else { return false };
        let end = match unit {
            Err(failed) => Err(failed),
            Ok(unit) => match self.decompress(lane, unit) {
                Some(end) => end,
                None => return false,
            },
        };
        self.board().lane(lane).end = Some(end);
        self.news.notify_all();
        true
    }

    /// The next unit and its lane on the board. After one that failed there are no more.
    fn claim(&self) -> Option<(u64, Result<Unit, DecodeError>)> {
        // Held while the board is written, so that lanes are in the order of the units.
        let mut plan = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        let unit = if self.board().closed { None } else { plan.next() };
        let mut board = self.board();
        let Some((input_idx, unit)) = unit else {
            board.planned = true;
            self.news.notify_all();
            return None;
        };
        let skip = unit.as_ref().map_or(0, |unit| unit.skip);
        board.lanes.push_back(DecodeLane { input_idx, skip, chunks: VecDeque::new(), end: None });
        // Its input may be over, or may at last have begun.
        self.news.notify_all();
        Some((board.gone + board.lanes.len() as u64 - 1, unit))
    }

    /// Puts a unit on the board, chunk by chunk. None: nobody wants it.
    fn decompress(&self, lane: u64, unit: Unit) -> Option<Result<(), DecodeError>> {
        if unit.is_big {
            drop(self.wait(|board| board.gone == lane)?);
        }
        let count = unit.bytes.count();
        let failed = |source| DecodeError { stored: Some(count.get()), source };
        let mut decoder = match unit.codec.decoder(unit.bytes) {
            Ok(decoder) => decoder,
            Err(source) => return Some(Err(failed(source))),
        };
        loop {
            let mut bytes = self.board().spare.pop().unwrap_or_default();
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

    /// Puts a chunk on the board when there is room. None: nobody wants it.
    fn put(&self, lane: u64, chunk: DecodedChunk) -> Option<()> {
        let mut board = self.wait(|board| {
            let first = board.gone == lane && board.lanes[0].chunks.len() < CHUNKS_FIRST;
            first || board.chunks < self.chunks_max
        })?;
        board.chunks += 1;
        board.lane(lane).chunks.push_back(chunk);
        self.news.notify_all();
        Some(())
    }

    /// Waits until there is room. None: nobody wants any more.
    fn wait(&self, is_room: impl Fn(&DecodeQueue) -> bool) -> Option<MutexGuard<'_, DecodeQueue>> {
        let mut board = self.board();
        while !board.closed && !is_room(&board) {
            board = self.room.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
        (!board.closed).then_some(board)
    }
}

/// Tells who reads if a thread panics: it would wait for ever otherwise.
struct PanicNotifier(Arc<DecodeShared>);

impl Drop for PanicNotifier {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.board().panicked = true;
            self.0.news.notify_all();
        }
    }
}
