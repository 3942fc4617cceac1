//! Memory of this machine and of this process.

use std::fs;
use std::path::Path;

/// Memory of this machine in bytes, as reported by the kernel.
#[must_use]
pub fn machine_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The minimum of the memory and swap of the machine, the limit of the cgroup (version 2) of this
/// process, and the limit of its address space (`ulimit -v`), in bytes.
#[must_use]
pub fn process_memory() -> Option<u64> {
    let machine = machine_memory().map(|bytes| bytes.saturating_add(swap()));
    [machine, cgroup_limit(), address_space_limit()].into_iter().flatten().min()
}

fn swap() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("SwapTotal:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn cgroup_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = Path::new("/sys/fs/cgroup").join(path);
    // A limit applies to all groups below it.
    let groups = folder.ancestors().take_while(|group| group.starts_with("/sys/fs/cgroup"));
    let limit = |group: &Path| fs::read_to_string(group.join("memory.max")).ok();
    groups.filter_map(|group| limit(group)?.trim().parse().ok()).min()
}

fn address_space_limit() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    line.split_whitespace().next()?.parse().ok()
}
