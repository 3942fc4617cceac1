//! Reads carried by threads of ours, each of which waits for one at a time: as parallel as anything
//! the kernel would do for a file system without asynchronous reads, with stacks that can be seen.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{io, thread};

use crate::flying::{Carrier, Done, Load};
use crate::{Error, Object, Read};

/// A thread needs some kilobytes. This is address space, of which it touches what it needs.
const STACK_BYTES: usize = 256 << 10;

/// A pool of threads that grows to what is in flight. Dropping it closes it: what waits is let go,
/// and a thread ends after the read that it is in, however long that takes.
#[derive(Debug)]
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: usize,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
    news: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Load>,
    done: Vec<Done>,
    /// Threads that wait for work.
    idle: usize,
    closed: bool,
}

impl Threads {
    /// `slots_max` is the most that will ever be in flight, orphans among them.
    pub(crate) fn new(slots_max: usize) -> Self {
        let state = State {
            waiting: VecDeque::with_capacity(slots_max),
            done: Vec::with_capacity(slots_max),
            ..State::default()
        };
        let shared = Shared { state: Mutex::new(state), ..Shared::default() };
        Threads { shared: Arc::new(shared), threads: 0 }
    }

    fn start_one(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let builder = thread::Builder::new().name("read".to_owned()).stack_size(STACK_BYTES);
        builder.spawn(move || shared.work())?;
        self.threads += 1;
        Ok(())
    }
}

impl Carrier for Threads {
    fn carry(&mut self, load: Load) {
        let mut state = self.shared.lock();
        let busy = state.waiting.len() >= state.idle;
        state.waiting.push_back(load);
        drop(state);
        self.shared.work.notify_one();
        // As many threads as requests: there are never more in flight than slots.
        if busy
            && let Err(e) = self.start_one()
            && self.threads == 0
            && let Some(load) = self.shared.lock().waiting.pop_back()
        {
            let doing = "start a thread to read";
            let error =
                Error::Io { doing: doing.to_owned(), what: load.object.display(), source: e };
            self.shared.lock().done.push(load.failed(error));
        }
    }

    fn wait(&mut self, until: Instant, done: &mut Vec<Done>) {
        let mut state = self.shared.lock();
        loop {
            let now = Instant::now();
            if !state.done.is_empty() || now >= until {
                done.append(&mut state.done);
                return;
            }
            let woken = self.shared.news.wait_timeout(state, until - now);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn place(&self, _: &Arc<dyn Object>, _: u64) -> (String, String) {
        ("threads".to_owned(), String::new())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        let done = std::mem::take(&mut state.done);
        drop(state);
        self.shared.work.notify_all();
        drop((waiting, done));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if state.closed {
                return;
            }
            let Some(load) = state.waiting.pop_front() else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            let done = load.read();
            state = self.lock();
            if !state.closed {
                state.done.push(done);
                self.news.notify_one();
            }
        }
    }
}

impl Load {
    /// Reads by what every object can.
    fn read(mut self) -> Done {
        let buf = &mut self.buf[..self.len];
        let outcome = self.object.read_many(&mut [Read { offset: self.offset, buf }]);
        let moved_bytes = if outcome.is_ok() { self.len as u64 } else { 0 };
        let Load { slot, buf, len, .. } = self;
        Done { slot, buf, data: 0..len, moved_bytes, short_reads: 0, outcome }
    }

    pub(crate) fn failed(self, error: Error) -> Done {
        let Load { slot, buf, .. } = self;
        Done { slot, buf, data: 0..0, moved_bytes: 0, short_reads: 0, outcome: Err(error) }
    }
}
