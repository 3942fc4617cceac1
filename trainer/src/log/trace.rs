//! Where the time of every step went, as a Chrome trace: `chrome://tracing` and Perfetto read it.
//!
//! Each rank writes a file of its own. Times count from 1970, so the ranks of a machine are beside
//! one another in a file that holds the events of several:
//!
//! ```text
//! jq -s '{traceEvents: map(.traceEvents) | add}' trace/rank-*.json
//! ```

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use storage::{Error, Result};

/// The newest events that are kept: some 100 bytes each in memory, and as many in the file. That
/// is 500 steps of 64 micro-batches.
const EVENTS_MAX: usize = 1 << 16;

/// Takes the events of one rank; clones take them into the same file. Off, it costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Trace(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    rank: usize,
    begun: Instant,
    /// Microseconds from 1970 to `begun`.
    begun_us: f64,
    events: Mutex<VecDeque<Event>>,
}

/// What took how long.
#[derive(Debug)]
struct Event {
    name: &'static str,
    /// Microseconds after `begun`.
    at_us: f64,
    took_us: f64,
    args: Vec<(&'static str, u64)>,
}

impl Trace {
    /// A trace of a rank into `folder`, which must be there when [`Trace::write`] is called.
    #[must_use]
    pub fn new(folder: &Path, rank: usize) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Trace(Some(Arc::new(Inner {
            path: folder.join(format!("rank-{rank:05}.json")),
            rank,
            begun: Instant::now(),
            begun_us: since.as_secs_f64() * 1e6,
            events: Mutex::default(),
        })))
    }

    /// Begins something that ends when what is given back is dropped. What it is about goes into
    /// `args`: `[("step", 7), ("micro", 3)]`.
    pub fn span(&self, name: &'static str, args: &[(&'static str, u64)]) -> Span<'_> {
        let begin = |inner| Begun { inner, name, args: args.to_vec(), at: Instant::now() };
        Span(self.0.as_deref().map(begin))
    }

    /// Writes the file anew, whole or not at all, with the newest events.
    ///
    /// # Errors
    /// [`Error::Io`] and its kin.
    pub fn write(&self) -> Result<()> {
        let Some(inner) = &self.0 else { return Ok(()) };
        let named = |error| Error::from_io("write", inner.path.display().to_string(), error);
        let folder = inner.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(named)?;
        let draft = inner.path.with_extension("json.draft");
        fs::write(&draft, inner.json().to_string()).map_err(named)?;
        fs::rename(&draft, &inner.path).map_err(named)
    }
}

impl Inner {
    fn events(&self) -> MutexGuard<'_, VecDeque<Event>> {
        // Whoever panicked while holding it left a queue of whole events.
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn json(&self) -> Value {
        let name = format!("rank {}", self.rank);
        let process = json!({
            "name": "process_name", "ph": "M", "pid": self.rank, "tid": 0, "args": { "name": name },
        });
        let event = |event: &Event| {
            let args = event.args.iter().map(|(key, value)| ((*key).to_owned(), (*value).into()));
            json!({
                "name": event.name, "cat": "train", "ph": "X", "pid": self.rank, "tid": 0,
                "ts": self.begun_us + event.at_us, "dur": event.took_us,
                "args": args.collect::<Map<String, Value>>(),
            })
        };
        let events: Vec<Value> = self.events().iter().map(event).collect();
        let all: Vec<Value> = std::iter::once(process).chain(events).collect();
        json!({ "traceEvents": all, "displayTimeUnit": "ms" })
    }
}

/// Something that is going on; see [`Trace::span`].
#[derive(Debug)]
#[must_use = "it ends when it is dropped"]
pub struct Span<'a>(Option<Begun<'a>>);

#[derive(Debug)]
struct Begun<'a> {
    inner: &'a Inner,
    name: &'static str,
    args: Vec<(&'static str, u64)>,
    at: Instant,
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        let Some(Begun { inner, name, args, at }) = self.0.take() else { return };
        let took_us = at.elapsed().as_secs_f64() * 1e6;
        let at_us = at.duration_since(inner.begun).as_secs_f64() * 1e6;
        let mut events = inner.events();
        if events.len() == EVENTS_MAX {
            events.pop_front();
        }
        events.push_back(Event { name, at_us, took_us, args });
    }
}
