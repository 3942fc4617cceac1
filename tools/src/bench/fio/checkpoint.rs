//! What fio does with the same file system, block and depth.

use std::path::Path;

use anyhow::{Context as _, Result};

use crate::bench::fio;

pub(crate) const WRITE: &str = "fio write, direct";
pub(crate) const READ: &str = "fio read, direct";

/// The requests of a save: two files, two buffers of each on their way, in pieces of 1 MiB.
const BLOCK: &str = "1m";
const DEPTH: usize = 32;

/// Bytes a second of writing a new file until it is durable; `None` where there is no fio.
pub(crate) fn write(file: &Path, bytes: u64) -> Result<Option<f64>> {
    crate::ckpt::bench::remove_file(file)?;
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    run(&[file], bytes, "write", 1, &[])
}

/// Bytes a second of reading what was written.
pub(crate) fn read(file: &Path, bytes: u64) -> Result<Option<f64>> {
    run(&[file], bytes, "read", 1, &[])
}

/// Bytes a second read and written, so many of each, within files of so many together, which stay.
pub(crate) fn mixed(files: &[&Path], bytes: u64) -> Result<Option<f64>> {
    // A loop reads and writes a half each.
    run(files, bytes, "rw", 2, &[])
}

/// The same by a fio that makes what it writes anew, as who computes it does: that takes cores and
/// memory which the disk has to itself else.
pub(crate) fn mixed_anew(files: &[&Path], bytes: u64) -> Result<Option<f64>> {
    run(files, bytes, "rw", 2, &["--refill_buffers"])
}

fn run(files: &[&Path], bytes: u64, what: &str, loops: u32, more: &[&str]) -> Result<Option<f64>> {
    if !fio::is_there() {
        return Ok(None);
    }
    let mut job = fio::job(files)?;
    fio::ring(&mut job, DEPTH);
    job.args(["--direct=1", "--end_fsync=1", &format!("--bs={BLOCK}"), &format!("--rw={what}")]);
    job.args([format!("--size={}", bytes >> 20 << 20), format!("--loops={loops}")]);
    job.args(more);
    fio::rate(job, what).map(Some)
}
