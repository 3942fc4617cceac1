//! Processes that a test starts, stops and kills.

use std::process::{Command, ExitStatus, Stdio};
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
    assert!(kill(pid, signal).success());
}

/// The same of one that may have ended.
pub fn signal_if_there(pid: u32, signal: &str) {
    kill(pid, signal);
}

/// By the shell, of which it is a part: the program is not on every machine.
fn kill(pid: u32, signal: &str) -> ExitStatus {
    let kill = format!("kill {signal} {pid}");
    Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status().unwrap()
}

/// Whether a process has ended. Its entry may stay as a zombie: the first process of a container,
/// which inherits orphans, often does not reap them.
pub fn has_ended(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before it, in brackets, may hold any.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().next());
    matches!(state, None | Some("Z" | "X"))
}

/// Whether a dead process is known to be dead. Where it is not, says that a test is left out.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
pub fn dead_are_known() -> bool {
    let own = std::fs::read_link("/proc/self").unwrap_or_default();
    let is_shown = own.to_str() == Some(&std::process::id().to_string()) && !has_ended(1);
    if !is_shown {
        eprintln!("SKIPPED: /proc hides processes, so that none is known to be dead");
    }
    is_shown
}
