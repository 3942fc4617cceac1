//! A queue between two threads that can be closed, has timed waits, and reuses its memory. `std`'s
//! channels allocate as they go, or cannot be closed from the outside.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<QueueState<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct QueueState<T> {
    items: VecDeque<T>,
    capacity: usize,
    closed: bool,
    /// Threads that wait for a change: a wake-up costs a system call, also without a waiter.
    waiting: usize,
}

/// Why there is no item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueEmpty {
    /// Not yet.
    Late,
    /// The queue is closed and empty.
    Closed,
}

impl<T> Queue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let items = VecDeque::with_capacity(capacity);
        Queue {
            state: Mutex::new(QueueState { items, capacity, closed: false, waiting: 0 }),
            changed: Condvar::new(),
        }
    }

    /// Waits for room and appends. Returns the item if the queue is closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.lock();
        while state.items.len() >= state.capacity && !state.closed {
            state = self.wait(state, None);
        }
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        self.unlock_and_notify(state);
        Ok(())
    }

    /// Appends at once, beyond the capacity if necessary.
    pub(crate) fn push_now(&self, item: T) {
        let mut state = self.lock();
        if !state.closed {
            state.items.push_back(item);
        }
        self.unlock_and_notify(state);
    }

    /// Appends if there is room; otherwise the item is dropped.
    pub(crate) fn push_if_room(&self, item: T) {
        let mut state = self.lock();
        if state.closed || state.items.len() >= state.capacity {
            drop(state);
            drop(item); // without the lock: it may be large
            return;
        }
        state.items.push_back(item);
        self.unlock_and_notify(state);
    }

    /// Takes the first item, and waits for one until `until`. Items pushed before the queue was
    /// closed are still returned.
    pub(crate) fn pop(&self, until: Option<Instant>) -> Result<T, QueueEmpty> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                self.unlock_and_notify(state);
                return Ok(item);
            }
            if state.closed {
                return Err(QueueEmpty::Closed);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(QueueEmpty::Late);
            }
            state = self.wait(state, left);
        }
    }

    /// Takes the first item if there is one.
    pub(crate) fn try_pop(&self) -> Option<T> {
        let mut state = self.lock();
        let item = state.items.pop_front()?;
        self.unlock_and_notify(state);
        Some(item)
    }

    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        self.unlock_and_notify(state);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Waits for a change, but no longer than `most`.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, QueueState<T>>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, QueueState<T>> {
        state.waiting += 1;
        let mut state = match most {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(most) => {
                let waited = self.changed.wait_timeout(state, most);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        state.waiting -= 1;
        state
    }

    /// Unlocks, and wakes the waiting threads.
    fn unlock_and_notify(&self, state: MutexGuard<'_, QueueState<T>>) {
        let waits = state.waiting > 0;
        drop(state);
        if waits {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pushed_items_are_returned_after_close() {
        let queue = Queue::new(2);
        queue.push(1).unwrap();
        queue.push_now(2);
        queue.push_now(3);
        assert_eq!(queue.try_pop(), Some(1));
        queue.close();
        assert_eq!(queue.push(4), Err(4));
        queue.push_now(5);
        assert_eq!((queue.pop(None), queue.pop(None)), (Ok(2), Ok(3)));
        assert_eq!(queue.pop(None), Err(QueueEmpty::Closed));
    }

    #[test]
    fn pop_times_out_and_close_ends_a_blocked_push() {
        let queue = Queue::<u8>::new(1);
        let soon = Instant::now() + Duration::from_millis(5);
        assert_eq!(queue.pop(Some(soon)), Err(QueueEmpty::Late));
        queue.push(1).unwrap();
        std::thread::scope(|scope| {
            let full = scope.spawn(|| queue.push(2));
            queue.close();
            assert_eq!(full.join().unwrap(), Err(2), "the queue was full until it was closed");
        });
    }
}
