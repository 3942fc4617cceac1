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
/// Made in any order in the ranks of a node. The first one reads for all, on two threads of its
/// own; when it ends, in whatever way, another takes over. What a rank gets depends neither on
/// which rank reads nor on the fate of the others.
#[derive(Debug)]
pub struct NodeClient {
    common: Arc<NodeContext>,
    owner: Option<NodeServer>,
    peer: Peer,
    ring: RingReceiver,
    /// In whole steps, also after the last.
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
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Pause before a rank retries that found neither a free listener nor a process behind it.
const KNOCK_EVERY: Duration = Duration::from_millis(2);

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
        let common = Arc::new(NodeContext { options, fingerprint, open });
        let (owner, peer, ring) = find(&common, samples_consumed, StartAt::AtOnce, deadline)?;
        Ok(NodeClient { common, owner, peer, ring, samples_consumed })
    }

    /// This rank's samples of the next step, or `None` after the last. Waits for them if they have
    /// not been read. The next call frees their slot.
    ///
    /// # Errors
    /// [`NodeError::Failed`] for an error of the node reader, [`NodeError::Silent`] if nothing was
    /// received in time, and the errors of [`Self::join`] if another rank takes over.
    #[expect(clippy::should_implement_trait, reason = "what it gives borrows the slot")]
    pub fn next(&mut self) -> Result<Option<Samples<'_>>> {
        if self.ring.release() {
            self.peer.nudge();
        }
        if !self.message_or_end()? {
            return Ok(None);
        }
        self.samples_consumed += self.common.options.step_samples;
        let message = self.ring.message()?.expect("seen above, and only we release it");
        Samples::parse(message).map(Some)
    }

    /// Samples consumed by all ranks of all nodes when this rank's steps so far are done: the whole
    /// state to save.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed.min(self.common.options.samples_end)
    }

    /// Whether this process reads for the node.
    #[must_use]
    pub fn is_reader(&self) -> bool {
        self.owner.is_some()
    }

    /// Waits; true if there is a message, false at the end.
    fn message_or_end(&mut self) -> Result<bool> {
        let start = Instant::now();
        let deadline = start + self.common.options.wait_max;
        loop {
            // In this order: messages sent before the connection broke, or the end was set, can
            // still be taken.
            let lives = self.peer.drain();
            let tail = self.ring.tail()?;
            if self.ring.message()?.is_some() {
                return Ok(true);
            }
            let pid = self.peer.pid();
            match tail {
                RingEnd::End => return Ok(false),
                RingEnd::Failed(reason) => return Err(NodeError::Failed { pid, reason }.into()),
                RingEnd::Open if !lives => self.find_another(deadline)?,
                RingEnd::Open => {
                    let now = Instant::now();
                    if now >= deadline {
                        let reason = self.why();
                        return Err(NodeError::Silent { pid, waited: now - start, reason }.into());
                    }
                    self.ring.wait(LOOK_EVERY.min(deadline - now))?;
                }
            }
        }
    }

    /// Finds a new reader when the old one is gone and all its messages are consumed.
    fn find_another(&mut self, deadline: Instant) -> Result<()> {
        log::info!("node reader: process {} exited; another rank takes over", self.peer.pid());
        self.owner = None;
        let begin = StartAt::WhenAllAreThere;
        (self.owner, self.peer, self.ring) =
            find(&self.common, self.samples_consumed, begin, deadline)?;
        Ok(())
    }

    fn why(&self) -> String {
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
    common: &Arc<NodeContext>,
    position: u64,
    begin: StartAt,
    deadline: Instant,
) -> Result<Found> {
    let start = Instant::now();
    let mut pid = 0;
    loop {
        let (mut owner, mut found) = (None, None);
        if let Some(door) = LocalListener::open(&common.options.job)? {
            let (ours, theirs) = Peer::pair()?;
            owner = Some(NodeServer::start(door, Arc::clone(common), theirs, position, begin)?);
            found = Some(ours);
        } else if let Some(peer) = Peer::knock(&common.options.job)? {
            found = Some(peer);
        }
        let now = Instant::now();
        if let Some(peer) = found {
            pid = peer.pid();
            if let Some(ring) = greet(&peer, common, position, deadline)? {
                return Ok((owner, peer, ring));
            }
        }
        if now >= deadline {
            let reason = "no rank answered or took over".to_owned();
            return Err(NodeError::Silent { pid, waited: now - start, reason }.into());
        }
        std::thread::sleep(KNOCK_EVERY);
    }
}

/// Sends the greeting and receives the ring; `None` if the other process ended meanwhile or did not
/// answer.
fn greet(
    peer: &Peer,
    common: &NodeContext,
    position: u64,
    deadline: Instant,
) -> Result<Option<RingReceiver>> {
    let options = &common.options;
    let mut hello = HELLO.to_vec();
    hello.extend(options.rank.to_le_bytes());
    hello.extend(position.to_le_bytes());
    hello.extend((common.fingerprint.len() as u32).to_le_bytes()); // fits: checked
    hello.extend(common.fingerprint.as_bytes());
    let left = deadline.saturating_duration_since(Instant::now()).max(KNOCK_EVERY);
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
            let ours = common.fingerprint.clone();
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
