//! Signals to processes that a test started.

use std::process::{Child, Command, Stdio};

/// Sends a signal such as `-INT`; returns whether the process still existed. Uses the `kill` of the
/// shell: not every system has the program.
pub fn send(child: &Child, signal: &str) -> bool {
    let kill = format!("kill {signal} {}", child.id());
    let sent = Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status();
    sent.unwrap().success()
}
