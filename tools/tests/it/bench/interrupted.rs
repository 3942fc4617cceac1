//! Interrupted benchmarks remove their files, and end even if a mount does not respond.

use crate::{fuse, signals};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use storage::probe::{HostInfo, ProbeFolder};

/// A benchmark of a folder; its record of the device goes to another one.
fn bench(verb: &str, folder: &Path, cache: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
    command.args([verb, "bench"]).arg(folder).args(more).arg("--json");
    command.env("XDG_CACHE_HOME", cache).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

const SAVES: [&str; 2] = ["--bytes=8MB", "--processes=2"];
const ON_DISK: [&str; 2] = ["--parameters=200000", "--host-parameters=0"];
const UPDATES: [&str; 3] =
    ["--parameters=200000", "--host-parameters=100000", "--input-bytes=128MiB"];
const INPUTS: [&str; 3] = ["--parameters=0", "--host-parameters=0", "--input-bytes=128MiB"];

/// Why fio, if it is installed, cannot make direct io_uring requests here.
fn fio_cannot() -> Option<String> {
    if !tools::bench::fio::is_there() {
        return None;
    }
    if let Some(why) = HostInfo::here().ring_refused {
        return Some(format!("fio has no io_uring: {why}"));
    }
    let folder = tempfile::tempdir().unwrap();
    let direct = ProbeFolder::new(folder.path()).unwrap().direct();
    direct.err().map(|error| format!("fio has no direct IO: {error}"))
}

#[test]
fn benchmarks_remove_their_files() {
    if let Some(why) = fio_cannot() {
        return eprintln!("SKIPPED: {why}");
    }
    for (verb, small) in [("ckpt", &SAVES[..]), ("offload", &UPDATES[..])] {
        let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let more = [small, &["--rounds=1"]].concat();
        let output = bench(verb, folder.path(), cache.path(), &more).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{verb}: {err}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rate = match verb {
            "ckpt" => &report["rates"][0]["median_bytes_per_s"],
            _ => &report["disk_step_bytes_per_s"],
        };
        assert!(rate.as_f64().unwrap() > 0.0, "{report}");
        assert!(is_empty(folder.path()), "{verb} leaves files");
        if verb == "offload" {
            // At the turn the buffers hold half of the activations, and the disks the rest.
            let inputs = &report["inputs"];
            assert_eq!(inputs["bytes_per_step"], 128 << 20, "{report}");
            assert_eq!(inputs["memory_bytes"], 64 << 20, "{report}");
            for direction in ["writes", "reads", "both"] {
                assert!(
                    inputs[direction]["bytes_per_s"].as_f64().unwrap() > 0.0,
                    "{direction}: {report}"
                );
                let fio = ["fio_bytes_per_s", "of_fio"].map(|key| inputs[direction][key].as_f64());
                let is_there = fio.map(|value| value.is_some_and(|value| value > 0.0));
                assert_eq!(is_there, [tools::bench::fio::is_there(); 2], "{direction}: {report}");
            }
        }
    }
}

/// With so few activations, only memory would be measured.
#[test]
fn activations_that_fit_in_the_buffers_are_refused() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (more, expected) in [
        (
            "--input-bytes=64MiB",
            "cannot use --input-bytes 64 MiB: expected 0 B or at least 128 MiB",
        ),
        ("--layer-bytes=0B", "cannot use --layer-bytes 0 B: expected at least 1 B"),
    ] {
        let output = bench("offload", folder.path(), cache.path(), &[more]).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(expected) && is_empty(folder.path()), "{err}");
    }
}

#[test]
fn interrupted_benchmarks_remove_their_files() {
    if let Some(why) = fio_cannot() {
        return eprintln!("SKIPPED: {why}");
    }
    let cases = [
        ("ckpt", &SAVES[..], "-INT"),
        ("ckpt", &SAVES, "-TERM"),
        ("offload", &ON_DISK, "-INT"),
        ("offload", &INPUTS, "-INT"),
    ];
    for (verb, small, signal) in cases {
        let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let more = [small, &["--rounds=1000000"]].concat();
        let child = bench(verb, folder.path(), cache.path(), &more).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        while is_empty(folder.path()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(signals::send(&child, signal));
        let output = child.wait_with_output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        let is_interrupted = output.status.code() == Some(2) && err.contains("error: interrupted");
        assert!(is_interrupted, "{verb}: {:?}: {err}", output.status);
        assert!(output.stdout.is_empty() && is_empty(folder.path()), "{verb} leaves files");
    }
}

#[test]
fn hung_mount_is_reported() {
    let frozen = match fuse::Frozen::mount() {
        Ok(frozen) => frozen,
        Err(why) => return eprintln!("SKIPPED: no FUSE file system can be mounted here: {why}"),
    };
    let measure = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        command.arg("bench").arg(&frozen.folder).args(["--timeout=1", "--patterns=samples"]);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let stderr_of = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let output = thread::scope(|scope| {
        // This may wait for its last request until the server is healed.
        scope.spawn(|| frozen.deafen());
        let hangs = |output: &Output| stderr_of(output).contains("not finished after 1 s");
        let output = (0..20).map(|_| measure()).find(hangs);
        frozen.heal();
        output.expect("the server still answered")
    });
    let err = stderr_of(&output);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("(hint: use a larger --timeout if"), "{err}");
}
