//! The activity of a rank over time, as a Chrome trace for `chrome://tracing` and Perfetto.
//!
//! Each rank writes its own file. Times count from 1970, so that the events of several ranks can be
//! merged into one file:
//!
//! ```text
//! jq -s '{traceEvents: map(.traceEvents) | add}' trace/rank-*.json
//! ```

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use storage::{Error, Result};

/// The newest events that are kept, some 100 bytes each in memory and in the file: 250 steps of the
/// forward and backward passes of 64 micro-batches.
const EVENTS_MAX: usize = 1 << 15;

/// The activities of one rank, one after the other. Clones record for the same rank.
#[derive(Clone, Debug)]
pub struct Trace(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    rank: usize,
    started: Instant,
    /// Microseconds from 1970 to `started`.
    started_us: f64,
    step: u64,
    /// The current activity, its start, and its step.
    now: Option<(String, Instant, u64)>,
    events: VecDeque<Event>,
}

/// A completed activity.
#[derive(Debug)]
struct Event {
    name: String,
    step: u64,
    /// Microseconds after `started`.
    at_us: f64,
    took_us: f64,
}

impl Trace {
    /// The trace of a rank, written to a folder.
    #[must_use]
    pub fn new(folder: &Path, rank: usize) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Trace(Arc::new(Mutex::new(Inner {
            path: folder.join(format!("rank-{rank:05}.json")),
            rank,
            started: Instant::now(),
            started_us: since.as_secs_f64() * 1e6,
            step: 0,
            now: None,
            events: VecDeque::new(),
        })))
    }

    /// Activities that start from now on belong to this step.
    pub fn step(&self, step: u64) {
        self.inner().step = step;
    }

    /// Ends the current activity, and starts the next unless `name` is empty.
    pub fn doing(&self, name: &str) {
        let at = Instant::now();
        let mut inner = self.inner();
        if let Some((name, since, step)) = inner.now.take() {
            let event = Event {
                name,
                step,
                at_us: since.duration_since(inner.started).as_secs_f64() * 1e6,
                took_us: at.duration_since(since).as_secs_f64() * 1e6,
            };
            if inner.events.len() == EVENTS_MAX {
                inner.events.pop_front();
            }
            inner.events.push_back(event);
        }
        let step = inner.step;
        inner.now = (!name.is_empty()).then(|| (name.to_owned(), at, step));
    }

    /// Writes the newest events. Replaces the file atomically.
    ///
    /// # Errors
    /// [`Error::Io`] and similar errors.
    pub fn write(&self) -> Result<()> {
        let inner = self.inner();
        let named = |error| Error::from_io("write", inner.path.display().to_string(), error);
        let folder = inner.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(named)?;
        let draft = inner.path.with_extension("draft");
        fs::write(&draft, inner.json().to_string()).map_err(named)?;
        fs::rename(&draft, &inner.path).map_err(named)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A thread that panicked with the lock left complete events.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn json(&self) -> Value {
        let rank = self.rank;
        let process = json!({
            "name": "process_name", "ph": "M", "pid": rank, "tid": 0,
            "args": { "name": format!("rank {rank}") },
        });
        let event = |event: &Event| {
            json!({
                "name": event.name, "cat": "train", "ph": "X", "pid": rank, "tid": 0,
                "ts": self.started_us + event.at_us, "dur": event.took_us,
                "args": { "step": event.step },
            })
        };
        let events: Vec<Value> =
            [process].into_iter().chain(self.events.iter().map(event)).collect();
        json!({ "traceEvents": events, "displayTimeUnit": "ms" })
    }
}
