//! fio jobs with the requests of a pattern.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use storage::{IoEngine, Profile};

use crate::bench::fio::{self, FioResult};

/// Reads that feedline and fio can both make.
#[derive(Clone, Copy, Debug)]
pub struct Reads {
    /// Whether the reads are sequential; random otherwise.
    pub in_order: bool,
    /// Bytes of each.
    pub bytes: usize,
    /// Reads in flight.
    pub depth: usize,
    /// Duration.
    pub seconds: f64,
}

/// Writes that both can make: each writer writes its own range of one file, or its own file, then
/// syncs. IOR does the same with one segment and `-e`, and with `-F` for one file per writer.
#[derive(Clone, Copy, Debug)]
pub struct Writes {
    /// Whether each writer has its own file.
    pub apart: bool,
    /// Concurrent writers.
    pub writers: usize,
    /// Bytes of each writer.
    pub part_bytes: u64,
    /// Bytes of a request.
    pub bytes: usize,
}

/// Runs the reads with fio.
///
/// # Errors
/// If fio fails, or reports no rate.
pub fn read(file: &Path, reads: &Reads, profile: &Profile) -> Result<FioResult> {
    let mut job = fio::job(&[file])?;
    fio::ring(&mut job, reads.depth);
    if profile.engine != IoEngine::Ring {
        // Where a submission blocks until its read is done, io_uring has one request in flight,
        // unless each request is passed to the kernel's worker threads at once.
        job.arg("--force_async=1");
    }
    job.args(["--readonly", "--time_based", "--norandommap", "--randrepeat=0"]);
    job.arg(if reads.in_order { "--rw=read" } else { "--rw=randread" });
    job.arg(format!("--runtime={}ms", (reads.seconds * 1e3).ceil()));
    requests(&mut job, reads.bytes, profile.direct);
    fio::run(job, "read")
}

/// Runs the writes with fio and syncs, in existing files: one for all writers, or one per writer
/// with its number at the end of the name.
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
    let result = fio::run(job, "write")?;
    // Each writer has its own range or file.
    Ok(FioResult { cores: result.cores.map(|cores| cores * writes.writers as f64), ..result })
}

/// Options of reads and writes. fio drops nothing from the page cache, because feedline does not.
fn requests(job: &mut Command, bytes: usize, direct: bool) {
    job.args(["--invalidate=0", &format!("--bs={bytes}")]);
    job.arg(format!("--direct={}", u8::from(direct)));
}
