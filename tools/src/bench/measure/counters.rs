//! Resources that this process used: bytes of devices and time of cores.
//!
//! Bytes moved by the device per byte delivered show whether a number is valid: far below 1, a
//! cache was measured; far above, most bytes were not needed. The kernel counts the bytes that a
//! process moves to and from block devices and over NFS. It does not count those of FUSE, Lustre
//! and the kernel's CephFS client; there the benchmark counts its own requests instead.

use std::fs;

use serde::{Deserialize, Serialize};
use storage::probe::cpu_times;

/// Source of the count of moved bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CounterSource {
    /// The kernel: bytes of this process that were moved below the page cache.
    Kernel,
    /// The requests of the benchmark, rounded to blocks: caches below them are not visible.
    Requests,
    /// None: the files are in memory.
    Memory,
}

/// File systems for which the kernel counts the bytes that a process moves.
const COUNTED: [&str; 7] = ["ext4", "xfs", "btrfs", "f2fs", "overlay", "nfs", "nfs4"];

impl CounterSource {
    /// The source for files on `file_system`.
    #[must_use]
    pub fn of(file_system: &str) -> Self {
        match file_system {
            "tmpfs" | "ramfs" => CounterSource::Memory,
            name if COUNTED.contains(&name) && Counters::now().is_counted => CounterSource::Kernel,
            _ => CounterSource::Requests,
        }
    }
}

/// Counts since the process started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counters {
    is_counted: bool,
    /// Bytes read from devices.
    pub read_bytes: u64,
    /// Bytes written to devices.
    pub written_bytes: u64,
    /// Seconds of all cores, including the kernel's on behalf of this process.
    pub cpu_s: f64,
    /// The kernel's part of them.
    pub kernel_cpu_s: f64,
}

impl Counters {
    /// Reads the counters.
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

    /// The difference between now and `before`.
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
    fn computation_uses_cpu_time() {
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
