//! fio, the reference of all benchmarks, with the options that make it fastest.
//!
//! With its defaults fio loses up to half of a fast device: its buffers are in small pages, each of
//! which is an entry of the request's list; it modifies every 512 bytes before it writes them; and
//! it reads the clock twice per request. `requests` and `checkpoint` build the jobs, `comparison`
//! runs them in turn with the patterns.

pub(crate) mod checkpoint;
pub mod comparison;
pub mod requests;

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// Whether fio is installed on this machine.
#[must_use]
pub fn is_there() -> bool {
    let mut fio = Command::new("fio");
    fio.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    fio.status().is_ok_and(|status| status.success())
}

/// A job on these files.
///
/// # Errors
/// If a name is not UTF-8.
pub fn job(files: &[&Path]) -> Result<Command> {
    let named = |file: &&Path| Some(file.to_str()?.replace(':', "\\:"));
    let names: Option<Vec<String>> = files.iter().map(named).collect();
    let names = names.context("cannot run fio: file name is not UTF-8")?;
    let mut fio = bare();
    // A colon divides the names of several files.
    fio.arg(format!("--filename={}", names.join(":")));
    Ok(fio)
}

/// A job whose files the caller names.
#[must_use]
pub fn bare() -> Command {
    let mut fio = Command::new("fio");
    // Large pages for buffers, where the C library is GNU's, of 2.35 or newer.
    fio.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    fio.args([
        "--name=feedline",
        "--output-format=json",
        "--scramble_buffers=0",
        "--gtod_reduce=1",
        // Otherwise the buffers begin and end in small pages.
        "--iomem_align=2m",
    ]);
    fio
}

/// Submits `depth` requests at once through io_uring. Registered buffers would need a larger
/// `ulimit -l` than users have, and make no difference with large pages.
pub fn ring(fio: &mut Command, depth: usize) {
    fio.args(["--ioengine=io_uring", "--registerfiles=1"]);
    // Several requests per system call, as io_uring is meant to be used.
    fio.arg(format!("--iodepth={depth}"));
    fio.arg(format!("--iodepth_batch_submit={}", depth.div_ceil(4)));
    fio.arg(format!("--iodepth_batch_complete_max={depth}"));
}

/// Result of a fio job.
#[derive(Clone, Copy, Debug)]
pub struct FioResult {
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// Cores in use, as a share of the time of one job; `None` if fio does not report it.
    pub cores: Option<f64>,
}

/// Bytes per second that the job read, wrote or (`rw`) both together.
///
/// # Errors
/// As [`run`].
pub fn rate(fio: Command, what: &str) -> Result<f64> {
    Ok(run(fio, what)?.bytes_per_s)
}

/// Runs a job and returns what it read, wrote or (`rw`) both together.
///
/// # Errors
/// If fio fails, or reports no rate.
pub fn run(mut fio: Command, what: &str) -> Result<FioResult> {
    let done = fio.stdin(Stdio::null()).output().context("cannot start fio")?;
    if !done.status.success() {
        let stderr = String::from_utf8_lossy(&done.stderr);
        bail!(
            "cannot run fio for {what}: {}: {}",
            done.status,
            stderr.lines().next().unwrap_or("")
        );
    }
    let text = String::from_utf8_lossy(&done.stdout);
    // Notes may come before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: Value =
        serde_json::from_str(json).context("cannot read the output of fio: expected JSON")?;
    let rate = |what: &str| report["jobs"][0][what]["bw_bytes"].as_f64();
    let rate = match what {
        "rw" => rate("read").zip(rate("write")).map(|(read, write)| read + write),
        _ => rate(what),
    };
    let bytes_per_s =
        rate.with_context(|| format!("cannot read the output of fio: no bw_bytes for {what}"))?;
    let per_cent = |whose: &str| report["jobs"][0][whose].as_f64();
    let both = per_cent("usr_cpu").zip(per_cent("sys_cpu"));
    Ok(FioResult { bytes_per_s, cores: both.map(|(own, kernel)| (own + kernel) / 100.0) })
}
