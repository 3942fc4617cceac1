//! Reads by a pool of threads, each of which waits for one read at a time: as parallel as the
//! kernel's own workers for a file system without asynchronous reads, and easier to debug.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use std::{fmt, io, thread};

use crate::reader::in_flight::{BackendCompletion, BackendRead, ReadBackend};
use crate::{Error, Object, RangeRead};

/// Stack of a thread. It needs some kilobytes; the rest is untouched address space.
const STACK_BYTES: usize = 256 << 10;

/// A task for a thread, and its result.
pub(crate) trait PoolTask: Send + fmt::Debug + 'static {
    type Out: Send + fmt::Debug;

    fn run(self) -> Self::Out;

    /// Its result if no thread can be started.
    fn fail(self, e: io::Error) -> Self::Out;
}

/// A pool of threads that grows to the number of tasks in flight. Dropping it closes it: queued
/// tasks are dropped, and a thread ends after its current read, however long that takes.
#[derive(Debug)]
pub(crate) struct WorkerPool<J: PoolTask> {
    shared: Arc<PoolShared<J>>,
    threads: usize,
}

#[derive(Debug)]
struct PoolShared<J: PoolTask> {
    state: Mutex<PoolState<J>>,
    work: Condvar,
    completed: Condvar,
}

#[derive(Debug)]
struct PoolState<J: PoolTask> {
    waiting: VecDeque<J>,
    done: Vec<J::Out>,
    /// Threads that wait for work.
    idle: usize,
    closed: bool,
}

impl<J: PoolTask> WorkerPool<J> {
    /// `jobs_max` is the most tasks at once, with stuck ones.
    pub(crate) fn new(jobs_max: usize) -> Self {
        let state = PoolState {
            waiting: VecDeque::with_capacity(jobs_max),
            done: Vec::with_capacity(jobs_max),
            idle: 0,
            closed: false,
        };
        let (work, completed) = (Condvar::new(), Condvar::new());
        let shared = PoolShared { state: Mutex::new(state), work, completed };
        WorkerPool { shared: Arc::new(shared), threads: 0 }
    }

    pub(crate) fn push(&mut self, job: J) {
        let mut state = self.shared.lock();
        let busy = state.waiting.len() >= state.idle;
        state.waiting.push_back(job);
        drop(state);
        self.shared.work.notify_one();
        // As many threads as jobs at once, and those are bounded.
        if !busy {
            return;
        }
        let shared = Arc::clone(&self.shared);
        let builder = thread::Builder::new().name("read".to_owned()).stack_size(STACK_BYTES);
        match builder.spawn(move || shared.work()) {
            Ok(_) => self.threads += 1,
            // The existing threads will run it.
            Err(_) if self.threads > 0 => {}
            Err(e) => {
                let mut state = self.shared.lock();
                if let Some(job) = state.waiting.pop_back() {
                    state.done.push(job.fail(e));
                }
            }
        }
    }

    /// Waits for at least one result or until `until`, and takes all results.
    pub(crate) fn wait(&mut self, until: Instant, done: &mut Vec<J::Out>) {
        let mut state = self.shared.lock();
        loop {
            let now = Instant::now();
            if !state.done.is_empty() || now >= until {
                done.append(&mut state.done);
                return;
            }
            let woken = self.shared.completed.wait_timeout(state, until - now);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl<J: PoolTask> Drop for WorkerPool<J> {
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

impl<J: PoolTask> PoolShared<J> {
    fn lock(&self) -> MutexGuard<'_, PoolState<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if state.closed {
                return;
            }
            let Some(job) = state.waiting.pop_front() else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
                continue;
            };
            drop(state);
            let done = job.run();
            state = self.lock();
            if !state.closed {
                state.done.push(done);
                self.completed.notify_one();
            }
        }
    }
}

impl ReadBackend for WorkerPool<BackendRead> {
    fn submit(&mut self, request: BackendRead) {
        self.push(request);
    }

    fn wait(&mut self, until: Instant, done: &mut Vec<BackendCompletion>) {
        WorkerPool::wait(self, until, done);
    }

    fn describe(&self, _: &Arc<dyn Object>, _: u64) -> (String, String) {
        ("threads".to_owned(), String::new())
    }
}

impl PoolTask for BackendRead {
    type Out = BackendCompletion;

    fn run(self) -> BackendCompletion {
        self.read()
    }

    fn fail(self, e: io::Error) -> BackendCompletion {
        let object = self.object.display();
        self.failed(Error::Io { operation: "start a thread to read".to_owned(), object, source: e })
    }
}

impl BackendRead {
    /// Reads by [`Object::read_many`](crate::Object::read_many).
    pub(crate) fn read(mut self) -> BackendCompletion {
        let buf = &mut self.buf[..self.len];
        let outcome = self.object.read_many(&mut [RangeRead { offset: self.offset, buf }]);
        let moved_bytes = if outcome.is_ok() { self.len as u64 } else { 0 };
        let BackendRead { slot, buf, len, .. } = self;
        BackendCompletion { slot, buf, data: 0..len, moved_bytes, short_reads: 0, outcome }
    }

    pub(crate) fn failed(self, error: Error) -> BackendCompletion {
        let BackendRead { slot, buf, .. } = self;
        BackendCompletion {
            slot,
            buf,
            data: 0..0,
            moved_bytes: 0,
            short_reads: 0,
            outcome: Err(error),
        }
    }
}
