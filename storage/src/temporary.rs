//! Names of files that are being written, and of folders that are being deleted:
//! `.NAME.tmp-HOST-PID-UNIQUE`, and `.NAME.draft` for what outlives its writer. They are hidden from listings, and who wrote one can be read off
//! it, so that what a dead process left behind can be told from the work of a live one.

use std::fs;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// A process: a number is used again by the system, but not with the same start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Writer {
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Where its number is counted: containers may share a host name and not their processes.
    pub(crate) pid_namespace: u64,
    /// Clock ticks from boot to its start.
    pub(crate) started: u64,
}

const MARK: &str = ".tmp-";
const DRAFT: &str = ".draft";

/// Linux takes names of 255 bytes.
const NAME_BYTES_MAX: usize = 255;

/// A fresh temporary name for `name`, which is cut where all would be too long.
pub(crate) fn name_for(name: &str, writer: &Writer) -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let Writer { host, pid, pid_namespace, started } = writer;
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let tail = format!("{MARK}{host}-{pid}-{pid_namespace:x}.{started:x}.{count:x}");
    let room = NAME_BYTES_MAX.saturating_sub(tail.len() + 1);
    let kept = (0..=room.min(name.len())).rev().find(|&at| name.is_char_boundary(at));
    format!(".{}{tail}", &name[..kept.unwrap_or(0)])
}

/// Who made a temporary name; `None` for every other name.
pub(crate) fn writer_of(name: &str) -> Option<Writer> {
    let (_, tail) = name.strip_prefix('.')?.rsplit_once(MARK)?;
    let (rest, unique) = tail.rsplit_once('-')?;
    let (host, pid) = rest.rsplit_once('-')?;
    let mut numbers = unique.split('.').map(|digits| u64::from_str_radix(digits, 16));
    let (pid_namespace, started) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    let _count = numbers.next()?.ok()?;
    let writer = Writer { host: host.to_owned(), pid: pid.parse().ok()?, pid_namespace, started };
    numbers.next().is_none().then_some(writer)
}

/// The name of an object's draft: always the same, so that whoever goes on with it finds it.
pub(crate) fn draft_name(name: &str) -> String {
    format!(".{name}{DRAFT}")
}

/// Whether listings leave a name out: ours, and those that NFS (`.nfs` and digits) and FUSE give to
/// a file that was deleted while somebody had it open.
pub(crate) fn is_hidden(name: &str) -> bool {
    let draft = name.starts_with('.') && name.ends_with(DRAFT);
    let deleted = [".nfs", ".fuse_hidden"].iter().any(|mark| {
        let digits = name.strip_prefix(mark).unwrap_or("");
        digits.len() >= 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    });
    deleted || draft || writer_of(name).is_some()
}

/// This process.
pub(crate) fn this_process() -> &'static Writer {
    static OURS: OnceLock<Writer> = OnceLock::new();
    OURS.get_or_init(|| {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-';
        let host: String = host.trim().chars().filter(|&c| plain(c)).take(64).collect();
        let pid = std::process::id();
        let started = start_of(pid).unwrap_or(0);
        Writer { host, pid, pid_namespace: pid_namespace(), started }
    })
}

/// Whether a process still runs. Only those that we could see are ever called dead; where `/proc`
/// hides the processes of others (`hidepid`), it hides the first of them.
pub(crate) fn is_alive(writer: &Writer) -> bool {
    let ours = this_process();
    let visible = writer.host == ours.host
        && writer.pid_namespace == ours.pid_namespace
        && start_of(1).is_some();
    !visible || start_of(writer.pid) == Some(writer.started)
}

/// The 22nd field of `/proc/PID/stat`, counted after the name, which may hold anything. It is a
/// process of ours or of another user alike: the file is readable by all.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

fn pid_namespace() -> u64 {
    let link = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect::<String>();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_their_writer() {
        let ours = this_process();
        let long = "表".repeat(85);
        for name in ["a", "a.tmp-b", ".tmp-x-1-2", "step-7", &long] {
            let temporary = name_for(name, ours);
            assert!(temporary.len() <= NAME_BYTES_MAX, "{temporary}");
            assert_eq!(writer_of(&temporary).as_ref(), Some(ours), "{temporary}");
            assert_ne!(temporary, name_for(name, ours));
        }
        for other in ["", "a", ".a", ".tmp-step-3", "a.tmp-h-1-1.2.3", ".a.tmp-h-1-2", ".a.tmp-1"] {
            assert_eq!(writer_of(other), None, "{other}");
            assert!(!is_hidden(other), "{other}");
        }
    }

    #[test]
    fn deleted_and_still_open_is_hidden() {
        assert!(is_hidden(".nfs000000000b0a1c2d00000001"));
        assert!(is_hidden(".fuse_hidden0000000300000001"));
        assert!(is_hidden(&name_for("a", this_process())));
        for other in [".nfs", ".nfsroot", ".fuse_hidden", ".fuse_hidden_files_of_mine"] {
            assert!(!is_hidden(other), "{other}");
        }
    }

    #[test]
    fn the_dead_are_told_from_the_living() {
        let ours = this_process();
        assert!(is_alive(ours));
        assert!(is_alive(&Writer { pid: 1, started: start_of(1).unwrap(), ..ours.clone() }));
        // The number of a live process with another start is a number used again.
        assert!(!is_alive(&Writer { started: ours.started + 1, ..ours.clone() }));
        assert!(!is_alive(&Writer { pid: u32::MAX, ..ours.clone() }));
        assert!(is_alive(&Writer { pid: u32::MAX, host: "other".to_owned(), ..ours.clone() }));
        assert!(is_alive(&Writer { pid: u32::MAX, pid_namespace: 1, ..ours.clone() }));
    }
}
