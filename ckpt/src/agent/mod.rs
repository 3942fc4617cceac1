//! Agent: a process that saves for a trainer, so that a copied state is saved even if the trainer
//! dies.
//!
//! The copy is in a memfd mapped by both processes; commands and replies go over a Unix socket that
//! only these two share. A save command names the offset in that memory where its orders are, so it
//! fits into one short message, which the kernel delivers even if the sender dies. The agent owns
//! the memory from command to reply, the trainer otherwise.
//!
//! An agent exits when its trainer does, after completing the save in progress. It ignores SIGTERM,
//! SIGINT and SIGHUP, which schedulers and terminals send to all processes of a job, and the kernel
//! to a stopped process whose parent dies: only the trainer decides that a save is cancelled.

mod serve;
mod wire;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::base::save_control::SaveControl;
use crate::{CheckpointOptions, Checkpoints, Error, LivenessTimeouts, Result, SaveReport};
use storage::ipc::{Arena, LocalListener, Peer, ready};
use storage::{ProcessIdentity, crc64, one_line, printable_message};
use wire::{AgentCommand, Answer, Hello};

pub use serve::serve;

/// Environment variable with the name of the trainer's socket.
const SOCKET_ENV: &str = "FEEDLINE_CKPT_AGENT";

/// Timeout for the start of a process, on a busy machine.
const START_MAX: Duration = Duration::from_secs(30);

/// Timeout for a reply that needs no work.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Interval between checks for cancellation.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The trainer's handle of an agent. Drop lets the agent exit.
#[derive(Debug)]
pub struct Agent {
    /// `None` once it is no longer usable.
    peer: Option<Peer>,
    child: Child,
    owner: ProcessIdentity,
    /// Length and descriptor of the memory that the agent has mapped.
    has_arena: Option<(usize, i32)>,
}

impl Agent {
    /// Starts an agent, by a command that calls [`serve()`]. It saves into the folder of the store
    /// with that URL, or, if the folder is empty, into the store itself. Both must be those of its
    /// [`AsyncSaver`](crate::AsyncSaver), and so must options and timeouts.
    ///
    /// # Errors
    /// [`Error::Agent`] if it does not start, or cannot open the store.
    pub fn start(
        mut command: Command,
        url: &str,
        folder: &str,
        options: CheckpointOptions,
        patience: LivenessTimeouts,
    ) -> Result<Self> {
        use std::os::unix::process::CommandExt as _;

        let here = ProcessIdentity::new();
        let name = format!("ckpt-{:016x}", crc64(here.to_string().as_bytes()));
        let listener =
            LocalListener::open(&name)?.ok_or_else(|| failed("its socket name is in use"))?;
        // In its own process group, so that terminal signals to the trainer do not reach it.
        let child = command.env(SOCKET_ENV, &name).stdin(Stdio::null()).process_group(0).spawn();
        let child = child.map_err(|e| failed(format!("cannot start {command:?}: {e}")))?;
        let mut agent = Agent { peer: None, child, owner: here.clone(), has_arena: None };
        let peer = agent.accept_agent(&listener)?;
        let (url, folder) = (url.to_owned(), folder.to_owned());
        let LivenessTimeouts { beat, silence_max } = patience;
        let trainer = here.to_string();
        let hello = Hello { url, folder, options, beat, silence_max, trainer };
        wire::send_hello(&peer, &hello)
            .map_err(|e| failed(format!("cannot send the handshake: {e}")))?;
        match wire::receive(&peer, START_MAX)? {
            Answer::Ready(owner) => {
                agent.owner = ProcessIdentity::parse(&owner)
                    .ok_or_else(|| failed("expected a process identity in its handshake"))?;
            }
            Answer::Failed(why) => return Err(failed(why)),
            other => return Err(failed(format!("expected its handshake, found {other:?}"))),
        }
        agent.peer = Some(peer);
        Ok(agent)
    }

    /// The agent's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn owner(&self) -> ProcessIdentity {
        self.owner.clone()
    }

    fn accept_agent(&mut self, listener: &LocalListener) -> Result<Peer> {
        use std::os::fd::AsFd as _;

        let started = Instant::now();
        while started.elapsed() < START_MAX {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(failed(format!("it exited at startup: {status}")));
            }
            if !ready(&[listener.as_fd()], Some(POLL_INTERVAL))?[0] {
                continue;
            }
            match listener.accept()? {
                Some(peer) if peer.pid() == self.child.id() => return Ok(peer),
                _ => {}
            }
        }
        Err(failed(format!("it did not connect within {} s", START_MAX.as_secs())))
    }

    /// Makes the agent unmap its memory before new memory is allocated: on return it has none, or
    /// is no longer usable.
    pub(crate) fn forget(&mut self) {
        let Some(peer) = self.peer.as_ref().filter(|_| self.has_arena.take().is_some()) else {
            return;
        };
        let is_sent = wire::send_command(peer, AgentCommand::Forget).is_ok();
        if !is_sent || !matches!(wire::receive(peer, ANSWER_MAX), Ok(Answer::Forgotten)) {
            self.peer = None;
        }
    }

    /// Starts a save of the contents of the arena, by the orders at `start`. Once this returns, the
    /// agent completes it even if this process dies.
    pub(crate) fn begin(&mut self, arena: &Arena, start: usize, len: usize) -> Result<()> {
        use std::os::fd::AsRawFd as _;

        let peer = self.peer.as_ref().ok_or_else(|| failed("the connection is closed"))?;
        let fd = arena.fd().ok_or_else(|| failed("the snapshot is not in shared memory"))?;
        let send = || -> std::io::Result<()> {
            if self.has_arena != Some((arena.len(), fd.as_raw_fd())) {
                wire::send_command(peer, AgentCommand::Arena { len: arena.len() as u64 })?;
                peer.send_fd(0, fd, ANSWER_MAX)?;
            }
            wire::send_command(peer, AgentCommand::Save { start: start as u64, len: len as u64 })
        };
        send().map_err(|e| failed(format!("cannot send the save command: {e}")))?;
        self.has_arena = Some((arena.len(), fd.as_raw_fd()));
        Ok(())
    }

    /// Waits for the reply. The outer error means that the agent has died and the save will not
    /// continue.
    pub(crate) fn finish(&mut self, control: &SaveControl) -> Result<Result<SaveReport>> {
        use std::os::fd::AsFd as _;

        let peer = self.peer.as_ref().ok_or_else(|| failed("the connection is closed"))?;
        let mut is_cancel_sent = false;
        loop {
            if control.is_cancelled() && !is_cancel_sent {
                is_cancel_sent = true;
                wire::send_command(peer, AgentCommand::Cancel)
                    .map_err(|e| failed(format!("cannot send the cancel command: {e}")))?;
            }
            if !ready(&[peer.as_fd()], Some(POLL_INTERVAL))?[0] {
                continue;
            }
            match wire::receive(peer, ANSWER_MAX)? {
                Answer::Wrote(bytes) => control.set_bytes(bytes),
                Answer::Saved(report) => return Ok(Ok(report)),
                Answer::Cancelled => return Ok(Err(Error::Cancelled)),
                Answer::Failed(why) => return Ok(Err(failed(why))),
                Answer::Ready(_) | Answer::Forgotten => {
                    return Err(failed("expected the outcome of the save, found another reply"));
                }
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Closing the connection makes the agent exit after its current work.
        self.peer = None;
        let started = Instant::now();
        while started.elapsed() < ANSWER_MAX {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(POLL_INTERVAL),
                _ => return,
            }
        }
        let (pid, waited) = (self.child.id(), ANSWER_MAX.as_secs());
        log::warn!("agent process {pid}: still saving after {waited} s; it continues alone");
    }
}

impl Checkpoints {
    /// Permits another process to write beside this one: a trainer and its agent do not exclude
    /// each other.
    pub(crate) fn admit(&self, process: ProcessIdentity) {
        self.lease.fence().admit(process);
    }
}

fn failed(reason: impl Into<String>) -> Error {
    Error::Agent { reason: reason.into() }
}

/// The text of an error for the other process, whose own error has a prefix as well.
fn reply_text(error: &Error) -> String {
    match error {
        Error::Agent { reason } => printable_message(reason),
        error => one_line(error),
    }
}
