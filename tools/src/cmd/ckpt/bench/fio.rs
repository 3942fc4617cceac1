//! What fio, the yardstick of devices, does with the same file system, block and depth.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

pub(super) const WRITE: &str = "fio write, direct";
pub(super) const READ: &str = "fio read, direct";

/// The requests of a save: two files, two buffers of each on their way, in pieces of 1 MiB.
const BLOCK: &str = "1m";
const DEPTH: &str = "32";

/// Bytes a second of writing a new file until it is durable; `None` where there is no fio.
pub(super) fn write(file: &Path, bytes: u64) -> Result<Option<f64>> {
    super::remove_file(file)?;
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    run(&[file], bytes, "write")
}

/// Bytes a second of reading what was written.
pub(super) fn read(file: &Path, bytes: u64) -> Result<Option<f64>> {
    run(&[file], bytes, "read")
}

/// Bytes a second read and written, half of them each, within files of so many together.
pub(crate) fn mixed(files: &[&Path], bytes: u64) -> Result<Option<f64>> {
    run(files, bytes, "rw")
}

fn run(files: &[&Path], bytes: u64, what: &str) -> Result<Option<f64>> {
    let names = files.iter().map(|file| file.to_str().map(|name| name.replace(':', "\\:")));
    let names: Option<Vec<String>> = names.collect();
    let file_name = names.context("the folder's name is not UTF-8")?.join(":");
    let size = bytes >> 20 << 20;
    let mut fio = Command::new("fio");
    fio.args(["--name=feedline", "--ioengine=io_uring", "--direct=1", "--end_fsync=1"]);
    fio.args([format!("--bs={BLOCK}"), format!("--iodepth={DEPTH}"), format!("--size={size}")]);
    fio.args([format!("--rw={what}"), format!("--filename={file_name}")]);
    let done = match fio.arg("--output-format=json").output() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        done => done.context("start fio")?,
    };
    if !done.status.success() {
        let told = String::from_utf8_lossy(&done.stderr);
        bail!("fio --rw={what}: {}: {}", done.status, told.lines().next().unwrap_or(""));
    }
    let text = String::from_utf8_lossy(&done.stdout);
    // Notes may come before the object.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let told: Value = serde_json::from_str(json).context("what fio printed is no JSON")?;
    let rate = |what: &str| told["jobs"][0][what]["bw_bytes"].as_f64();
    let rate = match what {
        "rw" => rate("read").zip(rate("write")).map(|(read, write)| read + write),
        _ => rate(what),
    };
    rate.map(Some).with_context(|| format!("fio told no bw_bytes of its {what}"))
}
