//! Divides counting among threads, until a training run is stopped.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::{Error, Result};

/// How many threads there are, and what ends them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Threads<'s> {
    pub(super) workers: usize,
    pub(super) stop: &'s AtomicBool,
}

impl Threads<'_> {
    /// Returns an error if the run was stopped.
    pub(super) fn check(self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(Error::Stopped) } else { Ok(()) }
    }

    /// Calls `work` with a part of the items on each thread; its results are in the order of the
    /// parts.
    ///
    /// # Errors
    /// [`Error::Stopped`]: the parts ended early.
    pub(super) fn in_parts<'a, T: Sync, R: Send>(
        self,
        items: &'a [T],
        work: impl Fn(&mut dyn Iterator<Item = &'a T>) -> R + Sync,
    ) -> Result<Vec<R>> {
        let run = |part: &'a [T]| work(&mut part.iter().take_while(|_| self.check().is_ok()));
        let run = &run;
        let results = thread::scope(|scope| {
            let spawn = |part| thread::Builder::new().spawn_scoped(scope, move || run(part));
            let parts = items.chunks(items.len().div_ceil(self.workers).max(1));
            let threads: Vec<_> = parts.map(spawn).collect::<std::io::Result<_>>()?;
            let end = |thread: thread::ScopedJoinHandle<'_, R>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            Ok(threads.into_iter().map(end).collect())
        });
        let results = results.map_err(Error::no_thread)?;
        self.check().map(|()| results)
    }

    /// Adds the counts that `each` finds in the items.
    ///
    /// # Errors
    /// As [`Threads::in_parts`].
    pub(super) fn counted<'a, T: Sync, K: Hash + Eq + Send>(
        self,
        items: &'a [T],
        each: impl Fn(&'a T, &mut HashMap<K, u64>) + Sync,
    ) -> Result<HashMap<K, u64>> {
        let parts = self.in_parts(items, |part| {
            let mut counts = HashMap::new();
            part.for_each(|item| each(item, &mut counts));
            counts
        })?;
        let mut parts = parts.into_iter();
        let mut all: HashMap<K, u64> = parts.next().unwrap_or_default();
        for (key, times) in parts.flatten() {
            *all.entry(key).or_default() += times;
        }
        Ok(all)
    }
}
