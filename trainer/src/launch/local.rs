//! Ranks on this machine, started and looked after by one process: `trainer launch`.
//!
//! The launcher keeps the store, so that no rank's end takes it away. It passes on what its ranks
//! print, line by line with their number before it, and a request to stop; when one of them fails
//! it gives the others some time to say whom they miss, and then ends them.

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

/// The variable that tells a rank which process started it, with which it ends.
pub const LAUNCHER: &str = "FEEDLINE_LAUNCHER";

/// How often the ranks are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Lines that may wait to be written, before a rank that prints has to wait.
const LINES_MAX: usize = 1024;

/// How long ranks may go on after one has failed: they say whom they miss after a second or so.
const LINGER: Duration = Duration::from_secs(10);

/// How long words may stay away when all ranks have ended, before they are taken for all. Only
/// where something that a rank started holds its outputs open is this waited for.
const REST_WAIT: Duration = Duration::from_secs(2);

/// The variables that tell OpenMP how a thread waits for work. By itself it spins, in ranks that
/// share their cores at the cost of those that compute: 8 ranks of 2 threads on 2 cores did 240
/// tokens a second, and 1,800 once they slept.
pub const WAITING: [&str; 2] = ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"];

const SIGTERM: i32 = 15;

/// What is started, and who hears of it.
pub struct Launch<'a> {
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// How many ranks.
    pub ranks: usize,
    /// Set at a request to stop, and cleared when that is seen. At the first one the ranks are
    /// asked to stop; at the second they are ended.
    pub stop: &'a AtomicBool,
    /// Takes what the ranks print.
    pub out: Box<dyn Write>,
    /// Takes what they say to standard error.
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

    /// The exit code that this is worth: who is killed is lost to the others.
    fn code(self) -> u8 {
        match self {
            RankExit::Code(code) => code,
            RankExit::Signal(_) => exit::PEER_LOST,
        }
    }

    fn is_good(self) -> bool {
        matches!(self, RankExit::Code(exit::DONE | exit::GAPS | exit::SAVED))
    }

    /// Done, done with gaps, saved, lost a peer, and then whatever made that peer go.
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

/// Starts the ranks, waits for all of them, and gives the worst of their exit codes.
///
/// # Errors
/// [`Error::Run`] if a rank cannot be started, or their words not be written;
/// [`Error::Bridge`] if there can be no store.
pub fn launch(launch: Launch<'_>) -> Result<u8> {
    let store = Store::serve("127.0.0.1", 0, Duration::from_secs(30))?;
    let (lines, words) = mpsc::sync_channel(LINES_MAX);
    let mut ranks = Ranks { ranks: Vec::new(), failed_at: None, asked: false };
    for rank in 0..launch.ranks {
        ranks.ranks.push(Rank::start(&launch, rank, store.port(), &lines)?);
    }
    drop(lines);
    let Launch { stop, out, err, .. } = launch;
    let mut outlets = Outlets { out, err };
    while ranks.look() {
        outlets.pass_on(&words)?;
        if stop.swap(false, Ordering::Relaxed) {
            ranks.stop();
        }
    }
    outlets.rest(&words)?;
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
        // A signal from the terminal comes to us alone, and once to each of them, from us.
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

/// The started ranks. Dropped, it leaves none behind.
struct Ranks {
    ranks: Vec<Rank>,
    failed_at: Option<Instant>,
    /// Whether they were asked to stop.
    asked: bool,
}

impl Ranks {
    /// Looks who has ended, and ends whom it has to. Whether any goes on.
    fn look(&mut self) -> bool {
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
            self.for_those_that_go_on(|rank| {
                log::error!("launch: rank {} runs after another failed: killing it", rank.rank);
                _ = rank.child.kill();
            });
            self.failed_at = None;
        }
        self.ranks.iter().any(|rank| rank.end.is_none())
    }

    fn stop(&mut self) {
        let asked = std::mem::replace(&mut self.asked, true);
        self.for_those_that_go_on(|rank| {
            if asked {
                _ = rank.child.kill();
            } else {
                // False if it has just ended, which the next look finds.
                _ = runtime::signal(rank.child.id(), SIGTERM);
            }
        });
    }

    fn for_those_that_go_on(&mut self, mut act: impl FnMut(&mut Rank)) {
        self.ranks.iter_mut().filter(|rank| rank.end.is_none()).for_each(&mut act);
    }

    fn worst(&self) -> u8 {
        let ends = self.ranks.iter().filter_map(|rank| rank.end);
        ends.max_by_key(|end| end.badness()).map_or(exit::DONE, RankExit::code)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.for_those_that_go_on(|rank| {
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

/// Reads lines on a thread of its own until the other side is closed.
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
            // A rank whose words cannot be read says no more; its exit code will.
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
    /// Writes the lines of a short while.
    fn pass_on(&mut self, words: &Receiver<RankLine>) -> Result<()> {
        let until = Instant::now() + LOOK;
        while Instant::now() < until {
            match words.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) => self.write(&line)?,
                Err(RecvTimeoutError::Timeout) => break,
                // All have closed their outputs, and end.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(LOOK),
            }
        }
        Ok(())
    }

    /// Writes what is left when all have ended. What a rank started and left behind may hold its
    /// outputs open, so there is an end to waiting.
    fn rest(&mut self, words: &Receiver<RankLine>) -> Result<()> {
        while let Ok(line) = words.recv_timeout(REST_WAIT) {
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
