//! What fio, the yardstick of devices, reads from the same file by the same requests.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// Requests that both can make.
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    /// Whether they are one behind the other, or anywhere.
    pub in_order: bool,
    /// Bytes of each.
    pub bytes: usize,
    /// How many at once.
    pub depth: usize,
    /// For so long.
    pub seconds: f64,
}

/// Whether there is one on this machine.
#[must_use]
pub fn is_there() -> bool {
    let mut fio = Command::new("fio");
    fio.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    fio.status().is_ok_and(|status| status.success())
}

/// Bytes a second.
///
/// # Errors
/// If fio fails, or tells nothing.
pub fn read(file: &Path, requests: &Requests, direct: bool) -> Result<f64> {
    let file_name = file.to_str().context("a name that is not UTF-8")?;
    // A colon divides the names of several files.
    let file_name = file_name.replace(':', "\\:");
    let rw = if requests.in_order { "read" } else { "randread" };
    let mut fio = Command::new("fio");
    fio.args(["--name=feedline", "--ioengine=io_uring", "--readonly", "--time_based"]);
    fio.args(["--norandommap", "--randrepeat=0", "--output-format=json"]);
    fio.args([format!("--bs={}", requests.bytes), format!("--iodepth={}", requests.depth)]);
    fio.args([format!("--rw={rw}"), format!("--filename={file_name}")]);
    fio.arg(format!("--runtime={}ms", (requests.seconds * 1e3).ceil()));
    fio.arg(format!("--direct={}", u8::from(direct)));
    let done = fio.stdin(Stdio::null()).output().context("start fio")?;
    if !done.status.success() {
        let told = String::from_utf8_lossy(&done.stderr);
        bail!("fio --rw={rw}: {}: {}", done.status, told.lines().next().unwrap_or(""));
    }
    let text = String::from_utf8_lossy(&done.stdout);
    // Notes may come before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let told: Value = serde_json::from_str(json).context("what fio printed is no JSON")?;
    told["jobs"][0]["read"]["bw_bytes"].as_f64().context("fio told no bw_bytes of its reads")
}
