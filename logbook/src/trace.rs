//! What a rank did when, as a Chrome trace: `chrome://tracing` and Perfetto read it.
//!
//! Each rank writes a file of its own. Times count from 1970, so that ranks are beside one another
//! in a file that holds the events of several:
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

/// The newest events that are kept, some 100 bytes each in memory and in the file: 250 steps of 64
/// micro-batches there and back.
const EVENTS_MAX: usize = 1 << 15;

/// What one rank does, one thing after the other. Clones speak for the same rank.
#[derive(Clone, Debug)]
pub struct Trace(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    rank: usize,
    begun: Instant,
    /// Microseconds from 1970 to `begun`.
    begun_us: f64,
    step: u64,
    /// What goes on, since when, and of which step.
    now: Option<(String, Instant, u64)>,
    events: VecDeque<Event>,
}

/// What took how long.
#[derive(Debug)]
struct Event {
    name: String,
    step: u64,
    /// Microseconds after `begun`.
    at_us: f64,
    took_us: f64,
}

impl Trace {
    /// Of a rank, into a folder.
    #[must_use]
    pub fn new(folder: &Path, rank: usize) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Trace(Arc::new(Mutex::new(Inner {
            path: folder.join(format!("rank-{rank:05}.json")),
            rank,
            begun: Instant::now(),
            begun_us: since.as_secs_f64() * 1e6,
            step: 0,
            now: None,
            events: VecDeque::new(),
        })))
    }

    /// What begins from here on belongs to this step.
    pub fn step(&self, step: u64) {
        self.inner().step = step;
    }

    /// Something begins, and what went on has ended. Nothing begins with an empty name.
    pub fn doing(&self, name: &str) {
        let at = Instant::now();
        let mut inner = self.inner();
        if let Some((name, since, step)) = inner.now.take() {
            let event = Event {
                name,
                step,
                at_us: since.duration_since(inner.begun).as_secs_f64() * 1e6,
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

    /// Writes the newest events: the file anew, whole or not at all.
    ///
    /// # Errors
    /// [`Error::Io`] and its kin.
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
        // Whoever panicked while holding it left whole events.
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
                "ts": self.begun_us + event.at_us, "dur": event.took_us,
                "args": { "step": event.step },
            })
        };
        let events: Vec<Value> =
            [process].into_iter().chain(self.events.iter().map(event)).collect();
        json!({ "traceEvents": events, "displayTimeUnit": "ms" })
    }
}
