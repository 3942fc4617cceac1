//! Processes that a test starts, stops and kills.

use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Polls a condition on another process every few milliseconds, for minutes.
const POLLS_MAX: usize = 12_000;

pub fn await_true(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..POLLS_MAX {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("timed out waiting for {what}");
}

pub fn signal(pid: u32, signal: &str) {
    assert!(kill(pid, signal).success());
}

/// The same for a process that may have ended.
pub fn signal_if_running(pid: u32, signal: &str) {
    kill(pid, signal);
}

/// Uses the builtin of the shell: not every machine has a `kill` program.
fn kill(pid: u32, signal: &str) -> ExitStatus {
    let kill = format!("kill {signal} {pid}");
    Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status().unwrap()
}

/// Whether a process has ended. Its entry may stay as a zombie: the first process of a container,
/// which inherits orphans, often does not reap them.
pub fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before it, in parentheses, may contain any character.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    matches!(state, None | Some("Z" | "X"))
}

/// Whether a dead process can be detected here. If not, prints that the test is skipped.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
pub fn can_detect_dead_processes() -> bool {
    let own = std::fs::read_link("/proc/self").unwrap_or_default();
    let is_shown = own.to_str() == Some(&std::process::id().to_string()) && !has_ended(1);
    if !is_shown {
        eprintln!("SKIPPED: /proc hides processes, so that dead ones cannot be detected");
    }
    is_shown
}
