//! Several processes, here or on several hosts, that do the same at the same time.
//!
//! They share a folder and nothing else. Whatever one has to tell the others is an object there,
//! named for the step and the process; each step is over when all have told. So one primitive is
//! barrier, broadcast and gather. One that fails says so in the same folder, and all end.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Error, Result, anyhow, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use storage::{Key, Storage};

use crate::ui::timeout::StopSignal;

/// All processes of one benchmark, as one of them sees them.
#[derive(Debug)]
pub struct BenchProcesses {
    /// Which of them this is.
    pub member: usize,
    /// How many there are.
    pub members: usize,
    meet: Option<BenchRendezvous>,
    children: Vec<Child>,
    /// A folder that was made to meet in.
    made: Option<String>,
}

#[derive(Clone, Debug)]
struct BenchRendezvous {
    store: Arc<dyn Storage>,
    folder: Key,
    is_ours: bool,
    timeout: Duration,
    stop: StopSignal,
    /// Why another has failed.
    heard: Arc<OnceLock<String>>,
    is_over: Arc<AtomicBool>,
}

/// A look at the folder costs a round trip on a shared store.
const LOOK: Duration = Duration::from_millis(5);

/// How often each looks whether another has failed while it measures.
const LISTEN: Duration = Duration::from_millis(500);

/// What a process that has been told to stop has to do so: more than its guards wait for a save
/// that is under way.
const PART_WAIT: Duration = Duration::from_secs(30);

/// What a process that has nothing more to do has to end.
const END_WAIT: Duration = Duration::from_secs(10);

impl BenchProcesses {
    /// One process.
    #[must_use]
    pub fn alone() -> Self {
        BenchProcesses { member: 0, members: 1, meet: None, children: Vec::new(), made: None }
    }

    /// One of several that meet in a folder. The first removes what they leave there.
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
        let (is_ours, stop) = (member == 0, stop.clone());
        let (heard, is_over) = Default::default();
        let meet = BenchRendezvous { store, folder, is_ours, timeout, stop, heard, is_over };
        meet.listen();
        Ok(BenchProcesses { member, members, meet: Some(meet), children: Vec::new(), made: None })
    }

    /// Why another process has failed, if that ended what this one did.
    #[must_use]
    pub fn heard(&self) -> Option<String> {
        self.meet.as_ref()?.heard.get().cloned()
    }

    /// Has the folder in which all meet removed with what they leave there.
    pub fn remove_at_end(&mut self, folder: &str) {
        self.made = Some(folder.to_owned());
    }

    /// Starts the other processes of this machine, each with what is told to it besides its place.
    ///
    /// # Errors
    /// If one cannot be started.
    pub fn start_others(&mut self, arguments: &[String]) -> Result<()> {
        for member in 1..self.members {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(arguments).arg(format!("--process={member}/{}", self.members));
            // Standard input ends when we do, and the child with it.
            command.stdin(Stdio::piped()).stdout(Stdio::null());
            self.children.push(command.spawn().context("cannot start a process of the benchmark")?);
        }
        Ok(())
    }

    /// Tells all the others, waits until all have told, and gives what each did, in their order.
    ///
    /// # Errors
    /// If one has failed, or does not come in time.
    pub fn exchange<T: Serialize + DeserializeOwned>(&self, step: &str, mine: T) -> Result<Vec<T>> {
        let Some(meet) = &self.meet else { return Ok(vec![mine]) };
        let told = meet.tell(&format!("{step}.{}", self.member), &serde_json::to_vec(&mine)?);
        told.map_err(|error| meet.explained(error))?;
        let due = Instant::now() + meet.timeout;
        let mut told = Vec::with_capacity(self.members);
        while told.len() < self.members {
            let name = format!("{step}.{}", told.len());
            match meet.read(&name)? {
                Some(bytes) => {
                    let decoded = serde_json::from_slice(&bytes);
                    told.push(decoded.with_context(|| format!("cannot decode {name}"))?);
                }
                None => {
                    meet.stop.check()?;
                    if let Some(why) = meet.failed()? {
                        bail!("cannot pass barrier '{step}': another process failed: {why}");
                    }
                    ensure!(
                        Instant::now() < due,
                        "cannot pass barrier '{step}': process {} of {} did not arrive within {} s \
                         (hint: start all processes with the same arguments)",
                        told.len(),
                        self.members,
                        meet.timeout.as_secs()
                    );
                    thread::sleep(LOOK);
                }
            }
        }
        Ok(told)
    }

    /// Tells the others that all is over, and why.
    pub fn fail(&mut self, why: &str) {
        if let Some(meet) = &self.meet {
            // Another may have failed first; then the first word counts.
            meet.is_over.store(true, Relaxed);
            let _ = meet.tell(FAILED, why.as_bytes());
        }
        self.children.iter_mut().for_each(|child| drop(child.stdin.take()));
    }

    /// The first waits until the others do nothing more, for a while at most; the others say so.
    pub fn part(&mut self) {
        let Some(meet) = &self.meet else { return };
        let gone = |member: usize| format!("gone.{member}");
        if self.member > 0 {
            // Where it cannot be told, the first waits in vain, and not for ever.
            let _ = meet.tell(&gone(self.member), b"");
            return;
        }
        let until = Instant::now() + PART_WAIT;
        for member in 1..self.members {
            while matches!(meet.read(&gone(member)), Ok(None)) && Instant::now() < until {
                thread::sleep(LOOK);
            }
        }
    }

    /// Ends the processes that were started here, and removes what lies in the folder.
    ///
    /// # Errors
    /// If the folder cannot be removed.
    pub fn end(&mut self) -> Result<()> {
        let until = Instant::now() + END_WAIT;
        for mut child in self.children.drain(..) {
            while child.try_wait()?.is_none() && Instant::now() < until {
                thread::sleep(LOOK);
            }
            // What hangs in a mount dies when that answers.
            let _ = child.kill();
        }
        match &self.meet {
            Some(meet) if meet.is_ours => meet.store.delete_folder(&meet.folder)?,
            _ => {}
        }
        if let Some(folder) = self.made.take() {
            std::fs::remove_dir(&folder).with_context(|| format!("cannot remove {folder}"))?;
        }
        Ok(())
    }
}

impl Drop for BenchProcesses {
    fn drop(&mut self) {
        if let Some(meet) = &self.meet {
            meet.is_over.store(true, Relaxed);
        }
        for child in &mut self.children {
            let _ = child.kill();
        }
        if let Some(folder) = self.made.take() {
            // It was told before, if it was not removed.
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

const FAILED: &str = "failed";

impl BenchRendezvous {
    fn tell(&self, name: &str, bytes: &[u8]) -> storage::Result<()> {
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

    /// Why another has failed, if one has.
    fn failed(&self) -> Result<Option<String>> {
        Ok(self.read(FAILED)?.map(|why| String::from_utf8_lossy(&why).into_owned()))
    }

    fn explained(&self, error: storage::Error) -> Error {
        match error {
            storage::Error::Exists { .. } => anyhow!(
                "{error} (hint: delete {}, which a killed benchmark left, or use another \
                 --rendezvous)",
                self.store.display(&self.folder)
            ),
            error => error.into(),
        }
    }

    /// Has all stop here when another has failed: a run is long, and what it writes after the first
    /// has removed everything would stay.
    fn listen(&self) {
        let meet = self.clone();
        let listen = move || {
            while !meet.is_over.load(Relaxed) && !meet.stop.is_set() {
                // What cannot be read now can be, the next time.
                if let Ok(Some(why)) = meet.failed() {
                    let _ = meet.heard.set(why);
                    meet.stop.set();
                }
                thread::sleep(LISTEN);
            }
        };
        // Without the thread it is heard at the next step.
        drop(thread::Builder::new().name("listener".to_owned()).spawn(listen));
    }
}

/// Sets the flag when standard input ends: whoever has started us is gone.
pub fn stop_with_parent(stop: &StopSignal) {
    let stop = stop.clone();
    let watch = move || {
        // Nothing is ever written there.
        let _ = std::io::stdin().read(&mut [0]);
        stop.set();
    };
    // Without the thread we end a little later, by the folder.
    drop(thread::Builder::new().name("parent".to_owned()).spawn(watch));
}
