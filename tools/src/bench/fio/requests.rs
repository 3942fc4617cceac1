//! What fio does with the same requests.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use storage::{IoEngine, Profile};

use crate::bench::fio::{self, FioResult};

/// Reads that both can make.
#[derive(Clone, Copy, Debug)]
pub struct Reads {
    /// Whether they are one behind the other, or anywhere.
    pub in_order: bool,
    /// Bytes of each.
    pub bytes: usize,
    /// How many at once.
    pub depth: usize,
    /// For so long.
    pub seconds: f64,
}

/// Writes that both can make: every writer its own range of one file or a file of its own, and then
/// a sync. So does IOR with one segment and `-e`, and with `-F` for files.
#[derive(Clone, Copy, Debug)]
pub struct Writes {
    /// Whether each has a file.
    pub apart: bool,
    /// Who write at once.
    pub writers: usize,
    /// Bytes of each of them.
    pub part_bytes: u64,
    /// Bytes of a request.
    pub bytes: usize,
}

/// What was read.
///
/// # Errors
/// If fio fails, or tells nothing.
pub fn read(file: &Path, reads: &Reads, profile: &Profile) -> Result<FioResult> {
    let mut job = fio::job(&[file])?;
    fio::ring(&mut job, reads.depth);
    if profile.engine != IoEngine::Ring {
        // Where a submission waits for its read, a ring is no more than one request at a time,
        // unless the kernel's threads are asked at once.
        job.arg("--force_async=1");
    }
    job.args(["--readonly", "--time_based", "--norandommap", "--randrepeat=0"]);
    job.arg(if reads.in_order { "--rw=read" } else { "--rw=randread" });
    job.arg(format!("--runtime={}ms", (reads.seconds * 1e3).ceil()));
    requests(&mut job, reads.bytes, profile.direct);
    fio::run(job, "read")
}

/// What was written and synced, into files that are there: one, or with a number
/// behind its name one for each.
///
/// # Errors
/// As [`read`].
pub fn write(file: &Path, writes: &Writes, direct: bool) -> Result<FioResult> {
    let part = writes.part_bytes;
    let mut job = if writes.apart {
        let name = file.to_str().context("cannot run fio: file name is not UTF-8")?;
        let mut job = fio::bare();
        job.arg(format!("--filename_format={name}$jobnum"));
        job
    } else {
        let mut job = fio::job(&[file])?;
        job.arg(format!("--offset_increment={part}"));
        job
    };
    job.args(["--ioengine=psync", "--rw=write", "--thread", "--group_reporting"]);
    job.args(["--end_fsync=1", "--fallocate=none"]);
    job.args([format!("--numjobs={}", writes.writers), format!("--size={part}")]);
    requests(&mut job, writes.bytes, direct);
    let told = fio::run(job, "write")?;
    // Each writer has its own share.
    Ok(FioResult { cores: told.cores.map(|cores| cores * writes.writers as f64), ..told })
}

/// What both kinds have in common. Nothing is dropped from a cache that we do not drop either.
fn requests(job: &mut Command, bytes: usize, direct: bool) {
    job.args(["--invalidate=0", &format!("--bs={bytes}")]);
    job.arg(format!("--direct={}", u8::from(direct)));
}
