//! Signals to processes that a test started.

use std::process::{Child, Command, Stdio};

/// Sends `-INT` and the like, and returns whether the process was still there. By the shell, of
/// which it is a part: not every system has a program for it.
pub fn send(child: &Child, signal: &str) -> bool {
    let kill = format!("kill {signal} {}", child.id());
    let sent = Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status();
    sent.unwrap().success()
}
