//! Heartbeats between processes that share nothing but a store.
//!
//! A heartbeat is an object whose name ends in its [`ProcessIdentity`] and, from the second on, a
//! sequence number: `OWNER`, `OWNER~1`, `OWNER~2`. Its owner repeatedly writes the next one and
//! deletes the previous. An observer that sees the same name for too long, by its own clock,
//! considers the owner dead: clocks are never compared, and no file times are read.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::liveness::fence::Fence;
use crate::{Error, Result};
use storage::{Key, ProcessIdentity, Storage, write_all};

/// How long processes wait for one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivenessTimeouts {
    /// Interval between heartbeats. Each writes one small object and deletes one. Default: 10 s.
    pub beat: Duration,
    /// A process of another machine or container without a new heartbeat for this long is
    /// considered dead. If this is shorter than a stall of the store, live processes are considered
    /// dead. Processes of this machine are checked directly. Default: 60 s.
    pub silence_max: Duration,
}

impl Default for LivenessTimeouts {
    fn default() -> Self {
        LivenessTimeouts { beat: Duration::from_secs(10), silence_max: Duration::from_secs(60) }
    }
}

/// Writes heartbeats until it is stopped or dropped.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    task: Arc<HeartbeatTask>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct HeartbeatTask {
    store: Arc<dyn Storage>,
    folder: Key,
    /// The name without the sequence number.
    name: String,
    text: String,
    beat: Duration,
    /// The fence of the lease, if this is the heartbeat of a lease.
    fence: Option<Arc<Fence>>,
    state: Mutex<HeartbeatState>,
    stopped: Condvar,
}

#[derive(Debug, Default)]
struct HeartbeatState {
    number: u64,
    /// The numbers whose objects may exist, the newest included: a failed call to the store may
    /// have written one, or not have deleted it.
    existing: BTreeSet<u64>,
    is_stopped: bool,
    is_lost: bool,
}

impl Heartbeat {
    /// Writes the first heartbeat, and starts a thread for the others. `name` ends in a
    /// [`ProcessIdentity`]. The heartbeat of a lease has its fence, and stops when the lease is
    /// lost; any other stops when another process has deleted its last heartbeat.
    pub(crate) fn start(
        store: &Arc<dyn Storage>,
        folder: &Key,
        name: String,
        text: String,
        beat: Duration,
        fence: Option<Arc<Fence>>,
    ) -> Result<Self> {
        let (state, stopped) = (Mutex::default(), Condvar::new());
        let (store, folder) = (Arc::clone(store), folder.clone());
        let task =
            Arc::new(HeartbeatTask { store, folder, name, text, beat, fence, state, stopped });
        write_text(&*task.store, &task.key(0)?, &task.text)?;
        task.state().existing.insert(0);
        let running = Arc::clone(&task);
        let thread = std::thread::Builder::new().name("ckpt-pulse".to_owned());
        let thread = thread.spawn(move || running.run());
        let thread = thread.inspect_err(|e| {
            log::warn!("cannot start the heartbeat thread; the first heartbeat is the last: {e}");
        });
        Ok(Heartbeat { task, thread: thread.ok() })
    }

    /// Stops, and returns the heartbeat objects that may still exist, for the caller to delete.
    pub(crate) fn stop(mut self) -> Result<Vec<Key>> {
        self.halt();
        let existing = self.task.state().existing.clone();
        existing.into_iter().map(|number| self.task.key(number)).collect()
    }

    fn halt(&mut self) {
        self.task.state().is_stopped = true;
        self.task.stopped.notify_all();
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, the heartbeats have stopped all the same.
            let _ = thread.join();
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.halt();
    }
}

impl HeartbeatTask {
    fn state(&self) -> MutexGuard<'_, HeartbeatState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, number: u64) -> Result<Key> {
        let name = &self.name;
        let name = if number == 0 { name.clone() } else { format!("{name}~{number}") };
        Ok(self.folder.join(&name)?)
    }

    fn run(&self) {
        loop {
            let wait = self.stopped.wait_timeout_while(self.state(), self.beat, |s| !s.is_stopped);
            let state = wait.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_stopped || state.is_lost {
                return;
            }
            let number = state.number;
            drop(state);
            // Before the next one, which would keep others out of a folder that this process has
            // lost.
            match self.fence.as_ref().map_or(Ok(()), |fence| fence.check()) {
                Ok(()) => {}
                Err(Error::LeaseLost { .. }) => return self.lose(number),
                Err(error) => {
                    log::warn!("cannot check the lease; the next heartbeat retries: {error}");
                }
            }
            if let Err(error) = self.beat(number) {
                log::warn!("cannot write a heartbeat: {error}");
            }
        }
    }

    fn beat(&self, last: u64) -> Result<()> {
        let next = last + 1;
        self.state().existing.insert(next);
        match write_text(&*self.store, &self.key(next)?, &self.text) {
            // No other process uses our name: an earlier try succeeded although it reported an
            // error.
            Ok(()) | Err(storage::Error::Exists { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        self.state().number = next;
        let earlier: Vec<u64> = self.state().existing.range(..next).copied().collect();
        let mut outcome = Ok(());
        for number in earlier {
            match self.store.delete(&self.key(number)?) {
                // Another process deleted it and continues without us: our next heartbeat must not
                // keep others out. We have tried to delete the earlier ones ourselves. With a
                // fence, only the fence decides whether another process has the lease.
                Err(storage::Error::NotFound { .. }) if number == last && self.fence.is_none() => {
                    self.lose(next);
                }
                Err(storage::Error::NotFound { .. }) | Ok(()) => {}
                Err(error) => {
                    outcome = Err(error.into());
                    continue;
                }
            }
            self.state().existing.remove(&number);
        }
        outcome
    }

    /// Ends the heartbeats, and deletes the last one.
    fn lose(&self, last: u64) {
        self.state().is_lost = true;
        let deleted = self.key(last).and_then(|key| delete_if_exists(&*self.store, &key));
        if let Err(error) = deleted {
            log::warn!("the last heartbeat of a lost lease is not deleted: {error}");
        }
    }
}

/// The owner of a heartbeat, and its name without the sequence number.
pub(crate) fn owner_of(name: &str) -> (Option<ProcessIdentity>, &str) {
    let stem = name.split_once('~').map_or(name, |(stem, _)| stem);
    (ProcessIdentity::parse(stem), stem)
}

/// Creates an object whose name has all required information: on a full disk, from which the owner
/// may be about to delete something, it is empty.
pub(crate) fn write_text(store: &dyn Storage, key: &Key, text: &str) -> storage::Result<()> {
    match write_all(store, key, text.as_bytes()) {
        Err(storage::Error::NoSpace { .. }) => write_all(store, key, b"").map(drop),
        written => written.map(drop),
    }
}

/// Deletes an object that another process may delete at the same time.
pub(crate) fn delete_if_exists(store: &dyn Storage, key: &Key) -> Result<()> {
    match store.delete(key) {
        Err(storage::Error::NotFound { .. }) | Ok(()) => Ok(()),
        Err(error) => Err(Error::from(error)),
    }
}
