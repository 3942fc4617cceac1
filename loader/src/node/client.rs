//! A rank's side: finding the rank that reads, or becoming it, and taking what it sends.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use storage::ipc::{LocalListener, Peer, RingEnd, RingReceiver};

use super::server::{NodeServer, StartAt};
use super::{NodeError, NodeOptions, Open, Samples};
use crate::Result;

/// One rank's samples, step after step, out of the node's one reader.
///
/// Made in any order in the ranks of a node. Whichever was first reads for all, on two threads of
/// its own; when it ends, however that happens, another goes on. What a rank gets does not depend
/// on who reads, nor on what becomes of the others.
#[derive(Debug)]
pub struct NodeClient {
    common: Arc<NodeContext>,
    owner: Option<NodeServer>,
    peer: Peer,
    ring: RingReceiver,
    /// In whole steps, also after the last.
    samples_consumed: u64,
}

/// What a rank's two sides have in common.
pub(super) struct NodeContext {
    pub(super) options: NodeOptions,
    pub(super) fingerprint: String,
    pub(super) open: Open,
}

/// How long a rank sleeps before it looks whether the rank that reads still lives. Only one that
/// waits for its next batch pays for it.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// A rank that found neither a door to take nor one behind which somebody is tries again.
const KNOCK_EVERY: Duration = Duration::from_millis(2);

pub(super) const HELLO: [u8; 8] = *b"FLnode01";
pub(super) const WELCOME: u8 = b'w';
pub(super) const MISMATCH: u8 = b'm';
pub(super) const REFUSED: u8 = b'r';

impl NodeClient {
    /// Joins the ranks of the node, or is the first of them.
    ///
    /// # Errors
    /// [`crate::Error::Option`] for what cannot be; [`NodeError::Mismatch`] if the rank that reads
    /// was told something else; [`NodeError::Refused`] if this rank has joined already;
    /// [`NodeError::Silent`] if nobody answers; [`crate::Error::Storage`] for what the kernel says.
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
    /// not been read. Their slot is taken back with the next call.
    ///
    /// # Errors
    /// [`NodeError::Failed`] for what the rank that reads met, [`NodeError::Silent`] if nothing
    /// came in time, and all that [`Self::join`] may say if another takes over.
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

    /// Samples consumed by all ranks of all nodes when this rank's steps so far are done: all that
    /// there is to remember.
    #[must_use]
    pub fn samples_consumed(&self) -> u64 {
        self.samples_consumed.min(self.common.options.samples_end)
    }

    /// Whether this process reads for the node.
    #[must_use]
    pub fn is_reader(&self) -> bool {
        self.owner.is_some()
    }

    /// Whether a message came before the end did.
    fn message_or_end(&mut self) -> Result<bool> {
        let start = Instant::now();
        let deadline = start + self.common.options.wait_max;
        loop {
            // In this order: what was sent before the connection broke, or the end was told, is
            // there to be taken.
            let lives = self.peer.drain();
            let tail = self.ring.tail()?;
            if self.ring.message()?.is_some() {
                return Ok(true);
            }
            let pid = self.peer.pid();
            match tail {
                RingEnd::End => return Ok(false),
                RingEnd::Failed(told) => return Err(NodeError::Failed { pid, reason: told }.into()),
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

    /// The rank that read is gone, and nothing that it sent is left.
    fn find_another(&mut self, deadline: Instant) -> Result<()> {
        log::info!("process {}, which read for the node, is gone", self.peer.pid());
        self.owner = None;
        let begin = StartAt::WhenAllAreThere;
        (self.owner, self.peer, self.ring) =
            find(&self.common, self.samples_consumed, begin, deadline)?;
        Ok(())
    }

    fn why(&self) -> String {
        match self.ring.note() {
            0 => "it waits for its own reads".to_owned(),
            rank => {
                let rank = rank - 1;
                format!("it waits for rank {rank}, which has not joined or takes no batches")
            }
        }
    }
}

type Found = (Option<NodeServer>, Peer, RingReceiver);

/// Knocks at the node's door, or takes it if nobody is behind it.
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
            let reason = "nobody took its place".to_owned();
            return Err(NodeError::Silent { pid, waited: now - start, reason }.into());
        }
        std::thread::sleep(KNOCK_EVERY);
    }
}

/// Says who we are and gets our ring; `None` if the other ended meanwhile, or did not answer.
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
            let told = match read_text(peer, left) {
                Ok(told) => told,
                Err(e) => return lost(peer, e),
            };
            let pid = peer.pid();
            if kind == REFUSED {
                return Err(NodeError::Refused { pid, reason: told }.into());
            }
            let ours = common.fingerprint.clone();
            Err(NodeError::Mismatch { pid, ours, theirs: told }.into())
        }
        _ => {
            let told = "its answer is not one of this version".to_owned();
            Err(NodeError::Refused { pid: peer.pid(), reason: told }.into())
        }
    }
}

fn lost(peer: &Peer, e: io::Error) -> Result<Option<RingReceiver>> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    match e.kind() {
        BrokenPipe | ConnectionReset | TimedOut | UnexpectedEof | WouldBlock => Ok(None),
        _ => {
            let whom = format!("process {}, which reads for the node", peer.pid());
            Err(storage::Error::from_io("talk to", whom, e).into())
        }
    }
}

/// A length and so much text.
pub(super) fn read_text(peer: &Peer, limit: Duration) -> io::Result<String> {
    let mut len = [0; 4];
    peer.receive(&mut len, limit)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > TEXT_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a text of {len} bytes")));
    }
    let mut text = vec![0; len];
    peer.receive(&mut text, limit)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// An identity of 4096 bytes, 256 blocks and the sizes beside them.
pub(super) const TEXT_BYTES_MAX: usize = 16 << 10;

impl std::fmt::Debug for NodeContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeContext").field("options", &self.options).finish_non_exhaustive()
    }
}
