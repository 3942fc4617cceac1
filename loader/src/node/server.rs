//! The node reader: one thread that serves the ranks, and one that reads.
//!
//! The serving thread sleeps until a rank joins, takes a batch or ends, or a batch was read, and
//! never waits for anything else: a stuck read stops neither a rank from joining nor this process
//! from ending. It proceeds step by step: a step is done when every joined rank has its part.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use storage::ipc::{LocalListener, Peer, RingEnd, RingSender, ready};

use super::client::{HELLO, MISMATCH, NodeContext, REFUSED, TEXT_BYTES_MAX, WELCOME, read_text};
use super::{Open, RawBatch, SAMPLES_MAX};
use crate::{Error, Result};

/// Reads for the node until it is dropped.
#[derive(Debug)]
pub(super) struct NodeServer {
    stop: Option<Peer>,
    serving: Option<JoinHandle<()>>,
}

/// When to start reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartAt {
    /// At once: the first reader of a job starts where all ranks start.
    AtOnce,
    /// A reader that takes over first waits up to [`JOIN_WAIT`] for the other ranks; those that
    /// have not joined by then are dropped, like the reader that ended.
    AfterRanksJoined,
}

/// Ranks notice the loss of their reader within 20 ms.
const JOIN_WAIT: Duration = Duration::from_millis(500);
/// A rank sends its greeting in one piece, at once.
const GREETING_LIMIT: Duration = Duration::from_secs(1);

impl NodeServer {
    /// `own` is this process's connection to itself.
    pub(super) fn start(
        listener: LocalListener,
        context: Arc<NodeContext>,
        own: Peer,
        position: u64,
        start_at: StartAt,
    ) -> Result<Self> {
        let (stop, stopped) = Peer::pair()?;
        let (wake, woken) = Peer::pair()?;
        let join_deadline =
            (start_at == StartAt::AfterRanksJoined).then(|| Instant::now() + JOIN_WAIT);
        let options = &context.options;
        log::info!(
            "node reader: serving {} ranks of job {} from sample {position}",
            options.blocks.len(),
            options.job
        );
        let mut slots = Vec::new();
        for &block in &options.blocks {
            let ring = Some(RingSender::create(options.geometry())?);
            let block = block as usize;
            slots.push(ClientSlot { block, peer: None, ring, start: position, position });
        }
        let state = NodeServerState {
            context,
            listener,
            stopped,
            woken,
            wake: Arc::new(wake),
            slots,
            join_deadline,
            source: None,
            batch: None,
            position,
            tail: RingEnd::Open,
        };
        let serving = std::thread::Builder::new()
            .name("node".to_owned())
            .spawn(move || state.run(own))
            .map_err(|e| storage::Error::from_io("start", "a thread for the node reader", e))?;
        Ok(NodeServer { stop: Some(stop), serving: Some(serving) })
    }
}

impl Drop for NodeServer {
    fn drop(&mut self) {
        // The serving thread sees the closed connection, and frees the listener for another
        // process.
        self.stop = None;
        if let Some(serving) = self.serving.take() {
            let _ = serving.join();
        }
    }
}

/// State of the serving thread.
struct NodeServerState {
    context: Arc<NodeContext>,
    listener: LocalListener,
    stopped: Peer,
    woken: Peer,
    wake: Arc<Peer>,
    slots: Vec<ClientSlot>,
    join_deadline: Option<Instant>,
    source: Option<ReaderThread>,
    /// The step being sent to the ranks, which starts at `position`.
    batch: Option<RawBatch>,
    position: u64,
    tail: RingEnd,
}

/// The slot of a rank. The server does not wait for a slot without a ring. Without a peer the rank
/// has not joined.
struct ClientSlot {
    block: usize,
    peer: Option<Peer>,
    ring: Option<RingSender>,
    /// Where its ring starts, and the next step to write into it.
    start: u64,
    position: u64,
}

/// Why a rank is refused.
type JoinRefusal = (u8, String);

impl NodeServerState {
    fn run(mut self, own: Peer) {
        self.welcome(own);
        loop {
            self.send_steps();
            match self.sleep() {
                Ok(true) => {}
                Ok(false) => return,
                Err(e) => {
                    log::warn!("node reader: stopped: {e}");
                    return;
                }
            }
        }
    }

    /// Sleeps until there is something to do, then serves the listener and the slots. Returns
    /// `false` if the thread must end.
    fn sleep(&mut self) -> Result<bool> {
        let now = Instant::now();
        let limit = self.join_deadline.map(|until| until.saturating_duration_since(now));
        let mut fds = vec![self.stopped.as_fd(), self.listener.as_fd(), self.woken.as_fd()];
        let peers = self.slots.iter().enumerate();
        let joined: Vec<(usize, &Peer)> =
            peers.filter_map(|(rank, slot)| Some((rank, slot.peer.as_ref()?))).collect();
        fds.extend(joined.iter().map(|(_, peer)| peer.as_fd()));
        // `poll` truncates the limit to milliseconds: add one, or the loop would spin in the last.
        let is_ready = ready(&fds, limit.map(|limit| limit + Duration::from_millis(1)))?;
        let disconnected: Vec<usize> = joined
            .iter()
            .zip(&is_ready[3..])
            .filter(|((_, peer), is_ready)| **is_ready && !peer.drain())
            .map(|((rank, _), _)| *rank)
            .collect();
        for rank in disconnected {
            log::info!("node reader: rank {rank} disconnected; the others continue");
            self.slots[rank].leave();
        }
        self.woken.drain();
        match self.listener.accept() {
            Ok(Some(peer)) => self.welcome(peer),
            Ok(None) => {}
            Err(e) => {
                log::warn!("node reader: connection not accepted: {e}");
                // The error would repeat at once, for example with too many open files.
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(!is_ready[0])
    }

    /// Sends a joining rank its ring, or the reason for a refusal.
    fn welcome(&mut self, peer: Peer) {
        let greeting = greeting(&peer);
        let outcome = greeting.map(|(rank, position, theirs)| {
            self.assign_slot(rank, position, &theirs).map(|()| rank)
        });
        let answered = match outcome {
            Ok(Ok(rank)) => {
                let rank = rank as usize;
                let slot = &mut self.slots[rank];
                let ring = slot.ring.as_ref().expect("a rank with a slot has one");
                let sent = peer.send_fd(WELCOME, ring.fd(), GREETING_LIMIT);
                slot.peer = Some(peer);
                sent
            }
            Ok(Err((kind, text))) => {
                let differs = if kind == MISMATCH { "its options differ from " } else { "" };
                log::warn!("node reader: process {} rejected: {differs}{text}", peer.pid());
                refuse(&peer, kind, &text)
            }
            Err(e) => Err(e),
        };
        if let Err(e) = answered {
            // A slot whose rank received no answer is freed when its connection closes.
            log::warn!("node reader: a process failed to join: {e}");
        }
    }

    /// Assigns a rank its slot, with a ring that starts at its position.
    fn assign_slot(
        &mut self,
        rank: u32,
        position: u64,
        theirs: &str,
    ) -> std::result::Result<(), JoinRefusal> {
        if theirs != self.context.fingerprint {
            return Err((MISMATCH, self.context.fingerprint.clone()));
        }
        let geometry = self.context.options.geometry();
        let step = self.context.options.step_samples;
        let Some(slot) = self.slots.get_mut(rank as usize) else {
            return Err((REFUSED, format!("rank {rank} does not exist")));
        };
        if let Some(peer) = slot.peer.as_ref().filter(|peer| peer.drain()) {
            return Err((REFUSED, format!("rank {rank} has joined as process {}", peer.pid())));
        }
        let steps = position.abs_diff(self.position).is_multiple_of(step);
        let is_done = position >= self.context.options.samples_end;
        if !(steps || is_done) || position > SAMPLES_MAX {
            let at = self.position;
            let reason = format!(
                "expected whole steps of {step} samples from sample {at}, found sample {position}"
            );
            return Err((REFUSED, reason));
        }
        let waits = slot.peer.is_none() && slot.ring.is_some();
        if !(waits && slot.start == position) {
            let ring = RingSender::create(geometry).map_err(|e| (REFUSED, e.to_string()))?;
            (slot.ring, slot.start, slot.position) = (Some(ring), position, position);
        }
        if slot.position < self.position && !is_done {
            self.restart_reading();
        } else if let Some(ring) = &mut self.slots[rank as usize].ring {
            // With `RingEnd::Open` this is a no-op.
            ring.close(&self.tail);
        }
        Ok(())
    }

    /// Restarts reading at the smallest position.
    fn restart_reading(&mut self) {
        let joined = self.slots.iter().filter(|slot| slot.ring.is_some());
        self.position = joined.map(|slot| slot.position).min().unwrap_or(self.position);
        (self.source, self.batch, self.tail) = (None, None, RingEnd::Open);
    }

    /// Sends steps to the ranks that have a free slot, step after step.
    fn send_steps(&mut self) {
        if let Some(until) = self.join_deadline {
            if self.slots.iter().any(|slot| slot.peer.is_none()) && Instant::now() < until {
                return;
            }
            self.join_deadline = None;
            self.slots.iter_mut().filter(|slot| slot.peer.is_none()).for_each(ClientSlot::leave);
            self.restart_reading();
        }
        while self.tail == RingEnd::Open {
            if self.batch.is_none() && !self.fetch() {
                return;
            }
            match self.step() {
                Ok(None) => {}
                Ok(Some(rank)) => return self.note(rank as u32 + 1),
                Err(e) => return self.close(RingEnd::Failed(e.to_string())),
            }
        }
    }

    /// Sends the step to each rank that lacks its part. Returns a rank without a free slot; if
    /// there is none, the step is done.
    fn step(&mut self) -> Result<Option<usize>> {
        let batch = self.batch.as_ref().expect("the caller fetched it");
        let options = &self.context.options;
        for (rank, slot) in self.slots.iter_mut().enumerate() {
            if slot.ring.is_some()
                && slot.position == self.position
                && !slot.take(batch, options.micro_batch)?
            {
                return Ok(Some(rank));
            }
            if slot.position == self.position {
                slot.position += options.step_samples;
            }
        }
        self.position += options.step_samples;
        if let (Some(source), Some(batch)) = (&self.source, self.batch.take()) {
            // A reading thread that has ended does not need the buffer back.
            let _ = source.spent.send(batch);
        }
        Ok(None)
    }

    /// Takes the next step, if it has been read.
    fn fetch(&mut self) -> bool {
        if self.source.is_none() {
            match ReaderThread::start(&self.context.open, self.position, &self.wake) {
                Ok(source) => self.source = Some(source),
                Err(e) => self.close(RingEnd::Failed(e.to_string())),
            }
        }
        let Some(source) = &self.source else { return false };
        match source.read.try_recv() {
            Ok(Ok(Some(batch))) => self.batch = Some(batch),
            Ok(Ok(None)) => self.close(RingEnd::End),
            Ok(Err(e)) => self.close(RingEnd::Failed(e.to_string())),
            Err(TryRecvError::Empty) => self.note(0),
            Err(TryRecvError::Disconnected) => {
                self.close(RingEnd::Failed(Error::ThreadPanicked.to_string()));
            }
        }
        self.batch.is_some()
    }

    fn close(&mut self, tail: RingEnd) {
        self.slots.iter_mut().filter_map(|slot| slot.ring.as_mut()).for_each(|r| r.close(&tail));
        self.tail = tail;
    }

    /// Publishes, for ranks that time out, what the step waits for.
    fn note(&self, rank: u32) {
        self.slots.iter().filter_map(|slot| slot.ring.as_ref()).for_each(|ring| ring.note(rank));
    }
}

impl ClientSlot {
    /// Writes this rank's rows of a step into its ring; `false` if no slot is free.
    fn take(&mut self, batch: &RawBatch, micro_batch: usize) -> Result<bool> {
        let Some(ring) = &mut self.ring else { return Ok(true) };
        let first = self.block.saturating_mul(micro_batch).min(batch.rows());
        // Sent also without rows: all ranks take the same number of steps.
        let rows = first..first.saturating_add(micro_batch).min(batch.rows());
        match ring.slot() {
            Ok(None) => return Ok(false),
            Ok(Some(slot)) => {
                let len = batch.write(rows, slot)?;
                ring.send(len);
            }
            // Its shared memory is corrupt, which must not stop the other ranks.
            Err(e) => {
                log::warn!("node reader: a rank is disconnected: {e}");
                self.leave();
            }
        }
        Ok(true)
    }

    fn leave(&mut self) {
        self.peer = None;
        self.ring = None;
    }
}

/// The reading thread, which ends when its receiver is dropped.
struct ReaderThread {
    read: Receiver<Result<Option<RawBatch>>>,
    spent: Sender<RawBatch>,
}

impl ReaderThread {
    fn start(open: &Open, position: u64, wake: &Arc<Peer>) -> Result<Self> {
        // Three batches: one queued, one being read, one being sent.
        let (to_server, read) = sync_channel(1);
        let (spent, recycled) = channel::<RawBatch>();
        let (open, wake) = (Arc::clone(open), Arc::clone(wake));
        let work = move || {
            let mut source = match open(position) {
                Ok(source) => source,
                Err(e) => {
                    let _ = to_server.send(Err(e));
                    return wake.nudge();
                }
            };
            loop {
                let mut batch = recycled.try_recv().unwrap_or_default();
                let result = source.next(&mut batch).map(|more| more.then_some(batch));
                let last = !matches!(result, Ok(Some(_)));
                let is_received = to_server.send(result).is_ok();
                wake.nudge();
                if last || !is_received {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("node reads".to_owned())
            .spawn(work)
            .map_err(|e| storage::Error::from_io("start", "a thread for node reads", e))?;
        Ok(ReaderThread { read, spent })
    }
}

/// The greeting of a rank: its number, its position and its fingerprint.
fn greeting(peer: &Peer) -> io::Result<(u32, u64, String)> {
    let mut hello = [0; HELLO.len() + 12];
    peer.receive(&mut hello, GREETING_LIMIT)?;
    let (magic, rest) = hello.split_at(HELLO.len());
    if magic != HELLO {
        let reason = "expected a greeting of this version, found other bytes";
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let (rank, position) = rest.split_at(4);
    let rank = u32::from_le_bytes(rank.try_into().expect("four bytes"));
    let position = u64::from_le_bytes(position.try_into().expect("eight bytes"));
    Ok((rank, position, read_text(peer, GREETING_LIMIT)?))
}

fn refuse(peer: &Peer, kind: u8, text: &str) -> io::Result<()> {
    let text = &text.as_bytes()[..text.len().min(TEXT_BYTES_MAX)];
    let mut answer = vec![kind];
    answer.extend((text.len() as u32).to_le_bytes()); // fits: bounded above
    answer.extend(text);
    peer.send(&answer, GREETING_LIMIT)
}
