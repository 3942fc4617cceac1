//! Several processes, on one or several hosts, that measure at the same time.
//!
//! They share only a folder. Each process publishes a message as an object there, named for the
//! step and the process; a step is over when all have published. This one primitive serves as
//! barrier, broadcast and gather. A process that fails publishes its error in the same folder, and
//! all stop.

use std::io::Read as _;
use std::process::{Child, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use storage::{Key, Storage};

use crate::command::Invocation;
use crate::ui::timeout::StopSignal;

/// The group of processes of one benchmark, as one of them sees it.
#[derive(Debug)]
pub struct BenchProcesses {
    /// Index of this process.
    pub member: usize,
    /// Count of processes.
    pub members: usize,
    rendezvous: Option<BenchRendezvous>,
    children: Vec<Child>,
    /// A temporary folder that was created for the rendezvous.
    temp_folder: Option<String>,
}

#[derive(Clone, Debug)]
struct BenchRendezvous {
    store: Arc<dyn Storage>,
    folder: Key,
    is_first: bool,
    timeout: Duration,
    stop: StopSignal,
    /// The error of another process.
    peer_failure: Arc<OnceLock<String>>,
    is_over: Arc<AtomicBool>,
}

/// Interval between polls of the folder; each is a round trip on a shared store.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Interval at which a measuring process checks whether another has failed.
const FAILURE_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum time that the first process waits for the others to stop. It is longer than the others
/// wait for a running save.
const STOP_WAIT: Duration = Duration::from_secs(30);

/// Maximum time until a child process exits.
const END_WAIT: Duration = Duration::from_secs(10);

impl BenchProcesses {
    /// A group of one process.
    #[must_use]
    pub fn alone() -> Self {
        BenchProcesses {
            member: 0,
            members: 1,
            rendezvous: None,
            children: Vec::new(),
            temp_folder: None,
        }
    }

    /// Joins the group that exchanges messages in a folder. The first process removes the group's
    /// files there.
    ///
    /// # Errors
    /// If the folder cannot be opened.
    pub fn join(
        (member, members): (usize, usize),
        folder: &str,
        token: &str,
        timeout: Duration,
        stop: &StopSignal,
    ) -> Result<Self> {
        ensure!(member < members, "cannot use --process {member}/{members}: expected I below N");
        let store = storage::open_url(folder)
            .with_context(|| format!("cannot use --rendezvous {folder}"))?;
        let folder = Key::new(format!("{}meet-{token}", super::target::FOLDER))?;
        let (is_first, stop) = (member == 0, stop.clone());
        let (peer_failure, is_over) = Default::default();
        let rendezvous =
            BenchRendezvous { store, folder, is_first, timeout, stop, peer_failure, is_over };
        rendezvous.listen();
        Ok(BenchProcesses {
            member,
            members,
            rendezvous: Some(rendezvous),
            children: Vec::new(),
            temp_folder: None,
        })
    }

    /// The error of another process, if it stopped this one.
    #[must_use]
    pub fn failure_of_other(&self) -> Option<String> {
        self.rendezvous.as_ref()?.peer_failure.get().cloned()
    }

    /// Removes the rendezvous folder at the end.
    pub fn remove_at_end(&mut self, folder: &str) {
        self.temp_folder = Some(folder.to_owned());
    }

    /// Starts the other processes on this machine: with the arguments of this one, with `more`
    /// and with their index.
    ///
    /// # Errors
    /// If one cannot be started.
    pub fn start_others(&mut self, invocation: &Invocation, more: &[String]) -> Result<()> {
        for member in 1..self.members {
            let mut command = invocation.restarted()?;
            command.args(invocation.command_line.iter().skip(1)).args(more);
            command.arg(format!("--process={member}/{}", self.members));
            // When this process ends, the child's standard input is closed, and the child exits.
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            self.children.push(command.spawn().context("cannot start a process of the benchmark")?);
        }
        Ok(())
    }

    /// Publishes `mine`, waits until all processes have published, and returns their values in
    /// order.
    ///
    /// # Errors
    /// If another process has failed, or does not arrive in time.
    pub fn exchange<T: Serialize + DeserializeOwned>(&self, step: &str, mine: T) -> Result<Vec<T>> {
        let Some(rendezvous) = &self.rendezvous else { return Ok(vec![mine]) };
        let sent =
            rendezvous.publish(&format!("{step}.{}", self.member), &serde_json::to_vec(&mine)?);
        sent.map_err(|error| rendezvous.with_hint(error))?;
        let deadline = Instant::now() + rendezvous.timeout;
        let mut values = Vec::with_capacity(self.members);
        while values.len() < self.members {
            let name = format!("{step}.{}", values.len());
            match rendezvous.read(&name)? {
                Some(bytes) => {
                    let decoded = serde_json::from_slice(&bytes);
                    values.push(decoded.with_context(|| format!("cannot decode {name}"))?);
                }
                None => {
                    rendezvous.stop.check()?;
                    if let Some(why) = rendezvous.failed()? {
                        bail!("cannot pass barrier '{step}': another process failed: {why}");
                    }
                    ensure!(
                        Instant::now() < deadline,
                        "cannot pass barrier '{step}': process {} of {} did not arrive within {} s \
                         (hint: start all processes with the same arguments)",
                        values.len(),
                        self.members,
                        rendezvous.timeout.as_secs()
                    );
                    thread::sleep(POLL_INTERVAL);
                }
            }
        }
        Ok(values)
    }

    /// Reports a failure to the others, which then stop.
    pub fn fail(&mut self, why: &str) {
        if let Some(rendezvous) = &self.rendezvous {
            // If another process failed first, its error is kept.
            rendezvous.is_over.store(true, Relaxed);
            let _ = rendezvous.publish(FAILED, why.as_bytes());
        }
        self.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    }

    /// The other processes report that they have stopped; the first waits for them, for a limited
    /// time.
    pub fn leave(&mut self) {
        let Some(rendezvous) = &self.rendezvous else { return };
        let stopped = |member: usize| format!("gone.{member}");
        if self.member > 0 {
            // If this cannot be written, the first process waits until its timeout.
            let _ = rendezvous.publish(&stopped(self.member), b"");
            return;
        }
        let until = Instant::now() + STOP_WAIT;
        for member in 1..self.members {
            while matches!(rendezvous.read(&stopped(member)), Ok(None)) && Instant::now() < until {
                thread::sleep(POLL_INTERVAL);
            }
        }
    }

    /// Waits for the child processes and kills those that remain, then removes the folder.
    ///
    /// # Errors
    /// If the folder cannot be removed.
    pub fn end(&mut self) -> Result<()> {
        let until = Instant::now() + END_WAIT;
        for mut child in self.children.drain(..) {
            while child.try_wait()?.is_none() && Instant::now() < until {
                thread::sleep(POLL_INTERVAL);
            }
            // A process that is stuck in a mount dies when the mount responds.
            let _ = child.kill();
        }
        match &self.rendezvous {
            Some(rendezvous) if rendezvous.is_first => {
                rendezvous.store.delete_folder(&rendezvous.folder)?;
            }
            _ => {}
        }
        if let Some(folder) = self.temp_folder.take() {
            std::fs::remove_dir(&folder).with_context(|| format!("cannot remove {folder}"))?;
        }
        Ok(())
    }
}

impl Drop for BenchProcesses {
    fn drop(&mut self) {
        if let Some(rendezvous) = &self.rendezvous {
            rendezvous.is_over.store(true, Relaxed);
        }
        for child in &mut self.children {
            let _ = child.kill();
        }
        if let Some(folder) = self.temp_folder.take() {
            // A failure to remove it was reported before.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

const FAILED: &str = "failed";

impl BenchRendezvous {
    fn publish(&self, name: &str, bytes: &[u8]) -> storage::Result<()> {
        storage::write_all(self.store.as_ref(), &self.folder.join(name)?, bytes)?;
        Ok(())
    }

    fn read(&self, name: &str) -> Result<Option<Vec<u8>>> {
        match storage::read_all(self.store.as_ref(), &self.folder.join(name)?) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(storage::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The error of another process, if one has failed.
    fn failed(&self) -> Result<Option<String>> {
        Ok(self.read(FAILED)?.map(|why| String::from_utf8_lossy(&why).into_owned()))
    }

    fn with_hint(&self, error: storage::Error) -> Error {
        match error {
            storage::Error::Exists { .. } => anyhow!(
                "{error} (hint: delete {}, which a killed benchmark left, or use another \
                 --rendezvous)",
                self.store.display(&self.folder)
            ),
            error => error.into(),
        }
    }

    /// Stops this process when another has failed. Otherwise it would continue a long run and write
    /// files after the first process has removed everything.
    fn listen(&self) {
        let rendezvous = self.clone();
        let listen = move || {
            while !rendezvous.is_over.load(Relaxed) && !rendezvous.stop.is_set() {
                // A read error is ignored: the next poll may succeed.
                if let Ok(Some(why)) = rendezvous.failed() {
                    let _ = rendezvous.peer_failure.set(why);
                    rendezvous.stop.set();
                }
                thread::sleep(FAILURE_POLL_INTERVAL);
            }
        };
        // Without the thread, this process detects the failure at the next step.
        drop(thread::Builder::new().name("listener".to_owned()).spawn(listen));
    }
}

/// Sets the signal when standard input ends, that is, when the parent process has ended.
pub fn stop_with_parent(stop: &StopSignal) {
    let stop = stop.clone();
    let watch = move || {
        // The parent never writes to it.
        let _ = std::io::stdin().read(&mut [0]);
        stop.set();
    };
    // Without the thread this process stops a little later, through the folder.
    drop(thread::Builder::new().name("parent".to_owned()).spawn(watch));
}
