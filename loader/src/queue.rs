//! A queue between two threads that can be closed, waits no longer than it is told to, and keeps
//! its memory. `std`'s channels allocate as they go, or cannot be closed from the outside.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Debug)]
pub(crate) struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    capacity: usize,
    closed: bool,
}

/// Why there is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nothing {
    /// Not yet.
    Late,
    /// It is closed, and there will be nothing more.
    Closed,
}

impl<T> Queue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let items = VecDeque::with_capacity(capacity);
        Queue {
            state: Mutex::new(State { items, capacity, closed: false }),
            changed: Condvar::new(),
        }
    }

    /// Appends, and waits for room first. Gives the item back if the queue is closed.
    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        let mut state = self.lock();
        while state.items.len() >= state.capacity && !state.closed {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return Err(item);
        }
        state.items.push_back(item);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Appends beyond the capacity if it must.
    pub(crate) fn push_now(&self, item: T) {
        let mut state = self.lock();
        if !state.closed {
            state.items.push_back(item);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Takes the first item, and waits for one until then. What was pushed before the queue was
    /// closed still comes.
    pub(crate) fn pop(&self, until: Option<Instant>) -> Result<T, Nothing> {
        let mut state = self.lock();
        loop {
            if let Some(item) = state.items.pop_front() {
                drop(state);
                self.changed.notify_all();
                return Ok(item);
            }
            if state.closed {
                return Err(Nothing::Closed);
            }
            state = match until {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Nothing::Late);
                    }
                    let waited = self.changed.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Takes the first item if there is one.
    pub(crate) fn try_pop(&self) -> Option<T> {
        let item = self.lock().items.pop_front()?;
        self.changed.notify_all();
        Some(item)
    }

    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_was_pushed_comes_also_after_the_end() {
        let queue = Queue::new(2);
        queue.push(1).unwrap();
        queue.push_now(2);
        queue.push_now(3);
        assert_eq!(queue.try_pop(), Some(1));
        queue.close();
        assert_eq!(queue.push(4), Err(4));
        queue.push_now(5);
        assert_eq!((queue.pop(None), queue.pop(None)), (Ok(2), Ok(3)));
        assert_eq!(queue.pop(None), Err(Nothing::Closed));
    }

    #[test]
    fn nobody_waits_for_ever() {
        let queue = Queue::<u8>::new(1);
        let soon = Instant::now() + Duration::from_millis(5);
        assert_eq!(queue.pop(Some(soon)), Err(Nothing::Late));
        queue.push(1).unwrap();
        std::thread::scope(|scope| {
            let full = scope.spawn(|| queue.push(2));
            queue.close();
            assert_eq!(full.join().unwrap(), Err(2), "nobody made room");
        });
    }
}
