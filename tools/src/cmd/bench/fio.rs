//! What fio, the yardstick of devices, does with the same requests.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

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

/// Whether there is one on this machine.
#[must_use]
pub fn is_there() -> bool {
    let mut fio = Command::new("fio");
    fio.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    fio.status().is_ok_and(|status| status.success())
}

/// Bytes a second that were read.
///
/// # Errors
/// If fio fails, or tells nothing.
pub fn read(file: &Path, reads: &Reads, direct: bool) -> Result<f64> {
    let mut fio = command(reads.bytes, direct);
    fio.arg(named(file)?);
    fio.args(["--ioengine=io_uring", "--readonly", "--time_based", "--norandommap"]);
    fio.args([if reads.in_order { "--rw=read" } else { "--rw=randread" }, "--randrepeat=0"]);
    fio.arg(format!("--iodepth={}", reads.depth));
    fio.arg(format!("--runtime={}ms", (reads.seconds * 1e3).ceil()));
    rate(fio, "read")
}

/// Bytes a second that were written and synced, into files that are there: one, or with a number
/// behind its name one for each.
///
/// # Errors
/// As [`read`].
pub fn write(file: &Path, writes: &Writes, direct: bool) -> Result<f64> {
    let mut fio = command(writes.bytes, direct);
    fio.args(["--ioengine=psync", "--rw=write", "--thread", "--group_reporting"]);
    fio.args(["--end_fsync=1", "--fallocate=none"]);
    fio.arg(format!("--numjobs={}", writes.writers));
    let part = writes.part_bytes;
    fio.arg(format!("--size={part}"));
    if writes.apart {
        fio.arg(format!("--filename_format={}$jobnum", name(file)?));
    } else {
        fio.args([named(file)?, format!("--offset_increment={part}")]);
    }
    rate(fio, "write")
}

/// What both kinds have in common. Nothing is dropped from a cache that we do not drop either.
fn command(bytes: usize, direct: bool) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=feedline", "--output-format=json", "--invalidate=0"]);
    fio.args([format!("--bs={bytes}"), format!("--direct={}", u8::from(direct))]);
    fio
}

fn name(file: &Path) -> Result<&str> {
    file.to_str().context("a name that is not UTF-8")
}

fn named(file: &Path) -> Result<String> {
    // A colon divides the names of several files.
    Ok(format!("--filename={}", name(file)?.replace(':', "\\:")))
}

fn rate(mut fio: Command, what: &str) -> Result<f64> {
    let done = fio.stdin(Stdio::null()).output().context("start fio")?;
    if !done.status.success() {
        let told = String::from_utf8_lossy(&done.stderr);
        bail!("{what} by fio: {}: {}", done.status, told.lines().next().unwrap_or(""));
    }
    let text = String::from_utf8_lossy(&done.stdout);
    // Notes may come before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let told: Value = serde_json::from_str(json).context("what fio printed is no JSON")?;
    let rate = told["jobs"][0][what]["bw_bytes"].as_f64();
    rate.with_context(|| format!("fio told no bw_bytes of its {what}"))
}
