//! Findings about this machine.

use storage::ByteSize;
use storage::probe::HostInfo;

use super::{Finding, Findings};

/// Locked memory that rings and registered buffers take on kernels before 5.12.
const MEMLOCK_BYTES_MIN: u64 = 8 << 20;

/// Open files of one process: shards, indexes, connections and logs.
const OPEN_FILES_MIN: u64 = 4096;

pub(super) fn judge(facts: &HostInfo) -> Vec<Finding> {
    let mut found = Findings::of("this machine");
    match (&facts.ring_refused, facts.ring_disabled) {
        (None, _) => found.fine("io_uring", "available"),
        (Some(why), disabled) => {
            let (fact, fix) = match disabled {
                Some(level @ (1 | 2)) => (
                    format!("{why} (kernel.io_uring_disabled is {level})"),
                    "sysctl -w kernel.io_uring_disabled=0",
                ),
                _ => (
                    why.clone(),
                    "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp \
                     profile of the container",
                ),
            };
            let cost = "reads and writes use threads: on a local disk about half the requests per \
                        second, at twice the CPU time";
            found.hurts("io_uring", fact, cost, fix);
        }
    }
    match facts.memlock_bytes {
        Some(bytes) if bytes < MEMLOCK_BYTES_MIN => found.note(
            "locked memory",
            format!("at most {} per process", ByteSize(bytes)),
            "kernels before 5.12 charge io_uring memory to it, and network transports of NCCL pin \
             more",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit of slurmd or containerd",
        ),
        Some(bytes) => found.fine("locked memory", format!("up to {}", ByteSize(bytes))),
        None => found.fine("locked memory", "no limit"),
    }
    match facts.open_files {
        Some(count) if count < OPEN_FILES_MIN => found.hurts(
            "open files",
            format!("at most {count} per process"),
            "a run over many shards, or a save of many files, fails with 'too many open files'",
            "ulimit -n 65536, or LimitNOFILE=65536 in the unit of slurmd or containerd",
        ),
        Some(count) => found.fine("open files", format!("up to {count}")),
        None => found.fine("open files", "no limit"),
    }
    match facts.clock_is_kept {
        Some(false) => found.note(
            "clock",
            "not synchronized, according to the kernel",
            "log times of nodes differ; S3 refuses requests that are 15 minutes off",
            "systemctl enable --now chronyd (for a container: on its host)",
        ),
        Some(true) => found.fine("clock", "synchronized"),
        None => {}
    }
    found.all
}
