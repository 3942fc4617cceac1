//! A rank's side: finds the node reader or becomes it, and takes what it sends.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage::ipc::{LocalListener, Peer, RingEnd, RingReceiver};

use super::server::{NodeServer, StartAt};
use super::{NodeError, NodeOptions, Open, Samples};
use crate::Result;

/// One rank's samples, step after step, from the node reader.
///
/// The ranks of a node join in any order. The first one reads for all, on two threads of its own;
/// when it ends, in whatever way, another takes over. The samples of a rank depend neither on which
/// rank reads nor on the end of others.
#[derive(Debug)]
pub struct NodeClient {
    context: Arc<NodeContext>,
    server: Option<NodeServer>,
    peer: Peer,
    ring: RingReceiver,
    /// A multiple of the samples per step, also after the last step.
    samples_consumed: u64,
}

/// Shared by a rank's client and server.
pub(super) struct NodeContext {
    pub(super) options: NodeOptions,
    pub(super) fingerprint: String,
    pub(super) open: Open,
}

/// How often a waiting rank checks that the node reader lives. Only a rank that waits for its next
/// batch pays for it.
const CHECK_EVERY: Duration = Duration::from_millis(20);
/// Pause before the next attempt of a rank that found neither a free listener nor a node reader.
const RETRY_PAUSE: Duration = Duration::from_millis(2);

pub(super) const HELLO: [u8; 8] = *b"FLnode01";
pub(super) const WELCOME: u8 = b'w';
pub(super) const MISMATCH: u8 = b'm';
pub(super) const REFUSED: u8 = b'r';

impl NodeClient {
    /// Joins the ranks of the node, or becomes their reader.
    ///
    /// # Errors
    /// [`crate::Error::Option`] for an invalid option; [`NodeError::Mismatch`] if the node reader
    /// was given other options; [`NodeError::Refused`] if this rank has joined already;
    /// [`NodeError::Silent`] if no process answers; [`crate::Error::Storage`] for errors of the
    /// kernel.
    pub fn join(options: NodeOptions, open: Open) -> Result<Self> {
        options.check()?;
        let samples_consumed = options.samples_consumed;
        let deadline = Instant::now() + options.wait_max;
        let fingerprint = options.fingerprint();
        let context = Arc::new(NodeContext { options, fingerprint, open });
        let (server, peer, ring) = find(&context, samples_consumed, StartAt::AtOnce, deadline)?;
        Ok(NodeClient { context, server, peer, ring, samples_consumed })
    }

    /// This rank's samples of the next step, or `None` after the last. Waits for them if they have
    /// not been read. The next call frees their slot.
    ///
    /// # Errors
    /// [`NodeError::Failed`] for an error of the node reader, [`NodeError::Silent`] if nothing was
    /// received in time, and the errors of [`Self::join`] if another rank takes over.
    #[expect(clippy::should_implement_trait, reason = "the samples borrow the slot")]
    pub fn next(&mut self) -> Result<Option<Samples<'_>>> {
        if self.ring.release() {
            self.peer.nudge();
        }
        if !self.wait_for_message()? {
            return Ok(None);
        }
        self.samples_consumed += self.context.options.step_samples;
        let message = self.ring.message()?.expect("seen above, and only this client releases it");
        Samples::parse(message).map(Some)
    }

    /// Samples consumed by all ranks of all nodes when this rank's steps so far are done: the whole
    /// state to save.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed.min(self.context.options.samples_end)
    }

    /// Whether this process reads for the node.
    #[must_use]
    pub fn is_reader(&self) -> bool {
        self.server.is_some()
    }

    /// Waits; true if there is a message, false at the end.
    fn wait_for_message(&mut self) -> Result<bool> {
        let start = Instant::now();
        let deadline = start + self.context.options.wait_max;
        loop {
            // In this order: messages sent before the connection broke, or before the end was set,
            // can still be taken.
            let is_connected = self.peer.drain();
            let tail = self.ring.tail()?;
            if self.ring.message()?.is_some() {
                return Ok(true);
            }
            let pid = self.peer.pid();
            match tail {
                RingEnd::End => return Ok(false),
                RingEnd::Failed(reason) => return Err(NodeError::Failed { pid, reason }.into()),
                RingEnd::Open if !is_connected => self.find_another(deadline)?,
                RingEnd::Open => {
                    let now = Instant::now();
                    if now >= deadline {
                        let reason = self.wait_reason();
                        return Err(NodeError::Silent { pid, waited: now - start, reason }.into());
                    }
                    self.ring.wait(CHECK_EVERY.min(deadline - now))?;
                }
            }
        }
    }

    /// Finds a new reader when the old one has ended and all its messages are consumed.
    fn find_another(&mut self, deadline: Instant) -> Result<()> {
        log::info!("node reader: process {} exited; another rank takes over", self.peer.pid());
        self.server = None;
        let start_at = StartAt::AfterRanksJoined;
        (self.server, self.peer, self.ring) =
            find(&self.context, self.samples_consumed, start_at, deadline)?;
        Ok(())
    }

    /// What the node reader is waiting for.
    fn wait_reason(&self) -> String {
        match self.ring.note() {
            0 => "it is waiting for its own reads".to_owned(),
            rank => {
                let rank = rank - 1;
                format!(
                    "it is waiting for rank {rank}, which has not joined or consumes no batches"
                )
            }
        }
    }
}

type Found = (Option<NodeServer>, Peer, RingReceiver);

/// Connects to the node reader, or takes the listener if it is free.
fn find(
    context: &Arc<NodeContext>,
    position: u64,
    start_at: StartAt,
    deadline: Instant,
) -> Result<Found> {
    let start = Instant::now();
    let mut pid = 0;
    loop {
        let (mut server, mut found) = (None, None);
        if let Some(listener) = LocalListener::open(&context.options.job)? {
            let (ours, theirs) = Peer::pair()?;
            server =
                Some(NodeServer::start(listener, Arc::clone(context), theirs, position, start_at)?);
            found = Some(ours);
        } else if let Some(peer) = Peer::knock(&context.options.job)? {
            found = Some(peer);
        }
        let now = Instant::now();
        if let Some(peer) = found {
            pid = peer.pid();
            if let Some(ring) = greet(&peer, context, position, deadline)? {
                return Ok((server, peer, ring));
            }
        }
        if now >= deadline {
            let reason = "no rank answered or took over".to_owned();
            return Err(NodeError::Silent { pid, waited: now - start, reason }.into());
        }
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// Sends the greeting and receives the ring; `None` if the other process ended meanwhile or did not
/// answer.
fn greet(
    peer: &Peer,
    context: &NodeContext,
    position: u64,
    deadline: Instant,
) -> Result<Option<RingReceiver>> {
    let options = &context.options;
    let mut hello = HELLO.to_vec();
    hello.extend(options.rank.to_le_bytes());
    hello.extend(position.to_le_bytes());
    hello.extend((context.fingerprint.len() as u32).to_le_bytes()); // fits: checked
    hello.extend(context.fingerprint.as_bytes());
    let left = deadline.saturating_duration_since(Instant::now()).max(RETRY_PAUSE);
    let answer = peer.send(&hello, left).and_then(|()| peer.receive_fd(left));
    let (kind, fd) = match answer {
        Ok(answer) => answer,
        Err(e) => return lost(peer, e),
    };
    match (kind, fd) {
        (WELCOME, Some(fd)) => Ok(Some(RingReceiver::open(fd, options.geometry())?)),
        (MISMATCH | REFUSED, None) => {
            let text = match read_text(peer, left) {
                Ok(text) => text,
                Err(e) => return lost(peer, e),
            };
            let pid = peer.pid();
            if kind == REFUSED {
                return Err(NodeError::Refused { pid, reason: text }.into());
            }
            let ours = context.fingerprint.clone();
            Err(NodeError::Mismatch { pid, ours, theirs: text }.into())
        }
        _ => {
            let reason = "its answer is not of this version".to_owned();
            Err(NodeError::Refused { pid: peer.pid(), reason }.into())
        }
    }
}

fn lost(peer: &Peer, e: io::Error) -> Result<Option<RingReceiver>> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    match e.kind() {
        BrokenPipe | ConnectionReset | TimedOut | UnexpectedEof | WouldBlock => Ok(None),
        _ => {
            let object = format!("node reader (process {})", peer.pid());
            Err(storage::Error::from_io("contact", object, e).into())
        }
    }
}

/// Reads a length and that many bytes of text.
pub(super) fn read_text(peer: &Peer, limit: Duration) -> io::Result<String> {
    let mut len = [0; 4];
    peer.receive(&mut len, limit)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > TEXT_BYTES_MAX {
        let reason = format!("expected at most {TEXT_BYTES_MAX} bytes of text, found {len}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut text = vec![0; len];
    peer.receive(&mut text, limit)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Room for an identity of 4096 bytes, 256 blocks and the sizes.
pub(super) const TEXT_BYTES_MAX: usize = 16 << 10;

impl std::fmt::Debug for NodeContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeContext").field("options", &self.options).finish_non_exhaustive()
    }
}
