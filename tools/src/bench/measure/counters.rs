//! What this process took of the machine: bytes of devices and time of cores.
//!
//! Bytes that the device moved by bytes that were delivered is the honesty of a number: far below
//! 1, a cache was measured; far above, most of what came was for nothing. The kernel counts the
//! bytes of a process where they go to a block device or over NFS; what FUSE, Lustre and the CephFS
//! of the kernel move it does not see, and there the requests as they were made stand in for it.

use std::fs;

use serde::{Deserialize, Serialize};
use storage::probe::cpu_times;

/// Who has counted the bytes that were moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CounterSource {
    /// The kernel, of this process: what went to and came from below the page cache.
    Kernel,
    /// Our own requests, rounding counted in: caches below them are not seen.
    Requests,
    /// There is nothing below: the files are in memory.
    Memory,
}

/// File systems below which the kernel counts what a process moves.
const COUNTED: [&str; 7] = ["ext4", "xfs", "btrfs", "f2fs", "overlay", "nfs", "nfs4"];

impl CounterSource {
    /// For files of such a file system.
    #[must_use]
    pub fn of(file_system: &str) -> Self {
        match file_system {
            "tmpfs" | "ramfs" => CounterSource::Memory,
            name if COUNTED.contains(&name) && Counters::now().is_counted => CounterSource::Kernel,
            _ => CounterSource::Requests,
        }
    }
}

/// Since the process began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    is_counted: bool,
    /// Bytes that came from devices.
    pub read_bytes: u64,
    /// Bytes that went to them.
    pub written_bytes: u64,
    /// Seconds of all cores, those of the kernel for us counted in.
    pub cpu_s: f64,
    /// Those of the kernel.
    pub kernel_cpu_s: f64,
}

impl Counters {
    /// As they stand.
    #[must_use]
    pub fn now() -> Self {
        let io = fs::read_to_string("/proc/self/io").unwrap_or_default();
        let bytes = |name: &str| {
            let line = io.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.trim().parse().ok())
        };
        let (read, written): (Option<u64>, Option<u64>) =
            (bytes("read_bytes:"), bytes("write_bytes:"));
        let [own_s, kernel_s] = cpu_times().unwrap_or_default().map(|time| time.as_secs_f64());
        Counters {
            is_counted: read.is_some() && written.is_some(),
            read_bytes: read.unwrap_or(0),
            written_bytes: written.unwrap_or(0),
            cpu_s: own_s + kernel_s,
            kernel_cpu_s: kernel_s,
        }
    }

    /// What came since then.
    #[must_use]
    pub fn since(before: &Counters) -> Self {
        let now = Counters::now();
        Counters {
            is_counted: now.is_counted,
            read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
            written_bytes: now.written_bytes.saturating_sub(before.written_bytes),
            cpu_s: now.cpu_s - before.cpu_s,
            kernel_cpu_s: now.kernel_cpu_s - before.kernel_cpu_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_time_of_cores() {
        let (before, mut words) = (Counters::now(), 7);
        // Some kernels count in hundredths of a second.
        for _ in 0..1000 {
            words = (0..5_000_000).fold(words, |sum: u64, word| sum.wrapping_mul(31) ^ word);
            if Counters::since(&before).cpu_s > 0.0 {
                return;
            }
        }
        panic!("no time was taken: {words}");
    }

    #[test]
    fn memory_has_no_device() {
        assert_eq!(CounterSource::of("tmpfs"), CounterSource::Memory);
        assert_eq!(CounterSource::of("fuse.ceph-fuse"), CounterSource::Requests);
        assert_eq!(CounterSource::of("s3"), CounterSource::Requests);
    }
}
