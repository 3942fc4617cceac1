//! The process that made a temporary file, a temporary folder or a lease, written into its very
//! name, and whether that process is still alive. A name is created atomically; a note inside a
//! folder could be missing after a crash.

use std::fmt;
use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A process, distinct from every other that ever had its pid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The machine's name, which may itself contain dots.
    host: String,
    /// The first 8 digits of the machine's id, since many machines are called `localhost`.
    machine: String,
    /// The first 8 digits of the kernel's boot id.
    boot: String,
    /// The inode of the namespace in which `pid` counts.
    namespace: u64,
    pid: u32,
    /// Start time of the process, in clock ticks since the boot: pids are reused.
    started: u64,
    /// Distinguishes the names that one process makes.
    number: u64,
}

/// Inode of the initial PID namespace: `PROC_PID_INIT_INO` of the kernel's `proc_ns.h`.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Used if there is no id to read.
const NO_ID: &str = "0";

/// Whether a process is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It is this process.
    Ours,
    /// It runs.
    Alive,
    /// It has ended, for certain.
    Dead,
    /// It counts as alive: it is on another machine or in another container.
    Unknown,
}

impl ProcessIdentity {
    /// This process. Every call returns another name.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "no two are equal")]
    pub fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        ProcessIdentity {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            ..ProcessIdentity::here()
        }
    }

    fn here() -> ProcessIdentity {
        static HERE: OnceLock<ProcessIdentity> = OnceLock::new();
        let here = HERE.get_or_init(ProcessIdentity::read);
        // After a fork without exec, as in Python programs, the cached one is that of the parent.
        if here.pid == std::process::id() { here.clone() } else { ProcessIdentity::read() }
    }

    fn read() -> Self {
        let pid = std::process::id();
        ProcessIdentity {
            host: host(),
            machine: id_digits("/etc/machine-id"),
            boot: id_digits("/proc/sys/kernel/random/boot_id"),
            namespace: namespace(),
            pid,
            started: started(pid).unwrap_or(0),
            number: 0,
        }
    }

    /// Its pid on the simulated machine.
    #[cfg(feature = "sim")]
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// The same number, with another process.
    #[cfg(feature = "sim")]
    pub(crate) fn of_process(self, process: &ProcessIdentity) -> Self {
        ProcessIdentity { number: self.number, ..process.clone() }
    }

    /// Whether both are of one process.
    #[must_use]
    pub fn is_same_process(&self, other: &ProcessIdentity) -> bool {
        *self == ProcessIdentity { number: self.number, ..other.clone() }
    }

    /// A process of a simulated machine.
    #[cfg(feature = "sim")]
    pub(crate) fn simulated(pid: u32) -> Self {
        let [host, machine, boot] = ["sim", "0", "0"].map(str::to_owned);
        ProcessIdentity { host, machine, boot, namespace: 0, pid, started: 0, number: 0 }
    }

    /// Parses the result of `ProcessIdentity::to_string`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.rsplitn(7, '.');
        let number = parts.next()?.parse().ok()?;
        let started = parts.next()?.parse().ok()?;
        let pid = parts.next()?.parse().ok()?;
        let namespace = parts.next()?.parse().ok()?;
        let [boot, machine, host] =
            [parts.next()?, parts.next()?, parts.next()?].map(str::to_owned);
        Some(ProcessIdentity { host, machine, boot, namespace, pid, started, number })
    }

    /// Whether the process is alive, as far as this machine can tell.
    #[must_use]
    pub fn life(&self) -> Liveness {
        self.life_as_seen_by(&ProcessIdentity::here())
    }

    fn life_as_seen_by(&self, here: &ProcessIdentity) -> Liveness {
        if (&self.host, &self.machine) != (&here.host, &here.machine) {
            Liveness::Unknown
        } else if self.boot != here.boot {
            // A container takes its name, and an id that is part of its image, to other machines.
            let is_machine = |owner: &ProcessIdentity| owner.namespace == FIRST_NAMESPACE;
            let is_distinct = self.machine != NO_ID && is_machine(self) && is_machine(here);
            if is_distinct { Liveness::Dead } else { Liveness::Unknown }
        } else if self.namespace != here.namespace {
            Liveness::Unknown
        } else if self.pid == here.pid && self.started == here.started {
            Liveness::Ours
        } else if started(self.pid) == Some(self.started) {
            Liveness::Alive
        } else if processes_are_visible() {
            Liveness::Dead
        } else {
            Liveness::Unknown
        }
    }

    /// `process 12 on host`, for messages.
    #[must_use]
    pub fn label(&self) -> String {
        format!("process {} on {}", self.pid, self.host)
    }
}

/// `host.machine.boot.namespace.pid.started.number`, fit for a file name.
impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProcessIdentity { host, machine, boot, namespace, pid, started, number } = self;
        write!(f, "{host}.{machine}.{boot}.{namespace}.{pid}.{started}.{number}")
    }
}

fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    let plain = |c| if is_plain(c) { c } else { '_' };
    // A file name has at most 255 bytes, and POSIX host names have at most 64.
    let name: String = name.trim().chars().take(64).map(plain).collect();
    if name.is_empty() { "unnamed".to_owned() } else { name }
}

fn id_digits(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(8).collect();
    if digits.is_empty() { NO_ID.to_owned() } else { digits }
}

/// The link reads `pid:[4026531836]`.
fn namespace() -> u64 {
    let link = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// Whether a process missing in `/proc` has ended. `/proc` may belong to another namespace, and may
/// hide the processes of other users, pid 1 among them (`hidepid`).
fn processes_are_visible() -> bool {
    let own = fs::read_link("/proc/self").unwrap_or_default();
    own.to_str() == Some(&std::process::id().to_string()) && started(1).is_some()
}

/// When a process started, in clock ticks since the boot; `None` if it has ended, even if its
/// parent has not yet waited for it (a zombie).
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in parentheses, and may contain spaces and
    // parentheses: proc_pid_stat(5). State is the third field, the start time the twenty-second.
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_back() {
        let here = ProcessIdentity::new();
        assert_eq!(ProcessIdentity::parse(&here.to_string()), Some(here.clone()));
        let dotted = ProcessIdentity { host: "node-7.rack.example".to_owned(), ..here };
        assert_eq!(ProcessIdentity::parse(&dotted.to_string()), Some(dotted));
        for bad in ["", "host", "h.m.b.1.2.3.x", "h.m.b.1.-2.3.4", "m.b.1.2.3.4"] {
            assert_eq!(ProcessIdentity::parse(bad), None, "{bad}");
        }
        assert_ne!(ProcessIdentity::new().to_string(), ProcessIdentity::new().to_string());
    }

    #[test]
    fn a_reboot_ends_host_processes_but_not_containers() {
        let life_before_reboot = |namespace: u64, machine: &str| {
            let here = ProcessIdentity {
                namespace,
                machine: machine.to_owned(),
                ..ProcessIdentity::new()
            };
            ProcessIdentity { boot: "before".to_owned(), ..here.clone() }.life_as_seen_by(&here)
        };
        assert_eq!(life_before_reboot(FIRST_NAMESPACE, "1f2e3d4c"), Liveness::Dead);
        assert_eq!(life_before_reboot(FIRST_NAMESPACE, NO_ID), Liveness::Unknown);
        assert_eq!(life_before_reboot(4_026_532_999, "1f2e3d4c"), Liveness::Unknown);
    }

    #[test]
    fn liveness_of_own_other_and_ended_processes() {
        let here = ProcessIdentity::new();
        assert_eq!(here.life(), Liveness::Ours);
        let other = |host: &str, boot: &str| ProcessIdentity {
            host: host.to_owned(),
            boot: boot.to_owned(),
            ..here.clone()
        };
        assert_eq!(other("elsewhere.example", &here.boot).life(), Liveness::Unknown);
        assert_eq!(ProcessIdentity { namespace: 1, ..here.clone() }.life(), Liveness::Unknown);
        if !processes_are_visible() {
            return eprintln!("SKIPPED: /proc hides processes, so that none is known to be dead");
        }
        // A reused pid: the start time differs.
        assert_eq!(
            ProcessIdentity { started: here.started + 1, ..here.clone() }.life(),
            Liveness::Dead
        );
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        let theirs = ProcessIdentity { pid, started: started(pid).unwrap(), ..here };
        assert_eq!(theirs.life(), Liveness::Alive);
        child.kill().unwrap();
        // Killed, but not waited for: a zombie counts as dead while its /proc entry exists.
        while theirs.life() == Liveness::Alive {
            std::thread::yield_now();
        }
        assert_eq!(theirs.life(), Liveness::Dead);
        child.wait().unwrap();
        assert_eq!(theirs.life(), Liveness::Dead);
    }
}
