//! Processes that a test starts, stops and kills.

use std::process::Command;
use std::time::Duration;

/// Looks at what another process does, every few milliseconds; in all, minutes.
const LOOKS_MAX: usize = 12_000;

pub fn await_true(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..LOOKS_MAX {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} does not come about");
}

pub fn signal(pid: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
    assert!(sent.success());
}
