//! fio with the file system, block size and queue depth of a save.

use std::path::Path;

use anyhow::{Context as _, Result};

use crate::bench::fio;

pub(crate) const WRITE: &str = "fio write, direct";
pub(crate) const READ: &str = "fio read, direct";

/// The requests of a save: two files with two buffers each in flight, in pieces of 1 MiB.
const BLOCK: &str = "1m";
const DEPTH: usize = 32;

/// Bytes per second of writing a new file until it is durable; `None` without fio.
pub(crate) fn write(file: &Path, bytes: u64) -> Result<Option<f64>> {
    crate::ckpt::bench::remove_file(file)?;
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    run(&[file], bytes, "write", 1, &[])
}

/// Bytes per second of reading the file that `write` wrote.
pub(crate) fn read(file: &Path, bytes: u64) -> Result<Option<f64>> {
    run(&[file], bytes, "read", 1, &[])
}

/// Bytes per second of reading and writing `bytes` each, in files of `bytes` in total, which are
/// retained.
pub(crate) fn mixed(files: &[&Path], bytes: u64) -> Result<Option<f64>> {
    // One loop reads half of the bytes and writes half.
    run(files, bytes, "rw", 2, &[])
}

/// As [`mixed`], but fio refills its buffers before each write, as a program that computes its data
/// does. That takes cores and memory bandwidth.
pub(crate) fn refilled(files: &[&Path], bytes: u64) -> Result<Option<f64>> {
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
