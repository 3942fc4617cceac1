//! A process that saves in a trainer's stead, so that what was copied is saved even if the trainer
//! dies.
//!
//! The copy lies in a memfd, which both processes have mapped; orders and answers go over a Unix
//! socket of which only the two have ends. An order names a place in that memory where the list of
//! tensors lies, so it fits into one short message, which the kernel keeps if its sender dies. From
//! order to answer the memory is the agent's; before and after, the trainer's.
//!
//! An agent ends when its trainer does, after the save that it was ordered. It does not heed
//! SIGTERM, SIGINT and SIGHUP, which schedulers and terminals send to all processes of a job, and
//! the kernel to a stopped process whose parent dies: that a save is to end is for the trainer to
//! say.

mod serve;
mod wire;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::base::save_control::SaveControl;
use crate::{CheckpointOptions, Checkpoints, Error, LivenessTimeouts, Result, SaveReport};
use storage::ipc::{Arena, LocalListener, Peer, ready};
use storage::{ProcessIdentity, crc64, one_line};
use wire::{AgentCommand, Answer, Hello};

pub use serve::serve;

/// Tells the agent where its trainer waits.
const DOOR: &str = "FEEDLINE_CKPT_AGENT";

/// For a process to start, on a machine that has other things to do.
const START_MAX: Duration = Duration::from_secs(30);

/// For an answer that only takes the time of a message.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Between two looks at whether a save shall end.
const LOOK_PAUSE: Duration = Duration::from_millis(20);

/// The trainer's end of an agent. Dropped, it lets the agent end.
#[derive(Debug)]
pub struct Agent {
    /// `None` once it is of no use.
    peer: Option<Peer>,
    child: Child,
    owner: ProcessIdentity,
    /// The length of the memory that the agent has, and which it is.
    has_arena: Option<(usize, i32)>,
}

impl Agent {
    /// Starts an agent, by a command that calls [`serve`]. It saves into the folder below the store
    /// of that URL, or, if that is empty, into the store itself. Both must be those of the
    /// [`AsyncSaver`](crate::AsyncSaver) that it is for, as must options and patience.
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
        let door = LocalListener::open(&name)?.ok_or_else(|| failed("its door is taken"))?;
        // In a group of its own: what a terminal sends to the trainer is not for it.
        let child = command.env(DOOR, &name).stdin(Stdio::null()).process_group(0).spawn();
        let child = child.map_err(|e| failed(format!("start {command:?}: {e}")))?;
        let mut agent = Agent { peer: None, child, owner: here.clone(), has_arena: None };
        let peer = agent.await_knock(&door)?;
        let (url, folder) = (url.to_owned(), folder.to_owned());
        let LivenessTimeouts { beat, silence_max } = patience;
        let trainer = here.to_string();
        let hello = Hello { url, folder, options, beat, silence_max, trainer };
        wire::send_hello(&peer, &hello).map_err(|e| failed(format!("greet it: {e}")))?;
        match wire::receive(&peer, START_MAX)? {
            Answer::Ready(owner) => {
                agent.owner =
                    ProcessIdentity::parse(&owner).ok_or_else(|| failed("its name is none"))?;
            }
            Answer::Failed(why) => return Err(failed(why)),
            other => return Err(failed(format!("it begins with {other:?}"))),
        }
        agent.peer = Some(peer);
        Ok(agent)
    }

    /// The agent's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn owner(&self) -> ProcessIdentity {
        self.owner.clone()
    }

    fn await_knock(&mut self, door: &LocalListener) -> Result<Peer> {
        use std::os::fd::AsFd as _;

        let begun = Instant::now();
        while begun.elapsed() < START_MAX {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(failed(format!("it ended at once, with {status}")));
            }
            if !ready(&[door.as_fd()], Some(LOOK_PAUSE))?[0] {
                continue;
            }
            match door.accept()? {
                Some(peer) if peer.pid() == self.child.id() => return Ok(peer),
                _ => {}
            }
        }
        Err(failed(format!("it has not come after {} s", START_MAX.as_secs())))
    }

    /// Has the agent give up the memory that it has, before there is new memory: when this returns
    /// there is none, or the agent is of no more use.
    pub(crate) fn forget(&mut self) {
        let Some(peer) = self.peer.as_ref().filter(|_| self.has_arena.take().is_some()) else {
            return;
        };
        let is_sent = wire::send_order(peer, AgentCommand::Forget).is_ok();
        if !is_sent || !matches!(wire::receive(peer, ANSWER_MAX), Ok(Answer::Forgotten)) {
            self.peer = None;
        }
    }

    /// Orders a save of what lies in the arena, by the list at `start`. When this returns it will
    /// be done, whatever becomes of this process.
    pub(crate) fn begin(&mut self, arena: &Arena, start: usize, len: usize) -> Result<()> {
        use std::os::fd::AsRawFd as _;

        let peer = self.peer.as_ref().ok_or_else(|| failed("it is gone"))?;
        let fd = arena.fd().ok_or_else(|| failed("the copy is not in memory that it can have"))?;
        let told = || -> std::io::Result<()> {
            if self.has_arena != Some((arena.len(), fd.as_raw_fd())) {
                wire::send_order(peer, AgentCommand::Arena { len: arena.len() as u64 })?;
                peer.send_fd(0, fd, ANSWER_MAX)?;
            }
            wire::send_order(peer, AgentCommand::Save { start: start as u64, len: len as u64 })
        };
        told().map_err(|e| failed(format!("order a save: {e}")))?;
        self.has_arena = Some((arena.len(), fd.as_raw_fd()));
        Ok(())
    }

    /// Waits for the answer. The outer error says that the agent is gone, and that nothing more
    /// will come of the order.
    pub(crate) fn finish(&mut self, control: &SaveControl) -> Result<Result<SaveReport>> {
        use std::os::fd::AsFd as _;

        let peer = self.peer.as_ref().ok_or_else(|| failed("it is gone"))?;
        let mut is_told = false;
        loop {
            if control.is_cancelled() && !is_told {
                is_told = true;
                wire::send_order(peer, AgentCommand::Cancel).map_err(|e| failed(format!("{e}")))?;
            }
            if !ready(&[peer.as_fd()], Some(LOOK_PAUSE))?[0] {
                continue;
            }
            match wire::receive(peer, ANSWER_MAX)? {
                Answer::Wrote(bytes) => control.set_bytes(bytes),
                Answer::Saved(report) => return Ok(Ok(report)),
                Answer::Cancelled => return Ok(Err(Error::Cancelled)),
                Answer::Failed(why) => return Ok(Err(failed(why))),
                Answer::Ready(_) | Answer::Forgotten => {
                    return Err(failed("it answers what was not asked"));
                }
            }
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The end of the connection is the end of the agent, after what it is about.
        self.peer = None;
        let begun = Instant::now();
        while begun.elapsed() < ANSWER_MAX {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(LOOK_PAUSE),
                _ => return,
            }
        }
        log::warn!("the agent, process {}, is still at work and is left alone", self.child.id());
    }
}

impl Checkpoints {
    /// Lets another process write beside this one: a trainer and its agent do not keep each other
    /// out.
    pub(crate) fn admit(&self, process: ProcessIdentity) {
        self.lease.admit(process);
    }
}

fn failed(reason: impl Into<String>) -> Error {
    Error::Agent { reason: reason.into() }
}

fn tell(error: &Error) -> String {
    one_line(error)
}
