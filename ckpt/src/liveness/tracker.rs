//! Liveness tracker: which of the other processes are alive.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use crate::liveness::heartbeat::{LivenessTimeouts, owner_of};
use storage::{Liveness, ProcessIdentity};

/// The latest heartbeats of some processes, timed by this process's clock.
#[derive(Debug)]
pub(crate) struct LivenessTracker {
    seen: Vec<Option<Seen>>,
    /// The number of all writers, for messages.
    writers: usize,
    silence_max: Duration,
    started: Option<Instant>,
}

/// How many times the longest silence a process of another machine may take until its first
/// heartbeat: before it, a writer copies tensors to its memory, and the first one waits for the
/// lease.
const FIRST_SILENCES: u32 = 10;

#[derive(Debug)]
struct Seen {
    name: String,
    /// When the heartbeat was first seen; `None` before the first one.
    since: Option<Instant>,
    owner: Option<ProcessIdentity>,
}

impl LivenessTracker {
    /// Tracks writers `0..first` of `writers`.
    pub(crate) fn new(first: usize, writers: usize, patience: LivenessTimeouts) -> Self {
        let seen = (0..first).map(|_| None).collect();
        LivenessTracker { seen, writers, silence_max: patience.silence_max, started: None }
    }

    /// The same for writers whose processes are known before their first heartbeat: one that dies
    /// before it is detected as well, on this machine at once. `members` are those of all writers,
    /// or none.
    pub(crate) fn expecting(mut self, members: &[ProcessIdentity], now: Instant) -> Self {
        self.started = Some(now);
        for (writer, (seen, owner)) in self.seen.iter_mut().zip(members).enumerate() {
            let name = format!("{writer:05}-{owner}");
            *seen = Some(Seen { name, since: None, owner: Some(owner.clone()) });
        }
        self
    }

    /// Records the current heartbeats, `00003-OWNER` or `00003-OWNER~7`.
    pub(crate) fn record(&mut self, names: &[String], now: Instant) {
        for name in names {
            let Some((writer, maker)) = name.split_once('-') else { continue };
            let place = writer.parse().ok().and_then(|writer: usize| self.seen.get_mut(writer));
            let Some(place) = place else { continue };
            // During a renewal both the old and the new heartbeat may exist; only a newer one
            // counts.
            if place.as_ref().is_none_or(|seen| is_later(name, &seen.name)) {
                let owner = owner_of(maker).0;
                *place = Some(Seen { name: name.clone(), since: Some(now), owner });
            }
        }
    }

    /// Describes the writers that are dead, or whose heartbeat has timed out, and that have not
    /// finished their part; `None` if there are none.
    pub(crate) fn dead(&self, done: &HashSet<usize>, now: Instant) -> Option<String> {
        let silent = |(writer, seen): (usize, &Option<Seen>)| {
            let seen = seen.as_ref().filter(|_| !done.contains(&writer))?;
            let life = seen.owner.as_ref().map_or(Liveness::Unknown, ProcessIdentity::life);
            let since = |at: Instant| now.saturating_duration_since(at);
            let (silence, most) = match seen.since {
                Some(at) => (since(at), self.silence_max),
                // A process of this machine that lives will join, or die.
                None if life != Liveness::Unknown => (Duration::ZERO, self.silence_max),
                None => (self.started.map_or(Duration::ZERO, since), self.first_max()),
            };
            let why = if life == Liveness::Dead {
                "process is dead".to_owned()
            } else if silence >= most {
                format!("no heartbeat for {} s", silence.as_secs_f64().round())
            } else {
                return None;
            };
            Some(format!("{}: {why}", self.label(writer)))
        };
        let all: Vec<String> = self.seen.iter().enumerate().filter_map(silent).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    fn first_max(&self) -> Duration {
        self.silence_max.saturating_mul(FIRST_SILENCES)
    }

    /// Describes the writers that have not finished their part at the deadline.
    pub(crate) fn late(&self, done: &HashSet<usize>) -> String {
        let text = |writer: usize| match &self.seen[writer] {
            Some(Seen { since: Some(_), .. }) => format!("{}: not finished", self.label(writer)),
            _ => format!("{}: never joined", self.label(writer)),
        };
        let late: Vec<usize> = (0..self.seen.len()).filter(|w| !done.contains(w)).collect();
        // The message is bounded; if a whole rack has failed, these are enough to identify it.
        let mut lines: Vec<String> = late.iter().take(LATE_LISTED_MAX).map(|w| text(*w)).collect();
        if late.len() > LATE_LISTED_MAX {
            lines.push(format!("and {} more", late.len() - LATE_LISTED_MAX));
        }
        lines.join("; ")
    }

    pub(crate) fn label(&self, writer: usize) -> String {
        let owner = self.seen[writer].as_ref().and_then(|seen| seen.owner.as_ref());
        label_of(writer, self.writers, owner)
    }
}

const LATE_LISTED_MAX: usize = 16;

/// `writer 3 of 8 (process 12 on host)`.
pub(crate) fn label_of(writer: usize, writers: usize, owner: Option<&ProcessIdentity>) -> String {
    match owner {
        Some(owner) => format!("writer {writer} of {writers} ({})", owner.label()),
        None => format!("writer {writer} of {writers}"),
    }
}

/// Whether a heartbeat is later than another of the same owner, or has another owner.
fn is_later(name: &str, than: &str) -> bool {
    let parts = |name: &str| {
        let (stem, number) = name.split_once('~').unwrap_or((name, "0"));
        (stem.to_owned(), number.parse::<u64>().unwrap_or(0))
    };
    let ((stem, number), (old_stem, old)) = (parts(name), parts(than));
    stem != old_stem || number > old
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writer_that_dies_before_first_heartbeat_is_reported() {
        let (started, patience) = (Instant::now(), LivenessTimeouts::default());
        let own = ProcessIdentity::new();
        // A process of this boot with that number started at another time.
        let text = own.to_string();
        let mut parts: Vec<&str> = text.rsplitn(3, '.').collect();
        parts[1] = "1";
        parts.reverse();
        let dead = ProcessIdentity::parse(&parts.join(".")).unwrap();
        let tracker = LivenessTracker::new(2, 2, patience).expecting(&[own.clone(), dead], started);
        let text = tracker.dead(&HashSet::new(), started).unwrap();
        assert!(text.starts_with("writer 1 of 2") && text.ends_with("process is dead"), "{text}");
        let tracker = LivenessTracker::new(2, 2, patience).expecting(&[own.clone(), own], started);
        assert_eq!(tracker.dead(&HashSet::new(), started + 2 * patience.silence_max), None);
        assert!(tracker.late(&HashSet::from([0])).ends_with("never joined"));
    }

    /// Whether it lives cannot be seen, and its first heartbeat may follow a long copy.
    #[test]
    fn writer_of_another_machine_that_never_joins_is_reported() {
        let (started, patience) = (Instant::now(), LivenessTimeouts::default());
        let members =
            [ProcessIdentity::new(), ProcessIdentity::parse("node-1.m.b.1.77.5.0").unwrap()];
        let at = |s| started + Duration::from_secs(s);
        let mut tracker = LivenessTracker::new(2, 2, patience).expecting(&members, started);
        let none = HashSet::new();
        assert_eq!(tracker.dead(&none, at(599)), None);
        let expected = "writer 1 of 2 (process 77 on node-1): no heartbeat for 600 s";
        assert_eq!(tracker.dead(&none, at(600)).as_deref(), Some(expected));
        tracker.record(&["00001-node-1.m.b.1.77.5.1".to_owned()], at(599));
        assert_eq!(tracker.dead(&none, at(658)), None);
        assert!(tracker.dead(&none, at(659)).is_some());
    }

    #[test]
    fn timed_out_and_missing_writers_are_reported() {
        let patience = LivenessTimeouts {
            silence_max: Duration::from_secs(60),
            ..LivenessTimeouts::default()
        };
        let started = Instant::now();
        let at = |s| started + Duration::from_secs(s);
        let mut tracker = LivenessTracker::new(4, 4, patience);
        let heartbeat =
            |writer: usize, beat: &str| format!("{writer:05}-node-{writer}.m.b.1.77.5.0{beat}");
        tracker.record(
            &[
                heartbeat(0, ""),
                heartbeat(1, ""),
                heartbeat(2, "~9"),
                "x".to_owned(),
                heartbeat(9, ""),
            ],
            at(0),
        );
        tracker.record(&[heartbeat(0, "~1"), heartbeat(1, ""), heartbeat(2, "~8")], at(50));
        let done = HashSet::from([2]);
        assert_eq!(tracker.dead(&done, at(59)), None);
        let expected = "writer 1 of 4 (process 77 on node-1): no heartbeat for 62 s";
        assert_eq!(tracker.dead(&done, at(62)).as_deref(), Some(expected));
        let both = tracker.dead(&HashSet::new(), at(62)).unwrap();
        assert!(both.contains(expected) && both.contains("writer 2 of 4"), "{both}");
        let late = tracker.late(&HashSet::from([0, 2]));
        assert_eq!(
            late,
            "writer 1 of 4 (process 77 on node-1): not finished; writer 3 of 4: never joined"
        );
    }
}
