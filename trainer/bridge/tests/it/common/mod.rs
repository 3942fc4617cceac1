//! Ranks as threads of one process, each with its own connection to one store.

mod ports;

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bridge::dist::{Group, GroupOptions, Store};

pub use ports::free_port;

/// Far more than any operation takes, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `body` on `size` ranks and returns the results.
pub fn stores<T: Send>(size: usize, body: impl Fn(usize, Store) -> T + Sync) -> Vec<T> {
    let server = Store::serve("127.0.0.1", 0, PATIENCE).unwrap();
    let port = server.port();
    thread::scope(|scope| {
        let spawn = |rank| {
            let body = &body;
            scope.spawn(move || {
                let store = Store::connect("127.0.0.1", port, PATIENCE).unwrap();
                let pulse = pulse(&store);
                let result = body(rank, store);
                drop(pulse);
                result
            })
        };
        let ranks: Vec<_> = (0..size).map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Reports to the others what a rank waits for, until it is dropped, as a watchdog does.
pub struct Pulse {
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Pulse {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A process must not end while one of its threads is in a call of libtorch.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn pulse(store: &Store) -> Pulse {
    let store = store.again().unwrap();
    let (stop, stopped) = mpsc::channel();
    let thread = thread::spawn(move || {
        let interval = Duration::from_millis(50);
        while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
            if store.tell_waits(interval).is_err() {
                return;
            }
        }
    });
    Pulse { stop: Some(stop), thread: Some(thread) }
}

/// The same with a group of all of them.
pub fn ranks<T: Send>(size: usize, body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    let members: Vec<usize> = (0..size).collect();
    stores(size, |rank, store| {
        let options = GroupOptions::local(PATIENCE);
        let group = Group::gloo(&store, "world", rank, &members, &options).unwrap();
        let result = body(&group);
        group.barrier().unwrap();
        result
    })
}
