//! Logs what each rank waits for, when that takes too long.
//!
//! On each rank a thread writes to the store every second what the rank is doing. When a rank has
//! waited for another too long, one of those that wait collects and logs these texts: the report of
//! a hang then names the rank that all others wait for, and what it was about to do.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bridge::dist::{Store, Wait, ranks_text};

use crate::Result;

/// How often a rank reports its activity; more often if its limit is short. 4,096 ranks send 4,096
/// small messages a second, a tenth of what a store handles.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// A rank has no heartbeat if its report does not change for this many intervals.
const MISSED_HEARTBEATS: u32 = 3;

/// Lines of a report.
const LINES_MAX: usize = 64;

/// Watches until it is dropped.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches rank `rank` of `size`, through a connection of its own. `doing` describes what the
    /// rank does. When it has waited for `limit`, a report of what all ranks do is logged. The
    /// rank's first description is in the store when this returns, so that the report has one also
    /// of a rank that stops right after it.
    ///
    /// # Errors
    /// [`crate::Error::Bridge`] if there is no second connection.
    pub fn start(
        store: &Store,
        (rank, size): (usize, usize),
        limit: Duration,
        doing: impl Fn() -> String + Send + 'static,
    ) -> Result<Self> {
        let interval = HEARTBEAT.min(limit / MISSED_HEARTBEATS);
        let watch = Watch { store: store.again()?, rank, size, limit, interval };
        watch.publish(0, &doing())?;
        let (stop, stopped) = mpsc::channel();
        let name = format!("watch-{rank}");
        let run = move || {
            let mut heartbeats = 0;
            while stopped.recv_timeout(watch.interval) == Err(RecvTimeoutError::Timeout) {
                heartbeats += 1;
                // Without a store no report is possible; the rank itself will notice.
                if watch.publish(heartbeats, &doing()).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name).spawn(run);
        let thread = thread.map_err(|source| crate::Error::Run {
            operation: "start the watchdog thread".to_owned(),
            source,
        })?;
        Ok(Watchdog { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is already on standard error.
            _ = thread.join();
        }
    }
}

struct Watch {
    store: Store,
    rank: usize,
    size: usize,
    limit: Duration,
    interval: Duration,
}

impl Watch {
    fn publish(&self, count: u64, doing: &str) -> bridge::Result<()> {
        self.store.tell_waits(self.interval / 4)?;
        let waits = self.store.waits();
        let text = describe(doing, waits.first());
        self.store.set(&format!("doing/{}", self.rank), format!("{count}\n{text}").as_bytes())?;
        if waits.first().is_some_and(|wait| wait.age >= self.limit) && self.is_first()? {
            self.report(&text)?;
        }
        Ok(())
    }

    /// Whether no other rank has reported in this period. If clocks differ, two ranks may report.
    fn is_first(&self) -> bridge::Result<bool> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let period = now.as_millis() / self.limit.as_millis().max(1);
        Ok(self.store.add(&format!("told/{period}"), 1)? == 1)
    }

    fn report(&self, own: &str) -> bridge::Result<()> {
        let before = self.read_all()?;
        thread::sleep(self.interval * MISSED_HEARTBEATS);
        let after = self.read_all()?;
        let mut lines = Vec::new();
        let mut silent = Vec::new();
        for (rank, (before, after)) in before.into_iter().zip(after).enumerate() {
            match after.as_deref().and_then(|text| text.split_once('\n')) {
                // This rank reports now, so it is alive.
                _ if rank == self.rank => lines.push(format!("  rank {rank}: {own}")),
                Some((_, text)) if before != after => lines.push(format!("  rank {rank}: {text}")),
                Some((_, text)) => {
                    silent.push(rank);
                    lines.push(format!("  rank {rank}: no heartbeat; last: {text}"));
                }
                None => {
                    silent.push(rank);
                    lines.push(format!("  rank {rank}: no report"));
                }
            }
        }
        let left_out = lines.len().saturating_sub(LINES_MAX);
        lines.truncate(LINES_MAX);
        if left_out > 0 {
            lines.push(format!("  and {left_out} more"));
        }
        if !silent.is_empty() {
            lines.push(format!("  no heartbeat: ranks {}", ranks_text(&silent)));
        }
        log::warn!(
            "watch: rank {} has waited too long; activity of each rank:\n{}",
            self.rank,
            lines.join("\n")
        );
        Ok(())
    }

    /// The last report of each rank.
    fn read_all(&self) -> bridge::Result<Vec<Option<String>>> {
        let read = |rank| {
            let bytes = self.store.look(&format!("doing/{rank}"))?;
            Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
        };
        (0..self.size).map(read).collect()
    }
}

/// `Backward(micro-batch 3), waiting for rank 6 (recv on pp[0], 31 s)`.
fn describe(doing: &str, wait: Option<&Wait>) -> String {
    let doing = if doing.is_empty() { "starting" } else { doing };
    let Some(Wait { op, group, members, peer, age, .. }) = wait else {
        return format!("{doing}, not waiting");
    };
    let whom = match peer {
        Some(peer) => format!("rank {peer}"),
        None => format!("ranks {}", ranks_text(members)),
    };
    format!("{doing}, waiting for {whom} ({op} on {group}, {:.0} s)", age.as_secs_f64())
}
