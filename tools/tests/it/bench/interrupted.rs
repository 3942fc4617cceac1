//! What measures and does not end by itself: benchmarks that are told to stop leave nothing behind,
//! and a mount that does not answer keeps none of them.

use crate::{fuse, signals};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use storage::probe::{HostInfo, ProbeFolder};

/// One of them over a folder; what it remembers of the device goes to another.
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

/// Why fio, if it is there, cannot do what it is asked for here: direct requests of a ring.
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
fn nothing_stays_of_what_was_measured() {
    if let Some(why) = fio_cannot() {
        return eprintln!("SKIPPED: {why}");
    }
    for (verb, small) in [("ckpt", &SAVES[..]), ("offload", &UPDATES[..])] {
        let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let more = [small, &["--rounds=1"]].concat();
        let output = bench(verb, folder.path(), cache.path(), &more).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{verb}: {err}");
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        let rate = match verb {
            "ckpt" => &told["rates"][0]["median_bytes_per_s"],
            _ => &told["disk_step_bytes_per_s"],
        };
        assert!(rate.as_f64().unwrap() > 0.0, "{told}");
        assert!(is_empty(folder.path()), "{verb} leaves files");
        if verb == "offload" {
            // The buffers have half of them at the turn, so that the rest was away.
            let inputs = &told["inputs"];
            assert_eq!(inputs["bytes_per_step"], 128 << 20, "{told}");
            assert_eq!(inputs["memory_bytes"], 64 << 20, "{told}");
            for way in ["there", "back", "both"] {
                assert!(inputs[way]["bytes_per_s"].as_f64().unwrap() > 0.0, "{way}: {told}");
                let fio = ["fio_bytes_per_s", "of_fio"].map(|key| inputs[way][key].as_f64());
                let is_there = fio.map(|value| value.is_some_and(|value| value > 0.0));
                assert_eq!(is_there, [tools::bench::fio::is_there(); 2], "{way}: {told}");
            }
        }
    }
}

/// Of so few inputs of layers nothing would be measured but memory.
#[test]
fn inputs_that_would_not_leave_memory_are_refused() {
    let (folder, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (more, due) in [
        (
            "--input-bytes=64MiB",
            "cannot use --input-bytes 64 MiB: expected 0 B or at least 128 MiB",
        ),
        ("--layer-bytes=0B", "cannot use --layer-bytes 0 B: expected at least 1 B"),
    ] {
        let output = bench("offload", folder.path(), cache.path(), &[more]).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains(due) && is_empty(folder.path()), "{err}");
    }
}

#[test]
fn nothing_stays_of_an_interrupted_one() {
    if let Some(why) = fio_cannot() {
        return eprintln!("SKIPPED: {why}");
    }
    let wanted = [
        ("ckpt", &SAVES[..], "-INT"),
        ("ckpt", &SAVES, "-TERM"),
        ("offload", &ON_DISK, "-INT"),
        ("offload", &INPUTS, "-INT"),
    ];
    for (verb, small, signal) in wanted {
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
        let is_told = output.status.code() == Some(2) && err.contains("error: interrupted");
        assert!(is_told, "{verb}: {:?}: {err}", output.status);
        assert!(output.stdout.is_empty() && is_empty(folder.path()), "{verb} leaves files");
    }
}

#[test]
fn a_mount_that_hangs_is_told_of() {
    let frozen = match fuse::Frozen::mount() {
        Ok(frozen) => frozen,
        Err(why) => return eprintln!("SKIPPED: no FUSE file system can be mounted here: {why}"),
    };
    let measure = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_feedline"));
        command.arg("bench").arg(&frozen.folder).args(["--timeout=1", "--patterns=samples"]);
        command.stdin(Stdio::null()).output().unwrap()
    };
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let output = thread::scope(|scope| {
        // It may have to wait for its last request until all is healed.
        scope.spawn(|| frozen.deafen());
        let hangs = |output: &Output| said(output).contains("not finished after 1 s");
        let output = (0..20).map(|_| measure()).find(hangs);
        frozen.heal();
        output.expect("the server went on answering")
    });
    let err = said(&output);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains("(hint: use a larger --timeout if"), "{err}");
}
