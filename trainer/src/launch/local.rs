//! Starts and supervises the ranks of one machine: `trainer launch`.
//!
//! The launcher hosts the store, so that the store outlives every rank. It forwards the output of
//! its ranks, line by line and prefixed with the rank, and forwards a request to stop to them. When
//! a rank fails, it gives the others some time to report which rank is missing, and kills them.

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use bridge::dist::Store;
use bridge::runtime;

use crate::{Error, Result, exit};

/// The variable with the process id of the launcher, with which the rank ends.
pub const LAUNCHER: &str = "FEEDLINE_LAUNCHER";

/// How often the ranks are polled.
const POLL: Duration = Duration::from_millis(20);

/// Lines that are queued before a rank that prints blocks.
const LINES_MAX: usize = 1024;

/// How long ranks may run after one has failed: they report the missing one within about a second.
const LINGER: Duration = Duration::from_secs(10);

/// How long to wait for more output after all ranks have ended. The wait occurs only if a process
/// that a rank started holds its outputs open.
const REMAINING_WAIT: Duration = Duration::from_secs(2);

/// The variables that set how an OpenMP thread waits for work. By default it spins, and takes cores
/// from the ranks that compute: 8 ranks of 2 threads on 2 cores did 240 tokens a second, and 1,800
/// with sleeping threads.
pub const WAITING: [&str; 2] = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"];

const SIGTERM: i32 = 15;

/// What to start, and where its output goes.
pub struct Launch<'a> {
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// How many ranks.
    pub ranks: usize,
    /// Set at a request to stop; the launcher clears it. At the first request it asks the ranks to
    /// stop; at the second it kills them.
    pub stop: &'a AtomicBool,
    /// Takes what the ranks write to standard output.
    pub out: Box<dyn Write>,
    /// Takes what they write to standard error.
    pub err: Box<dyn Write>,
}

impl std::fmt::Debug for Launch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Launch")
            .field("program", &self.program)
            .field("arguments", &self.arguments)
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

/// How a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankExit {
    /// With this code.
    Code(u8),
    /// By this signal.
    Signal(i32),
}

impl RankExit {
    fn of(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => RankExit::Code(u8::try_from(code).unwrap_or(u8::MAX)),
            None => RankExit::Signal(status.signal().unwrap_or_default()),
        }
    }

    /// The exit code for this: a killed rank counts as a lost peer.
    fn code(self) -> u8 {
        match self {
            RankExit::Code(code) => code,
            RankExit::Signal(_) => exit::PEER_LOST,
        }
    }

    fn is_good(self) -> bool {
        matches!(self, RankExit::Code(exit::DONE | exit::GAPS | exit::SAVED))
    }

    /// In order: done, done with gaps, saved, lost a peer, any other failure, which is the cause.
    fn badness(self) -> (u8, u8) {
        let code = self.code();
        let class = match code {
            exit::DONE => 0,
            exit::GAPS => 1,
            exit::SAVED => 2,
            exit::PEER_LOST => 3,
            _ => 4,
        };
        (class, code)
    }
}

/// Starts the ranks, waits for all of them, and returns the worst of their exit codes.
///
/// # Errors
/// [`Error::Run`] if a rank cannot be started, or their output cannot be written;
/// [`Error::Bridge`] if the store cannot be started.
pub fn launch(launch: Launch<'_>) -> Result<u8> {
    let store = Store::serve("127.0.0.1", 0, Duration::from_secs(30))?;
    let (lines, receiver) = mpsc::sync_channel(LINES_MAX);
    let mut ranks = Ranks { ranks: Vec::new(), failed_at: None, stop_requested: false };
    for rank in 0..launch.ranks {
        ranks.ranks.push(Rank::start(&launch, rank, store.port(), &lines)?);
    }
    drop(lines);
    let Launch { stop, out, err, .. } = launch;
    let mut outlets = Outlets { out, err };
    while ranks.poll() {
        outlets.pass_on(&receiver)?;
        if stop.swap(false, Ordering::Relaxed) {
            ranks.stop();
        }
    }
    outlets.write_remaining(&receiver)?;
    Ok(ranks.worst())
}

struct Rank {
    rank: usize,
    child: Child,
    end: Option<RankExit>,
}

impl Rank {
    fn start(
        launch: &Launch<'_>,
        rank: usize,
        port: u16,
        lines: &SyncSender<RankLine>,
    ) -> Result<Self> {
        let doing = || format!("start rank {rank} with {}", launch.program.display());
        let size = launch.ranks.to_string();
        let mut command = Command::new(&launch.program);
        command.args(&launch.arguments).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        // A signal of the terminal goes to the launcher only, which forwards it once to each rank.
        command.process_group(0);
        command.envs([
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", size.clone()),
            ("LOCAL_WORLD_SIZE", size),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
            (LAUNCHER, std::process::id().to_string()),
        ]);
        if launch.ranks > 1 && WAITING.iter().all(|name| std::env::var_os(name).is_none()) {
            command.env(WAITING[0], "passive");
        }
        let mut child =
            command.spawn().map_err(|source| Error::Run { operation: doing(), source })?;
        let out = child.stdout.take().map(|out| forward(out, rank, Outlet::Out, lines.clone()));
        let err = child.stderr.take().map(|err| forward(err, rank, Outlet::Err, lines.clone()));
        if let Some(source) = [out, err].into_iter().flatten().find_map(io::Result::err) {
            _ = child.kill();
            _ = child.wait();
            return Err(Error::Run { operation: doing(), source });
        }
        Ok(Rank { rank, child, end: None })
    }
}

/// The started ranks. Drop kills those that still run.
struct Ranks {
    ranks: Vec<Rank>,
    failed_at: Option<Instant>,
    /// Whether they were asked to stop.
    stop_requested: bool,
}

impl Ranks {
    /// Polls the ranks, and kills those that run too long after a failure. Whether any still runs.
    fn poll(&mut self) -> bool {
        for rank in self.ranks.iter_mut().filter(|rank| rank.end.is_none()) {
            let Ok(Some(status)) = rank.child.try_wait() else { continue };
            let end = RankExit::of(status);
            rank.end = Some(end);
            if end.is_good() {
                continue;
            }
            match end {
                RankExit::Code(code) => log::error!("launch: rank {}: exit code {code}", rank.rank),
                RankExit::Signal(by) => {
                    log::error!("launch: rank {} was killed by signal {by}", rank.rank);
                }
            }
            self.failed_at.get_or_insert_with(Instant::now);
        }
        if self.failed_at.is_some_and(|at| at.elapsed() >= LINGER) {
            self.for_each_running(|rank| {
                log::error!("launch: rank {} runs after another failed: killing it", rank.rank);
                _ = rank.child.kill();
            });
            self.failed_at = None;
        }
        self.ranks.iter().any(|rank| rank.end.is_none())
    }

    fn stop(&mut self) {
        let is_second = std::mem::replace(&mut self.stop_requested, true);
        self.for_each_running(|rank| {
            if is_second {
                _ = rank.child.kill();
            } else {
                // False if it has just ended, which the next poll finds.
                _ = runtime::signal(rank.child.id(), SIGTERM);
            }
        });
    }

    fn for_each_running(&mut self, mut act: impl FnMut(&mut Rank)) {
        self.ranks.iter_mut().filter(|rank| rank.end.is_none()).for_each(&mut act);
    }

    fn worst(&self) -> u8 {
        let ends = self.ranks.iter().filter_map(|rank| rank.end);
        ends.max_by_key(|end| end.badness()).map_or(exit::DONE, RankExit::code)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.for_each_running(|rank| {
            _ = rank.child.kill();
            _ = rank.child.wait();
        });
    }
}

#[derive(Clone, Copy)]
enum Outlet {
    Out,
    Err,
}

/// A line, with its end, of one rank.
struct RankLine {
    outlet: Outlet,
    text: Vec<u8>,
}

/// Reads lines on a thread of its own until the writer closes its end.
fn forward(
    from: impl Read + Send + 'static,
    rank: usize,
    outlet: Outlet,
    to: SyncSender<RankLine>,
) -> io::Result<()> {
    let read = move || {
        let mut from = BufReader::new(from);
        loop {
            let mut text = format!("[{rank}] ").into_bytes();
            let begin = text.len();
            // After a read error the output ends; the exit code of the rank is still reported.
            if from.read_until(b'\n', &mut text).is_err() || text.len() == begin {
                return;
            }
            if text.last() != Some(&b'\n') {
                text.push(b'\n');
            }
            if to.send(RankLine { outlet, text }).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().spawn(read).map(drop)
}

struct Outlets {
    out: Box<dyn Write>,
    err: Box<dyn Write>,
}

impl Outlets {
    /// Writes the lines that arrive within one poll interval.
    fn pass_on(&mut self, receiver: &Receiver<RankLine>) -> Result<()> {
        let until = Instant::now() + POLL;
        while Instant::now() < until {
            match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.write(&line)?,
                Err(RecvTimeoutError::Timeout) => break,
                // All ranks have closed their outputs, and are about to end.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
            }
        }
        Ok(())
    }

    /// Writes the remaining lines after all ranks have ended. A process that a rank started may
    /// still hold its outputs open, so the wait is limited.
    fn write_remaining(&mut self, receiver: &Receiver<RankLine>) -> Result<()> {
        while let Ok(line) = receiver.recv_timeout(REMAINING_WAIT) {
            self.write(&line)?;
        }
        Ok(())
    }

    fn write(&mut self, line: &RankLine) -> Result<()> {
        let to = match line.outlet {
            Outlet::Out => &mut self.out,
            Outlet::Err => &mut self.err,
        };
        to.write_all(&line.text).and_then(|()| to.flush()).map_err(|source: io::Error| Error::Run {
            operation: "forward the output of ranks".to_owned(),
            source,
        })
    }
}
