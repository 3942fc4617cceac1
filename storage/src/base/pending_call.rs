//! Blocking calls that have not returned: opening a file, listing a folder, a request to a bucket.
//! The reads of a [`Reader`](crate::Reader) have tables of their own.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::base::per_process::PerProcess;
use crate::base::watchdog::{WARN_AFTER, watch};

/// A call from its start until this is dropped. The watchdog reports it while it is old.
#[derive(Debug)]
pub(crate) struct PendingCall(usize);

/// The calls of one process; free entries are `None`, and are used again.
#[derive(Debug, Default)]
struct CallTable(Vec<Option<CallEntry>>);

#[derive(Debug)]
struct CallEntry {
    /// What is done, such as `open`.
    operation: Cow<'static, str>,
    object: String,
    started: Instant,
    warnings: usize,
}

static CALLS: PerProcess<Mutex<CallTable>> = PerProcess::new();

impl PendingCall {
    /// The start of a call, such as `open` of a path.
    pub(crate) fn start(
        operation: impl Into<Cow<'static, str>>,
        object: impl Into<String>,
    ) -> Self {
        PendingCall(calls().start(operation.into(), object.into(), Instant::now()))
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        // In a forked child, the call is one of the parent.
        if let Some(entry) = calls().0.get_mut(self.0) {
            *entry = None;
        }
    }
}

impl CallTable {
    fn start(&mut self, operation: Cow<'static, str>, object: String, at: Instant) -> usize {
        let entry = Some(CallEntry { operation, object, started: at, warnings: 0 });
        let free = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        match self.0.get_mut(free) {
            Some(place) => *place = entry,
            None => self.0.push(entry),
        }
        free
    }

    /// The warnings that are due now, each once.
    fn due(&mut self, now: Instant) -> Vec<String> {
        let mut due = Vec::new();
        for call in self.0.iter_mut().flatten() {
            let age = now.saturating_duration_since(call.started);
            let passed = WARN_AFTER.iter().filter(|after| age >= **after).count();
            if passed > call.warnings {
                call.warnings = passed;
                let CallEntry { operation, object, .. } = call;
                due.push(format!("{operation} {object}: no completion for {} s", age.as_secs()));
            }
        }
        due
    }
}

fn scan() -> Option<Duration> {
    // The lock is free while the warnings are written.
    let due = calls().due(Instant::now());
    due.iter().for_each(|warning| log::warn!("{warning}"));
    None
}

fn calls() -> MutexGuard<'static, CallTable> {
    let first = || {
        watch(scan);
        Mutex::default()
    };
    CALLS.get(first).lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_call_is_reported_three_times() {
        let mut calls = CallTable::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let open = calls.start("open".into(), "/a".to_owned(), start);
        let list = calls.start("list".into(), "/b".to_owned(), at(9));
        assert!(calls.due(at(9)).is_empty());
        assert_eq!(calls.due(at(12)), ["open /a: no completion for 12 s"]);
        assert!(calls.due(at(13)).is_empty());
        calls.0[open] = None;
        assert_eq!(calls.due(at(40)), ["list /b: no completion for 31 s"]);
        // The free entry is used again.
        assert_eq!(calls.start("stat".into(), "/c".to_owned(), at(40)), open);
        let expected = ["stat /c: no completion for 70 s", "list /b: no completion for 101 s"];
        assert_eq!(calls.due(at(110)), expected);
        assert_eq!((calls.due(at(500)).len(), list), (0, 1));
    }
}
